"""A map that contains another map, and delegates to it what it does not override."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from polarstep.polar.base import Carry, Draw, PolarMap
from polarstep.polar.result import Polar

__all__ = ["Containing"]


class Containing(PolarMap):
    """A map whose properties, random numbers, carry and cost are those of the map it contains.

    A subclass names the contained map in :attr:`contained` and overrides what differs. A subclass that
    chooses a map by shape also overrides :meth:`inside`.
    """

    @property
    @abstractmethod
    def contained(self) -> PolarMap:
        """The map inside."""

    def inside(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The map inside that runs on m×n matrices on ``device``."""
        return self.contained

    @property
    def is_random(self) -> bool:
        """As for the map inside."""
        return self.contained.is_random

    @property
    def rounds_input(self) -> bool:
        """As for the map inside."""
        return self.contained.rounds_input

    @property
    def ignores_scale(self) -> bool:
        """As for the map inside."""
        return self.contained.ignores_scale

    @property
    def uses_norm(self) -> bool:
        """As for the map inside."""
        return self.contained.uses_norm

    @property
    def carries(self) -> tuple[str, ...]:
        """As for the map inside."""
        return self.contained.carries

    @property
    def wide_carries(self) -> tuple[str, ...]:
        """As for the map inside."""
        return self.contained.wide_carries

    def effective_rank(self, m: int, n: int) -> int:
        """As for the map inside, on a CPU."""
        return self.inside(m, n, torch.device("cpu")).effective_rank(m, n)

    def init(self, batch: int, m: int, n: int, device: torch.device, dtype: torch.dtype) -> Carry:
        """As for the map inside."""
        return self.inside(m, n, device).init(batch, m, n, device, dtype)

    def resumes(self, carry: Carry, m: int, n: int) -> bool:
        """As for the map inside, on the device of ``carry``."""
        where = next((tensor.device for tensor in carry.values()), torch.device("cpu"))
        return self.inside(m, n, where).resumes(carry, m, n)

    def numbers_at(self, step: int, *, resumed: bool) -> tuple[int, ...] | None:
        """As for the map inside."""
        return self.contained.numbers_at(step, resumed=resumed)

    def draw(
        self,
        m: int,
        n: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The random numbers of the map inside, which must be random."""
        return self.inside(m, n, generator.device).draw(m, n, generator, dtype, out)

    def step(self, M: Tensor, carry: Carry, draw: Draw) -> tuple[Polar, Carry]:
        """A step of the map inside."""
        return self.inside(M.shape[-2], M.shape[-1], M.device).step(M, carry, draw)

    def flops(self, m: int, n: int) -> int:
        """The paper's count for the map inside, on a CPU."""
        return self.inside(m, n, torch.device("cpu")).flops(m, n)
