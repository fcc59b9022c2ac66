"""A basis that several steps work in, fused: as the plain phases have it."""

from __future__ import annotations

import pytest
import torch
from tests.resuming import gone_on_beside
from torch import Tensor, nn

import polarstep as ps
from polarstep.polar.finders import Fresh

INNER = ps.NewtonSchulz(4, "polar-express-sketch")
KEPT = ps.LowRank(12, 5, power=0, inner=INNER, always_sketch=True, keep=3)  # ℓ = 17, padded to 32
SHAPES = [(48, 64), (64, 48), (48, 64), (2, 48, 96)]


def parameters(device: torch.device) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=g).to(device)) for s in SHAPES]


def set_gradients(params: list[Tensor], step: int) -> None:
    g = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p)


def run(device: torch.device, steps: int, **options: object) -> tuple[list[Tensor], ps.Muon]:
    params = parameters(device)
    optimizer = ps.Muon(params, lr=0.1, polar=KEPT, **options)
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return params, optimizer


def test_it_takes_the_plain_steps(device: torch.device) -> None:
    """In bfloat16 on a GPU, where the two round in other places."""
    fused, optimizer = run(device, 8)
    plain, reference = run(device, 8, fused=False)
    atol = 3e-2 if device.type == "cuda" else 1e-4
    for p, q in zip(fused, plain, strict=True):
        assert torch.allclose(p, q, atol=atol)
        kept, expected = optimizer.state[p]["kept"], reference.state[q]["kept"]
        assert kept.shape == expected.shape
        assert torch.allclose(kept.float(), expected.float(), atol=atol)


def test_a_step_in_between_draws_no_sketch_and_makes_no_basis(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = run(device, 4)
    before = [optimizer.state[p]["kept"].clone() for p in params]

    def refuse(*_: object) -> None:
        raise AssertionError("this step has its basis")

    monkeypatch.setattr(Fresh, "basis", refuse)
    monkeypatch.setattr(Fresh, "draw", refuse)
    weights = [p.detach().clone() for p in params]
    set_gradients(params, 4)
    optimizer.step()
    for p, weight, kept in zip(params, weights, before, strict=True):
        assert torch.equal(optimizer.state[p]["kept"], kept)
        assert not torch.equal(p, weight)


@pytest.mark.parametrize("steps", [2, 4, 5, 6, 24, 25])
def test_a_run_resumes_within_a_basis(device: torch.device, steps: int) -> None:
    if device.type == "cpu" and steps > 6:
        pytest.skip("there are no graphs to resume from")
    params, optimizer = run(device, steps)
    copies = gone_on_beside(
        params, optimizer, list, set_gradients, range(steps, steps + KEPT.keep), lr=0.1, polar=KEPT
    )
    assert all(map(torch.equal, params, copies))


def test_a_parameter_that_is_skipped_keeps_its_basis(device: torch.device) -> None:
    params, optimizer = run(device, 6, nonfinite="skip")
    before = [optimizer.state[p]["kept"].clone() for p in params]
    set_gradients(params, 6)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    now = [optimizer.state[p]["kept"] for p in params]
    assert [*map(torch.equal, now, before)] == [True, False, False, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures nothing without a GPU")
def test_both_kinds_of_step_have_a_graph(device: torch.device) -> None:
    params, optimizer = run(device, 24)
    assert len(optimizer._replayed.graphs) == 2
    launched = parameters(device)
    reference = ps.Muon(launched, lr=0.1, polar=KEPT)
    for step in range(24):
        set_gradients(launched, step)
        reference._replayed._plan.replays.steps.clear()  # never enough of them to capture any
        reference.step()
    assert not reference._replayed.graphs
    assert all(map(torch.equal, params, launched))
