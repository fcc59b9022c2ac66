"""The rest of a sketch in plain torch: 1/δ for polynomial steps, the dual of a head, and ‖R‖_op."""

from __future__ import annotations

import pytest
import torch
from tests.spectra import gaussian, orthogonal

from polarstep.ops.base import Products
from polarstep.ops.lazy import Head

OPS = Products()


# 1/δ


def size(A, B, left=18, factor=1.5, floor=64 * 2.0**-23):
    return OPS.inverse_rest_size(A, B, left, factor, floor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e10, 1e30])
def test_the_inverse_size_is_its_formula_at_any_scale(scale, dtype):
    A = (scale * gaussian(3, 24, 40)).to(dtype)
    B = A[:, :6] / 2  # any B with less energy
    energy = A.double().square().sum((-2, -1)) - B.double().square().sum((-2, -1))
    expected = 1 / (1.5 * (energy / 18).sqrt())
    torch.testing.assert_close(size(A, B).flatten().double(), expected, rtol=1e-6, atol=0)
    assert size(A, B).shape == (3, 1, 1)


def test_a_rest_below_rounding_has_the_size_of_the_floor():
    A = gaussian(2, 24, 40)
    floor = 1e-3
    for B in (A, 1.1 * A, A * (1 - 1e-5)):
        expected = 1 / (1.5 * (floor * A.square().sum((-2, -1)) / 18).sqrt())
        torch.testing.assert_close(size(A, B, floor=floor).flatten(), expected)


def test_zero_has_no_rest_beside_others_that_do():
    A = torch.stack([torch.zeros(24, 40), gaussian(24, 40, dtype=torch.float32)])
    inverse = size(A, A[:, :6]).flatten()
    assert inverse[0] == 0
    assert 0 < inverse[1] < 10


def test_the_inverse_size_is_finite_for_denormals():
    A = torch.full((1, 24, 40), 1e-44)
    inverse = size(A, A[:, :6])
    assert inverse.float().isfinite().all()
    assert inverse.float() > 1e37


@pytest.mark.parametrize("weighted", [False, True])
def test_the_dual_of_a_head_is_the_same_map_and_leaves_no_head_in_the_rest(weighted):
    """Columns of norm 1 − 2⁻⁸: QᵀQ = I − E, and Qᵀ(A − DB) is E²B instead of EB."""
    A, Z = gaussian(2, 24, 40), gaussian(2, 6, 40, seed=1)
    Q = (1 - 2**-8) * orthogonal(24, 1, 6).expand(2, -1, -1)
    W = gaussian(2, 6, 6, seed=2) if weighted else None
    head = Head(Q, Q.mT @ A, Z, W)
    dual = OPS.dual(head)
    E = 1 - (1 - 2**-8) ** 2
    T = Q @ (Z if W is None else W @ Z)
    torch.testing.assert_close(dual.Q @ (dual.W @ dual.X), T, rtol=2 * E**2, atol=1e-3)
    torch.testing.assert_close(Q.mT @ (A - dual.Q @ dual.B), E**2 * head.B, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(Q.mT @ (A - Q @ head.B), E * head.B, atol=1e-12, rtol=1e-9)
