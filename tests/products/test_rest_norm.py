"""The rest of a sketch in plain torch: 1/δ for polynomial steps, the dual of a head, and ‖R‖_op."""

from __future__ import annotations

import math

import pytest
import torch
from tests.spectra import gaussian, orthogonal

from polarstep.products.base import Products
from polarstep.products.head import Head
from polarstep.products.rest_norm import SHIFT, RestRules, _norm_from_moments, _orthonormalizing
from polarstep.products.start_vectors import SIGNS, first_vectors

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


# ‖R‖_op

RULES = RestRules(margin=1.1, fresh=0.5, room=1e-12, least=1e-9)


def deflated(tail: torch.Tensor, m: int = 40, n: int = 60, ell: int = 4):
    """A with four leading directions, of which Q is a basis, and R = A − QB with a given spectrum."""
    spectrum = torch.cat([torch.full((ell,), 50.0, dtype=torch.float64), tail])
    U, V = (orthogonal(side)[:, : len(spectrum)] for side in (m, n))
    A = ((U * spectrum) @ V.mT)[None]
    Q = U[None, :, :ell]
    return A, Q, Q.mT @ A


@pytest.mark.parametrize("name", ["flat", "falling", "one direction"])
def test_delta_is_the_norm_of_the_rest_with_its_margin(name):
    k = torch.arange(1, 21, dtype=torch.float64)
    tail = {"flat": torch.ones_like(k), "falling": 1 / k, "one direction": (k == 1).double()}[name]
    A, Q, B = deflated(tail)
    vectors, scale = None, 3.0
    for _ in range(6):
        found = OPS.rest_norm(scale * A, Q, scale * B, RULES, vectors=vectors)
        vectors = found.vectors
    delta = 1 / found.inverse.item()
    # ‖R‖_op = 3; δ is never above ‖R‖_F, and above margin·‖R‖_op by what the moments give away.
    whole = 3 * tail.norm().item()
    least, most = min(3 * 1.05, whole), min(3 * 1.1 * 1.3, whole * (1 + 1e-6))
    assert least - 1e-6 <= delta <= most
    assert found.unheld.item() == pytest.approx((whole / delta) ** 2, rel=1e-6)
    # 16 vectors see all of the longest of 20 directions, and what is the same as of any other 16.
    longest = 3 * tail[:SIGNS].norm().item()
    assert found.seen.item() == pytest.approx((longest / delta) ** 2, rel=1e-2)
    assert found.inverse.shape == (1, 1, 1)
    assert found.unheld.shape == found.seen.shape == (1,)


def test_the_carried_vectors_turn_towards_the_leading_direction_and_keep_some_of_the_first():
    A, Q, B = deflated(torch.tensor([1.0, 0.1, 0.1], dtype=torch.float64))
    R = A - Q @ B
    leading = torch.linalg.svd(R[0]).Vh[0]
    found = OPS.rest_norm(A, Q, B, RULES)
    first = first_vectors(40, 60, A.device).double()
    turned = found.vectors - RULES.fresh * first
    # Of b vectors of length one on average, 1/(1 + 0.1² + 0.1²) lies along the leading direction.
    assert turned.square().sum().item() == pytest.approx(SIGNS, rel=1e-6)
    assert (turned @ leading).square().sum().item() == pytest.approx(SIGNS / 1.02, rel=1e-3)


def test_zero_and_what_is_not_finite_leave_no_trace():
    A, Q, B = deflated(torch.ones(8, dtype=torch.float64))
    broken = A.clone()
    broken[0, 0, 0] = math.nan
    batch = torch.cat([A, torch.zeros_like(A), broken])
    Q, B = Q.expand(3, -1, -1), torch.cat([B, torch.zeros_like(B), B])
    found = OPS.rest_norm(batch, Q, B, RULES)
    first = RULES.fresh * first_vectors(40, 60, A.device).double()
    assert found.inverse.flatten()[0] > 0
    assert found.inverse.flatten()[1:].tolist() == [0.0, 0.0]
    assert found.unheld[1:].tolist() == found.seen[1:].tolist() == [0.0, 0.0]
    for vectors in found.vectors[1:]:
        torch.testing.assert_close(vectors, first[0])


def test_squares_that_are_known_take_the_place_of_the_norm():
    A, Q, B = deflated(torch.ones(8, dtype=torch.float64))
    known = A.square().sum(-1)  # (batch, parts)
    usual, found = (OPS.rest_norm(A, Q, B, RULES, squares=each) for each in (None, known))
    torch.testing.assert_close(found.inverse, usual.inverse)
    torch.testing.assert_close(found.unheld, usual.unheld)
    torch.testing.assert_close(found.seen, usual.seen)


def test_columns_become_orthonormal_but_for_those_that_are_rounding():
    Y = gaussian(2, 30, 5)
    Y[1, :, 4] *= 1e-6
    N = _orthonormalizing(Y)
    shift = SHIFT * Y.square().sum((-2, -1))[:, None, None] * torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(N @ N.mT, torch.linalg.inv(Y.mT @ Y + shift), rtol=1e-6, atol=1e-9)
    U = Y @ N
    torch.testing.assert_close(U[0].mT @ U[0], torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-4)
    assert torch.linalg.matrix_norm(U[1], 2) <= 1 + 1e-9
    assert torch.linalg.svdvals(U[1])[-1] < 0.01


def test_the_bound_from_moments_lies_between_the_norm_and_a_schatten_norm():
    W = gaussian(3, 50, 6)
    K = torch.cat([W.mT @ W, torch.eye(6, dtype=torch.float64)[None]])
    values = torch.linalg.eigvalsh(K)
    bound = _norm_from_moments(K).flatten()
    assert (bound >= values[:, -1] - 1e-9).all()
    assert (bound <= values.pow(4).sum(-1).pow(0.25) + 1e-9).all()
    assert bound[-1].item() == pytest.approx(1)  # exact where all are equal
