"""Polynomials by repeated squaring: their value, how many products they take, and which have none."""

from __future__ import annotations

import pytest
import torch
from tests.spectra import gaussian, orthogonal
from torch.utils.flop_counter import FlopCounterMode

from polarstep.maps.coefficients import polar_express, resolve
from polarstep.numerics import squarings
from polarstep.ops.base import Products

# By the degree of the odd function, with the number of products of square matrices.
POLYNOMIALS = {
    5: (resolve("jordan", 1)[0], 1),
    9: (polar_express(0.15, 1, 9)[0], 2),
    17: (resolve("flat", 1)[0], 3),
}
over_polynomials = pytest.mark.parametrize(
    ("polynomial", "count"), POLYNOMIALS.values(), ids=POLYNOMIALS.keys()
)


def by_eigenvalues(G, polynomial):
    """P(G) = V·P(Λ)·Vᵀ in float64."""
    values, V = torch.linalg.eigh(G.double())
    P = sum(c * values**k for k, c in enumerate(polynomial))
    return (V * P[..., None, :]) @ V.mT


def symmetric(m, largest=1.0):
    """Symmetric matrices with eigenvalues from 0 to ``largest``."""
    values = torch.linspace(0, largest, m, dtype=torch.float64)
    return torch.stack([(V := orthogonal(m, seed)) * values @ V.mT for seed in range(2)])


@over_polynomials
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("free_of_identity", [False, True])
def test_the_squarings_are_the_polynomial(polynomial, count, dtype, free_of_identity):
    if free_of_identity:  # as iterations call it, which add a·X on their own
        polynomial = (0.0, *polynomial[1:])
    G = symmetric(24, 1.2).to(dtype)
    found = Products().polynomial(G, polynomial).double()
    tolerance = 1e-11 if dtype == torch.float64 else 2e-3
    torch.testing.assert_close(found, by_eigenvalues(G, polynomial), atol=tolerance, rtol=0)
    assert len(squarings(polynomial)) == count


@over_polynomials
def test_their_number_is_that_of_the_products(polynomial, count):
    G = symmetric(24)
    with FlopCounterMode(display=False) as counter:
        Products().polynomial(G, polynomial)
    assert counter.get_total_flops() == count * 2 * 2 * 24**3  # two matrices


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
@over_polynomials
def test_a_scale_comes_out_as_phi_of_s_times_x(polynomial, count, scale):
    """s·P(s²XXᵀ)X = φ(sX) on singular values, with another s for each matrix."""
    X = gaussian(2, 12, 20) / 10
    s = scale * torch.tensor([1.0, 0.5], dtype=torch.float64)[:, None, None]
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    x = s[..., 0] * sigma
    value = sum(c * x ** (2 * k + 1) for k, c in enumerate(polynomial))
    found = Products().scaled_polynomial(X @ X.mT, polynomial, s) @ X
    torch.testing.assert_close(found, (U * value[:, None]) @ Vh, atol=1e-8, rtol=1e-8)


def test_degree_eight_must_be_nested():
    nested = POLYNOMIALS[17][0]
    assert len(squarings(nested)) == 3
    for power in range(1, 6):
        other = tuple(c + (k == power) for k, c in enumerate(nested))
        assert squarings(other) is None, power
        # Horner's rule takes its place.
        G = symmetric(12)
        found = Products().polynomial(G, other)
        torch.testing.assert_close(found, by_eigenvalues(G, other), atol=1e-9, rtol=0)
    assert squarings((nested[0] + 1, *nested[1:])) is not None  # the identity is free


@pytest.mark.parametrize("degree", [0, 1, 3, 5, 6, 7, 9])
def test_other_degrees_have_none(degree):
    assert squarings(tuple(float(k + 1) for k in range(degree + 1))) is None


def test_a_leading_zero_is_no_degree():
    assert squarings((1.0, 2.0, 0.0)) is None
    assert squarings((8.0, -56.0, 167.0, -202.0, 0.0)) is None
