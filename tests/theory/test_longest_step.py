"""How long a deflated step can be, against the vectors and the estimates of such steps."""

from __future__ import annotations

import math

import pytest
import torch
from tests.theory.spectra import random_spectra, with_spectrum

from polarstep import rng
from polarstep.polar.coefficients import resolve
from polarstep.polar.flat_step_scale import MARGIN_OF_SCALE, norm_floor
from polarstep.polar.rest_norm import FRESH, MARGIN, rest_norm
from polarstep.products.start_vectors import first_vectors, norm_products
from polarstep.theory import bounds
from polarstep.theory.bounds.longest_step import longest_deflated_step, subspace_norm_floor

FLAT = resolve("flat", 1)
ROWS, COLUMNS, ELL = 768, 3072, 128


def least_delta(m, n, unseen):
    """The least δ/‖R‖_op that the bound allows for: ‖T‖²_op = 1 + (‖R‖_op/δ)²."""
    return (longest_deflated_step(m, n, unseen=unseen) ** 2 - 1) ** -0.5


@pytest.mark.parametrize("carried", ["flat", "a few directions", "one direction", "none"])
def test_the_vectors_hold_as_much_of_a_new_direction_as_is_said(carried):
    """κ of directions that are orthogonal to the carried vectors; a percent of them has less."""
    n, count = COLUMNS, 4000
    g = rng.generator("carried", carried)
    lengths = {"flat": 16, "a few directions": 4, "one direction": 1, "none": 0}[carried]
    W = torch.zeros(n, 16, dtype=torch.float64)
    W[:16, :16] = torch.eye(16)
    W[:, lengths:] = 0
    W *= (16 / max(lengths, 1)) ** 0.5
    V = W + FRESH * first_vectors(ROWS, n, torch.device("cpu"))[0].double().mT
    r = torch.randn(n, count, generator=g, dtype=torch.float64)
    r[:16] = 0
    kappa = (torch.linalg.qr(V).Q.mT @ r).square().sum(0) / r.square().sum(0)
    for unseen in (0.01, 0.2):
        floor = least_delta(ROWS, n, unseen)
        below = MARGIN * subspace_norm_floor(kappa) < floor
        assert float(below.double().mean()) <= 1.2 * unseen
        if carried == "flat":  # the worst that can be carried; the bound gives little away
            assert float(below.double().mean()) >= 0.5 * unseen


# κ and the estimate of ‖R‖_op


@pytest.mark.parametrize("count", [1, 3])
def test_the_norm_that_vectors_see_is_above_its_floor(count):
    sigma = random_spectra(60, 16, seed=4)
    R = with_spectrum(sigma, 16, 24, seed=4)
    r = torch.linalg.svd(R).Vh[:, 0, :, None]
    for part in (0.01, 0.3, 1.0):
        V = torch.randn(60, 24, count, generator=rng.generator("v", count), dtype=R.dtype)
        V[..., :1] += r * 5 * part
        V = torch.linalg.qr(V).Q
        kappa = (V.mT @ r).square().sum((-2, -1))
        W = R.mT @ torch.linalg.qr(R @ V).Q
        seen = torch.linalg.matrix_norm(W, 2) / sigma[:, 0]
        assert (seen >= subspace_norm_floor(kappa) - 1e-12).all()


@pytest.mark.parametrize("kappa", [0.5, 0.065, 0.001])
def test_the_floor_is_attained(kappa):
    root = math.sqrt(kappa)
    y = root / (1 + root)
    R = torch.diag(torch.tensor([1.0, math.sqrt(y)], dtype=torch.float64))
    v = torch.tensor([[root], [math.sqrt(1 - kappa)]], dtype=torch.float64)
    u = R @ v
    seen = float(torch.linalg.vector_norm(R.mT @ u) / torch.linalg.vector_norm(u))
    assert float(subspace_norm_floor(kappa)) == pytest.approx(seen, rel=1e-12)


def test_the_margin_covers_what_the_docstring_says():
    floor = subspace_norm_floor
    assert MARGIN * float(floor(0.5)) >= 1
    assert MARGIN * float(floor(0.45)) < 1
    assert MARGIN * float(floor(0.065)) >= 0.7


def test_a_mass_outside_its_range_is_refused():
    for bad in (math.nan, 1.5, -0.1):
        with pytest.raises(ValueError, match=f"mass={bad}: expected.*0 ≤ κ ≤ 1"):
            subspace_norm_floor(bad)


# δ and s


def ratios(size, seeds):
    """δ/‖R‖_op for directions of ``size`` that are new in a flat rest of size one.

    The rest begins in columns of M that were zero before. The head holds the first rows of M.
    """
    Q = torch.eye(ROWS, ELL, dtype=torch.float32)[None]
    flat, carried = torch.eye(ROWS, COLUMNS, dtype=torch.float32)[None], None
    for _ in range(2):
        carried = rest_norm(flat, Q, flat[:, :ELL], 2.0**-23, vectors=carried).vectors
    found = []
    for seed in seeds:
        g = rng.generator("new direction", seed)
        u = torch.randn(ROWS, 1, generator=g, dtype=torch.float32)
        v = torch.randn(1, COLUMNS - ROWS, generator=g, dtype=torch.float32)
        u[:ELL] = 0
        M = flat.clone()
        M[0, :, ROWS:] = size * (u / u.norm()) @ (v / v.norm())
        estimate = rest_norm(M, Q, M[:, :ELL], 2.0**-23, vectors=carried.clone())
        found.append(1 / float(estimate.inverse) / (1 + size**2) ** 0.5)
    return found


def test_delta_on_768x3072_is_above_its_floor(monkeypatch):
    """A new direction of the worst size; with less of the first vectors δ is far below the floor."""
    floor = least_delta(ROWS, COLUMNS, 0.001)
    worst = min(ratios(6.0, range(16)))
    assert floor <= worst <= 1.2 * floor
    assert min(ratios(2.0, range(2)) + ratios(40.0, range(2))) > 1.5 * worst
    assert min(ratios(10.0, range(3))) > floor
    monkeypatch.setattr("polarstep.polar.rest_norm.FRESH", 2.0**-5)
    assert max(ratios(10.0, range(3))) < floor


@pytest.mark.parametrize("m", [768, 4096])
def test_the_best_start_column_holds_what_is_said(m):
    """With steps: the share of directions below the κ that the bound allows for."""
    g = rng.generator("start", m)
    best = torch.randn(100_000, 16, generator=g, dtype=torch.float64).square().amax(-1) / m
    for unseen in (0.01, 0.2):
        reach = 1 / (MARGIN_OF_SCALE * norm_floor(float(best.quantile(unseen)), norm_products(m)))
        norm = 1 + bounds.lifted_nu(FLAT, reach)
        assert longest_deflated_step(m, m, FLAT, unseen=unseen) == pytest.approx(norm, rel=0.03)


def test_the_bound_grows_with_the_sides_and_with_what_must_be_seen():
    for polynomials in ((), FLAT):
        for sides in ((256, 768, 1024), (1025, 2048, 4096)):  # the second with two products more
            found = [longest_deflated_step(m, 2 * m, polynomials) for m in sides]
            assert found == sorted(found)
        found = [longest_deflated_step(768, 768, polynomials, unseen=0.1**k) for k in range(1, 7)]
        assert found == sorted(found)
        of_tall = longest_deflated_step(512, 96, polynomials)
        assert of_tall == longest_deflated_step(96, 512, polynomials)
    # A δ that is not too small leaves ‖T‖_op ≤ √2.
    assert longest_deflated_step(1, 1, unseen=0.99) == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"m": 0}, "rows or columns"),
        ({"n": 1.5}, "rows or columns"),
        ({"unseen": 0.0}, "no bound holds for all"),
        ({"unseen": 1.0}, "between 0 and 1"),
    ],
)
def test_what_it_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        longest_deflated_step(**({"m": 8, "n": 8} | arguments))
