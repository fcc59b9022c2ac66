"""Maps, sketches and range finders of a user's own on the fused path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.own_parts import (
    FIRST_STEPS,
    OWN,
    RULES,
    SHAPES,
    WITH_STATE,
    Run,
    same,
)

import polarstep as ps

over_own = pytest.mark.parametrize("polar", OWN.values(), ids=OWN.keys())
over_state = pytest.mark.parametrize("polar", WITH_STATE.values(), ids=WITH_STATE.keys())
ALL = WITH_STATE | OWN
over_all = pytest.mark.parametrize("polar", ALL.values(), ids=ALL.keys())
LAST = len(SHAPES) - 1
MORE_STEPS = 4 if torch.cuda.is_available() else 2  # a GPU captures its steps after the fourth


def close(a: Run, b: Run) -> bool:
    """To float32's rounding on a CPU; on a GPU M is rounded to bfloat16, which moves a sketch."""
    device = a.params[0].device
    tolerance = 1e-5 if device.type == "cpu" else 0.05
    pairs = zip(a.params, b.params, strict=True)
    return all((p - q).norm() <= tolerance * q.norm() for p, q in pairs)


@over_own
def test_it_takes_the_plain_steps(device: torch.device, polar: ps.PolarMap) -> None:
    fused = Run.of(polar, device).go(range(6))
    plain = Run.of(polar, device, fused=False).go(range(6))
    assert sum(bucket.count for bucket in fused.optimizer._replayed.buckets.values()) == 5
    assert not plain.optimizer._replayed.buckets
    assert close(fused, plain)
    for i in range(len(SHAPES)):
        assert fused.values(i).keys() == {"parameter", "momentum_buffer", *polar.traits.carries}


@over_all
@pytest.mark.parametrize("steps", [1, FIRST_STEPS])
def test_a_run_goes_on_from_a_file_bit_for_bit(
    device: torch.device, polar: ps.PolarMap, steps: int, tmp_path: Path
) -> None:
    run = Run.of(polar, device).go(range(steps))
    again = run.through_a_file(tmp_path / "run.pt", polar)
    for each in (run, again):
        each.go(range(steps, steps + MORE_STEPS))
    for i in range(len(SHAPES)):
        assert same(run.values(i), again.values(i))


@over_all
def test_a_skipped_parameter_keeps_its_carry(device: torch.device, polar: ps.PolarMap) -> None:
    def started() -> Run:
        return Run.of(polar, device, nonfinite="skip", weight_decay=0.1).go(range(FIRST_STEPS))

    clean = started().go([FIRST_STEPS])
    for bad in ({0}, {2, LAST}):  # beside another of its shape; alone, and in a group of its own
        run = started()
        before = {i: run.values(i) for i in bad}
        run.go([FIRST_STEPS], spoilt=lambda i, step, bad=bad: i in bad)
        for i in range(len(SHAPES)):
            assert same(run.values(i), clean.values(i)) == (i not in bad), (i, bad)
            assert i not in bad or same(run.values(i), before[i]), (i, bad)


@over_state
def test_parameters_that_come_later_change_nothing_for_the_others(
    device: torch.device, polar: ps.PolarMap
) -> None:
    """One beside another of its shape, and one in a group of its own, the one before the other.

    Also between two bases of a kept one: the basis of the others is neither renewed nor moved.
    """
    never = Run.of(polar, device).go(range(7), without=lambda i, step: i in (1, LAST))
    for when in ({1: 1, LAST: 4}, {1: 4, LAST: 1}):
        run = Run.of(polar, device).go(
            range(7), without=lambda i, step, when=when: step < when.get(i, 0)
        )
        for i in range(len(SHAPES)):
            if i in when:
                assert not same(run.values(i), never.values(i)), when
            elif device.type == "cpu":
                assert same(run.values(i), never.values(i)), (i, when)
            else:  # products of two matrices may sum in another order than those of one
                p, q = run.params[i], never.params[i]
                assert (p - q).norm() <= 0.01 * q.norm(), (i, when)


@over_state
def test_parameters_of_one_shape_that_take_turns_keep_their_own_carries(
    device: torch.device, polar: ps.PolarMap
) -> None:
    """Each as if it were the only one: no step starts from the other's carry, or writes to it."""
    run = Run.of(polar, device).go(range(6), without=lambda i, step: i > 1 or step % 2 != i)
    for own in (0, 1):
        alone = Run.of(polar, device).go(
            range(6), without=lambda i, step, o=own: i != o or step % 2 != o
        )
        assert same(run.values(own), alone.values(own))


@over_state
def test_a_run_that_is_set_back_starts_from_nothing_again(
    device: torch.device, polar: ps.PolarMap
) -> None:
    run, fresh = Run.of(polar, device), Run.of(polar, device)
    for _ in range(3):
        run.go(range(1))
        for p, q in zip(run.params, fresh.params, strict=True):
            p.data.copy_(q.data)
            run.optimizer.state[p].clear()
        for group in run.optimizer.param_groups:
            group["step"] = 0
    run.go(range(3))
    fresh.go(range(3))
    for i in range(len(SHAPES)):
        assert same(run.values(i), fresh.values(i))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_transform_and_a_momentum_rule_take_the_plain_steps(
    device: torch.device, rule: dict[str, object]
) -> None:
    """Under a momentum rule that the kernels do not have, torch's operations take the step.

    The last group has none, so that its two matrices are updated by kernels all the same.
    """
    fused, plain = (
        Run.of(ps.NewtonSchulz(3, "quintic"), device, fused=fused) for fused in (True, False)
    )
    for run in (fused, plain):
        run.optimizer.param_groups[0].update(rule)
        run.go(range(4))
    counts = [bucket.count for bucket in fused.optimizer._replayed.buckets.values()]
    assert sum(counts) == (2 if "momentum_rule" in rule else 5)
    assert close(fused, plain)
