"""The bound on ‖T‖_op from random columns: above the exact norm, and close to it."""

from __future__ import annotations

import math

import pytest
import torch
from tests.spectra import SPECTRA, batch, gaussian, matrix, operator_norm, with_singular_values
from torch.utils.flop_counter import FlopCounterMode

from polarstep.certificate import norm_bound as module
from polarstep.certificate.norm_bound import norm_bound

# Singular values of k directions, and how many times ‖T‖_op the bound may be for k = 768.
CASES = {
    "flat": (lambda k: torch.ones(k), 1.06),
    "ripple": (lambda k: torch.linspace(0.86, 1.14, k), 1.06),
    "half rank": (lambda k: 1.1 * (torch.arange(k) < k // 2), 1.06),
    "falling": (lambda k: torch.linspace(1.2, 0, k), 1.06),
    "power law": (lambda k: torch.arange(1, k + 1) ** -0.7, 1.06),
    "one above the others": (lambda k: torch.where(torch.arange(k) == 0, 1.15, 1.0), 1.06),
    "twice the others": (lambda k: torch.where(torch.arange(k) == 0, 1.0, 0.5), 1.06),
    "30 times the others": (lambda k: torch.where(torch.arange(k) == 0, 30.0, 1.0), 1.05),
    "1000 times the others": (lambda k: torch.where(torch.arange(k) == 0, 1000.0, 1.0), 1.03),
    "rank one": (lambda k: (torch.arange(k) == 0).double(), 1.03),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(96, 160), (160, 96), (256, 256), (768, 800)], ids=str)
def test_the_bound_is_above_the_norm_and_close(name, shape):
    values, within = CASES[name]
    sigma = values(min(shape)).double()
    T = with_singular_values(sigma, *shape)[None]
    for dtype in (torch.float32, torch.float64):
        found = float(norm_bound(T.to(dtype)) / sigma.max())
        assert 1 <= found <= within


def test_gaussian_matrices_are_bounded_closely():
    for shape in ((1, 768, 768), (1, 300, 900), (1, 900, 300)):
        T = gaussian(*shape, dtype=torch.float32)
        exact = operator_norm(T)
        assert (exact <= norm_bound(T)).all()
        assert (norm_bound(T) <= 1.06 * exact).all()


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(65, 65), (66, 90), (90, 66), (200, 201)], ids=str)
def test_every_spectrum_layout_and_scale(spectrum, shape):
    T = batch(spectrum, 3, *shape)
    exact = operator_norm(T)
    for laid in (T, T.mT.contiguous().mT, torch.stack([T, T], -1)[..., 0]):
        for scale in (1.0, 1e-30, 1e30):
            found = norm_bound((laid * scale).float()).double() / scale
            assert (exact * (1 - 1e-6) <= found).all()
            assert (found <= 1.06 * exact).all()
        assert (exact * (1 - 1e-14) <= norm_bound(laid)).all()


@pytest.mark.parametrize("d0", [1, 2, 3, 15, 16, 17, 64])
def test_few_rows_have_their_exact_norm(d0):
    for spectrum in SPECTRA:
        for T in (batch(spectrum, 3, d0, 70), batch(spectrum, 3, 70, d0)):
            for scale in (1.0, 1e-30, 1e30):
                given = (T * scale).float()
                found, exact = norm_bound(given).double() / scale, operator_norm(given / scale)
                assert (exact <= found).all()
                assert (found <= exact * (1 + 1e-4)).all()


@pytest.mark.parametrize("shape", [(20, 30), (100, 120), (120, 100)], ids=str)
def test_zero_is_zero_and_what_is_not_finite_has_nan_alone(shape):
    T = batch("flat", 5, *shape).float()
    T[1], T[2, 3, 4], T[3, 0, 0], T[4, :, 1] = 0, torch.nan, torch.inf, -torch.inf
    found = norm_bound(T)
    assert found[1] == 0
    assert found.isnan().tolist() == [False, False, True, True, True]
    assert found[0] == pytest.approx(float(norm_bound(T[:1])), rel=1e-6)


@pytest.mark.parametrize("spectrum", sorted({*SPECTRA} - {"zero"}))
@pytest.mark.parametrize("exponent", [-38, -37, -36, 36, 37, 38])
def test_beyond_its_range_the_bound_is_larger_or_nan(spectrum, exponent):
    """For ‖T‖_op from 1e-36 to 1e36 it is close. Beyond this it is still a bound, if it is a number."""
    T = (matrix(spectrum, 96, 160) * 10.0**exponent).float()[None]
    found = norm_bound(T).double()
    exact = operator_norm(T.double() * 10.0**-exponent) * 10.0**exponent
    assert found.isnan() or exact <= found
    if -36 <= exponent <= 36:
        assert found <= 1.06 * exact


def test_the_bound_is_a_function_of_t_alone():
    T = gaussian(2, 100, 120, dtype=torch.float32)
    before = torch.get_rng_state()
    assert torch.equal(norm_bound(T), norm_bound(T))
    assert torch.equal(torch.get_rng_state(), before)


def test_constants_made_in_inference_mode_can_be_used_outside_of_it():
    module._fixed.cache_clear()
    T = gaussian(1, 100, 120, dtype=torch.float32)
    with torch.inference_mode():
        inside = norm_bound(T)
    constants = module._fixed(T.dtype, T.device, module.LEAST * module.UNIT)
    assert module._fixed.cache_info().misses == 1
    assert not any(tensor.is_inference() for tensor in constants)
    assert torch.equal(norm_bound(T), inside)


@pytest.mark.parametrize("shape", [(768, 1000), (1000, 768), (300, 300)], ids=str)
def test_it_costs_fifteen_products_with_sixteen_columns(shape):
    T = gaussian(1, *shape, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        norm_bound(T)
    products = 15 * 2 * shape[0] * shape[1] * 16
    assert products <= counter.get_total_flops() <= 1.1 * products


def chebyshev(x, degree):
    inside = torch.cos(degree * torch.acos(x.clamp(-1, 1)))
    return torch.where(x > 1, torch.cosh(degree * torch.acosh(x.clamp_min(1))), inside)


@pytest.mark.parametrize("q", [0.5, 1000.0])  # the second is above every p, so that p/q counts as 1
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_formula_of_the_docstring(name, q):
    """P from an SVD, for all α; α₀ is the largest Rayleigh quotient of TTᵀ at (TTᵀ)²W."""
    values = CASES[name][0](80).double()
    T = with_singular_values(values, 80, 100)
    W = gaussian(80, 16, seed=5)
    U, sigma, Vh = torch.linalg.svd(T, full_matrices=False)
    five, four = ((sigma**power)[:, None] * (U.mT @ W) for power in (5, 4))
    alpha0 = (five.square().sum(0) / four.square().sum(0)).max().sqrt()
    assert alpha0 <= sigma[0] * (1 + 1e-12)
    least = math.inf
    for ratio in module.RATIOS:
        alpha = ratio * alpha0
        P = Vh.mT @ (chebyshev(sigma / alpha, 15)[:, None] * (U.mT @ W))
        schatten = torch.linalg.svdvals(P).pow(64).sum().pow(1 / 64)
        assert 1 - 1e-12 <= schatten / operator_norm(P) <= 16 ** (1 / 64)
        tau = (schatten / q).clamp_min(1)
        least = min(least, float(alpha * torch.cosh(torch.acosh(tau) / 15)))
    assert float(module._by_columns(T[None], W, q)) == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(96, 160), (768, 800)], ids=str)
def test_rounding_never_makes_the_bound_smaller(name, shape):
    """In float32 it is at least that of exact arithmetic with the same columns, and hardly more."""
    T = with_singular_values(CASES[name][0](shape[0]).double(), *shape)[None].float()
    for seed in range(8):
        W = gaussian(shape[0], 16, seed=seed, dtype=torch.float32)
        exact = module._by_columns(T.double(), W.double(), 0.5)
        found = module._by_columns(T, W, 0.5) * (1 + 64 * 2.0**-23)
        assert exact.item() <= found.item() <= 1.01 * exact.item()


def test_room_is_left_for_what_cancels():
    """Where α₀ is far below σ₁ the bound in float32 exceeds that of exact arithmetic by over 64ε."""
    sigma = torch.where(torch.arange(768) == 0, 1.0, 0.6).double()
    T = with_singular_values(sigma, 768, 800)[None].float()
    W = gaussian(768, 16, dtype=torch.float32)
    exact = module._by_columns(T.double(), W.double(), 0.5)
    assert 2e-5 <= float(module._by_columns(T, W, 0.5) / exact) - 1 <= 5e-3


def test_polynomials_of_another_interval():
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)
    for ratio, row in zip(module.RATIOS, module._coefficients(), strict=True):
        found = sum(c * chebyshev(x, j) for c, j in zip(row, range(1, 16, 2), strict=True))
        torch.testing.assert_close(found, chebyshev(x / ratio, 15))
        assert max(map(abs, row)) <= 2
    for j, row in zip((1, 3, 5, 4), module.CHEBYSHEV, strict=True):
        found = sum(c * x ** (2 * i + j % 2) for i, c in enumerate(row))
        torch.testing.assert_close(found, chebyshev(x, j))


def least_norms_are_rare(columns, least):
    """Pr(‖uᵀW‖ < q) ≤ (q²/2)^(b/2)/Γ(b/2 + 1), for b columns."""
    return (least**2 / 2) ** (columns / 2) / math.gamma(columns / 2 + 1)


def test_the_probability_of_the_docstring():
    assert least_norms_are_rare(module.COLUMNS, module.LEAST) == pytest.approx(1.5e-12, rel=0.02)
    assert least_norms_are_rare(1, 0.5) == pytest.approx(0.5 * math.sqrt(2 / math.pi))


@pytest.mark.parametrize(("columns", "least"), [(1, 0.4), (2, 0.7), (4, 1.2)])
def test_it_fails_as_seldom_as_it_says_and_no_more_seldom(columns, least):
    """With few columns and a large q failures can be counted. The bound on their number is near."""
    T = torch.diag(torch.tensor([1.0, 0.9], dtype=torch.float64))[None]
    draws = 2000
    W = gaussian(draws, 2, columns, seed=9)
    found = module._by_columns(T.expand(draws, -1, -1), W, least)
    rate = float((found < 1).double().mean())
    allowed = least_norms_are_rare(columns, least)
    error = math.sqrt(allowed * (1 - allowed) / draws)
    assert allowed / 3 <= rate <= allowed + 3 * error
    # It is those draws that fail, and no others.
    assert (found[torch.linalg.vector_norm(W[:, 0], dim=-1) >= least] >= 1).all()
