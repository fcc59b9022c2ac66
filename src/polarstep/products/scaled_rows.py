"""Matrices with scaled rows that are left to the update, which scales them on the way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["ScaledRows"]


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
