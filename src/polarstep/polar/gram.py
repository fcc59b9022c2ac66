"""An odd matrix polynomial evaluated on the small Gram matrix.

For odd polynomials φ_t(x) = x·P_t(x²) and wide ``X`` (m ≤ n), with ``G₀ = X Xᵀ`` (m×m):

    φ_q∘…∘φ₁(X) = W_q X,   W_t = P_t(G_{t−1}) W_{t−1},   G_t = P_t(G_{t−1}) G_{t−1} P_t(G_{t−1}).

Only two products have size m·m·n, one to form G₀ and one to apply W_q, where the plain iteration
has two a step. All else is m×m, so it pays when n is well above m.

The price is in the small singular values. A rounding error ε in G₀ is an error in σ², so a σ near
√ε is unknown, and it grows by P_t(0)² = a_t² a step. Where that growth would make it matter, the
iteration restarts: X is replaced by W X and its Gram matrix is formed afresh.

There is a second price. W is large where σ is small, up to ∏a_t, so that its rounding errors reach
the other singular values as ε∏a_t: 6e-5 after nine quintic steps in float32, on the wrong side of
‖T‖_op ≤ 1. A last step with φ(1) = 1 and φ'(1) = 0, as the paper's two polynomials have, squares an
error of that kind away, if it works on the Gram matrix of the X that has it. So such a step comes
after a restart of its own.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from polarstep.matrix import product_like
from polarstep.polar.symmetric import symmetric_product

__all__ = ["Polynomial", "apply_polynomials", "gram_matrix", "restarts", "times_gram"]

Polynomial = tuple[float, ...]

# Largest error in an eigenvalue of G_t that is left to grow, on the scale of ‖G_t‖ ≤ 1. A negative
# eigenvalue of this size changes P(λ) by under a tenth for every coefficient set we ship.
TOLERATED_ERROR = 2e-2

# Largest ε∏a_t that needs no settling by a last step after a restart.
TOLERATED_OVERSHOOT = 4e-6


def gram_matrix(X: Tensor) -> Tensor:
    """``X Xᵀ``, accumulated and returned in float32 when ``X`` is of lower precision."""
    if X.dtype.itemsize >= 4:
        return symmetric_product(X, X)
    if X.is_cuda:
        return torch.bmm(X, X.mT, out_dtype=torch.float32)
    X = X.float()
    return X @ X.mT


def times_gram(G: Tensor, polynomial: Polynomial) -> Tensor:
    """``P(G) − a·I = bG + cG² + …`` for the polynomial x·P(x²) = ax + bx³ + cx⁵ + …"""
    *lower, last = polynomial[1:]
    if not lower:
        return last * G
    H = symmetric_product(G, G, plus=G, alpha=last, beta=lower[-1])
    for coefficient in reversed(lower[:-1]):
        H = symmetric_product(H, G, plus=G, beta=coefficient)
    return H


def restarts(polynomials: tuple[Polynomial, ...], epsilon: float) -> list[int]:
    """The steps before which the Gram matrix must be formed afresh."""
    starts, error, overshoot = [], epsilon, epsilon
    for t, polynomial in enumerate(polynomials):
        growth = polynomial[0]
        drowned = error * growth**2 > TOLERATED_ERROR
        # In products of lower precision there is nothing to gain: they round more coarsely than this.
        settling = (
            t == len(polynomials) - 1
            and _settles(polynomial)
            and epsilon < TOLERATED_OVERSHOOT < overshoot * growth
        )
        if t > 0 and (drowned or settling):
            starts.append(t)
            error = overshoot = epsilon
        error *= growth**2
        overshoot *= growth
    return starts


def _settles(polynomial: Polynomial) -> bool:
    """Whether φ(1) = 1 and φ'(1) = 0, so that φ(1 + e) = 1 + O(e²)."""
    slope = sum((2 * k + 1) * c for k, c in enumerate(polynomial))
    return abs(sum(polynomial) - 1) < 1e-12 and abs(slope) < 1e-12


def apply_polynomials(X: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of ``X``, of shape (batch, m, n) and ‖X‖_op ≤ 1."""
    small = torch.promote_types(X.dtype, torch.float32)  # m×m work is never below float32
    epsilon = max(torch.finfo(small).eps, torch.finfo(X.dtype).eps / 2**8)
    starts = [0, *restarts(polynomials, epsilon), len(polynomials)]
    for first, end in pairwise(starts):
        if first < end:
            W = _accumulate(gram_matrix(X), polynomials[first:end])
            X = product_like(X, W.to(X.dtype), X)
    return X


def _accumulate(G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """W_q for the Gram matrix ``G``."""
    W: Tensor | None = None
    for t, polynomial in enumerate(polynomials):
        P = times_gram(G, polynomial)
        P.diagonal(dim1=-2, dim2=-1).add_(polynomial[0])
        W = P if W is None else symmetric_product(P, W)
        if t + 1 < len(polynomials):
            G = symmetric_product(symmetric_product(P, G), P)
    assert W is not None
    return W
