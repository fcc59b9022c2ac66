"""A bucket: the matrices that go through a polar map as one batch in a step.

They have a shape, a precision, a device and a map in common, and the random numbers of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from polarstep import rng
from polarstep.cuda_graphs import in_a_graph
from polarstep.distributed.layout import whole
from polarstep.float64 import fitting
from polarstep.maps import Carry, Draw, Polar, PolarMap
from polarstep.maps.result import Captured, Factors
from polarstep.optim.stepping.carried import entry, remember
from polarstep.optim.stepping.collect import Member, Signature, State, all_recalled

__all__ = ["Bucket", "Draws", "Engine", "Observed", "PolarHook", "TensorBucket"]

# Numbers that are the same at every step are kept for at most this many shapes and seeds.
MOST_DRAWN = 64


@dataclass(frozen=True)
class Observed:
    """What a hook sees of a bucket's step.

    A hook must not change it: ``M`` may be the momentum buffer itself.
    """

    map: PolarMap
    step: int  # the largest, if groups have taken different numbers of steps
    generator_key: tuple[int | str, ...]
    names: tuple[str, ...]  # the parameter of each matrix of the batch
    params: tuple[Tensor, ...]
    M: Tensor  # (batch, m, n)
    T: Tensor  # (batch, m, n)
    factors: Factors | None = None  # if the map works in a subspace
    captured: Captured | None = None  # if T is more than what the map found in a subspace


PolarHook = Callable[[Observed], None]


class Bucket:
    """The matrices of a bucket. A subclass knows where their carry lies from step to step."""

    def __init__(self, signature: Signature, members: list[Member]) -> None:
        self.signature, self.members = signature, members

    @property
    def map(self) -> PolarMap:
        """T, the transform included."""
        return self.signature.polar

    def carry(self) -> Carry:
        """What the last step left for this one."""
        raise NotImplementedError

    def draw(self, *, shown: bool) -> Draw:
        """The random numbers of this step, and which matrices it skips."""
        raise NotImplementedError

    def keep(self, left: Carry) -> None:
        """Keep what this step leaves for the next one."""
        raise NotImplementedError

    def observed(self, polar: Polar) -> Observed:
        """What hooks see of this step."""
        owners = [member for member in self.members for _ in range(member.count)]
        step = max(member.group["step"] for member in self.members)
        return Observed(
            self.map,
            step,
            self.signature.drawn_at(step)[1],
            tuple(member.name for member in owners),
            tuple(member.param for member in owners),
            polar.M,
            polar.dense.to(polar.M.dtype),
            polar.factors,
            polar.captured,
        )


class Engine(Protocol):
    """How C and X are touched."""

    def momentum(self, b: Any) -> Tensor:
        """``C ← βC + G`` in place, and M of the bucket's matrices as one batch (count, m, n)."""

    def update(self, b: Any, polar: Polar) -> None:
        """``X ← (1 − ηλ)X − η·scale·T``: decoupled weight decay, then the step."""


class TensorBucket(Bucket):
    """A bucket of one step, whose carry lies in the optimizer's state."""

    def __init__(
        self,
        signature: Signature,
        members: list[Member],
        state: State,
        numbers: Callable[[], Tensor | None],
    ) -> None:
        super().__init__(signature, members)
        self.state, self._numbers = state, numbers
        self.counts = [member.count for member in members]

    @property
    def nbytes(self) -> int:
        """The bytes of M."""
        return (
            sum(self.counts) * self.signature.m * self.signature.n * self.signature.dtype.itemsize
        )

    def carry(self) -> Carry:
        """A copy of what the state holds, which this step may write to."""
        its = self.signature
        if its.resumed:
            return Carry.joined(all_recalled(its, self.members, self.state))
        return self.map.init(sum(self.counts), its.m, its.n, its.device, its.dtype)

    def gather_carry(self) -> None:
        """Make the carry whole in the state, where the last step's plan left it in parts.

        A step with hooks gathers matrices that ranks otherwise compute in parts, or for one another.
        """
        for member in self.members:
            of_parameter = self.state[member.param]
            for key in (entry(name, member.block) for name in self.map.carries):
                if key in of_parameter:
                    of_parameter[key] = whole(of_parameter[key])

    def draw(self, *, shown: bool) -> Draw:
        """The numbers of this step, and a flag for each matrix if some may be skipped."""
        return Draw(self._numbers(), self._finite(), shown=shown)

    def _finite(self) -> Tensor | None:
        """A number per matrix, zero if its gradient is not finite; ``None`` if nothing is skipped."""
        if all(member.work.finite is None for member in self.members):
            return None
        flags = [
            torch.ones((), dtype=torch.bool, device=member.param.device)
            if member.work.finite is None
            else member.work.finite[member.index]
            for member in self.members
            for _ in range(member.count)
        ]
        return torch.stack(flags).to(torch.float32)

    def keep(self, left: Carry) -> None:
        """Put the carry for the next step into the optimizer's state."""
        for member, part in zip(self.members, left.split(self.counts), strict=True):
            work, p = member.work, member.param
            finite = None if work.finite is None else work.finite[member.index]
            remember(self.state[p], member.block, self.map, part, p.dtype, finite)


class Draws:
    """The random numbers of steps; those that are the same at every step are kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def numbers(self, signature: Signature) -> Tensor | None:
        """The random numbers of a bucket's step, if it needs any.

        Inside a CUDA graph they are not kept, as every replay draws new numbers.
        """
        needed, key = signature.drawn_at(signature.step)
        if needed is None:
            return None
        constant = not needed and not in_a_graph()
        m, n, device = signature.m, signature.n, signature.device
        place = (*key, signature.polar, device, signature.dtype)
        if constant and place in self._kept:
            return self._kept[place]
        dtype = torch.promote_types(signature.dtype, torch.float32)
        drawn = signature.polar.draw(m, n, rng.generator(*key, device=device), dtype)
        numbers = fitting(drawn, device)
        if constant:
            if len(self._kept) >= MOST_DRAWN:
                del self._kept[next(iter(self._kept))]  # the oldest
            self._kept[place] = numbers
        return numbers
