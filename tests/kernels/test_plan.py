"""A plan is made anew when something that it depends on has changed between two steps."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tests.own_parts import Run, sketched

import polarstep as ps

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
    optimizer = ps.Muon([p], polar=ps.NewtonSchulz(3))
    for step in range(3):
        if step == 2:
            assert optimizer._replayed.buckets
            optimizer.param_groups[0][option] = value
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert entry in optimizer.state[p]
    assert option == "rounding" or optimizer.state[p][entry].dtype == value


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("polar", [SKETCHED, ps.NewtonSchulz(3)], ids=["sketched", "full"])
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
    ps.Muon([q], polar=ps.NewtonSchulz(3)).step()
    optimizer = ps.Muon([p], polar=ps.NewtonSchulz(3))
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
        optimizer = ps.Muon([p], lr=0.1, polar=ps.NewtonSchulz(3), fused=fused)
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
