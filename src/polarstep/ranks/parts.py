"""Which rank computes which matrix of a bucket, and what travels to it and back.

A plan is a row of a table::

    plan          T of a matrix is computed by   M gets there by    T comes back by
    local         the rank that holds it         –                  –
    owner         one rank, its owner            all-to-all         all-to-all
    replicated    one rank; all have M           –                  all-gather
    gather        every rank that holds a part   all-gather         –

:class:`Table` is the second column for the matrices of one bucket, with the third and the fourth worked
out as lists of :class:`Item`. It is made once and kept while the bucket stays the same. Parts may be any
boxes of rows and columns, uneven or empty. Where a parameter has several copies (DDP, the replicate axis
of HSDP), the ranks of all copies share the work: M's parts come from the copy of the rank that computes,
and T's parts go to all copies.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.bucket import BucketKey, Member, TensorBucket, in_parts
from polarstep.maps import LowRank, PolarMap
from polarstep.ops import ops_of
from polarstep.ranks import carries, collectives
from polarstep.ranks.layout import Layout, Piece
from polarstep.state import State, carried_dtype, momentum_dtype

__all__ = [
    "Item",
    "Part",
    "PartsOfCarry",
    "SharedBucket",
    "Slot",
    "Table",
    "Way",
    "computing_ranks",
    "factor_width",
    "part_of",
    "wire_dtype",
]


# What travels beside carries, by names that no carry has.
M, T, L, R = "(M)", "(T)", "(L)", "(R)"

# The shape of each tensor that a map carries for one matrix.
Shapes = dict[str, tuple[int, ...]]
# By name that shape, and this rank's part of the carry of each matrix of a bucket.
PartsOfCarry = dict[str, tuple[tuple[int, ...], list[Tensor]]]


@dataclass(frozen=True)
class Part:
    """A rank's part of one matrix: where it lies in the rank's tensor, and where in the matrix."""

    batch: int  # in the rank's tensor, read as (batch, rows, columns)
    rows: tuple[int, int]
    first_row: int  # of the matrix
    cols: tuple[int, int]  # of the matrix; the rank's tensor has these columns alone

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def in_tensor(self) -> tuple[int, slice]:
        """The index of the part in the rank's tensor."""
        return self.batch, slice(*self.rows)

    @property
    def in_matrix(self) -> tuple[slice, slice]:
        """The index of the part in the matrix."""
        return slice(self.first_row, self.first_row + self.shape[0]), slice(*self.cols)


def part_of(piece: Piece, member: Member, k: int) -> Part | None:
    """The part of the ``k``-th matrix of a member's block that lies in a rank's piece."""
    split = member.view.runs
    if len(set(split)) == 1:
        batch, j = divmod(k, len(split))
        first, size = j * split[0], split[0]
    else:
        batch, first, size = k, sum(split[: member.block]), split[member.block]
    start, stop = max(first, piece.rows[0]), min(first + size, piece.rows[1])
    inside = piece.batch[0] <= batch < piece.batch[1] and piece.cols[0] < piece.cols[1]
    if not inside or start >= stop:
        return None
    rows = (start - piece.rows[0], stop - piece.rows[0])
    return Part(batch - piece.batch[0], rows, start - first, piece.cols)


def wire_dtype(polar: PolarMap, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of M and T on the way: bfloat16 where the step rounds to it anyway."""
    dtype = momentum_dtype(dtype)
    fast = ops_of(device).dtype(dtype)
    return fast if polar.traits.rounds_input and fast.itemsize < dtype.itemsize else dtype


def factor_width(polar: PolarMap) -> int | None:
    """ℓ of a map whose T is two factors; ``None`` where T is dense."""
    return polar.width if isinstance(polar, LowRank) else None


class SharedBucket(TensorBucket):
    """A bucket whose matrices lie in parts, or as copies, on several ranks."""

    def __init__(
        self,
        key: BucketKey,
        members: list[Member],
        layouts: list[Layout],
        state: State,
        numbers: Callable[[], Tensor | None],
    ) -> None:
        super().__init__(key, members, state, numbers)
        self.layouts = layouts
        self.dtype = wire_dtype(key.polar, key.dtype, key.device)  # of numbers on the way

    def carried_dtype(self, name: str) -> torch.dtype:
        """The precision in which a carry is computed: that of M, or float32 for ``wide_carries``."""
        wide = name in self.map.traits.wide_carries
        return carried_dtype(self.map, name, self.key.dtype) if wide else self.dtype

    def as_sent(self, name: str, X: Tensor) -> Tensor:
        """``X`` as it is sent: numbers of a carry that is kept in float32 are not rounded."""
        wide = self.carried_dtype(name)
        return X if wide == self.dtype else collectives.words(X, wide, self.dtype)

    def as_computed(self, name: str, flat: Tensor) -> Tensor:
        """The numbers that :meth:`as_sent` made ``flat`` of."""
        wide = self.carried_dtype(name)
        return flat if wide == self.dtype else collectives.from_words(flat, wide)

    @property
    def decides(self) -> tuple[Any, ...]:
        """Everything that decides which part is sent to which rank."""
        members = tuple((id(each.param), each.block) for each in self.members)
        fused = tuple(member.group["fused"] for member in self.members)
        return replace(self.key, step=0, resumed=False), members, tuple(self.layouts), fused

    @property
    def bytes_of_one(self) -> int:
        """What a rank holds of one matrix between two exchanges, on average and the same for all ranks.

        The rank that computes has M and T, and every rank has its parts of both.
        """
        its, N, S = self.key, len(self.layouts[0].ranks), len(self.layouts[0].peers)
        return -(-2 * its.m * its.n * its.dtype.itemsize * (N + S) // (N * S))

    def in_parts(self, most: int) -> Iterator[SharedBucket]:
        """Buckets of this one's members that hold at most ``most`` bytes, or one member."""
        both = list(zip(self.members, self.layouts, strict=True))
        count = min(max(1, most // self.bytes_of_one), kernels.MOST_MATRICES)
        for part in in_parts(both, lambda each: each[0].count, count):
            members, layouts = [m for m, _ in part], [layout for _, layout in part]
            yield SharedBucket(self.key, members, layouts, self.state, self._numbers)

    def pieces(self, i: int) -> tuple[Piece, ...]:
        """What each rank has of the ``i``-th member's parameter."""
        found = self.layouts[i].pieces(self.members[i].view)
        assert found is not None
        return found

    def found(self, i: int, shapes: Shapes) -> dict[str, Tensor]:
        """This rank's part of what the last step left for the ``i``-th member."""
        member = self.members[i]
        return {name: carries.found(self.state, member, name, s) for name, s in shapes.items()}

    def keep(self, left: PartsOfCarry) -> None:
        """Store this rank's parts of the carry for the next step."""
        for name, (shape, parts) in left.items():
            first = 0
            for member in self.members:
                finite = member.work.finite
                flag = None if finite is None else finite[member.index]
                part = torch.stack(parts[first : first + member.count])
                dtype = carried_dtype(self.map, name, member.param.dtype)
                carries.put(self.state, member, name, shape, part, flag, dtype)
                first += member.count


class Slot(NamedTuple):
    """A tensor that travels between a rank that has a part of a matrix and the rank that computes it."""

    name: str  # :data:`M`, :data:`T`, its factors :data:`L` and :data:`R`, or the name of a carry
    at: tuple[Any, ...]  # its index in that tensor of the whole matrix
    shape: tuple[int, ...]
    size: int  # numbers on the way


class Item(NamedTuple):
    """A :class:`Slot` of matrix ``j`` that goes to a rank or comes from it."""

    j: int
    slot: Slot
    rank: int
    start: int  # its first number among all numbers that go to this rank, or come from it


class Way(NamedTuple):
    """What travels in one exchange of a bucket."""

    sizes: list[int]  # the numbers that this rank sends to each rank
    counts: list[int]  # and that it receives from each rank
    sent: list[Item]
    received: list[Item]


class Table:
    """Which rank computes each matrix of a bucket: ``computes[j]`` is an index into the ranks."""

    def __init__(self, b: SharedBucket, computes: list[int]) -> None:
        self.computes, its = computes, b.key
        self.ranks, self.me = b.layouts[0].ranks, b.layouts[0].me
        self.dtype = b.dtype  # of numbers on the way
        self.matrices = [(i, k) for i, member in enumerate(b.members) for k in range(member.count)]
        self.owned = [j for j, rank in enumerate(computes) if rank == self.me]
        self.row = {j: row for row, j in enumerate(self.owned)}
        # Whether every rank has all of M and needs all of T, as where parameters are copies.
        self.copied = all(layout.cut == () for layout in b.layouts)
        self.nbytes = len(self.matrices) * b.bytes_of_one
        # ℓ where T comes in two factors; a map joins the parts of more matrices as dense T.
        joined = len(self.matrices) > kernels.MOST_MATRICES
        self.width = None if joined else factor_width(its.polar)
        self.shapes = carries.shapes_of(its, self.dtype)
        self.mine = [self._part(b, j, self.me) for j in range(len(computes))]
        self.there, self.there_at_first = (
            self._way(partial(self._slots_there, b, shapes), away=True)
            for shapes in (self.shapes, Shapes())
        )
        self.back = self._way(partial(self._slots_back, b), away=False)

    def resumed_from(self, b: SharedBucket) -> Shapes:
        """The carries that a step of ``b`` continues from."""
        return self.shapes if b.key.resumed else {}

    def _way(self, slots: Callable[[int, int], list[Slot]], *, away: bool) -> Way:
        """What travels to the ranks that compute, or from them; ``slots`` has it for (j, rank)."""
        N = range(len(self.ranks))
        held: list[list[tuple[int, Slot]]] = [[] for _ in N]
        for j, rank in enumerate(self.computes):
            held[rank] += [(j, slot) for slot in slots(j, self.me)]
        computed = [[(j, slot) for j in self.owned for slot in slots(j, rank)] for rank in N]
        if self.copied and not away:  # one copy is sent, to all ranks
            computed = [
                each if rank == self.me else [] for rank, each in zip(N, computed, strict=True)
            ]
        sent, received = (held, computed) if away else (computed, held)
        sizes, counts = (
            [sum(slot.size for _, slot in each) for each in side] for side in (sent, received)
        )
        return Way(sizes, counts, _items(sent), _items(received))

    def _part(self, b: SharedBucket, j: int, rank: int) -> Part | None:
        i, k = self.matrices[j]
        return part_of(b.pieces(i)[rank], b.members[i], k)

    def _slots_there(self, b: SharedBucket, shapes: Shapes, j: int, rank: int) -> list[Slot]:
        """What ``rank`` sends to the rank that computes matrix j: both belong to one copy."""
        replicas = b.layouts[self.matrices[j][0]].replicas
        if replicas[rank] != replicas[self.computes[j]]:
            return []
        part = self._part(b, j, rank)
        of_M = [] if part is None else [_slot(M, part.in_matrix, part.shape)]
        return of_M + self._slots_of_carry(b, j, rank, shapes)

    def _slots_back(self, b: SharedBucket, j: int, rank: int) -> list[Slot]:
        """What ``rank`` gets: its part of T, or of T's two factors where they are fewer numbers."""
        part, of_T = self._part(b, j, rank), list[Slot]()
        if part is not None:
            (height, width), ell = part.shape, self.width
            rows, columns = part.in_matrix
            of_T = [_slot(T, part.in_matrix, part.shape)]
            if ell is not None and ell * (height + width) < height * width:
                of_T = [
                    _slot(L, (rows, slice(ell)), (height, ell)),
                    _slot(R, (slice(ell), columns), (ell, width)),
                ]
        return of_T + self._slots_of_carry(b, j, rank, self.shapes)

    def _slots_of_carry(self, b: SharedBucket, j: int, rank: int, shapes: Shapes) -> list[Slot]:
        i, _ = self.matrices[j]
        found = []
        for name, shape in shapes.items():
            member = b.members[i]
            start, stop = carries.spans(member.param, b.layouts[i], member.count, shape)[rank]
            at = (..., slice(start, stop)) if shape else ()
            words = max(1, b.carried_dtype(name).itemsize // self.dtype.itemsize)
            found.append(_slot(name, at, (*shape[:-1], stop - start) if shape else (), words))
        return found


def _slot(name: str, at: tuple[Any, ...], shape: tuple[int, ...], words: int = 1) -> Slot:
    return Slot(name, at, shape, math.prod(shape) * words)


def _items(by_rank: list[list[tuple[int, Slot]]]) -> list[Item]:
    """The slots of all ranks, in the order in which they are packed."""
    found = []
    for rank, of_rank in enumerate(by_rank):
        start = 0
        for j, slot in of_rank:
            found.append(Item(j, slot, rank, start))
            start += slot.size
    return found


def computing_ranks(buckets: Sequence[SharedBucket]) -> list[list[int]]:
    """The rank that computes each matrix of each bucket, as an index into the bucket's ranks.

    Matrices are assigned from the most FLOPs to the least, each to the rank with the least so far.
    """
    computes = [[0] * sum(b.counts) for b in buckets]
    loads: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    costs = [float(b.map.flops(b.key.m, b.key.n)) for b in buckets]
    works = [
        (-cost, number, j)
        for number, (b, cost) in enumerate(zip(buckets, costs, strict=True))
        for j in range(sum(b.counts))
    ]
    for cost, number, j in sorted(works):
        ranks = buckets[number].layouts[0].ranks
        load = loads.setdefault(ranks, [(0.0, i) for i in range(len(ranks))])
        least, rank = load[0]
        computes[number][j] = rank
        heapq.heapreplace(load, (least - cost, rank))
    return computes
