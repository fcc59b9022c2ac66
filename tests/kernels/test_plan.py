"""A plan is made anew when something that it depends on has changed between two steps."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from tests.counting import Operations
from tests.own_parts import WITH_STATE, Run, sketched
from torch import Tensor

import polarstep as ps
from polarstep.engines import replay
from polarstep.engines.fused import has_momentum_like, lies_like

SKETCHED = sketched(ps.Gaussian())


def assert_as_planned_anew(device: torch.device, change: Any, **options: Any) -> None:
    """Three steps, a change, three more: as without plans, and not as without the change."""
    ends = []
    for fused, changed in ((True, True), (False, True), (True, False)):
        run = Run.of(SKETCHED, device, fused=fused, **options).go(range(3))
        if changed:
            change(run)
        ends.append([p.detach().double() for p in run.go(range(3, 6)).params])
        assert bool(run.optimizer._replayed.buckets) == fused
    got, want, without = ends
    # The change is one of the last group, whose parameter is the last one.
    moved = (got[-1] - without[-1]).norm()
    if device.type == "cuda":  # M is rounded to bfloat16 there, which moves a sketch
        assert (got[-1] - want[-1]).norm() < 0.5 * moved
        return
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(got, want, strict=True))
    assert moved > 2e-5 * without[-1].norm()


@pytest.mark.parametrize(
    ("option", "value"), [("seed", 7), ("nesterov", False), ("step", 40)], ids=str
)
def test_an_option_that_was_written_into_a_group(
    device: torch.device, option: str, value: Any
) -> None:
    """``step`` decides the sketch; the plan holds how far a group's is ahead of the first one's."""
    assert_as_planned_anew(
        device, lambda run: run.optimizer.param_groups[1].update({option: value}), lr=0.5
    )


@pytest.mark.parametrize(
    ("option", "value", "entry"),
    [
        ("momentum_dtype", torch.float32, "momentum_buffer"),
        ("rounding", "compensated", "rounding_error"),
    ],
)
def test_an_option_that_kernels_do_not_have(
    device: torch.device, option: str, value: Any, entry: str
) -> None:
    """A parameter that the kernels can no longer update leaves the plan."""
    p = torch.nn.Parameter(torch.eye(16, 32, device=device, dtype=torch.bfloat16))
    optimizer = ps.Muon([p], polar=ps.NewtonSchulz(3, "quintic"))
    for step in range(3):
        if step == 2:
            assert optimizer._replayed.buckets
            optimizer.param_groups[0][option] = value
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert entry in optimizer.state[p]
    assert option == "rounding" or optimizer.state[p][entry].dtype == value


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize(
    "polar", [SKETCHED, ps.NewtonSchulz(3, "quintic")], ids=["sketched", "full"]
)
def test_a_plan_does_not_keep_gradients(
    device: torch.device, polar: ps.PolarMap, nonfinite: str
) -> None:
    """A plan lives as long as training does, and gradients are as large as the model."""
    p = torch.nn.Parameter(torch.ones(16, 32, device=device))
    optimizer = ps.Muon([p], polar=polar, nonfinite=nonfinite)  # type: ignore[arg-type]
    for _ in range(3):
        p.grad = torch.ones_like(p)
        kept = weakref.ref(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer._replayed.buckets
        assert kept() is None


@pytest.mark.parametrize("default", ["meta", "cuda"])
def test_tables_do_not_depend_on_the_default_device(device: torch.device, default: str) -> None:
    """``torch.set_default_device("cuda")`` is usual where a step runs by kernels."""
    if default == "cuda" and device.type != "cuda":
        pytest.skip("needs a GPU")
    p, q = (torch.nn.Parameter(torch.eye(16, 32, device=device)) for _ in range(2))
    for X in (p, q):
        X.grad = torch.ones_like(X) + X.detach()
    ps.Muon([q], polar=ps.NewtonSchulz(3, "quintic")).step()
    optimizer = ps.Muon([p], polar=ps.NewtonSchulz(3, "quintic"))
    with torch.device(default):
        optimizer.step()
    assert optimizer._replayed.buckets
    assert torch.equal(p, q)


@pytest.mark.parametrize("how", ["precision", "layout"])
def test_parameters_that_were_moved_are_no_longer_where_the_plan_has_them(
    device: torch.device, how: str
) -> None:
    """``model.to(...)`` keeps the parameters and changes their memory; momentum is left behind."""
    ends = []
    for fused in (True, False):
        p = torch.nn.Parameter(torch.ones(16, 8, 2, 2, device=device))
        optimizer = ps.Muon([p], lr=0.1, polar=ps.NewtonSchulz(3, "quintic"), fused=fused)
        for step in range(4):
            if step == 2 and how == "precision":
                p.data = p.data.bfloat16()
            elif step == 2:
                p.data = p.data.to(memory_format=torch.channels_last)
            g = torch.Generator().manual_seed(step)
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=g))
            optimizer.step()
        ends.append(p.detach().float())
    assert torch.allclose(*ends, atol=2e-2)


def gradient(p: Tensor, step: int) -> Tensor:
    values = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
    return torch.empty_like(p).copy_(values)


def shifted(G: Tensor) -> Tensor:
    """G eight bytes after an address that is a multiple of 16, as it may lie in a bucket of DDP."""
    room = G.new_empty(G.numel() + 2)[2:].view(G.shape)
    assert room.data_ptr() % 16 == 8
    return room.copy_(G)


def strided(G: Tensor) -> Tensor:
    return G.mT.contiguous().mT


@pytest.mark.parametrize("how", ["in another order", "gone"])
def test_momentum_that_was_replaced_between_two_steps(device: torch.device, how: str) -> None:
    """A filter in ``channels_last``, and its momentum as another format of checkpoints returns it."""
    ends = []
    for fused in (True, False):
        p = torch.nn.Parameter(torch.ones(16, 8, 2, 2, device=device))
        p.data = p.data.to(memory_format=torch.channels_last)
        optimizer = ps.Muon([p], lr=0.1, polar=ps.NewtonSchulz(3, "quintic"), fused=fused)
        for step in range(5):
            if step == 3:
                C = optimizer.state[p].pop("momentum_buffer")
                assert not C.is_contiguous()
                if how == "in another order":
                    optimizer.state[p]["momentum_buffer"] = C.contiguous()
            p.grad = gradient(p, step)
            optimizer.step()
            assert bool(optimizer._replayed.buckets) == fused
        ends.append(p.detach())
    assert (ends[0] - ends[1]).norm() <= (2e-2 if device.type == "cuda" else 1e-5) * ends[1].norm()


def test_momentum_on_another_device_is_not_for_the_kernels(device: torch.device) -> None:
    """They would read its address as one of their own device."""
    p = torch.nn.Parameter(torch.eye(16, device=device))
    elsewhere = torch.zeros(16, 16, device="meta")
    assert elsewhere.data_ptr() % 16 == 0
    assert lies_like(torch.zeros_like(p), p)
    assert not lies_like(elsewhere, p)
    assert not has_momentum_like(p, {"momentum_buffer": elsewhere})


@pytest.mark.parametrize("first", [strided, shifted, torch.Tensor.clone])
@pytest.mark.parametrize("later", [strided, shifted, torch.Tensor.clone])
def test_a_gradient_that_lies_otherwise_leaves_its_parameter_with_the_kernels(
    device: torch.device, first: Any, later: Any
) -> None:
    ends = []
    for changed in (True, False):
        params = [torch.nn.Parameter(torch.eye(16, 32, device=device)) for _ in range(3)]
        optimizer = ps.Muon(params, lr=0.1, polar=ps.NewtonSchulz(3, "quintic"))
        for step in range(4):
            for i, p in enumerate(params):
                G = gradient(p, 10 * step + i)
                p.grad = (later if step else first)(G) if changed and i else G
            with Operations() as ops:
                optimizer.step()
            assert optimizer._replayed._plan.fused == [[0, 1, 2]]
            odd = changed and (later if step else first) is not torch.Tensor.clone
            assert ops.counts["_foreach_copy_"] == odd  # all copies of a step are one operation
        ends.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


MAPS = {
    "sketched": SKETCHED,
    "warm": WITH_STATE["warm"],
    "map with an average": WITH_STATE["map with an average"],
}


def in_turn(i: int, step: int) -> bool:
    """Whether parameter i has no gradient: the first two take turns, as with two losses."""
    return i < 2 and step % 2 == i


@pytest.mark.parametrize("polar", MAPS.values(), ids=MAPS.keys())
def test_plans_that_take_turns_are_kept_and_change_nothing(
    device: torch.device, polar: ps.PolarMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reaches the steps after which it is captured, on tensors that keep their places."""
    run = Run.of(polar, device, nonfinite="skip").go(range(8), without=in_turn)
    kept, places = [run.optimizer._replayed._plan, *run.optimizer._replayed._others], []
    assert len(kept) == 2
    for step in range(8, 14):
        run.go([step], without=in_turn)
        plan = run.optimizer._replayed._plan
        assert plan is kept[(step + 1) % 2]
        places.append([bucket.place() for bucket in plan.runs])
        assert step < 10 or places[-1] == places[-3]
    assert all(sum(plan.replays.steps.values()) > 3 for plan in kept)
    monkeypatch.setattr(replay, "MOST_PLANS", 1)
    alone = Run.of(polar, device, nonfinite="skip").go(range(14), without=in_turn)
    assert not alone.optimizer._replayed._others
    for p, q in zip(run.params, alone.params, strict=True):
        assert torch.equal(p, q)
        for entry, X in run.optimizer.state[p].items():
            assert torch.equal(X, alone.optimizer.state[q][entry])


@pytest.mark.parametrize("polar", MAPS.values(), ids=MAPS.keys())
def test_plans_that_come_again_at_random_change_nothing(
    device: torch.device, polar: ps.PolarMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checkpoint that is loaded, and gradients to skip, in between."""
    drawn = torch.randint(3, (40, 2), generator=torch.Generator().manual_seed(5))
    ends = []
    for most in (replay.MOST_PLANS, 1):
        monkeypatch.setattr(replay, "MOST_PLANS", most)
        run = Run.of(polar, device, nonfinite="skip")
        for first in (0, 10):
            run.go(
                range(first, first + 10),
                without=lambda i, step: i in drawn[step],
                spoilt=lambda i, step: i == drawn[step + 20, 0],
            )
            run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        ends.append(run)
    for p, q in zip(ends[0].params, ends[1].params, strict=True):
        assert torch.equal(p, q)


def test_plans_that_do_not_come_again_are_dropped(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their carries and graphs would take memory: of layers left out at random, and of a first phase."""
    run = Run.of(ps.NewtonSchulz(1, "quintic"), device)
    for step in range(4):
        run.go([step], without=lambda i, step: i == step)
        assert not run.optimizer._replayed._others
    monkeypatch.setattr(replay, "STEPS_WITHOUT", 5)
    run.go(range(4, 8))
    assert not run.optimizer._replayed._others
    run.go(range(8, 12), without=lambda i, step: i == 0)
    assert len(run.optimizer._replayed._others) == 1  # the plan with all parameters
    run.go(range(12, 14), without=lambda i, step: i == 0)
    assert not run.optimizer._replayed._others


@pytest.mark.parametrize(
    ("polar", "counts"),
    [
        (ps.NewtonSchulz(1, "quintic"), [3]),
        (sketched(ps.Warm()), [3]),
        (SKETCHED, [2, 1]),  # whose numbers are a function of the step
    ],
    ids=["full space", "warm", "Gaussian"],
)
def test_a_group_that_was_added_later_is_in_the_buckets_of_the_others(
    device: torch.device, polar: ps.PolarMap, counts: list[int]
) -> None:
    ends = []
    for fused in (True, False):
        params = [torch.nn.Parameter(torch.eye(12, 20, device=device)) for _ in range(3)]
        optimizer = ps.Muon(params[:2], lr=0.1, polar=polar, fused=fused)
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": params[2:], "algorithm": "muon"})
            for i, p in enumerate(params):
                p.grad = gradient(p, 10 * step + i)
            optimizer.step()
        found = [bucket.count for bucket in optimizer._replayed.buckets.values()]
        assert found == (counts if fused else [])
        ends.append(torch.stack([p.detach() for p in params]))
    assert (ends[0] - ends[1]).norm() <= (0.1 if device.type == "cuda" else 1e-4) * ends[1].norm()


def test_parameters_that_were_taken_out_of_a_group_are_let_go(device: torch.device) -> None:
    params = [torch.nn.Parameter(torch.eye(16, 32, device=device)) for _ in range(2)]
    optimizer = ps.Muon(params, polar=ps.NewtonSchulz(1, "quintic"))

    def step() -> None:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()

    for _ in range(3):
        step()
    gone = weakref.ref(params[1])
    optimizer.state.pop(params.pop())
    optimizer.param_groups[0]["params"].pop()
    step()
    gc.collect()
    assert gone() is None
    assert optimizer._replayed.buckets
