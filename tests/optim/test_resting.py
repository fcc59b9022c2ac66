"""A parameter that gets no gradient any more comes to rest, finite, with every map."""

from __future__ import annotations

import pytest
import torch
from tests.solvers import Solver, over_solvers
from torch import Tensor

import polarstep as ps
from polarstep.optim.stepping.resting import EVERY, FADED


def trained(p: Tensor, optimizer: ps.Muon, gradients: list[Tensor | float]) -> list[Tensor]:
    """The parameter after each step; a number is a gradient of that everywhere."""
    after = []
    for G in gradients:
        p.grad = G.clone() if isinstance(G, Tensor) else torch.full_like(p, G)
        optimizer.step()
        after.append(p.detach().clone())
    return after


def random(shape: tuple[int, ...], count: int = 5) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=g) for _ in range(count)]


@over_solvers(scale_invariant=True)
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_it_ends_where_it_is_finite(solver: Solver, scale: float, monkeypatch) -> None:
    """Checked at every fourth step, and with momentum that fades as fast as 64 steps of 0.8 do."""
    monkeypatch.setattr("polarstep.optim.stepping.resting.EVERY", 4)
    p = torch.nn.Parameter(torch.zeros(12, 20))
    optimizer = ps.Muon([p], lr=1e-3, momentum=0.03, polar=solver.map)
    start = [scale * G for G in random((12, 20))]
    after = trained(p, optimizer, [*start, *[0.0] * 16])
    assert all(bool(X.isfinite().all()) for X in after)
    assert torch.equal(after[-1], after[-4])
    assert not torch.equal(after[6], after[5])


def test_the_report_of_nan_before_step_900() -> None:
    """Momentum in the denormals once made every low-rank map infinite.

    That was with a momentum of 0.9. One of 0.8 reaches the denormals in half as many steps.
    """
    p = torch.nn.Parameter(torch.zeros(24, 32))
    optimizer = ps.Muon([p], lr=1e-3, momentum=0.8, polar=ps.LowRank(8, 4))
    after = trained(p, optimizer, [*random((24, 32)), *[0.0] * 450])
    assert bool(after[-1].isfinite().all())
    assert torch.equal(after[-1], after[200])


@pytest.mark.parametrize("scale", [1e-38, 1e-42])
def test_denormal_matrices_are_lifted_like_others(scale: float) -> None:
    """T(cM) = T(M) up to the digits that a denormal has, and finite in any case."""
    (M,) = random((24, 32), 1)
    polar = ps.LowRank(8, 4)
    T, small = polar(M), polar(scale * M)
    assert bool(small.isfinite().all())
    assert (T - small).norm() < 0.1 * T.norm()


def test_one_expert_of_a_stack_rests_while_the_others_move() -> None:
    p = torch.nn.Parameter(torch.zeros(3, 8, 8))
    optimizer = ps.Muon([p], lr=1e-3, momentum=0.8)
    gradients = random((3, 8, 8), 6 * EVERY)
    for G in gradients[5:]:
        G[1] = 0
    after = trained(p, optimizer, [*gradients])
    assert torch.equal(after[-1][1], after[-EVERY][1])
    assert not torch.equal(after[-1][0], after[-2][0])


def test_slow_decay_and_spikes_are_left_alone() -> None:
    """Momentum may fall by √β a step for ever, and from a spike of 1e10 at once."""
    p = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = ps.Muon([p], lr=1e-3, momentum=0.8)
    (G,) = random((8, 8), 1)
    falling = [G * 0.8 ** (k / 2) for k in range(4 * EVERY)]  # by 1e-12 in all
    spiked = [G, 1e10 * G, *[G] * (4 * EVERY)]
    for gradients in (falling, spiked):
        buffers = []
        for step in gradients:
            p.grad = step.clone()
            optimizer.step()
            buffers.append(optimizer.state[p]["momentum_buffer"].clone())
        expected = torch.zeros_like(G)
        for step, C in zip(gradients, buffers, strict=True):
            expected = 0.8 * expected + step
            assert torch.allclose(C, expected, rtol=1e-4)
        optimizer = ps.Muon([p], lr=1e-3, momentum=0.8)


def test_the_rule_survives_a_checkpoint(tmp_path) -> None:
    gradients = [*random((8, 12)), *[0.0] * (4 * EVERY)]
    ends = []
    for stop in (None, 2 * EVERY - 7):
        p = torch.nn.Parameter(torch.zeros(8, 12))
        optimizer = ps.Muon([p], lr=1e-3, momentum=0.8)
        trained(p, optimizer, gradients[:stop])
        if stop is not None:
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
            optimizer = ps.Muon([p], lr=1e-3, momentum=0.8)
            optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))
            trained(p, optimizer, gradients[stop:])
        ends.append(p.detach())
    assert torch.equal(*ends)


def test_an_infinite_momentum_is_no_measure() -> None:
    p = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = ps.Muon([p], lr=1e-3, momentum=0.5)
    trained(p, optimizer, [1.0] * EVERY)
    optimizer.state[p]["momentum_buffer"].fill_(float("inf"))
    trained(p, optimizer, [1.0])
    assert bool(optimizer.state[p]["peak"].isfinite().all())
    assert FADED < 1e-3


def test_other_matrices_than_before_start_with_peaks_of_their_own(monkeypatch) -> None:
    """``split_sizes`` may be written to a group, or be missing in an older checkpoint."""
    monkeypatch.setattr("polarstep.optim.stepping.resting.EVERY", 2)
    p = torch.nn.Parameter(torch.zeros(12, 8))
    optimizer = ps.Muon([p])
    trained(p, optimizer, random((12, 8)))
    optimizer.param_groups[0]["split_sizes"] = (4, 4, 4)
    trained(p, optimizer, random((12, 8)))
    assert optimizer.state[p]["peak"].shape == (3,)
