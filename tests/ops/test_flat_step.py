"""X₀ and a polynomial step on it in plain torch, and the scale that brings ‖X₀‖_op to one."""

from __future__ import annotations

import math

import pytest
import torch
from tests.spectra import gaussian, orthogonal, with_singular_values

from polarstep import rng
from polarstep.maps.coefficients import evaluate, polar_express, resolve
from polarstep.maps.deflated import (
    MARGIN_OF_SCALE,
    TOLERATED_NORM,
    norm_floor,
    tolerant_scale,
)
from polarstep.numerics import SIGNS, norm_products, signs, start_vectors
from polarstep.ops.base import Products
from polarstep.ops.cpu import Cpu
from polarstep.ops.lazy import Head, HeadPlusRest

OPS = Products()


# X₀


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["wide", "transposed"])
def test_the_flattened_matrix_is_its_formula(layout, weighted, dtype):
    A = gaussian(2, 24, 40)
    Q = orthogonal(24, 1, 6).expand(2, -1, -1)
    B, X, W = Q.mT @ A, gaussian(2, 6, 40, seed=1), gaussian(2, 6, 6, seed=2)
    inverse = torch.tensor([0.5, 3.0], dtype=torch.float64)[:, None, None]
    expected = Q @ (W @ X if weighted else X) + (A - Q @ B) * inverse
    given = A.to(dtype)
    given = given if layout == "wide" else given.mT.contiguous().mT
    head = Head(Q.to(dtype), B.to(dtype), X.to(dtype), W.to(dtype) if weighted else None)
    found = OPS.flattened(given, head, inverse)
    assert found.dtype == dtype
    assert (found.mT if layout == "transposed" else found).is_contiguous()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


def test_a_basis_that_is_orthonormal_but_roughly_leaves_little_of_the_head():
    """Columns of norm 1 − 2⁻⁸, as bfloat16 leaves them, under a head a thousand times the rest."""
    sigma = torch.where(torch.arange(24) < 1, 1000.0, 1.0).double()
    M = with_singular_values(sigma, 24, 40)[None]
    Q = torch.linalg.svd(M).U[..., :1]
    Z = torch.linalg.svd(Q.mT @ M, full_matrices=False).Vh
    exact = Q @ Z + (M - Q @ (Q.mT @ M))
    rough = (1 - 2**-8) * Q
    B = rough.mT @ M
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    found = OPS.flattened(M, Head(rough, B, Z), one)
    error = torch.linalg.matrix_norm(found - exact, 2)
    without = torch.linalg.matrix_norm(rough @ Z + (M - rough @ B) - exact, 2)
    assert error < 0.1
    assert without > 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", ["wide", "transposed"])
def test_x0_is_multiplied_out_in_the_layout_of_its_matrix(layout, dtype):
    A, L, R = (gaussian(2, *s).to(dtype) for s in ((12, 20), (12, 3), (3, 20)))
    A = A if layout == "wide" else A.mT.contiguous().mT
    inverse = torch.tensor([0.5, 3.0])
    flat = HeadPlusRest(A, inverse, L, R)
    T = flat.multiplied_out()
    expected = A * inverse[:, None, None].to(dtype) + L @ R
    assert T.dtype == dtype
    assert (T.mT if layout == "transposed" else T).is_contiguous()
    torch.testing.assert_close(T, expected)
    torch.testing.assert_close(flat.mT.multiplied_out(), expected.mT)


# The scale


def spectrum(kind, m):
    """Eigenvalues of G, the largest first."""
    k = torch.arange(1, m + 1, dtype=torch.float64)
    return {
        "flat": torch.ones(m, dtype=torch.float64),
        "power law": k**-1.0,
        "spiked": torch.where(k == 1, 1.0, 0.3),
        "rank one": torch.where(k == 1, 1.0, 0.0),
        "square of a random matrix": torch.linalg.svdvals(gaussian(m, 2 * m)) ** 2,
    }[kind]


KINDS = ["flat", "power law", "spiked", "rank one", "square of a random matrix"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [16, 100, 256])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_norm_is_seen_from_below_and_not_from_far_below(kind, m, size, dtype):
    values = size * spectrum(kind, m)
    G = torch.stack([(V := orthogonal(m, seed)) * values @ V.mT for seed in range(4)]).to(dtype)
    scale = OPS.scale_to_one(G, 1.0)
    assert scale.shape == (4, 1, 1)
    ratio = 1 / (scale.flatten().double() * values[0].sqrt())  # √λ/‖X‖_op
    assert (ratio <= 1 + 1e-5).all()
    assert (ratio >= norm_floor(min(1, 6 / m), norm_products(m))).all()
    torch.testing.assert_close(OPS.scale_to_one(G, 1.25), scale / 1.25)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_what_has_no_norm_has_a_scale_of_zero(bad):
    G = torch.eye(20).repeat(3, 1, 1)
    G[1] *= 0
    G[1, 3, 3] = bad
    scale = OPS.scale_to_one(G, 1.0).flatten()
    torch.testing.assert_close(scale, torch.tensor([1.0, 0.0, 1.0]))


def at_its_worst(m, kappa):
    """G of norm one whose leading direction has a part ``kappa`` of the best of the start vectors.

    All other eigenvalues are the y of :func:`norm_floor`. Returns G and y.
    """
    V = start_vectors(m, torch.device("cpu"))[0].double()
    V = V / torch.linalg.vector_norm(V, dim=0)
    w = torch.randn(m, generator=rng.generator("worst"), dtype=torch.float64)
    outside = torch.linalg.qr(torch.cat([V, w[:, None]], dim=1)).Q[:, -1]
    u = math.sqrt(kappa) * V[:, 0] + math.sqrt(1 - kappa) * outside
    y = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    p = norm_products(m)
    below = (kappa + (1 - kappa) * y ** (2 * p)) / (kappa + (1 - kappa) * y ** (2 * p - 2))
    y = float(y[below.argmin()])
    return y * torch.eye(m, dtype=torch.float64) + (1 - y) * torch.outer(u, u), y


@pytest.mark.parametrize("m", [64, 256, 1024, 1025])
def test_the_floor_is_attained(m):
    G, _ = at_its_worst(m, 6 / m)
    found = 1 / float(OPS.scale_to_one(G[None], 1.0))
    assert found == pytest.approx(norm_floor(6 / m, norm_products(m)), rel=1e-3)


SETS = {
    "flat": resolve("flat", 1),
    "jordan x2": resolve("jordan", 2),
    "minimax": polar_express(0.2, 1),
    "minimax x2": polar_express(0.1, 2),
}


@pytest.mark.parametrize("polynomials", SETS.values(), ids=SETS.keys())
@pytest.mark.parametrize("kappa", [6 / 4096, 6 / 256])
def test_steps_stay_bounded_where_the_scale_is_at_its_worst(polynomials, kappa):
    """‖T‖_op ≤ 2.6 for X₀ = G^½, also with the κ that 4096 rows would have."""
    G, y = at_its_worst(256, kappa)
    margin = MARGIN_OF_SCALE / tolerant_scale(polynomials)
    s = float(OPS.scale_to_one(G[None], margin))
    assert s * margin > 1.1  # the norm is one: the scale is too large indeed
    values, V = torch.linalg.eigh(G)
    X = ((V * values.clamp_min(0).sqrt()) @ V.mT)[None]
    scale = torch.full((1, 1, 1), s, dtype=torch.float64)
    T = OPS.scaled_polynomial(G[None], polynomials[0], scale) @ X
    T = OPS.iterate(T, polynomials[1:])
    norm = float(torch.linalg.matrix_norm(T, 2))
    assert norm <= TOLERATED_NORM
    ends = s * torch.tensor([1.0, math.sqrt(y)], dtype=torch.float64)
    assert norm == pytest.approx(float(evaluate(polynomials, ends).abs().max()), rel=1e-6)


@pytest.mark.parametrize("size", [70.0, 85.0, 100.0])
def test_two_rows_with_equal_signs_make_no_long_step(size):
    """The direction is new, so that the head lacks it: with start vectors of signs ‖T‖_op was 3500."""
    m = 768
    S = signs(m, torch.device("cpu"))[0].double()
    alike = (S @ S.mT).fill_diagonal_(0)
    i, j = divmod(int(alike.abs().argmax()), m)
    assert alike[i, j].abs() == SIGNS
    u, v = torch.zeros(m, dtype=torch.float64), torch.zeros(m, dtype=torch.float64)
    u[i], u[j] = 0.5**0.5, -(0.5**0.5) * alike[i, j].sign()
    v[:2] = 0.5**0.5
    noise = gaussian(m, m)
    noise -= torch.outer(u, u @ noise)
    noise -= torch.outer(noise @ v, v)
    X = (noise + size * torch.outer(u, v))[None] / (2 * math.sqrt(m))  # as after δ, without a head
    G = X @ X.mT
    polynomials = resolve("flat", 1)
    s = OPS.scale_to_one(G, MARGIN_OF_SCALE)
    T = OPS.scaled_polynomial(G, polynomials[0], s) @ X
    assert float(torch.linalg.matrix_norm(T, 2)) <= TOLERATED_NORM


@pytest.mark.parametrize("polynomials", SETS.values(), ids=SETS.keys())
def test_a_norm_that_is_too_small_by_30_percent_makes_no_long_step(polynomials):
    """s is 1/√0.7 times as large then, and ‖s·X₀‖_op = 1.11."""
    margin = MARGIN_OF_SCALE / tolerant_scale(polynomials)
    x = torch.linspace(0, 1 / (margin * math.sqrt(0.7)), 10_001, dtype=torch.float64)
    assert float(evaluate(polynomials, x).abs().max()) <= TOLERATED_NORM


# A step of a CPU, matrix by matrix.


def flat_step(ops, A, coefficients="flat"):
    """T and ‖T‖²_F of one step with a head of six directions."""
    Q, _ = torch.linalg.qr(A[..., :6])
    B = Q.mT @ A
    Z = torch.linalg.qr(B.mT)[0].mT * (B != 0).any(-1, keepdim=True)  # T(0) = 0
    head = Head(Q, B, Z)
    (polynomial,) = resolve(coefficients, 1)
    inverse = ops.inverse_rest_size(A, B, A.shape[-2] - 6, 1.5, 64 * 2.0**-23)
    T, squared = ops.flat_step(A, head, inverse, polynomial, 1.08, most=100.0, float8=False)
    return T, squared()


@pytest.mark.parametrize("coefficients", ["flat", "quintic", "cubic"])
@pytest.mark.parametrize("rows", [40, 520])
@pytest.mark.parametrize("tall", [False, True])
def test_a_cpu_takes_the_step_of_other_devices(tall, rows, coefficients):
    A = gaussian(2, rows + 30, rows).mT if tall else gaussian(2, rows, rows + 30)
    T, squared = flat_step(Cpu(), A, coefficients)
    expected, its_square = flat_step(OPS, A, coefficients)
    torch.testing.assert_close(T, expected)
    torch.testing.assert_close(squared, its_square)
    assert T.stride() == expected.stride()


def test_a_step_of_a_cpu_keeps_zero_and_shows_nan():
    A = gaussian(3, 24, 40)
    A[0] = 0
    whole, _ = flat_step(Cpu(), A)
    assert not whole[0].any()
    A[1, 3, 4] = torch.nan
    T, _ = flat_step(Cpu(), A)
    assert T[1].isnan().any()
    assert torch.equal(T[2], whole[2])


def test_gradients_go_through_a_step_of_a_cpu():
    A = gaussian(1, 24, 40).requires_grad_()
    T, _ = flat_step(Cpu(), A)
    T.square().sum().backward()
    assert A.grad is not None
    assert A.grad.isfinite().all()
