"""A parameter that gets no gradient any more comes to rest, finite, with every map."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.counting import Operations
from tests.solvers import Solver, over_solvers
from torch import Tensor

import polarstep as ps
from polarstep import gradients
from polarstep.gradients import collect
from polarstep.stale_momentum import EVERY, FADED, reset


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
    monkeypatch.setattr("polarstep.stale_momentum.EVERY", 4)
    p = torch.nn.Parameter(torch.zeros(12, 20))
    optimizer = ps.Muon([p], lr=1e-3, momentum=0.03, polar=solver.map)
    start = [scale * G for G in random((12, 20))]
    after = trained(p, optimizer, [*start, *[0.0] * 16])
    assert all(bool(X.isfinite().all()) for X in after)
    assert torch.equal(after[-1], after[-4])
    assert not torch.equal(after[6], after[5])


@pytest.mark.parametrize("scale", [1e-38, 1e-42])
def test_denormal_matrices_are_lifted_like_others(scale: float) -> None:
    """T(cM) = T(M) up to the digits that a denormal has, and finite in any case."""
    (M,) = random((24, 32), 1)
    polar = ps.LowRank(8, 4)
    T, small = polar(M), polar(scale * M)
    assert bool(small.isfinite().all())
    assert (T - small).norm() < 0.1 * T.norm()


def test_momentum_below_every_normal_number_is_set_to_zero() -> None:
    """Its peak is as small, and β times the smallest number would be that number for ever."""
    p = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = ps.Muon([p], lr=1e-3)
    trained(p, optimizer, [1e-40, *[0.0] * EVERY])
    assert not optimizer.state[p]["momentum_buffer"].any()


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
    for those in (falling, spiked):
        buffers = []
        for step in those:
            p.grad = step.clone()
            optimizer.step()
            buffers.append(optimizer.state[p]["momentum_buffer"].clone())
        expected = torch.zeros_like(G)
        for step, C in zip(those, buffers, strict=True):
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
    monkeypatch.setattr("polarstep.stale_momentum.EVERY", 2)
    p = torch.nn.Parameter(torch.zeros(12, 8))
    optimizer = ps.Muon([p])
    trained(p, optimizer, random((12, 8)))
    optimizer.param_groups[0]["split_sizes"] = (4, 4, 4)
    trained(p, optimizer, random((12, 8)))
    assert optimizer.state[p]["peak"].shape == (3,)


VIEWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "a matrix": ((8, 12), {}),
    "a stack": ((3, 8, 12), {}),
    "stored transposed": ((3, 8, 12), {"layout": "transposed"}),
    "a filter": ((8, 4, 3, 1), {}),
    "equal parts": ((12, 8), {"split_sizes": (4, 4, 4)}),
    "unequal parts": ((12, 8), {"split_sizes": (8, 4)}),
    "columns": ((12, 8), {"split_columns": (2, 2, 4)}),
    "equal columns": ((12, 8), {"split_columns": (4, 4)}),
    "parts in turn": ((12, 8), {"split_sizes": (2, 1), "split_repeats": 4}),
    "columns of a stack": ((2, 12, 8), {"layout": "transposed", "split_sizes": (2, 6)}),
}


@pytest.mark.parametrize("by_norms", [False, True], ids=["by extremes", "by norms"])
@pytest.mark.parametrize("momentum_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_order", [True, False], ids=["contiguous", "strided"])
def test_the_rule_is_the_same_for_each_way_to_be_a_matrix(
    monkeypatch, in_order: bool, momentum_dtype: torch.dtype | None, by_norms: bool
) -> None:
    """C ← 0 in the matrices whose largest entry is below 1e-6 of their peak, and in no other."""
    monkeypatch.setattr(gradients, "_by_norms", lambda device: by_norms)
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, (shape, _) in VIEWS.items()}
    groups = [{"params": [params[name]]} | options for name, (_, options) in VIEWS.items()]
    optimizer = ps.Muon(groups, momentum=1e-9, momentum_dtype=momentum_dtype)
    works = []
    for group, p in zip(optimizer.param_groups, params.values(), strict=True):
        group["step"], p.grad = EVERY, torch.zeros_like(p)
        works.append(collect(group))
        (view,) = works[-1].views
        C = random(tuple(p.shape), 1)[0].to(momentum_dtype or torch.float32)
        optimizer.state[p]["momentum_buffer"] = C if in_order else C.mT.contiguous().mT
    reset(works, optimizer.state)  # finds the peaks
    for work, p in zip(works, params.values(), strict=True):
        C, (view,) = optimizer.state[p]["momentum_buffer"], work.views
        blocks = view.blocks(C.clone())
        peaks = torch.cat([block.abs().amax((-2, -1)) for block in blocks])
        assert torch.equal(optimizer.state[p]["peak"], peaks)
        shrunk, first = [], 0
        for block in blocks:  # every other matrix fades
            size = torch.tensor([1e-7 if (first + k) % 2 == 0 else 1.0 for k in range(len(block))])
            shrunk.append((block * size[:, None, None]).to(C.dtype))
            first += len(block)
        C.copy_(view.assemble(shrunk, C.shape))
        optimizer.state[p]["peak"].mul_(1.0)
        work.group["momentum"] = 1.0  # peaks do not fade
    reset(works, optimizer.state)
    for work, p in zip(works, params.values(), strict=True):
        (view,), first = work.views, 0
        for block in view.blocks(optimizer.state[p]["momentum_buffer"]):
            for matrix in block:
                assert bool(matrix.any()) == (first % 2 == 1)
                first += 1


def test_many_matrices_take_one_launch_each_and_a_few_for_all(monkeypatch) -> None:
    """Where the host does not know which of them rest, as on a GPU."""
    monkeypatch.setattr(gradients, "_by_norms", lambda device: True)
    launches = []
    for count in (8, 64):
        shapes = [(24, 32), (32, 24), (3, 8, 8), (8, 4, 3, 3)]
        with torch.device("meta"):
            params = [torch.nn.Parameter(torch.empty(shapes[i % 4])) for i in range(count)]
        optimizer = ps.Muon(params)
        for p in params:
            p.grad = torch.empty_like(p)
            optimizer.state[p] = {"momentum_buffer": torch.empty_like(p)}
        optimizer.param_groups[0]["step"] = EVERY
        works = [collect(optimizer.param_groups[0])]
        with torch.no_grad():
            reset(works, optimizer.state)  # makes the peaks
            with Operations() as ops:
                reset(works, optimizer.state)
        assert ops.counts["masked_fill_"] == count
        stacks = count // 4
        launches.append(ops.launches - count - stacks)  # a norm for the matrices of each stack
    assert launches[0] == launches[1] < 20
