"""Polynomial steps on one large matrix in its own memory.

A step X ← aX + bGX + cG²X with G = XXᵀ usually needs memory for G, for its polynomial and for the next
X. Here it needs half of G, which is symmetric, and a few columns:

    G          the strips on and below the diagonal
    X[:, J]    ← aX[:, J] + G(bX[:, J] + G·cX[:, J]), for some columns J at a time

For a square X this takes 5m³ FLOPs a step where 4m³ are needed with more memory, and the additions run
in another order. It is for matrices that would not fit otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep.products.base import Polynomial

__all__ = ["frobenius_norm", "iterate_in_place"]

# Rows of a strip of G, and the part of all columns that are worked on at a time.
STRIP = 192
PARTS = 128
FEWEST_COLUMNS = 16

Strips = list[tuple[int, Tensor]]


def iterate_in_place(X: Tensor, polynomials: tuple[Polynomial, ...]) -> None:
    """``X ← φ_q∘…∘φ₁(X)`` for one matrix of shape (m, n) with m ≤ n and ‖X‖_op ≤ 1."""
    width = max(FEWEST_COLUMNS, X.shape[1] // PARTS)
    for a, *higher in polynomials:
        strips = _half_of_gram(X)
        for first in range(0, X.shape[1], width):
            columns = X[:, first : first + width]
            old = columns.contiguous()
            H = higher[-1] * old
            for coefficient in (*reversed(higher[:-1]), a):
                H = _times(strips, H).add_(old, alpha=coefficient)
            columns.copy_(H)
        del strips  # before the next G is made


def frobenius_norm(X: Tensor) -> Tensor:
    """‖X‖_F in float64, of some rows at a time: torch makes a float64 copy of what it takes."""
    norms = [
        torch.linalg.vector_norm(rows, dtype=torch.float64)
        for rows in torch.split(X, max(1, X.shape[0] // PARTS))
    ]
    return torch.linalg.vector_norm(torch.stack(norms))


def _half_of_gram(X: Tensor) -> Strips:
    """(i, G[i:, i:j]) for each strip of G = XXᵀ."""
    m = X.shape[0]
    starts = range(0, m, STRIP)
    return [(first, X[first:] @ X[first : first + STRIP].mT) for first in starts]


def _times(strips: Strips, Y: Tensor) -> Tensor:
    """``GY`` from the strips of the symmetric G."""
    out = torch.zeros_like(Y)
    for first, S in strips:
        end = first + S.shape[1]
        out[first:].addmm_(S, Y[first:end])
        out[first:end].addmm_(S[end - first :].mT, Y[end:])
    return out
