"""The plain Newton–Schulz iteration: X ← P(XXᵀ)X, step by step on the matrix itself.

In float32 and float64 the polynomial is evaluated as written. In bfloat16, on a GPU, each step is
three products: G = XXᵀ and H = P(G), of which only half is computed as both are symmetric, and HX.
There a·X is part of HX; the rounding of H's diagonal that this costs is no larger than that of X,
and it saves a pass over memory. Rounding does not build up: every step starts from the X that the
last one left, and pulls it towards orthonormal rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.matrix import product_like
from polarstep.polar.gram import Polynomial, times_gram
from polarstep.polar.symmetric import symmetric_product

__all__ = ["iterate"]

# Below this many rows the products of a step are too small for half of them to be a saving.
SYMMETRIC_GRAM_FROM = 512


def iterate(X: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of ``X``, of shape (batch, m, n) with m ≤ n."""
    if X.dtype == torch.bfloat16 and kernels.available(X.device):
        return _iterate_bfloat16(X, polynomials)
    for polynomial in polynomials:
        H = times_gram(symmetric_product(X, X), polynomial)
        if X.mT.is_contiguous():  # a transposed tall matrix stays one
            X = torch.baddbmm(X.mT, X.mT, H, beta=polynomial[0]).mT
        else:
            X = torch.baddbmm(X, H, X, beta=polynomial[0])
    return X


def _iterate_bfloat16(X: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    for polynomial in polynomials:
        X = product_like(X, _polynomial_of(_gram(X), polynomial), X)
    return X


def _gram(X: Tensor) -> Tensor:
    if X.shape[-2] < SYMMETRIC_GRAM_FROM:
        return X @ X.mT
    from polarstep.kernels.product import product

    return product(X, X.mT, symmetric=True)


def _polynomial_of(G: Tensor, polynomial: Polynomial) -> Tensor:
    """``P(G) = aI + bG + cG² + …`` by Horner's rule; every partial result is symmetric."""
    from polarstep.kernels.product import product

    a, *rest = polynomial
    if len(rest) == 1:
        H = rest[0] * G
        H.diagonal(dim1=-2, dim2=-1).add_(a)
        return H
    H, scale = G, rest.pop()
    while len(rest) > 1:
        H, scale = product(H, G, alpha=scale, D=G, beta=rest.pop(), symmetric=True), 1.0
    return product(H, G, alpha=scale, D=G, beta=rest.pop(), identity=a, symmetric=True)
