"""A sketch that remembers: last step's factor in place of fresh random columns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep.sketch.base import Sketch
from polarstep.sketch.gaussian import Gaussian

__all__ = ["Warm"]


@dataclass(frozen=True)
class Warm(Sketch):
    """``Ω = Z₋ᵀ + noise·N(0, 1)^{n×ℓ}/√n`` with Z₋ the factor of the last step's T₋ = Q₋Z₋.

    Momentum moves slowly, so that Z₋ᵀ already spans most of what is to be found: one product does
    the work of a power iteration, which came for nothing with the last step. The noise is there so
    that no direction is missed for ever: a matrix that was zero, as zero-initialized projections
    are at step one, starts from noise alone.

    The optimizer keeps Z₋ (ℓ×n per matrix, in its state and its checkpoints). Without one, at the
    first step or in a plain call of the map, Ω is Gaussian and the map's power iterations run.

    Args:
        noise: size of the fresh part; the spectral norm of Z₋ is at most one.
    """

    noise: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.noise < math.inf:
            raise ValueError(
                f"noise={self.noise}: expected a number > 0, as 0.1; without noise a direction "
                "that was missed once is missed for ever"
            )

    def matrix(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """The cold start: a Gaussian Ω."""
        return Gaussian().matrix(M, width, generator)

    def __call__(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """The cold start: ``MΩ`` with a Gaussian Ω."""
        return Gaussian()(M, width, generator)

    def blend(self, start: Tensor, fresh: Tensor) -> Tensor:
        """Ω from ``start`` = Z₋ᵀ (batch, n, ℓ) and a Gaussian matrix ``fresh`` (n, ℓ)."""
        return torch.add(start, fresh.to(start.dtype), alpha=self.noise / math.sqrt(len(fresh)))

    def flops(self, m: int, n: int, width: int) -> int:
        """One dense product."""
        return Gaussian().flops(m, n, width)
