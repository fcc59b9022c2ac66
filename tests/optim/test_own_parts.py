"""Maps, sketches and range finders of a user's own, trained with ``Muon``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.own_parts import FIRST_STEPS, OWN, SHAPES, WITH_STATE, Run, same

import polarstep as ps

over_own = pytest.mark.parametrize("polar", OWN.values(), ids=OWN.keys())
over_state = pytest.mark.parametrize("polar", WITH_STATE.values(), ids=WITH_STATE.keys())
ALL = OWN | WITH_STATE
over_all = pytest.mark.parametrize("polar", ALL.values(), ids=ALL.keys())
LAST = len(SHAPES) - 1


@over_own
def test_training_moves_every_parameter_and_leaves_what_the_map_carries(polar: ps.PolarMap) -> None:
    run, start = Run.of(polar).go(range(4)), Run.of(polar)
    for i, (p, q) in enumerate(zip(run.params, start.params, strict=True)):
        assert p.isfinite().all()
        assert not torch.equal(p, q)
        assert run.values(i).keys() == {"parameter", "momentum_buffer", *polar.traits.carries}


@over_own
def test_a_step_goes_on_from_the_carry_that_the_last_one_left(polar: ps.PolarMap) -> None:
    """The carry is used: without it the next step is another one."""
    run, forgetful = (Run.of(polar).go(range(FIRST_STEPS)) for _ in range(2))
    for p in forgetful.params:
        for name in polar.traits.carries:
            del forgetful.optimizer.state[p][name]
    run.go([FIRST_STEPS + 1])
    forgetful.go([FIRST_STEPS + 1])
    moved = [not same(run.values(i), forgetful.values(i)) for i in range(len(SHAPES))]
    assert moved == [bool(polar.traits.carries)] * len(SHAPES)


@over_own
def test_a_map_draws_by_seed_and_step(polar: ps.PolarMap) -> None:
    """Two runs of a seed are one; another seed is another run where numbers are drawn."""
    first, second, other = (Run.of(polar, seed=seed).go(range(2)) for seed in (0, 0, 1))
    draws = polar.traits.draws != "never"
    for i in range(len(SHAPES)):
        assert same(first.values(i), second.values(i))
        assert same(first.values(i), other.values(i)) != draws


@over_all
@pytest.mark.parametrize("steps", [1, FIRST_STEPS, 4])
def test_a_run_goes_on_from_a_file_bit_for_bit(
    polar: ps.PolarMap, steps: int, tmp_path: Path
) -> None:
    run = Run.of(polar).go(range(steps))
    again = run.through_a_file(tmp_path / "run.pt", polar)
    assert again.optimizer.param_groups[0]["polar"] == polar
    run.go(range(steps, steps + 4))
    again.go(range(steps, steps + 4))
    for i in range(len(SHAPES)):
        assert same(run.values(i), again.values(i))


@over_all
@pytest.mark.parametrize("bad", [0, 2, LAST], ids=["beside another", "alone", "own group"])
def test_a_skipped_parameter_keeps_its_carry(polar: ps.PolarMap, bad: int) -> None:
    run = Run.of(polar, nonfinite="skip", weight_decay=0.1).go(range(FIRST_STEPS))
    clean = Run.of(polar, nonfinite="skip", weight_decay=0.1).go(range(FIRST_STEPS))
    before = run.values(bad)
    run.go([FIRST_STEPS], spoilt=lambda i, step: i == bad)
    clean.go([FIRST_STEPS])
    assert same(run.values(bad), before)
    for i in range(len(SHAPES)):
        assert same(run.values(i), clean.values(i)) == (i != bad)


@over_state
@pytest.mark.parametrize("late", [1, LAST], ids=["same shape", "own group"])
@pytest.mark.parametrize("when", [1, 3, 4, 5])
def test_a_parameter_that_comes_later_changes_nothing_for_the_others(
    polar: ps.PolarMap, late: int, when: int
) -> None:
    """Also between two bases of a kept one: the basis of the others is neither renewed nor moved."""
    run = Run.of(polar).go(range(8), without=lambda i, step: i == late and step < when)
    never = Run.of(polar).go(range(8), without=lambda i, step: i == late)
    for i in range(len(SHAPES)):
        assert same(run.values(i), never.values(i)) == (i != late)


@over_state
def test_a_parameter_that_comes_later_starts_from_nothing(polar: ps.PolarMap) -> None:
    """As if it were the only one, although its neighbour of the same shape has a carry already."""
    when = 4
    run = Run.of(polar).go(range(8), without=lambda i, step: i == 1 and step < when)
    alone = Run.of(polar).go(range(8), without=lambda i, step: i != 1 or step < when)
    assert same(run.values(1), alone.values(1))


@over_state
def test_parameters_of_one_shape_that_take_turns_keep_their_own_carries(
    polar: ps.PolarMap,
) -> None:
    """Each as if it were the only one: no step starts from the other's carry, or writes to it."""
    run = Run.of(polar).go(range(8), without=lambda i, step: i > 1 or step % 2 != i)
    for own in (0, 1):
        alone = Run.of(polar).go(range(8), without=lambda i, step, o=own: i != o or step % 2 != o)
        assert same(run.values(own), alone.values(own))


@over_state
def test_a_run_that_is_set_back_starts_from_nothing_again(polar: ps.PolarMap) -> None:
    run, fresh = Run.of(polar).go(range(1)), Run.of(polar)
    for p, q in zip(run.params, fresh.params, strict=True):
        p.data.copy_(q.data)
    run.optimizer.load_state_dict(fresh.optimizer.state_dict())
    run.go(range(3))
    fresh.go(range(3))
    for i in range(len(SHAPES)):
        assert same(run.values(i), fresh.values(i))
