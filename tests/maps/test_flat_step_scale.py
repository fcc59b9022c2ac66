"""The scale of X₀ for polynomial steps: how far its estimate may be off, and what steps make of that."""

from __future__ import annotations

import pytest
import torch

from polarstep import rng
from polarstep.maps.coefficients import evaluate, polar_express, resolve
from polarstep.maps.deflated import (
    MARGIN_OF_SCALE,
    TOLERATED_NORM,
    TOLERATED_VALUE,
    norm_floor,
    tolerant_scale,
)
from polarstep.numerics import norm_products
from polarstep.theory import bounds

SETS = {
    "cubic": resolve("cubic", 1),
    "quintic x3": resolve("quintic", 3),
    "jordan x2": resolve("jordan", 2),
    "flat": resolve("flat", 1),
    "minimax": polar_express(0.2, 1),
    "minimax x2": polar_express(0.1, 2),
    "minimax of degree 9": polar_express(0.15, 1, 9),
}
KAPPAS = [6 / 4096, 6 / 768, 6 / 64, 0.5]


def seen(values, weights, p):
    """√(‖Gv‖/‖v‖) for v = Gᵖ⁻¹v₀, from G's eigenvalues and v₀'s squared parts along its eigenvectors."""
    return (
        (weights * values ** (2 * p)).sum(-1) / (weights * values ** (2 * p - 2)).sum(-1)
    ) ** 0.25


@pytest.mark.parametrize("p", [5, 7])
@pytest.mark.parametrize("kappa", KAPPAS)
def test_the_norm_floor_is_attained_by_a_spectrum_of_two_levels(kappa, p):
    y = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    levels = torch.stack([torch.ones_like(y), y], dim=-1)
    found = seen(levels, torch.tensor([kappa, 1 - kappa], dtype=torch.float64), p)
    assert float(found.min()) == pytest.approx(norm_floor(kappa, p), rel=1e-6)


@pytest.mark.parametrize("p", [5, 7])
@pytest.mark.parametrize("kappa", KAPPAS)
def test_no_spectrum_is_below_the_norm_floor(kappa, p):
    g = rng.generator("floor")
    values = torch.rand(2000, 12, generator=g, dtype=torch.float64) ** 0.3
    values[:, 0] = 1
    weights = torch.rand(2000, 11, generator=g, dtype=torch.float64) ** 4
    weights = (1 - kappa) * weights / weights.sum(-1, keepdim=True)
    weights = torch.cat([torch.full((2000, 1), kappa, dtype=torch.float64), weights], dim=-1)
    assert (seen(values, weights, p) >= norm_floor(kappa, p) - 1e-12).all()


def test_the_margin_keeps_a_scale_at_the_floor_within_what_is_tolerated():
    for m in (64, 768, 1024, 4096, 16384):
        reach = 1 / (MARGIN_OF_SCALE * norm_floor(6 / m, norm_products(m)))
        assert reach <= 0.975 * TOLERATED_VALUE  # with room for rounding
    assert reach > 0.96 * TOLERATED_VALUE  # at 16384 rows little is given away


def test_the_best_of_16_random_vectors_has_the_part_that_the_docstring_says():
    g = rng.generator("best of 16")
    best = torch.randn(20_000, 16, generator=g, dtype=torch.float64).square().amax(-1)
    for part, share in ((6, 0.2), (4, 0.5), (1.3, 0.99)):  # κ ≥ part/m
        assert float((best >= part).double().mean()) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("name", SETS)
def test_the_tolerant_scale_keeps_polynomials_within_their_bound(name):
    polynomials = SETS[name]
    c = tolerant_scale(polynomials)
    x = torch.linspace(0, TOLERATED_VALUE, 50_001, dtype=torch.float64)
    assert 0 < c <= 1
    assert float(evaluate(polynomials, c * x).abs().max()) <= TOLERATED_NORM * (1 + 1e-3)
    assert bounds.lifted_nu(polynomials, c * 1.17) <= (TOLERATED_NORM - 1) * (1 + 1e-2)
    if c < 1:  # and it is not smaller than it must be
        wider = evaluate(polynomials, (c + 1e-3) * x).abs().max()
        assert float(wider) > TOLERATED_NORM


def test_the_scales_are_those_of_the_docstring():
    for name in ("cubic", "quintic x3", "flat"):
        assert tolerant_scale(SETS[name]) == 1
    assert tolerant_scale(SETS["minimax x2"]) == pytest.approx(0.88, abs=0.005)
    # Without it, values of 1.17 explode.
    x = torch.tensor(TOLERATED_VALUE, dtype=torch.float64)
    assert float(evaluate(SETS["minimax x2"], x).abs()) > 100
