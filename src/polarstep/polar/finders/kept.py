"""One basis for several steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polarstep.checked_values import check_integer
from polarstep.polar.base import Carry, Draw, PolarMap
from polarstep.polar.finders.base import Basis, Finder
from polarstep.polar.finders.fresh import Fresh
from polarstep.polar.orthonormal import Method
from polarstep.polar.result import Lift

__all__ = ["Kept"]


@dataclass(frozen=True)
class Kept(Finder):
    """A fresh basis at every ``steps``-th step, from the M of that step, and kept until the next.

    The steps between need neither a sketch nor an orthonormalization. What M gains outside the
    range of the basis waits in the momentum for the next basis.

    The carry is Qᵀ, of shape (batch, ℓ, m), so that each basis vector is contiguous.
    """

    fresh: Fresh = field(default_factory=Fresh)
    steps: int = 4

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1, "it is the number of steps to keep a basis")

    @property
    def fresh_sketch(self) -> Fresh:
        """The finder of the bases that are kept."""
        return self.fresh

    def with_options(self, power: float, orth: Method, keep: int) -> Kept:
        """This finder with LowRank's orth, for the fresh bases too."""
        options = super().with_options(power, orth, keep)
        return replace(options, fresh=self.fresh.with_options(1, orth, 1))

    @property
    def carries(self) -> tuple[str, ...]:
        """The name of Qᵀ."""
        return ("kept",)

    def resumes(self, carry: Carry, m: int, n: int, width: int) -> bool:
        """Whether ``carry`` has a basis of this width."""
        return "kept" in carry and carry["kept"].shape[1:] == (width, m)

    def numbers_at(self, step: int, *, resumed: bool) -> tuple[int, ...] | None:
        """The step, if it makes a new basis: every ``steps``-th step, and all before step ``steps``.

        The first bases are not kept, because at step zero whole gradients may be zero and have no basis.
        """
        if resumed and step >= self.steps and step % self.steps != 0:
            return None
        return (step,)

    def basis(self, A: Tensor, width: int, carry: Carry, draw: Draw) -> Basis:
        """A new basis where numbers were drawn for it, else the kept basis."""
        if draw.numbers is not None:
            return self.fresh.basis(A, width, carry, draw)
        Qt = carry["kept"].to(A.dtype)
        missing = self.padded(width, A.dtype, A.device) - width
        return Basis((torch.nn.functional.pad(Qt, (0, 0, 0, missing)) if missing else Qt).mT)

    def lift(
        self, inner: PolarMap, B: Tensor, basis: Basis, width: int, carry: Carry, draw: Draw
    ) -> tuple[Lift, Carry]:
        """The inner map of B; a new basis is left for the next steps."""
        if draw.numbers is not None:
            carry = Carry(kept=basis.Q.mT[:, :width])
        return inner.lift(B), carry

    def draw(
        self,
        m: int,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        """The random numbers of the fresh basis."""
        return self.fresh.draw(m, n, width, generator, dtype, out)

    def flops(self, m: int, n: int, width: int) -> int:
        """The parts of a fresh basis, charged to each step in equal shares."""
        return sum(part // self.steps for part in self.fresh.parts(m, n, width))

    def makes_orthonormal(self, device: torch.device, dtype: torch.dtype) -> bool:
        """As for the fresh basis."""
        return self.fresh.makes_orthonormal(device, dtype)

    def describe(self, m: int, n: int, inner: PolarMap, width: int, device: torch.device) -> str:
        """How the fresh basis is found, and for how many steps it is kept."""
        return f"{self.fresh.describe(m, n, inner, width, device)}, basis kept {self.steps} steps"
