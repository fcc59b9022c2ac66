"""The Gaussian sketch of Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep import flops
from polarstep.sketch.base import Sketch

__all__ = ["Gaussian"]


@dataclass(frozen=True)
class Gaussian(Sketch):
    """``Ω ~ N(0, 1)^{n×ℓ}``, independent entries (Algorithm 1, step 1).

    Rotations do not change the distribution of Ω, so the quality of the sketch depends on the
    singular values of M alone. Proposition 2 uses this.
    """

    @property
    def is_dense(self) -> bool:
        """True: Ω is dense."""
        return True

    def draw(
        self,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """Ω, of shape (n, ℓ), shared by a batch.

        Each column is contiguous, like the columns of the factor Zᵀ that a warm start adds to Ω.
        """
        if out is None:
            out = torch.empty(width, n, device=generator.device, dtype=dtype).mT
        out.mT.normal_(generator=generator)
        return out

    def omega(self, M: Tensor, numbers: Tensor) -> Tensor:
        """Ω is the drawn numbers themselves."""
        return numbers.to(M.dtype)

    def times(self, M: Tensor, numbers: Tensor) -> Tensor:
        """``MΩ``, one product of size m·n·ℓ."""
        return M @ numbers.to(M.dtype)

    def flops(self, m: int, n: int, width: int) -> int:
        """Two FLOPs per multiply-add; drawing Ω is not counted."""
        return flops.gaussian_sketch(m, n, width)
