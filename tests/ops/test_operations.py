"""Every operation against its formula, on the plain device and on a CPU."""

from __future__ import annotations

import pytest
import torch
from tests.spectra import gaussian, orthogonal
from torch.utils.flop_counter import FlopCounterMode

from polarstep import rng
from polarstep.maps.coefficients import resolve
from polarstep.ops import ops_of
from polarstep.ops.base import Products, squared_norm
from polarstep.ops.cpu import Cpu
from polarstep.ops.cuda import Cuda
from polarstep.ops.lazy import Head

DEVICES = {"plain": Products(), "cpu": Cpu()}
over_devices = pytest.mark.parametrize("ops", DEVICES.values(), ids=DEVICES.keys())
POLYNOMIALS = [
    (0.0, 2.0),
    (1.5, -0.5),
    (1.875, -1.25, 0.375),
    (35 / 16, -35 / 16, 21 / 16, -5 / 16),
    (2.0, -2.5, 3.0, -2.0, 0.5),
]


def by_singular_values(X, polynomials):
    """φ_q∘…∘φ₁ on the singular values, from an SVD."""
    U, x, Vh = torch.linalg.svd(X, full_matrices=False)
    for polynomial in polynomials:
        x = sum(c * x ** (2 * k + 1) for k, c in enumerate(polynomial))
    return (U * x[..., None, :]) @ Vh


def small(*shape, seed=0):
    """Matrices with ‖X‖_F = 1 each."""
    X = gaussian(*shape, seed=seed)
    return X / torch.linalg.matrix_norm(X, keepdim=True)


# Precision


def test_the_device_of_a_tensor_has_its_operations():
    assert type(ops_of(torch.device("cpu"))) is Cpu
    assert isinstance(ops_of(torch.device("meta")), Cuda)
    assert ops_of(torch.device("cpu")) is ops_of(torch.device("cpu"))


@over_devices
def test_sixteen_bits_are_worked_on_in_float32(ops):
    for dtype in (torch.bfloat16, torch.float16):
        assert ops.workable(torch.ones(2, dtype=dtype)).dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        X = torch.ones(2, dtype=dtype)
        assert ops.workable(X) is X


def test_bfloat16_stays_where_the_device_multiplies_in_it():
    class Fast(Products):
        def dtype(self, given):
            return torch.bfloat16

    X = torch.ones(2, dtype=torch.bfloat16)
    assert Fast().workable(X) is X
    assert Fast().workable(X.half()).dtype == torch.float32


# Products


@over_devices
@pytest.mark.parametrize("width", [None, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sketch_has_contiguous_columns_and_zero_columns_up_to_its_width(ops, width, dtype):
    factor, S = gaussian(2, 5, 7).to(dtype), gaussian(2, 7, 4, seed=1).to(dtype)
    if dtype == torch.bfloat16 and width == 6:
        pytest.skip("bfloat16 sketches of a CPU are not padded")
    Y = ops.times(factor, S, width)
    assert Y.shape == (2, 5, width or 4)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    expected = factor.double() @ S.double()
    torch.testing.assert_close(Y[..., :4].double(), expected, atol=tolerance, rtol=0)
    assert not Y[..., 4:].any()
    if dtype != torch.bfloat16:
        assert Y.mT.is_contiguous()


@over_devices
@pytest.mark.parametrize("width", [4, 6])
def test_one_omega_sketches_all_matrices(ops, width):
    factor, Omega = gaussian(3, 5, 7), gaussian(7, 4, seed=1)
    Y = ops.sketched(factor, Omega, width)
    torch.testing.assert_close(Y[..., :4], factor @ Omega)
    assert Y.shape == (3, 5, width)


@over_devices
def test_apply_is_a_product_in_the_layout_of_x(ops):
    W, X = gaussian(2, 5, 5), gaussian(2, 5, 7, seed=1)
    for given in (X, X.mT.contiguous().mT):
        found = ops.apply(W, given, torch.float32)
        assert found.dtype == torch.float32
        assert found.stride() == given.stride()
        torch.testing.assert_close(found.double(), W @ X, atol=1e-5, rtol=0)


@over_devices
@pytest.mark.parametrize("m", [1, 9, 530])
def test_a_symmetric_product_with_all_its_terms(ops, m):
    A, D = gaussian(2, m, 3), gaussian(2, m, m, seed=1)
    D = D + D.mT
    found = ops.symmetric(A, A, plus=D, alpha=2.0, beta=-0.5, identity=3.0)
    expected = 2 * A @ A.mT - 0.5 * D + 3 * torch.eye(m, dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ops.symmetric(A, A), A @ A.mT)
    torch.testing.assert_close(ops.symmetric(A, A, plus=D), A @ A.mT + D)


@over_devices
def test_the_factors_of_a_symmetric_product_are_not_changed(ops):
    A, D = gaussian(2, 9, 3), torch.eye(9, dtype=torch.float64).repeat(2, 1, 1)
    before = A.clone(), D.clone()
    ops.symmetric(A, A, plus=D, identity=2.0)
    assert torch.equal(A, before[0])
    assert torch.equal(D, before[1])


def test_the_plain_symmetric_product_costs_a_whole_one():
    X = gaussian(1, 600, 5)
    with FlopCounterMode(display=False) as counter:
        Products().symmetric(X, X)
    assert counter.get_total_flops() == Products().symmetric_flops(600, 5, torch.float64)


@pytest.mark.parametrize("m", [512, 575, 577, 700, 1000])
def test_strips_of_a_cpu_are_about_as_wide_as_they_should_be(m):
    """Half of the product, and the half of each strip on the diagonal: 1/2 + 192/2m of it."""
    part = Cpu().symmetric_flops(m, 4, torch.float32) / Products().symmetric_flops(
        m, 4, torch.float32
    )
    assert part == pytest.approx(0.5 + 192 / (2 * m), abs=0.05)


@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
def test_a_copied_factor_changes_nothing(machine, monkeypatch):
    monkeypatch.setattr("polarstep.ops.cpu.platform.machine", lambda: machine)
    for m, k in ((40, 40), (130, 130)):
        A, B = gaussian(2, m, k), gaussian(2, m, k, seed=1)
        C = A @ B.mT
        torch.testing.assert_close(Cpu().symmetric(A, B), C)


@over_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gram_sums_in_float32_at_least(ops, dtype):
    X = gaussian(2, 3, 2000).to(dtype)
    G = ops.gram(X)
    assert G.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(G.double(), X.double() @ X.double().mT, atol=1e-2, rtol=0)


# Norms


@over_devices
@pytest.mark.parametrize("exponent", [-1000, -500, -300, -120, -20, 0, 20, 100, 300, 500, 1000])
@pytest.mark.parametrize("given", [torch.float64, torch.float32])
def test_a_normalized_matrix_is_x_over_its_norm_at_any_scale(ops, exponent, given):
    if given == torch.float32 and abs(exponent) > 120:
        pytest.skip("float32 has no such numbers")
    unit = gaussian(3, 5, 7).to(given)
    X = torch.ldexp(unit, torch.tensor(exponent))
    X[1] = 0
    expected = unit.double() / torch.linalg.matrix_norm(unit.double(), keepdim=True)
    expected[1] = 0
    found = ops.normalized(X, given)
    assert found.dtype == given
    tolerance = 1e-14 if given == torch.float64 else 1e-6
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@over_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64])
def test_a_norm_in_sixteen_bits_is_at_most_one_and_hardly_less(ops, dtype, given):
    X = torch.cat([gaussian(60, 2, 3).to(given), torch.ones(1, 2, 3, dtype=given)])
    norms = torch.linalg.matrix_norm(ops.normalized(X, dtype).double())
    assert norms.max() <= 1 + torch.finfo(dtype).eps / 8
    assert norms.min() >= 1 - 2 * torch.finfo(dtype).eps


# Rows


@over_devices
def test_rows_over_the_root_of_their_moments_keep_the_norm_of_the_matrix(ops):
    """T' = c·diag(v)^(-½)·T with ‖T'‖_F = ‖T‖_F, for v ← β₂v + (1 − β₂)·mean_j T²_ij."""
    known = moments = None
    for step in range(3):
        T = gaussian(2, 5, 7, seed=step) * torch.logspace(0, -3, 5, dtype=torch.float64)[:, None]
        T[1, 2] = 0
        scaled, known = ops.normalized_rows(T, 0.9, known, torch.float64)
        fresh = 0.1 * T.square().mean(-1)
        moments = fresh if moments is None else 0.9 * moments + fresh
        torch.testing.assert_close(known, moments)
        rows = torch.where(moments > 0, moments, 1).rsqrt()[..., None] * T
        c = torch.linalg.matrix_norm(T) / torch.linalg.matrix_norm(rows)
        torch.testing.assert_close(scaled, c[:, None, None] * rows)
        assert not scaled[1, 2].any()


# Polynomials


@over_devices
@pytest.mark.parametrize("polynomial", POLYNOMIALS, ids=lambda p: f"degree {2 * len(p) - 1}")
def test_a_polynomial_of_a_symmetric_matrix(ops, polynomial):
    values = torch.linspace(0, 1.5, 9, dtype=torch.float64)
    V = torch.stack([orthogonal(9, seed) for seed in range(2)])
    P = sum(c * values**k for k, c in enumerate(polynomial))
    found = ops.polynomial((V * values) @ V.mT, polynomial)
    torch.testing.assert_close(found, (V * P) @ V.mT, atol=1e-12, rtol=0)


SEQUENCES = [
    resolve("cubic", 1),
    resolve("quintic", 3),
    ((1.5, -0.5), (1.875, -1.25, 0.375), (35 / 16, -35 / 16, 21 / 16, -5 / 16)),
]


@over_devices
@pytest.mark.parametrize("polynomials", SEQUENCES, ids=len)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_both_forms_of_a_sequence_act_on_singular_values(ops, polynomials, layout):
    X = small(2, 5, 9)
    X = X if layout == "rows" else X.mT.contiguous().mT
    expected = by_singular_values(X, polynomials)
    plain = ops.iterate(X, polynomials)
    torch.testing.assert_close(plain, expected, atol=1e-12, rtol=0)
    assert plain.stride() == X.stride()
    W = ops.accumulated(X @ X.mT, polynomials)
    torch.testing.assert_close(W @ X, expected, atol=1e-12, rtol=0)


@over_devices
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_the_first_step_normalizes_by_the_trace(ops, scale):
    X = small(3, 5, 9).float()
    polynomial = (1.875, -1.25, 0.375)
    found = ops.first_step(scale * 7 * X, polynomial, torch.float64)
    assert found.dtype == torch.float64
    expected = by_singular_values(X.double(), (polynomial,))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@over_devices
def test_the_first_step_of_what_leaves_the_range_is_zero(ops):
    X = small(4, 5, 9).float() * torch.tensor([1e-19, 1.0, 1e19, 0.0])[:, None, None]
    found = ops.first_step(X, (1.5, -0.5), torch.float32)
    assert [bool(each.any()) for each in found] == [False, True, False, False]


def test_the_squared_norm_is_estimated_without_bias_and_exactly_on_a_diagonal():
    """tr(PGP) of diagonal matrices has no off-diagonal part, which alone has a variance."""
    diagonal = torch.rand(3, 20, generator=rng.generator("diagonal"), dtype=torch.float64)
    P, G = torch.diag_embed(2 * diagonal), torch.diag_embed(diagonal)
    torch.testing.assert_close(squared_norm(P, G), (4 * diagonal**3).sum(-1))
    X = small(3, 60, 80)
    G = X @ X.mT
    found = squared_norm(torch.linalg.inv(G) @ torch.linalg.cholesky(G), G)
    assert found.shape == (3,)
    torch.testing.assert_close(found, torch.full((3,), 60.0, dtype=torch.float64), rtol=0.3, atol=0)
    near = squared_norm(P.bfloat16(), torch.diag_embed(diagonal).bfloat16())
    assert near.dtype == torch.float32
    torch.testing.assert_close(near.double(), (4 * diagonal**3).sum(-1), rtol=0.02, atol=0)


@over_devices
@pytest.mark.parametrize("weighted", [False, True])
def test_a_flat_step_is_its_parts(ops, weighted):
    A, Q = gaussian(2, 12, 20), torch.linalg.qr(gaussian(2, 12, 3)).Q
    B = Q.mT @ A
    W = gaussian(2, 3, 3, seed=1) if weighted else None
    Z = torch.linalg.svd(B, full_matrices=False).Vh
    inverse = torch.tensor([0.2, 0.3], dtype=torch.float64)[:, None, None]
    polynomial = (1.875, -1.25, 0.375)
    head = Head(Q, B, Z, W)
    T, size = ops.flat_step(A, head, inverse, polynomial, 1.2, most=20.0, float8=False)
    X = ops.flattened(A, head, inverse)
    s = ops.scale_to_one(X @ X.mT, 1.2)
    expected = by_singular_values(s * X, (polynomial,))
    torch.testing.assert_close(T, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(size(), T.square().sum((-2, -1)), rtol=0.3, atol=0)
