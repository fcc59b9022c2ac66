"""X₀ of a deflated step before it is multiplied out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polarstep.products.plain import product_like

__all__ = ["HeadPlusRest"]


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
