"""A bucket whose matrices are spread over ranks: each rank's parts of them, and who owns which matrix.

Parts may be any boxes of rows and columns, uneven or empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polarstep.bucket import Member, BucketKey, in_parts
from polarstep.ranks import ledger
from polarstep.ranks.layout import Layout, Piece

__all__ = ["Part", "Spread", "balanced", "part_of"]


@dataclass(frozen=True)
class Part:
    """A rank's part of one matrix: where it lies in the rank's tensor, and where in the matrix."""

    batch: int  # in the rank's tensor, read as (batch, rows, columns)
    rows: tuple[int, int]
    first_row: int  # of the matrix
    cols: tuple[int, int]  # of the matrix; the rank's tensor has these columns alone

    @property
    def height(self) -> int:
        """The number of rows."""
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.cols[1] - self.cols[0]

    @property
    def in_matrix(self) -> tuple[slice, slice]:
        """Rows and columns of the matrix."""
        return slice(self.first_row, self.first_row + self.height), slice(*self.cols)


@dataclass
class Spread:
    """A bucket whose matrices are spread over ranks: its members, their layouts and matrices."""

    signature: BucketKey
    members: list[Member]
    layouts: list[Layout]

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that decides which part is sent to which rank."""
        members = tuple((id(each.param), each.block) for each in self.members)
        return replace(self.signature, step=0, resumed=False), members, tuple(self.layouts)

    @property
    def bytes_of_one(self) -> int:
        """What a rank holds of one matrix between two exchanges, on average and the same for all ranks.

        An owner has M and T, and every rank has its parts of both.
        """
        its, N, S = self.signature, len(self.ranks), len(self.layouts[0].peers)
        return -(-2 * its.m * its.n * its.dtype.itemsize * (N + S) // (N * S))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, the same for all members."""
        return self.layouts[0].ranks

    def in_parts(self, most: int) -> Iterator[Spread]:
        """Buckets of this one's members that hold at most ``most`` bytes, or one member."""
        both = list(zip(self.members, self.layouts, strict=True))
        count = max(1, most // self.bytes_of_one)
        for part in in_parts(both, lambda each: each[0].count, count):
            yield Spread(self.signature, [m for m, _ in part], [layout for _, layout in part])

    @property
    def me(self) -> int:
        """This rank's index."""
        return self.layouts[0].me

    def matrices(self) -> list[tuple[int, int]]:
        """The matrices: the index of a member, and of the matrix in its block."""
        return [(i, k) for i, member in enumerate(self.members) for k in range(member.count)]

    def part(self, index: int, k: int, rank: int) -> Part | None:
        """The part of a member's ``k``-th matrix that ``rank``, an index into the ranks, has."""
        member = self.members[index]
        pieces = self.layouts[index].pieces(member.view)
        assert pieces is not None
        return part_of(pieces[rank], member, k)


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


def balanced(buckets: Sequence[Spread]) -> list[list[int]]:
    """The owner of every matrix of every bucket, as an index into the bucket's ranks.

    Matrices are assigned from the most work to the least, each to the rank with the least work so far.
    """
    owners = [[0] * len(bucket.matrices()) for bucket in buckets]
    loads: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    works = [
        (-_cost(bucket), b, k)
        for b, bucket in enumerate(buckets)
        for k in range(len(bucket.matrices()))
    ]
    for cost, b, k in sorted(works):
        ranks = buckets[b].ranks
        load = loads.setdefault(ranks, [(0.0, i) for i in range(len(ranks))])
        least, rank = load[0]
        owners[b][k] = rank
        heapq.heapreplace(load, (least - cost, rank))
    return owners


def _cost(bucket: Spread) -> float:
    its = bucket.signature
    return float(ledger.product_flops(its.polar, its.m, its.n))
