"""Steps are finite and of full size over the whole range of gradients that a precision has."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from tests.solvers import Solver, over_solvers
from torch import Tensor

import polarstep as ps
from polarstep.stale_momentum import EVERY


def gradients(count: int, scale: float, dtype: torch.dtype, shape=(12, 20)) -> list[Tensor]:
    """Gradients of the given size that point in similar directions, so that momentum builds up."""
    g = torch.Generator().manual_seed(5)
    common = torch.randn(shape, generator=g, dtype=torch.float64)
    noise = torch.randn(count, *shape, generator=g, dtype=torch.float64)
    return [((common + 0.3 * each).clamp(-3, 3) / 3 * scale).to(dtype) for each in noise]


STEPS = 6
"""Steps until momentum, with β = 0.95, is five times as large as a gradient."""


def trained(
    steps: list[Tensor], dtype: torch.dtype, **options: Any
) -> tuple[Tensor, ps.Muon, Tensor]:
    """The parameter, its optimizer, and a second parameter of the same shape, also updated."""
    params = [torch.nn.Parameter(torch.zeros(steps[0].shape, dtype=dtype)) for _ in range(2)]
    optimizer = ps.Muon(params, **{"lr": 1e-3} | options)
    for G in steps:
        for p in params:
            p.grad = G.clone()
        optimizer.step()
    return params[0].detach(), optimizer, params[1].detach()


@over_solvers(scale_invariant=True)
def test_float16_gradients_of_any_size_leave_finite_weights(solver: Solver) -> None:
    """C is up to 20 G at β = 0.95, and soon beyond float16: gradients of 5,000 once ended in NaN."""
    assert_float16_gradients_of_any_size_leave_finite_weights(solver.map, nesterov=True)


@pytest.mark.parametrize(
    "polar", [ps.NewtonSchulz(5, "quintic"), ps.LowRank(4, 2, always_sketch=True)]
)
def test_so_they_do_without_nesterovs_step(polar: ps.PolarMap) -> None:
    """M is made before any map sees it, so a map in full space and a sketched one do."""
    assert_float16_gradients_of_any_size_leave_finite_weights(polar, nesterov=False)


def assert_float16_gradients_of_any_size_leave_finite_weights(
    polar: ps.PolarMap, *, nesterov: bool
) -> None:
    expected = None
    for scale in (1.0, 6e4):
        steps = gradients(STEPS, scale, torch.float16)
        X, optimizer, twin = trained(steps, torch.float16, polar=polar, nesterov=nesterov)
        assert X.dtype == torch.float16
        assert X.isfinite().all()
        assert torch.equal(X, twin)
        buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
        assert all(C.dtype == torch.float32 and C.isfinite().all() for C in buffers)
        assert (max(float(C.abs().max()) for C in buffers) > 65504) == (scale > 1)
        expected = X if expected is None else expected
        # Rounding to float16 differs with the scale, and T of small singular values with it.
        assert (X - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("split", [None, (8, 4)])
def test_float16_steps_in_blocks_and_with_skipping(split: tuple[int, ...] | None) -> None:
    steps = gradients(20, 5e3, torch.float16)
    plain, *_ = trained(steps, torch.float16, split_sizes=split)
    steps.insert(3, torch.full_like(steps[0], torch.inf))
    skipped, *_ = trained(steps, torch.float16, split_sizes=split, nonfinite="skip")
    assert plain.isfinite().all()
    torch.testing.assert_close(plain, skipped, atol=1e-5, rtol=1e-2)


def test_momentum_of_float16_parameters_survives_a_checkpoint(tmp_path) -> None:
    """torch would cast C to float16, where it is infinite; and with it the peak of the resting rule."""
    steps = gradients(EVERY + 8, 5e3, torch.float16)
    whole, *_ = trained(steps, torch.float16)
    half, optimizer, _ = trained(steps[: EVERY + 2], torch.float16)
    assert float(optimizer.state_dict()["state"][0]["momentum_buffer"].max()) > 65504
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    for loaded in ("state", "pickle"):
        params = [torch.nn.Parameter(half.clone()) for _ in range(2)]
        again = ps.Muon(params, lr=1e-3)
        if loaded == "state":
            again.load_state_dict(torch.load(tmp_path / "state.pt"))
        else:
            again = pickle.loads(pickle.dumps(optimizer))
            params = again.param_groups[0]["params"]
        for G in steps[EVERY + 2 :]:
            for p in params:
                p.grad = G.clone()
            again.step()
        assert torch.equal(params[0].detach(), whole)


@over_solvers(scale_invariant=True)
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float32, (2.8e37, 1e-36)),  # momentum ends at a third of the largest number
        (torch.float64, (1.4e307, 1e-300)),
        (torch.bfloat16, (2.8e37,)),
    ],
    ids=str,
)
def test_steps_do_not_depend_on_the_scale_of_gradients(
    solver: Solver, dtype: torch.dtype, scales: tuple[float, ...]
) -> None:
    moderate = gradients(STEPS, 1.0, dtype)
    X, *_ = trained(moderate, dtype, polar=solver.map)
    for scale in scales:
        exponent = math.floor(math.log2(scale))
        extreme = [G * 2.0**exponent for G in moderate]
        scaled, *_ = trained(extreme, dtype, polar=solver.map)
        assert scaled.isfinite().all(), scale
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
        assert (X - scaled).norm() <= tolerance * X.norm(), scale


@over_solvers(scale_invariant=True)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_others_alone(solver, bad):
    """Matrices of one shape are stacked. One of them must not change the step of another."""

    def trained(*spoiled):
        params = [torch.nn.Parameter(torch.zeros(12, 20)) for _ in spoiled]
        optimizer = ps.Muon(params, lr=0.1, polar=solver.map, seed=1)
        for step in range(3):
            g = torch.Generator().manual_seed(step)
            G = torch.randn(12, 20, generator=g)
            for p, bad_step in zip(params, spoiled, strict=True):
                p.grad = G.clone()
                if step == bad_step:
                    p.grad[0, 0] = bad
            optimizer.step()
        return params[0].detach()

    torch.testing.assert_close(trained(None, 1), trained(None), atol=1e-4, rtol=0)
