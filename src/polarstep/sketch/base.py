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
    """How the ℓ test vectors are chosen. Subclasses are frozen dataclasses."""

    @abstractmethod
    def matrix(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """Ω itself, of shape ``(n, ℓ)`` or ``(..., n, ℓ)``, for ``M`` of shape ``(..., m, n)``."""

    @abstractmethod
    def __call__(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """MΩ, of shape ``(..., m, ℓ)``, by the cheapest route."""

    @abstractmethod
    def flops(self, m: int, n: int, width: int) -> int:
        """Cost of :meth:`__call__` on one m×n matrix in the paper's convention."""


def default_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The given generator or, for want of one, a fresh one with a fixed seed.

    The global generator is never touched; without a generator two calls give the same sketch.
    """
    return rng.generator("polarstep", device=device) if generator is None else generator
