"""A product in eight bits that is left to the update, which multiplies it out tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowProduct"]


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
