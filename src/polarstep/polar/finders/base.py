"""The contract of a range finder: an orthonormal basis Q of M's leading directions.

Algorithm 1 (:class:`polarstep.LowRank`) is T = Q·inner(QᵀM) for any Q. A finder computes Q, counts
its cost, and may leave tensors for the next step. Finders are frozen dataclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from polarstep import products
from polarstep.polar.base import Carry, Draw, PolarMap
from polarstep.polar.orthonormal import Method, resolved
from polarstep.polar.result import Lift

if TYPE_CHECKING:
    from polarstep.polar.finders.fresh import Fresh

__all__ = ["Basis", "Finder"]


@dataclass(frozen=True)
class Basis:
    """Q, and Qᵀ in float16 where the finder has computed it."""

    Q: Tensor  # (batch, m, ≥ ℓ); columns beyond ℓ are zero
    halves: Tensor | None = None  # (batch, ≥ ℓ, m): Qᵀ in float16


@dataclass(frozen=True, kw_only=True)
class Finder(ABC):
    """How the basis of a low-rank map is found. All matrices here are wide, (batch, m, n) with m ≤ n."""

    # How columns are made orthonormal (polarstep.polar.orthonormal). A LowRank gives its own.
    orth: Method = field(default="auto", repr=False)

    @abstractmethod
    def basis(self, A: Tensor, width: int, carry: Carry, draw: Draw) -> Basis:
        """Q with ℓ = ``width`` columns for the matrices ``A``, in the precision of ``A``."""

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
        """The random numbers for m×n matrices, m ≤ n, written to ``out`` if it is given."""

    @abstractmethod
    def flops(self, m: int, n: int, width: int) -> int:
        """Mean cost per step of the basis of an m×n matrix, m ≤ n, in the paper's convention."""

    def lift(
        self, inner: PolarMap, B: Tensor, basis: Basis, width: int, carry: Carry, draw: Draw
    ) -> tuple[Lift, Carry]:
        """The polar factor of B = QᵀM by the inner map, and the carry for the next step."""
        return inner.lift(B), Carry()

    @property
    def carries(self) -> tuple[str, ...]:
        """The names of the tensors that a step may leave for the next step."""
        return ()

    def resumes(self, carry: Carry, m: int, n: int, width: int) -> bool:
        """Whether a step can continue from ``carry``, perhaps of another width or finder."""
        return not self.carries

    def numbers_at(self, step: int, *, resumed: bool) -> tuple[int, ...] | None:
        """What the random numbers of a step depend on; ``None`` where it needs no numbers."""
        return (step,)

    def makes_orthonormal(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether QᵀQ = I up to rounding, with no column missing."""
        return resolved(self.orth, dtype, device) != "products"

    def padded(self, width: int, dtype: torch.dtype, device: torch.device) -> int:
        """ℓ, or a little more where products on this device run faster with zero columns added."""
        if resolved(self.orth, dtype, device) != "products":
            return width  # a factorization would fill zero columns
        return products.of(device).padded(width, dtype)

    def with_options(self, power: float, orth: Method) -> Self:
        """This finder with the options of the :class:`~polarstep.LowRank` that uses it.

        Raises:
            ValueError: if ``LowRank`` has an option that the finder should have, or the other way round.
        """
        if power != 1:
            raise ValueError(
                f"power={power!r} with {self!r}: expected the default, 1; give options to the finder "
                "itself"
            )
        self._refuse_own(orth=orth)
        return replace(self, orth=orth)

    def _refuse_own(self, **of_low_rank: object) -> None:
        """Raise for a value that was given to this finder and that ``LowRank`` would replace."""
        for each in fields(self):
            own = getattr(self, each.name)
            if each.name in of_low_rank and own not in (each.default, of_low_rank[each.name]):
                raise ValueError(
                    f"{each.name}={own!r} of {self!r} has no effect in LowRank, which gives its own "
                    f"{each.name}={of_low_rank[each.name]!r} to its finder: expected "
                    f"LowRank(..., {each.name}={own!r})"
                )

    @property
    def fresh_sketch(self) -> Fresh | None:
        """The fresh sketch inside this finder, with which it starts; ``None`` if there is none."""
        return None

    @abstractmethod
    def describe(self, m: int, n: int, inner: PolarMap, width: int, device: torch.device) -> str:
        """How the basis is found, in a few words, for the routing table."""
