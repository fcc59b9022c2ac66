"""The contract of a sketch: a random matrix Ω with ℓ columns, and the product MΩ.

One Ω is drawn for a whole batch of equally shaped matrices. The paper's guarantees are about each
matrix by itself, so sharing costs nothing there, and it buys two things: an ℓ-th of the random
numbers, and ``sketch(batch)[i] = sketch(batch[i])``, so that the sketch of a parameter does not
depend on which other parameters happen to have its shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from polarstep import rng

__all__ = ["Sketch"]


class Sketch(ABC):
    """How the ℓ test vectors are chosen. Subclasses are frozen dataclasses.

    Drawing random numbers and using them are two things: :meth:`draw` needs a generator,
    :meth:`omega` and :meth:`times` are functions of what it gave.
    """

    @property
    def is_dense(self) -> bool:
        """Whether Ω is a dense matrix that a batch shares, so that a map may multiply by it itself.

        It then chooses precision and memory layout, and :meth:`times` is not called.
        """
        return False

    @abstractmethod
    def draw(
        self,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The random numbers of a sketch with ℓ = ``width`` columns, on the generator's device.

        In place of earlier ones, if ``out`` has those.
        """

    @abstractmethod
    def omega(self, M: Tensor, numbers: Tensor) -> Tensor:
        """Ω itself, of shape ``(n, ℓ)`` or ``(..., n, ℓ)``, for ``M`` of shape ``(..., m, n)``."""

    @abstractmethod
    def times(self, M: Tensor, numbers: Tensor) -> Tensor:
        """MΩ, of shape ``(..., m, ℓ)``, by the cheapest route."""

    @abstractmethod
    def flops(self, m: int, n: int, width: int) -> int:
        """Cost of :meth:`times` on one m×n matrix in the paper's convention."""

    def matrix(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw Ω for ``M``."""
        return self.omega(M, self._numbers(M, width, generator))

    def __call__(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw Ω and return MΩ."""
        return self.times(M, self._numbers(M, width, generator))

    def _numbers(self, M: Tensor, width: int, generator: torch.Generator | None) -> Tensor:
        generator = default_generator(generator, M.device)
        dtype = torch.promote_types(M.dtype, torch.float32)
        return self.draw(M.shape[-1], width, generator, dtype).to(M.device)


def default_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The given generator or, for want of one, a fresh one with a fixed seed.

    The global generator is never touched; without a generator two calls give the same sketch.
    """
    if generator is None:
        return rng.generator("polarstep", device=device)
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator={generator!r}: expected a torch.Generator, as torch.Generator().manual_seed(0)"
        )
    return generator
