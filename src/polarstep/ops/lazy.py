"""Matrices that are not multiplied out: each reader forms only what it needs.

A product in eight bits and matrices with scaled rows are left to the update, which multiplies them out
tile by tile. A head and a head with its rest are between two operations of a deflated step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep.numerics import product_like

__all__ = ["Head", "HeadPlusRest", "RowProduct", "ScaledRows"]


@dataclass(frozen=True)
class Head:
    """The factors of a low-rank map of wide matrices A: T = QZ with Z = WX."""

    Q: Tensor  # (batch, m, ℓ)
    B: Tensor  # (batch, ℓ, n): QᵀA
    X: Tensor  # (batch, ℓ, n)
    W: Tensor | None = None  # (batch, ℓ, ℓ); without it Z = X


@dataclass(frozen=True)
class HeadPlusRest:
    """``X₀ = A/δ + LR`` with factors of a short side: the head, and the rest beside it."""

    A: Tensor  # (batch, m, n)
    inverse: Tensor  # (batch,): 1/δ of each matrix
    L: Tensor  # (batch, m, ℓ)
    R: Tensor  # (batch, ℓ, n)

    @property
    def mT(self) -> HeadPlusRest:
        """The transposes."""
        return HeadPlusRest(self.A.mT, self.inverse, self.R.mT, self.L.mT)

    def multiplied_out(self) -> Tensor:
        """T in the memory layout of A, in A's precision, or in the factors' if they have 16 bits."""
        A, L, R = self.A, self.L, self.R
        if L.dtype.itemsize != 2:
            inverse = self.inverse.to(L.dtype)[:, None, None]
            return (A.to(L.dtype) * inverse + product_like(A, L, R)).to(A.dtype)
        if A.mT.is_contiguous() and not A.is_contiguous():
            return self.mT.multiplied_out().mT
        # Only kernels make factors of 16 bits.
        from polarstep.kernels.product import product

        return product(L, R, D=A, scale=self.inverse, powers=(0, 1, 0), out_dtype=L.dtype)


@dataclass(frozen=True)
class RowProduct:
    """``T = alpha·s·ABᵀ`` of matrices in eight bits, not multiplied out.

    T is not written to memory where :func:`polarstep.kernels.update.update_from_rows` applies it.
    """

    A: Tensor  # (batch, m, k), contiguous
    B: Tensor  # (batch, n, k), contiguous
    scale: Tensor  # (batch,): s of each matrix, in float32
    alpha: float

    @property
    def mT(self) -> RowProduct:
        """The transposes."""
        return RowProduct(self.B, self.A, self.scale, self.alpha)

    def multiplied_out(self) -> Tensor:
        """T in float16, contiguous."""
        from polarstep.kernels.float8 import product_of_rows

        return product_of_rows(self.A, self.B, self.scale, self.alpha, torch.float16)


@dataclass(frozen=True)
class ScaledRows:
    """Each row of ``T`` times a number of its own and a number of its matrix, not multiplied out."""

    T: Tensor  # (batch, m, n), contiguous
    factors: Tensor  # (batch, m), in float32
    sizes: Tensor  # (batch,), in float32

    def multiplied_out(self) -> Tensor:
        """The scaled matrices in the precision of T."""
        numbers = self.factors * self.sizes[:, None]
        return (self.T * numbers[..., None]).to(self.T.dtype)
