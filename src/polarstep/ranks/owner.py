"""Each matrix is computed by one rank, its owner; the work of a step is balanced by FLOPs.

    1   each rank advances its parts of the momentum
    2   one all-to-all: the parts of M go to the owners
    3   owners run the polar map on their matrices, as one process would; on a GPU by replaying a
        CUDA graph (:mod:`polarstep.ranks.owned_graph`)
    4   one all-to-all: T's parts come back, or parts of its two factors where they are smaller
    5   each rank updates its parts of X

Where all ranks have whole copies, M is there already, and 4 is an all-gather of T.

Which parts these are, and who owns which matrix, is in :mod:`polarstep.ranks.spread`. Where a
parameter has several copies (DDP, the replicate axis of HSDP), the ranks of all copies share the work.
M's parts then come from the copy of the owner, and T's parts go to all copies.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import islice

import torch
from torch import Tensor

from polarstep.bucket import Member
from polarstep.engines.torch import Target
from polarstep.maps import Draw, MapState, Polar
from polarstep.ranks import carries, collectives
from polarstep.ranks.layout import Layout
from polarstep.ranks.owned_graph import OwnedGraphs
from polarstep.ranks.plans import factor_width, wire_dtype
from polarstep.ranks.spread import Part, Spread
from polarstep.rates import at_assumed_norm
from polarstep.state import State, carried_dtype

__all__ = ["Trip"]


def _check_carry(left: MapState, shapes: dict[str, tuple[int, ...]]) -> None:
    found = {name: tuple(tensor.shape[1:]) for name, tensor in left.items()}
    if found != shapes:
        raise ValueError(
            f"the map left tensors of shapes {found} for the next step: expected {shapes}, as for a "
            'matrix of zeros; with such a map use Muon(plan="gather")'
        )


class Trip:
    """Who sends what to whom for one bucket."""

    def __init__(self, bucket: Spread, owners: list[int]) -> None:
        self.bucket, self.owners = bucket, owners
        self.ranks, self.me = bucket.ranks, bucket.me
        self.matrices = bucket.matrices()
        self.owned = [j for j, owner in enumerate(owners) if owner == self.me]
        self.mine = [bucket.part(i, k, self.me) for i, k in self.matrices]  # this rank's parts
        # All parts of the owned matrices, by rank. Of all matrices they would be too many.
        self.parts = {
            j: [bucket.part(*self.matrices[j], rank) for rank in range(len(self.ranks))]
            for j in self.owned
        }
        its = bucket.signature
        self.width = factor_width(its.polar)
        self.dtype = wire_dtype(its.polar, its.dtype, its.device)  # of numbers on the way
        # Whether every rank has all of M and needs all of T, as where parameters are copies.
        self.copied = all(layout.cut == () for layout in bucket.layouts)
        self.nbytes = len(self.matrices) * bucket.bytes_of_one
        self._sizes: dict[tuple[str, bool], tuple[list[int], list[int]]] = {}

    def step(
        self,
        targets: Callable[[int], Target],
        state: State,
        numbers: Callable[[], Tensor | None],
        errors: list[Exception],
        graphs: OwnedGraphs,
    ) -> Generator[int, None, list[tuple[Member, list[tuple[Part | None, Tensor]]]]]:
        """One step of the bucket; yields the bytes that it holds wherever it waits for other ranks.

        Returns this rank's parts of T by member. Up to the last exchange an error is added to
        ``errors``, and zeros are sent in place of what failed, so that no rank waits for this one.
        """
        its, dtype = self.bucket.signature, self.dtype
        shapes = carries.shapes_of(its, dtype)
        known = shapes if its.resumed else {}

        def guarded(part: Callable[[], Tensor], sizes: list[int]) -> Tensor:
            try:
                return part()
            except Exception as error:
                errors.append(error)
                return torch.zeros(sum(sizes), dtype=dtype, device=its.device)

        def pack() -> Tensor:
            return collectives.packed(self.parts_there(targets, state, known), dtype, its.device)

        sizes, counts = self._sizes_there(known)
        received = guarded(pack, sizes)
        if not self.copied:
            there = collectives.exchange(received, sizes, counts, self.ranks)
            yield self.nbytes
            there.wait()
            received = there.received

        def compute(received: Tensor, draw: Draw, out: Tensor | None) -> Tensor:
            M, carry = self.assembled(torch.split(received, counts), known)
            return collectives.packed(
                self.parts_back(M, carry, draw, shapes), dtype, its.device, out
            )

        def run() -> Tensor:
            if not self.owned:
                return torch.empty(0, dtype=dtype, device=its.device)
            return graphs.run(self, compute, received, Draw(numbers(), self.finite()))

        to_each, from_each = self._sizes_back(shapes)
        sent = guarded(run, to_each)
        if self.copied:
            back = collectives.share(sent, from_each, self.ranks)
        else:
            back = collectives.exchange(sent, to_each, from_each, self.ranks)
        yield self.nbytes
        return self.received_back(back.wait(), shapes, state)

    def _part(self, j: int, rank: int) -> Part | None:
        """The part of matrix j that ``rank`` has; of other ranks, if this rank owns the matrix."""
        return self.mine[j] if rank == self.me else self.parts[j][rank]

    @property
    def _receivers(self) -> Sequence[int]:
        """The ranks for which the owner of a matrix packs something."""
        return (self.me,) if self.copied else range(len(self.ranks))

    def _layout(self, j: int) -> Layout:
        return self.bucket.layouts[self.matrices[j][0]]

    def _is_source(self, j: int, rank: int) -> bool:
        """Whether ``rank`` sends its part of matrix j to the owner: both belong to one copy."""
        replicas = self._layout(j).replicas
        return replicas[rank] == replicas[self.owners[j]]

    def _spans(self, j: int, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        i, _ = self.matrices[j]
        member = self.bucket.members[i]
        return carries.spans(member.param, self._layout(j), member.count, shape)

    def _factored(self, part: Part) -> bool:
        """Whether the two factors of a part are fewer numbers than the part."""
        width = self.width
        return width is not None and width * (part.height + part.width) < part.height * part.width

    def parts_there(
        self,
        targets: Callable[[int], Target],
        state: State,
        shapes: dict[str, tuple[int, ...]],
    ) -> list[list[Tensor]]:
        """For each rank, the parts of M and of the last step's carries that this rank sends to it."""
        momenta, known = [], []
        for i, member in enumerate(self.bucket.members):
            pieces = self.bucket.layouts[i].pieces(member.view)
            assert pieces is not None
            momenta.append(targets(i).local_momentum().reshape(pieces[self.me].shape))
            known.append({n: carries.found(state, member, n, s) for n, s in shapes.items()})
        out: list[list[Tensor]] = [[] for _ in self.ranks]
        for j, (i, k) in enumerate(self.matrices):
            if not self._is_source(j, self.me):
                continue
            part = self.mine[j]
            if part is not None:
                out[self.owners[j]].append(momenta[i][part.batch, slice(*part.rows)])
            out[self.owners[j]] += [self._sent(n, tensor[k]) for n, tensor in known[i].items()]
        return out

    def _sizes_there(self, shapes: dict[str, tuple[int, ...]]) -> tuple[list[int], list[int]]:
        """How many numbers this rank sends to each rank before the map, and receives from each."""
        key = ("there", bool(shapes))
        if key not in self._sizes:
            self._sizes[key] = self._counted_there(shapes)
        return self._sizes[key]

    def _counted_there(self, shapes: dict[str, tuple[int, ...]]) -> tuple[list[int], list[int]]:
        sizes, counts = [0] * len(self.ranks), [0] * len(self.ranks)
        for j, owner in enumerate(self.owners):
            sizes[owner] += self._size_there(j, self.me, shapes)
        for j in self.owned:
            for rank in range(len(self.ranks)):
                counts[rank] += self._size_there(j, rank, shapes)
        return sizes, counts

    def _size_there(self, j: int, rank: int, shapes: dict[str, tuple[int, ...]]) -> int:
        if not self._is_source(j, rank):
            return 0
        part = self._part(j, rank)
        size = 0 if part is None else part.height * part.width
        return size + sum(self._carried(j, rank, *each) for each in shapes.items())

    def _carried(self, j: int, rank: int, name: str, shape: tuple[int, ...]) -> int:
        start, stop = self._spans(j, shape)[rank]
        size = stop - start
        for each in shape[:-1]:
            size *= each
        return size * self._words(name)

    def _carried_dtype(self, name: str) -> torch.dtype:
        """The precision in which the owner has a carry: M's, or float32 for ``wide_carries``."""
        its = self.bucket.signature
        if name in its.polar.wide_carries:
            return carried_dtype(its.polar, name, its.dtype)
        return self.dtype

    def _words(self, name: str) -> int:
        """How many numbers on the way one number of a carry takes."""
        return max(1, self._carried_dtype(name).itemsize // self.dtype.itemsize)

    def _sent(self, name: str, X: Tensor) -> Tensor:
        """``X``, a part of a carry, as it is sent: what is kept in float32 is not rounded."""
        wide = self._carried_dtype(name)
        return X if wide == self.dtype else collectives.words(X, wide, self.dtype)

    def _arrived(self, name: str, flat: Tensor) -> Tensor:
        """The numbers of a carry that :meth:`_sent` made ``flat`` of."""
        wide = self._carried_dtype(name)
        return flat if wide == self.dtype else collectives.from_words(flat, wide)

    def assembled(
        self, arrived: Sequence[Tensor], shapes: dict[str, tuple[int, ...]]
    ) -> tuple[Tensor, MapState]:
        """M of the owned matrices, and what the last step left for them."""
        its = self.bucket.signature
        M = torch.empty(len(self.owned), its.m, its.n, dtype=self.dtype, device=its.device)
        carry = MapState(
            {
                name: M.new_empty(len(self.owned), *shape, dtype=self._carried_dtype(name))
                for name, shape in shapes.items()
            }
        )
        taken = [0] * len(self.ranks)

        def next_of(rank: int, size: int) -> Tensor:
            taken[rank] += size
            return arrived[rank][taken[rank] - size : taken[rank]]

        for row, j in enumerate(self.owned):
            for rank in range(len(self.ranks)):
                if not self._is_source(j, rank):
                    continue
                part = self.parts[j][rank]
                if part is not None:
                    piece = next_of(rank, part.height * part.width)
                    M[row][part.in_matrix] = piece.view(part.height, part.width)
                for name, shape in shapes.items():
                    start, stop = self._spans(j, shape)[rank]
                    place = carry[name][row]
                    place = place[..., start:stop] if shape else place
                    flat = next_of(rank, self._words(name) * place.numel())
                    place.copy_(self._arrived(name, flat).view(place.shape))
        return M, carry

    def finite(self) -> Tensor | None:
        """A number for each owned matrix, zero if its gradient is not finite."""
        members = self.bucket.members
        if all(member.work.finite is None for member in members):
            return None
        flags = []
        for j in self.owned:
            member = members[self.matrices[j][0]]
            finite = member.work.finite
            flag = None if finite is None else finite[member.index]
            one = torch.ones((), device=self.bucket.signature.device)
            flags.append(one if flag is None else flag.to(torch.float32))
        return torch.stack(flags)

    def parts_back(
        self, M: Tensor, carry: MapState, draw: Draw, shapes: dict[str, tuple[int, ...]]
    ) -> list[list[Tensor]]:
        """Run the polar map on the owned matrices; returns what is sent to each rank.

        A rank gets its parts of T, or of T's two factors, and its parts of the carry for the next step.
        """
        its = self.bucket.signature
        carry = carry or its.polar.init(len(M), its.m, its.n, its.device, its.dtype)
        out: list[list[Tensor]] = [[] for _ in self.ranks]
        owned = iter(self.owned)
        for polar, left in its.polar.steps_on_many(M, carry, draw):
            _check_carry(left, shapes)
            polar = at_assumed_norm(polar, its.polar) if its.by_norm else polar
            for row, j in enumerate(islice(owned, len(polar.M))):
                for rank in self._receivers:
                    out[rank] += self._back(polar, row, self.parts[j][rank])
                    for name, shape in shapes.items():
                        start, stop = self._spans(j, shape)[rank]
                        tensor = left[name][row]
                        tensor = tensor[..., start:stop] if shape else tensor
                        out[rank].append(self._sent(name, tensor))
        return out

    def _sizes_back(self, shapes: dict[str, tuple[int, ...]]) -> tuple[list[int], list[int]]:
        """How many numbers this rank sends to each rank after the map, and receives from each.

        What copies get is the same for all ranks, and is sent once.
        """
        key = ("back", bool(shapes))
        if key not in self._sizes:
            self._sizes[key] = self._counted_back(shapes)
        return self._sizes[key]

    def _counted_back(self, shapes: dict[str, tuple[int, ...]]) -> tuple[list[int], list[int]]:
        sizes, counts = [0] * len(self.ranks), [0] * len(self.ranks)
        for j, owner in enumerate(self.owners):
            counts[owner] += self._size_back(j, self.me, shapes)
        for j in self.owned:
            for rank in self._receivers:
                sizes[rank] += self._size_back(j, rank, shapes)
        return sizes, counts

    def _size_back(self, j: int, rank: int, shapes: dict[str, tuple[int, ...]]) -> int:
        part = self._part(j, rank)
        size = sum(self._carried(j, rank, *each) for each in shapes.items())
        if part is None:
            return size
        if self._factored(part):
            return size + (self.width or 0) * (part.height + part.width)
        return size + part.height * part.width

    def _back(self, polar: Polar, row: int, part: Part | None) -> list[Tensor]:
        if part is None:
            return []
        rows, cols = part.in_matrix
        if not self._factored(part):
            return [polar.dense[row, rows, cols]]
        assert polar.two_factors is not None
        L, R = polar.two_factors
        return [L[row, rows, : self.width], R[row, : self.width, cols]]

    def received_back(
        self, arrived: list[Tensor], shapes: dict[str, tuple[int, ...]], state: State
    ) -> list[tuple[Member, list[tuple[Part | None, Tensor]]]]:
        """This rank's parts of T by member; the carry for the next step goes into the state."""
        taken = [0] * len(self.ranks)
        found: list[list[tuple[Part | None, Tensor]]] = [[] for _ in self.bucket.members]
        left: list[dict[str, list[Tensor]]] = [{n: [] for n in shapes} for _ in found]

        def next_of(rank: int, *shape: int) -> Tensor:
            size = 1
            for each in shape:
                size *= each
            taken[rank] += size
            return arrived[rank][taken[rank] - size : taken[rank]].view(shape)

        for j, owner in enumerate(self.owners):
            i, _ = self.matrices[j]
            part = self.mine[j]
            if part is not None:
                if self._factored(part):
                    assert self.width is not None
                    L = next_of(owner, part.height, self.width)
                    T = L @ next_of(owner, self.width, part.width)
                else:
                    T = next_of(owner, part.height, part.width)
                found[i].append((part, T))
            for name, shape in shapes.items():
                start, stop = self._spans(j, shape)[self.me]
                mine = (*shape[:-1], stop - start) if shape else ()
                flat = next_of(owner, self._carried(j, self.me, name, shape))
                left[i][name].append(self._arrived(name, flat).view(mine))
        for i, member in enumerate(self.bucket.members):
            finite = member.work.finite
            flag = None if finite is None else finite[member.index]
            for name, shape in shapes.items():
                part_of = torch.stack(left[i][name])
                dtype = carried_dtype(self.bucket.signature.polar, name, member.param.dtype)
                carries.put(state, member, name, shape, part_of, flag, dtype)
        return list(zip(self.bucket.members, found, strict=True))
