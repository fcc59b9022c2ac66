"""The plain Newton–Schulz iteration: X ← P(XXᵀ)X, step by step on the matrix itself.

In float32 and float64 the polynomial is evaluated as written. In 16 bits, on a GPU, each step is
three products: G = XXᵀ and H = P(G), of which only half is computed as both are symmetric, and HX;
for few rows the last two are one launch. There a·X is part of HX; the rounding of H's diagonal that
this costs is no larger than that of X, and it saves a pass over memory. Rounding does not build up:
every step starts from the X that the last one left, and pulls it towards orthonormal rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.matrix import product_like
from polarstep.polar.coefficients import Polynomial
from polarstep.polar.gram import one_launch, polynomial_of, polynomial_times
from polarstep.polar.symmetric import symmetric_product

__all__ = ["iterate"]


def iterate(X: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of ``X``, of shape (batch, m, n) with m ≤ n."""
    three_products = X.dtype.itemsize == 2 and kernels.available(X.device)
    two_launches = one_launch(X, polynomials)
    for polynomial in polynomials:
        G = symmetric_product(X, X)
        if two_launches:
            X = polynomial_times(G, X, polynomial)
        elif three_products:
            X = product_like(X, polynomial_of(G, polynomial), X)
        else:
            a, *rest = polynomial
            H = polynomial_of(G, (0.0, *rest))
            if X.mT.is_contiguous():  # a transposed tall matrix stays one
                X = torch.baddbmm(X.mT, X.mT, H, beta=a).mT
            else:
                X = torch.baddbmm(X, H, X, beta=a)
    return X
