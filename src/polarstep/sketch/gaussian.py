"""The Gaussian sketch of Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep import flops
from polarstep.sketch.base import Sketch, default_generator

__all__ = ["Gaussian"]


@dataclass(frozen=True)
class Gaussian(Sketch):
    """``Ω ~ N(0, 1)^{n×ℓ}``, independent entries (Algorithm 1, step 1).

    Its law does not change under rotations, so the sketch sees a matrix through its singular
    values alone; that is what Proposition 2 uses.
    """

    def matrix(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """Ω, of shape (n, ℓ), shared by the batch."""
        generator = default_generator(generator, M.device)
        dtype = torch.promote_types(M.dtype, torch.float32)
        Omega = torch.randn(
            M.shape[-1], width, generator=generator, device=generator.device, dtype=dtype
        )
        return Omega.to(M.device, M.dtype)

    def __call__(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """``MΩ``, one product of size m·n·ℓ."""
        return M @ self.matrix(M, width, generator)

    def flops(self, m: int, n: int, width: int) -> int:
        """Two FLOPs per multiply-add; drawing Ω is not counted."""
        return flops.gaussian_sketch(m, n, width)
