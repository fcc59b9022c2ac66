"""A CUDA graph of the user's own around a step, while there are other ranks."""

from __future__ import annotations

import pytest
import torch

import polarstep as ps

DRAWING = ps.LowRank(4, 2, 0, always_sketch=True)


@pytest.fixture
def capturing(monkeypatch):
    """A function that tells the optimizer that its step is captured, on one of several ranks."""

    def begin(ranks: int) -> None:
        monkeypatch.setattr("polarstep.optimizer.in_a_graph", lambda: True)
        here = torch.device("cpu")
        monkeypatch.setattr(ps.Muon, "_first_gpu", lambda optimizer: here)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)

    return begin


def started(polar: ps.PolarMap) -> tuple[torch.nn.Parameter, ps.Muon]:
    p = torch.nn.Parameter(torch.ones(8, 12))
    p.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    optimizer = ps.Muon([p], polar=polar)
    optimizer.step()
    return p, optimizer


def test_random_numbers_of_many_ranks_are_refused(capturing) -> None:
    p, optimizer = started(DRAWING)
    before = p.detach().clone()
    capturing(ranks=2)
    with pytest.raises(RuntimeError, match="copies of a parameter would drift apart; capture") as e:
        optimizer.step()
    assert "parameter 0 with LowRank" in str(e.value)
    assert "one of 2 ranks: expected a map that draws no random numbers" in str(e.value)
    assert torch.equal(p, before)


@pytest.mark.parametrize(
    ("polar", "ranks"), [(ps.NewtonSchulz(3, "quintic"), 2), (DRAWING, 1)], ids=str
)
def test_what_cannot_drift_is_captured(polar, ranks, capturing) -> None:
    p, optimizer = started(polar)
    before = p.detach().clone()
    capturing(ranks)
    optimizer.step()
    assert not torch.equal(p, before)
