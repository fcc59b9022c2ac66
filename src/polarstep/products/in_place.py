"""Polynomial steps on one large matrix in its own memory.

A step X ← aX + bGX + cG²X with G = XXᵀ usually needs memory for G, for its polynomial and for the next
X. Here it needs half of G, which is symmetric, and a few columns:

    G          the strips on and below the diagonal
    X[:, J]    ← aX[:, J] + G(bX[:, J] + G·cX[:, J]), for some columns J at a time

The strips have (m² + 64m)/2 entries. Beside them there are two times 32 columns at a time, or, while the
strips are made, a copy of 64 rows of X, which torch makes on some CPUs: 64n entries at most.

For a square X this takes 5m³ FLOPs a step where 4m³ are needed with more memory, and the additions run
in another order. It is for matrices that would not fit otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep.products.squarings import Polynomial

__all__ = ["LARGE", "STRIP", "iterate_in_place"]

# A step on a matrix of this many bytes or more is in place.
LARGE = 256 * 2**20

# Columns of a strip of G, and columns of X that are worked on at a time. With 192 and 64 a step takes
# 15% less time, and twice the memory beside M and half of G.
STRIP = 64
COLUMNS = 32

Strips = list[tuple[int, Tensor]]


def iterate_in_place(X: Tensor, polynomials: tuple[Polynomial, ...]) -> None:
    """``X ← φ_q∘…∘φ₁(X)`` for one matrix of shape (m, n) with m ≤ n and ‖X‖_op ≤ 1."""
    for polynomial in polynomials:
        strips = _half_of_gram(X)
        for columns in torch.split(X, COLUMNS, dim=1):
            columns.copy_(_applied(polynomial, strips, columns))
        del strips  # before the next G is made


def _half_of_gram(X: Tensor) -> Strips:
    """(i, G[i:, i:j]) for each strip of G = XXᵀ."""
    starts = range(0, X.shape[0], STRIP)
    return [(first, X[first:] @ X[first : first + STRIP].mT) for first in starts]


def _applied(polynomial: Polynomial, strips: Strips, Y: Tensor) -> Tensor:
    """``P(G)Y`` by Horner's rule."""
    *lower, highest = polynomial
    H = highest * Y
    for coefficient in reversed(lower):
        H = _times(strips, H).add_(Y, alpha=coefficient)
    return H


def _times(strips: Strips, Y: Tensor) -> Tensor:
    """``GY`` from the strips of the symmetric G."""
    out = torch.zeros_like(Y)
    for first, S in strips:
        end = first + S.shape[1]
        out[first:].addmm_(S, Y[first:end])
        out[first:end].addmm_(S[end - first :].mT, Y[end:])
    return out
