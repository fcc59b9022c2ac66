"""Deflated maps in the optimizer: what they carry, and momentum that makes norms hard to estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.spectra import SPECTRA, gaussian, matrix, operator_norm
from torch import Tensor, nn

import polarstep as ps
from polarstep import rng
from polarstep.maps.deflated import FACTOR

INNER = ps.NewtonSchulz(4, "polar-express-sketch")
FRESH = ps.LowRank(12, 4, inner=INNER, always_sketch=True)
HEADS = {
    "fresh": FRESH,
    "no power": replace(FRESH, power=0),
    "kaczmarz": replace(FRESH, sketch=ps.Kaczmarz()),
    "warm": replace(FRESH, sketch=ps.Warm()),
}
STEPS = {
    "flat": ps.NewtonSchulz(1, "flat"),
    "jordan": ps.NewtonSchulz(2, "jordan"),
}
MAPS = {
    f"{head} {steps}": ps.Deflated(HEADS[head], STEPS[steps]) for head in HEADS for steps in STEPS
}
over_maps = pytest.mark.parametrize("polar", MAPS.values(), ids=MAPS.keys())


@over_maps
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains(polar, dtype):
    """Towards a target matrix, whose distance in the nuclear norm falls by lr·min(m, n) a step."""
    target = gaussian(32, 48, seed=1).to(dtype)
    p = nn.Parameter(torch.zeros(32, 48, dtype=dtype))
    optimizer = ps.Muon([p], lr=0.5, momentum=0.5, shape_scale="none", polar=polar)
    losses = []
    for _ in range(12):
        loss = (p - target).float().square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.35 * losses[0]


def zero_then_rank_one(m: int, n: int) -> Iterator[Tensor]:
    """Zero at first, as for a zero-initialized projection, then one direction 1e6 above the noise."""
    g = rng.generator("rank one", m, n)
    leading = 1e3 * torch.outer(torch.randn(m, generator=g), torch.randn(n, generator=g))
    for step in range(12):
        noise = 1e-3 * torch.randn(m, n, generator=g)
        yield torch.zeros(m, n) if step < 3 else leading + (noise if step > 4 else 0)


def drifting(m: int, n: int) -> Iterator[Tensor]:
    """Rank one and a little noise; both vectors change by half of their length at every step."""
    g = rng.generator("drifting", m, n)
    u, v = torch.randn(m, generator=g), torch.randn(n, generator=g)
    for _ in range(24):
        u = u + 0.5 * torch.randn(m, generator=g)
        v = v + 0.5 * torch.randn(n, generator=g)
        yield torch.outer(u, v) + 1e-3 * torch.randn(m, n, generator=g)


def new_directions(m: int, n: int) -> Iterator[Tensor]:
    """Every third step another leading direction, of a size between 1e-3 and 1e3."""
    g = rng.generator("new", m, n)
    for step in range(18):
        if step % 3 == 0:
            size = 10 ** (6 * torch.rand(1, generator=g) - 3)
            leading = size * torch.outer(torch.randn(m, generator=g), torch.randn(n, generator=g))
        yield leading + 0.1 * torch.randn(m, n, generator=g)


def single_entries(m: int, n: int) -> Iterator[Tensor]:
    """Every step one large entry elsewhere, and noise."""
    g = rng.generator("entries", m, n)
    for _ in range(18):
        G = 1e-2 * torch.randn(m, n, generator=g)
        i, j = (int(torch.randint(size, (1,), generator=g)) for size in (m, n))
        G[i, j] += 10 ** (4 * float(torch.rand(1, generator=g)))
        yield G


@over_maps
@pytest.mark.parametrize(
    "gradients", [zero_then_rank_one, drifting, new_directions, single_entries]
)
@pytest.mark.parametrize("shape", [(64, 96), (128, 128)], ids=str)
def test_a_new_leading_direction_does_not_blow_up(polar, gradients, shape):
    """What small matrices give; the bound for all shapes is in ``theory/test_deflated.py``."""
    p = nn.Parameter(torch.zeros(shape))
    optimizer = ps.Muon([p], lr=0.1, momentum=0.85, nesterov=False, polar=polar)
    updates = []
    optimizer.register_polar_hook(lambda bucket: updates.append(bucket.T.clone()))
    for G in gradients(*shape):
        p.grad = G
        optimizer.step()
    assert bool(p.isfinite().all())
    assert len(updates) > 10
    assert operator_norm(torch.cat(updates)).max() <= 1.25


@over_maps
@pytest.mark.parametrize("shape", [(64, 96), (128, 128)], ids=str)
def test_a_delta_that_is_too_small_by_30_percent_blows_nothing_up(polar, shape, monkeypatch):
    """Steps measure ‖X₀‖_op after δ, and hardly notice."""
    monkeypatch.setattr("polarstep.maps.deflated.FACTOR", 0.7 * FACTOR)
    M = torch.stack([matrix(spectrum, *shape) for spectrum in SPECTRA]).float()
    p = nn.Parameter(torch.zeros_like(M))
    optimizer = ps.Muon([p], lr=0.1, momentum=0.0, polar=polar)
    updates = []
    optimizer.register_polar_hook(lambda bucket: updates.append(bucket.T.clone()))
    for _ in range(5):
        p.grad = M.clone()
        optimizer.step()
    largest = operator_norm(torch.cat(updates)).max()
    assert 0.9 < largest <= 1.25
