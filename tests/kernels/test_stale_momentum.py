"""A fused parameter that gets no gradient any more comes to rest, as a plain one does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import polarstep as ps
from polarstep import stale_momentum as rule

# Interpreted steps take long: the rule is applied at every 16th of them, and momentum fades faster.
EVERY, MOMENTUM = 16, 0.1
MAPS = {
    "full space": ps.NewtonSchulz(3, "quintic"),
    "warm": ps.LowRank(4, 4, sketch=ps.Warm(), always_sketch=True),
}


@pytest.mark.parametrize("polar", MAPS.values(), ids=MAPS.keys())
def test_it_ends_where_it_is_finite(
    device: torch.device, polar: ps.PolarMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a parameter of the same bucket that goes on."""
    monkeypatch.setattr(rule, "EVERY", EVERY)
    resting, moving = (nn.Parameter(torch.zeros(24, 32, device=device)) for _ in range(2))
    optimizer = ps.Muon([resting, moving], lr=1e-3, momentum=MOMENTUM, polar=polar)
    g = torch.Generator().manual_seed(3)
    after: list[tuple[Tensor, Tensor]] = []
    for step in range(2 * EVERY + 4):
        G = torch.randn(2, 24, 32, generator=g).to(device)
        resting.grad, moving.grad = G[0] if step < 5 else torch.zeros_like(G[0]), G[1]
        optimizer.step()
        after.append((resting.detach().clone(), moving.detach().clone()))
    (bucket,) = optimizer._replayed.buckets.values()
    assert bucket.count == 2
    assert all(bool(X.isfinite().all()) for pair in after for X in pair)
    assert not torch.equal(after[10][0], after[9][0])  # momentum alone still moves it
    # The rule measures a peak at step 16, and finds at step 32 that the momentum has faded from it.
    assert all(torch.equal(X, after[2 * EVERY][0]) for X, _ in after[2 * EVERY :])
    assert not torch.equal(after[-1][1], after[-2][1])
    assert not optimizer.state[resting]["momentum_buffer"].any()
