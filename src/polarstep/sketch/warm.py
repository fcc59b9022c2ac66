"""A sketch that remembers: last step's factor in place of fresh random columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from polarstep.sketch.base import Sketch
from polarstep.sketch.gaussian import Gaussian

__all__ = ["Start", "Warm"]


@dataclass(frozen=True)
class Start:
    """What a step leaves for the next: Ωᵀ = V·S, or S itself where there is no V.

    V says how far S is from having rows of one length (:mod:`polarstep.polar.warm`).
    """

    S: Tensor  # (batch, ℓ, n)
    V: Tensor | None = None  # (batch, ℓ, ℓ), or with some more rows and columns

    @staticmethod
    def joined(starts: Sequence[Start]) -> Start:
        """Of all the matrices of ``starts``; with V if all of them have it, of one size."""
        if len(starts) == 1:
            return starts[0]
        sizes = {None if each.V is None else each.V.shape[-2:] for each in starts}
        if None in sizes or len(sizes) > 1:
            return Start(torch.cat([each.omega_transposed(each.S.dtype) for each in starts]))
        V = [each.V for each in starts if each.V is not None]
        return Start(torch.cat([each.S for each in starts]), torch.cat(V))

    def split(self, counts: list[int]) -> list[Start]:
        """The starts of ``counts`` matrices each."""
        S = torch.split(self.S, counts)
        V = [None] * len(counts) if self.V is None else torch.split(self.V, counts)
        return [Start(*each) for each in zip(S, V, strict=True)]

    def to(self, dtype: torch.dtype) -> Start:
        """The same in another precision."""
        return Start(self.S.to(dtype), None if self.V is None else self.V.to(dtype))

    def omega_transposed(self, dtype: torch.dtype) -> Tensor:
        """Ωᵀ (batch, ℓ, n) in ``dtype``."""
        S = self.S.to(dtype)
        if self.V is None:
            return S
        width = S.shape[-2]
        return self.V[..., :width, :width].to(dtype) @ S


@dataclass(frozen=True)
class Warm(Sketch):
    """``Ω = Z₋ᵀ + noise·N(0, 1)^{n×ℓ}/√n`` with Z₋ the factor of the last step's T₋ = Q₋Z₋.

    Momentum moves slowly, so that Z₋ᵀ already spans most of what is to be found: one product does
    the work of a power iteration, which came for nothing with the last step. The noise is there so
    that no direction is missed for ever: a matrix that was zero, as zero-initialized projections
    are at step one, starts from noise alone. Its numbers are the same at every step.

    The optimizer keeps Ωᵀ (ℓ×n per matrix) in its state and its checkpoints; on a GPU it may keep two
    factors of it (:class:`Start`). Without one, at the first step or in a plain call of the map, Ω is
    Gaussian and the map's power iterations run.

    Args:
        noise: size of the random part; the spectral norm of Z₋ is at most one.
    """

    noise: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.noise, Real):
            raise TypeError(f"noise={self.noise!r}: expected a number > 0, as 0.1")
        if not 0 < self.noise < math.inf:
            raise ValueError(
                f"noise={self.noise}: expected a number > 0, as 0.1; without noise a direction "
                "that was missed once is missed for ever"
            )

    def draw(
        self,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """Gaussian numbers, of shape (n, ℓ)."""
        return Gaussian().draw(n, width, generator, dtype, out)

    def omega(self, M: Tensor, numbers: Tensor) -> Tensor:
        """The cold start: a Gaussian Ω."""
        return Gaussian().omega(M, numbers)

    def times(self, M: Tensor, numbers: Tensor) -> Tensor:
        """The cold start: ``MΩ`` with a Gaussian Ω."""
        return Gaussian().times(M, numbers)

    def next_start(self, Z: Tensor, numbers: Tensor) -> Tensor:
        """Ωᵀ of the next step from this one's Z (batch, ℓ, n) and Gaussian numbers (n, ℓ)."""
        return torch.add(Z, numbers.mT.to(Z.dtype), alpha=self.scale(len(numbers)))

    def scale(self, n: int) -> float:
        """The factor before the Gaussian numbers: noise/√n."""
        return self.noise / math.sqrt(n)

    def flops(self, m: int, n: int, width: int) -> int:
        """One dense product."""
        return Gaussian().flops(m, n, width)
