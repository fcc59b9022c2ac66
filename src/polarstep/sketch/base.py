"""The contract of a sketch: a random matrix Ω with ℓ columns, and the product MΩ.

A whole batch of equally shaped matrices shares one Ω. The paper's guarantees are about each matrix
by itself, so sharing does not weaken them. It saves random numbers, and makes
``sketch(batch)[i] = sketch(batch[i])``: the sketch of a parameter does not depend on which other
parameters happen to have its shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from polarstep import rng
from polarstep.float64 import fitting

__all__ = ["Sketch", "default_generator"]


class Sketch(ABC):
    """How the ℓ test vectors are chosen. Subclasses are frozen dataclasses.

    Drawing random numbers and using them are separate: :meth:`draw` needs a generator;
    :meth:`omega` and :meth:`times` are functions of the numbers it returned.
    """

    @property
    def is_dense(self) -> bool:
        """Whether Ω is a dense matrix that a batch shares.

        A map then multiplies by Ω itself, in the precision and memory layout of its choice, and
        does not call :meth:`times`.
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

        They are written to ``out`` if it is given, over the numbers of an earlier call.
        """

    @abstractmethod
    def omega(self, M: Tensor, numbers: Tensor) -> Tensor:
        """Ω itself, of shape ``(n, ℓ)`` or ``(..., n, ℓ)``, for ``M`` of shape ``(..., m, n)``."""

    @abstractmethod
    def times(self, M: Tensor, numbers: Tensor) -> Tensor:
        """MΩ, of shape ``(..., m, ℓ)``, computed in the cheapest way."""

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
        return fitting(self.draw(M.shape[-1], width, generator, dtype), M.device)


def default_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The given generator or, if it is ``None``, a new generator with a fixed seed.

    The global generator is never used. Without a generator two calls give the same sketch.
    """
    if generator is None:
        return rng.generator("polarstep", device=device)
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator={generator!r}: expected a torch.Generator, as torch.Generator().manual_seed(0)"
        )
    return generator
