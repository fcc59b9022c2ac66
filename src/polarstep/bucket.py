"""A bucket: the matrices that go through a polar map as one batch in a step.

They have a :class:`BucketKey` in common: shape, precision, device, polar map, and the step if the map
draws other random numbers at other steps. They may be of several groups and parameters.

:class:`Engine` and :class:`Exchange` are what a bucket's step asks: how C and X are touched, and which
rank computes what. :class:`Alone` is the exchange of a process that has all matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from polarstep import kernels, rng
from polarstep.gradients import Work
from polarstep.groups import Group, is_by_norm, is_transposed
from polarstep.maps import Draw, MapState, Polar, PolarMap
from polarstep.maps.base import Captured, Factors
from polarstep.matrix import MatrixView
from polarstep.numerics import fitting
from polarstep.ranks.layout import whole
from polarstep.state import State, entry, recalled, remember
from polarstep.transforms import followed

__all__ = [
    "ALONE",
    "Alone",
    "Bucket",
    "BucketKey",
    "Draws",
    "Engine",
    "Exchange",
    "Member",
    "Observed",
    "Parts",
    "PartsOfT",
    "PolarHook",
    "PolarStep",
    "TensorBucket",
    "Waits",
    "all_recalled",
    "in_parts",
    "members_by_key",
    "members_of",
]

Item = TypeVar("Item")

# Numbers that are the same at every step are kept for at most this many shapes and seeds.
MOST_DRAWN = 64


@dataclass(frozen=True)
class BucketKey:
    """What the matrices of a bucket have in common."""

    polar: PolarMap  # the map that runs on this shape
    seed: int
    step: int | None  # None if the map's random numbers do not depend on it
    m: int
    n: int
    dtype: torch.dtype
    device: torch.device
    nesterov: bool
    skips_nonfinite: bool
    resumed: bool  # whether the map continues from the last step's carry
    by_norm: bool  # whether steps are scaled by ‖T‖_F
    captured: bool  # whether a CUDA graph of the user's own captures the step

    def drawn_at(self, step: int | None) -> tuple[tuple[int, ...] | None, tuple[int | str, ...]]:
        """What the random numbers of ``step`` depend on, and the key of their generator.

        ``None`` is for any step, where :attr:`step` is ``None``.

        The former is ``None`` if the step needs no random numbers. The key is a function of seed, shape
        and step, so that a resumed run draws the same numbers. In a CUDA graph of the user's own a
        step draws as the first step does, since every replay of the graph must draw new numbers.
        """
        step = 0 if step is None else step
        draws = self.polar.traits.draws
        rest = () if draws == "once" else (step,)
        numbers = None if draws == "never" else rest
        return numbers, (self.seed, f"{self.m}x{self.n}", *rest)


@dataclass(frozen=True)
class Member:
    """A block of a parameter: equally shaped matrices, which go to the same bucket."""

    work: Work
    index: int  # index of the parameter in its work
    block: int  # index of the block in the parameter's matrix view

    @property
    def param(self) -> Tensor:
        """The parameter."""
        return self.work.params[self.index]

    @property
    def name(self) -> str:
        """Its name."""
        return self.work.names[self.index]

    @property
    def group(self) -> Group:
        """Its group."""
        return self.work.group

    @property
    def view(self) -> MatrixView:
        """How the parameter is read as matrices."""
        return self.work.views[self.index]

    @property
    def count(self) -> int:
        """The number of matrices."""
        return self.view.shapes[self.block][0]


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

# Parts of T that lie in one tensor, each with its index in it.
Parts = list[tuple[tuple[int, slice], Tensor]]


class PartsOfT(NamedTuple):
    """For each member of a bucket that ranks share: this rank's parts of T."""

    shapes: list[tuple[int, int, int]]  # of this rank's tensor, as (batch, rows, columns)
    parts: list[Parts]


class Bucket(ABC):
    """The matrices of a bucket. A subclass knows where their carry lies from step to step."""

    def __init__(self, key: BucketKey, members: list[Member]) -> None:
        self.key, self.members = key, members

    @property
    def map(self) -> PolarMap:
        """T, the transform included."""
        return self.key.polar

    @abstractmethod
    def carry(self) -> MapState:
        """What the last step left for this one."""

    @abstractmethod
    def draw(self) -> Draw:
        """The random numbers of this step, and which matrices it skips."""

    @abstractmethod
    def keep(self, left: Any) -> None:
        """Keep what this step leaves for the next one."""

    def observed(self, polar: Polar) -> Observed:
        """What hooks see of this step."""
        owners = [member for member in self.members for _ in range(member.count)]
        step = max(member.group["step"] for member in self.members)
        return Observed(
            self.map,
            step,
            self.key.drawn_at(step)[1],
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

    def update(self, b: Any, polar: Any) -> None:
        """``X ← (1 − ηλ)X − η·scale·T``: decoupled weight decay, then the step."""


# A generator that yields, wherever it waits for other ranks, the bytes that it holds meanwhile.
Waits = Generator[int, None, Any]
# Takes M, the last step's carry and the draw of this step; returns T and the carry for the next step.
PolarStep = Callable[[Tensor, MapState, Draw], tuple[Polar, MapState]]


class Exchange(Protocol):
    """What a bucket's step asks of the ranks."""

    def bring(self, b: Any, engine: Any) -> Waits:
        """Return M of the matrices that this rank computes."""

    def computed(self, b: Any, M: Any, polar_step: PolarStep) -> Any:
        """T of what :meth:`bring` returned, and the carry for the next step."""

    def send_back(self, b: Any, T: Any) -> Waits:
        """Return T, and the carry for the next step, of the matrices that this rank updates."""

    def send_zeros(self, b: Any) -> Waits:
        """Send zeros in place of what this rank has not sent yet in this step."""


class Alone:
    """This rank has every matrix of the bucket and computes all of them."""

    def bring(self, b: Any, engine: Any) -> Waits:
        """M as the engine makes it."""
        return engine.momentum(b)
        yield  # a generator that never waits

    def computed(self, b: Bucket, M: Tensor, polar_step: PolarStep) -> tuple[Polar, MapState]:
        """T of all matrices."""
        return polar_step(M, b.carry(), b.draw())

    def send_back(self, b: Bucket, T: tuple[Polar, MapState]) -> Waits:
        """T as it is."""
        return T
        yield

    def send_zeros(self, b: Any) -> Waits:
        """Nothing: no rank waits for this one."""
        return
        yield


ALONE = Alone()


class TensorBucket(Bucket):
    """A bucket of one step, whose carry lies in the optimizer's state."""

    def __init__(
        self,
        key: BucketKey,
        members: list[Member],
        state: State,
        numbers: Callable[[], Tensor | None],
    ) -> None:
        super().__init__(key, members)
        self.state, self._numbers = state, numbers
        self.counts = [member.count for member in members]

    @property
    def nbytes(self) -> int:
        """The bytes of M."""
        its = self.key
        return sum(self.counts) * its.m * its.n * its.dtype.itemsize

    def carry(self) -> MapState:
        """A copy of what the state holds, which this step may write to."""
        its = self.key
        if its.resumed:
            return MapState.joined(all_recalled(its, self.members, self.state))
        return self.map.init(sum(self.counts), its.m, its.n, its.device, its.dtype)

    def gather_carry(self) -> None:
        """Make the carry whole in the state, where the last step's plan left it in parts.

        A step with hooks gathers matrices that ranks otherwise compute in parts, or for one another.
        """
        for member in self.members:
            of_parameter = self.state[member.param]
            for key in (entry(name, member.block) for name in self.map.traits.carries):
                if key in of_parameter:
                    of_parameter[key] = whole(of_parameter[key])

    def draw(self, of: Sequence[int] | None = None) -> Draw:
        """The numbers of this step, and a flag for each matrix if some may be skipped.

        ``of`` has the numbers of the matrices that are computed here; by default all are.
        """
        return Draw(self._numbers(), self._finite(of))

    def _finite(self, of: Sequence[int] | None) -> Tensor | None:
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
        flags = flags if of is None else [flags[j] for j in of]
        return torch.stack(flags).to(torch.float32)

    def keep(self, left: Any) -> None:
        """Put the carry for the next step into the optimizer's state."""
        for member, part in zip(self.members, left.split(self.counts), strict=True):
            work, p = member.work, member.param
            finite = None if work.finite is None else work.finite[member.index]
            remember(self.state[p], member.block, self.map, part, p.dtype, finite)


class Draws:
    """The random numbers of steps; those that are the same at every step are kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def of(self, key: BucketKey) -> Callable[[], Tensor | None]:
        """A function that returns :meth:`numbers`, drawn once for all parts of a bucket."""
        return cache(partial(self.numbers, key))

    def numbers(self, its: BucketKey) -> Tensor | None:
        """The random numbers of a bucket's step, if it needs any.

        Inside a CUDA graph they are not kept, as every replay draws new numbers.
        """
        needed, key = its.drawn_at(its.step)
        if needed is None:
            return None
        constant = not needed and not its.captured
        m, n, device = its.m, its.n, its.device
        place = (*key, its.polar, device, its.dtype)
        if constant and place in self._kept:
            return self._kept[place]
        dtype = torch.promote_types(its.dtype, torch.float32)
        drawn = its.polar.numbers(m, n, rng.generator(*key, device=device), dtype)
        numbers = fitting(drawn, device)
        if constant:
            if len(self._kept) >= MOST_DRAWN:
                del self._kept[next(iter(self._kept))]  # the oldest
            self._kept[place] = numbers
        return numbers


def members_by_key(
    works: Iterable[Work],
    state: State,
    apart: Callable[[Tensor], Hashable] = lambda p: None,
    skip: Container[int] = (),
) -> dict[tuple[BucketKey, Hashable], list[Member]]:
    """The blocks of all parameters that go through one map as one batch, whichever groups they are in.

    Parameters for which ``apart`` differs are kept apart; those whose ids are in ``skip`` are left out.
    """
    found: dict[tuple[BucketKey, Hashable], list[Member]] = {}
    for work in works:
        for index, p in enumerate(work.params):
            if p.numel() and id(p) not in skip:
                for key, member in members_of(work, index, state):
                    # Nesterov and skipping are up to each parameter here, and not to its bucket.
                    its = replace(key, nesterov=True, skips_nonfinite=False)
                    found.setdefault((its, apart(p)), []).append(member)
    return found


def members_of(work: Work, index: int, state: State) -> Iterator[tuple[BucketKey, Member]]:
    """The blocks of one parameter, each with the key of its bucket."""
    p, group, view = work.params[index], work.group, work.views[index]
    if view.rows * view.cols > kernels.MOST_ENTRIES and kernels.available(p.device):
        raise ValueError(
            f"{work.names[index]} has {view.rows}×{view.cols} entries: expected less than 2³¹ on a GPU, "
            "whose kernels count entries in 32 bits; update it by AdamW, or store it as a stack of "
            "smaller matrices"
        )
    for block, (count, m, n) in enumerate(view.shapes):
        polar = group["polar"].on(m, n, p.device)
        if group["transform"] is not None:
            polar = followed(polar, group["transform"], transposed=is_transposed(group))
        key = BucketKey(
            polar=polar,
            seed=group["seed"],
            # A group that was added later has taken fewer steps than the others.
            step=group["step"] if polar.traits.draws == "every step" else None,
            m=m,
            n=n,
            dtype=p.dtype,
            device=p.device,
            nesterov=group["nesterov"],
            skips_nonfinite=work.finite is not None,
            resumed=recalled(state.get(p, {}), block, polar, count, m, n) is not None,
            by_norm=is_by_norm(group),
            captured=work.captured,
        )
        yield key, Member(work, index, block)


def all_recalled(its: BucketKey, members: Iterable[Member], state: State) -> list[MapState]:
    """The last step's carry of each member of a bucket that continues from it."""
    found = (
        recalled(state[member.param], member.block, its.polar, member.count, its.m, its.n)
        for member in members
    )
    return [carry for carry in found if carry is not None]


def in_parts(
    items: Iterable[Item], count: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Lists of ``items`` with at most ``most`` matrices in all; a larger item has a list to itself.

    >>> list(in_parts([1, 1, 1, 5, 2], lambda matrices: matrices, most=2))
    [[1, 1], [1], [5], [2]]
    """
    part, size = list[Item](), 0
    for item in items:
        if part and size + count(item) > most:
            yield part
            part, size = [], 0
        part.append(item)
        size += count(item)
    yield part
