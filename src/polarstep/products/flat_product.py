"""A flattened matrix that is left to the update, which multiplies it out tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polarstep.products.plain import product_like

__all__ = ["FlatProduct"]


@dataclass(frozen=True)
class FlatProduct:
    """``T = A/δ + LR`` with factors of a short side, not multiplied out.

    T is not written to memory where :func:`polarstep.kernels.update.update_from_factors` applies it.
    """

    A: Tensor  # (batch, m, n)
    inverse: Tensor  # (batch,): 1/δ of each matrix
    L: Tensor  # (batch, m, ℓ)
    R: Tensor  # (batch, ℓ, n)

    @property
    def mT(self) -> FlatProduct:
        """The transposes."""
        return FlatProduct(self.A.mT, self.inverse, self.R.mT, self.L.mT)

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
