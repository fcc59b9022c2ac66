"""The contract of a range finder: an orthonormal basis Q of what matters in M.

Algorithm 1 (:class:`polarstep.LowRank`) is T = Q·inner(QᵀM) for any Q. A finder says where Q comes from,
what it costs, and what it leaves for the next step. Finders are frozen dataclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from polarstep import products
from polarstep.polar.base import Carry, Draw, Lift, PolarMap
from polarstep.polar.orthonormal import Method, resolved

__all__ = ["Basis", "Finder"]


@dataclass(frozen=True)
class Basis:
    """Q, and the same in float16 where a finder has it."""

    Q: Tensor  # (batch, m, ≥ ℓ); columns beyond ℓ are zero
    halves: Tensor | None = None  # (batch, ≥ ℓ, m): Qᵀ in float16


@dataclass(frozen=True, kw_only=True)
class Finder(ABC):
    """How the basis of a low-rank map is found. All matrices here are wide, (batch, m, n) with m ≤ n."""

    # How columns are made orthonormal (polarstep.polar.orthonormal).
    orth: Method = field(default="auto", repr=False)

    @abstractmethod
    def basis(self, A: Tensor, width: int, carry: Carry, draw: Draw) -> Basis:
        """Q with ℓ = ``width`` columns for the matrices ``A``, in their precision."""

    @abstractmethod
    def draw(
        self,
        m: int,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        """The random numbers for m×n matrices, m ≤ n; in place of earlier ones in ``out``."""

    @abstractmethod
    def flops(self, m: int, n: int, width: int) -> int:
        """Cost of the basis of an m×n matrix, m ≤ n, as a mean over steps, in the paper's convention."""

    def lift(
        self, inner: PolarMap, B: Tensor, basis: Basis, width: int, carry: Carry, draw: Draw
    ) -> tuple[Lift, Carry]:
        """The polar factor of B = QᵀM by the inner map, and what is left for the next step."""
        return inner.lift(B), Carry()

    @property
    def carries(self) -> tuple[str, ...]:
        """The names of what a step may leave for the next one."""
        return ()

    def resumes(self, carry: Carry, m: int, n: int, width: int) -> bool:
        """Whether a step can go on from ``carry``, which may be of another width or finder."""
        return not self.carries

    def numbers_at(self, step: int, *, resumed: bool) -> tuple[int, ...] | None:
        """What the numbers of a step are a function of; ``None`` where it needs none."""
        return (step,)

    def makes_orthonormal(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether QᵀQ = I up to rounding, with no column missing."""
        return resolved(self.orth, dtype, device) != "products"

    def padded(self, width: int, dtype: torch.dtype, device: torch.device) -> int:
        """ℓ, or a few columns more that are zero, which products on this device like."""
        if resolved(self.orth, dtype, device) != "products":
            return width  # a factorization makes something of zero columns
        return products.of(device).padded(width, dtype)

    def with_options(self, power: float, orth: Method, keep: int) -> Self:
        """This finder with the options of a :class:`~polarstep.LowRank` that it was given to."""
        if power != 1 or keep != 1:
            raise ValueError(
                f"power={power!r}, keep={keep!r} with {self!r}: expected their defaults; a finder has "
                "its own options"
            )
        return replace(self, orth=orth)

    @abstractmethod
    def describe(self, m: int, n: int, inner: PolarMap, width: int, device: torch.device) -> str:
        """How the basis is found, in a few words, for the routing table."""
