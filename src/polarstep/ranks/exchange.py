"""How the ranks share a bucket: M goes to the ranks that compute T, and T comes back.

    Gathered    every rank that holds a part gathers M and computes all of T
    OverRanks   each matrix is computed by one rank (:mod:`polarstep.ranks.parts`)

:class:`polarstep.bucket.Alone` is for a rank that has every matrix of the bucket.

A bucket's step (:func:`polarstep.muon.bucket_step`) calls ``bring``, ``computed`` and ``send_back`` in
turn. If one of them fails on this rank, it calls ``send_zeros``, so that no rank waits for this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polarstep.bucket import Alone, PartsOfT, PolarStep, Waits
from polarstep.gradients import Work
from polarstep.maps import Draw, MapState, Polar
from polarstep.ranks import collectives, parts
from polarstep.ranks.layout import Layout, local
from polarstep.ranks.owned_graph import OwnedGraph
from polarstep.ranks.parts import Item, PartsOfCarry, SharedBucket, Table, Way
from polarstep.rates import at_assumed_norm
from polarstep.state import State, momentum_dtype

__all__ = ["CannotSend", "Gathered", "OverRanks", "Shares"]


class CannotSend(Exception):
    """This rank has not even zeros for the others, who would take what it sends next for them."""


@contextmanager
def _must_send() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        told = f"no zeros in place of what failed: {error!r} after {error.__context__!r}"
        raise CannotSend(told) from error


@dataclass
class Shares:
    """The matrices of a step that this rank shares with others."""

    works: list[Work]  # all of them
    owned: list[tuple[SharedBucket, OverRanks]]  # those that one rank computes for others
    gathered: list[Work]  # those that every rank computes that holds a part
    layout_of: Callable[[Tensor], Layout | None]
    state: State
    bytes_in_flight: int  # that buckets may hold together while they wait for other ranks
    errors: list[Exception]  # of this rank


class Gathered(Alone):
    """Every rank that holds a part of the matrices gathers M and computes all of T."""

    def __init__(self) -> None:
        self._missing: list[Tensor] = []  # parameters of which this rank has not sent its part of M

    def bring(self, b: Any, engine: Any) -> Waits:
        """M from all ranks."""
        self._missing = engine.not_gathered(b)
        b.gather_carry()
        for update in engine.of(b):
            if self._missing and update.p is self._missing[0]:
                M = update.local_momentum()
                update.gathering = Gathering(M, self._missing.pop(0))
        yield b.nbytes
        return engine.momentum(b)

    def send_zeros(self, b: Any) -> Waits:
        """Zeros in place of the parts of M that are missing."""
        if self._missing:
            with _must_send():
                for p in self._missing:
                    Gathering(torch.zeros_like(local(p), dtype=momentum_dtype(p.dtype)), p)
            self._missing = []
            yield b.nbytes


class Gathering:
    """The whole of a tensor that is cut like ``p``; ``part`` is this rank's part of it.

    Parts are put where the layout of ``p`` says, whatever their sizes, and no ``DTensor`` is made.
    """

    def __init__(self, part: Tensor, p: Tensor) -> None:
        layout = Layout.of(p)
        assert layout is not None
        self._shape = layout.shape
        self._boxes = [layout.boxes[i] for i in layout.peers]
        ranks = tuple(layout.ranks[i] for i in layout.peers)
        counts = [math.prod(stop - start for start, stop in box) for box in self._boxes]
        self._coming = collectives.share(part.reshape(-1), counts, ranks)

    def wait(self) -> Tensor:
        """The whole tensor; a GPU waits in its stream, the host does not."""
        parts = self._coming.wait()
        whole = parts[0].new_empty(self._shape)
        for box, part in zip(self._boxes, parts, strict=True):
            place = whole[tuple(slice(*span) for span in box)]
            place.copy_(part.view(place.shape))
        return whole


class OverRanks:
    """Each matrix is computed by one rank, as its table says; kept while the bucket stays the same.

    On a GPU everything between the two exchanges is one CUDA graph
    (:mod:`polarstep.ranks.owned_graph`).
    """

    def __init__(self, table: Table, graph: OwnedGraph | None = None) -> None:
        self.table, self._graph = table, graph
        self._missing: list[Way] = []  # what this rank has not sent yet in this step

    def bring(self, b: SharedBucket, engine: Any) -> Waits:
        """What this rank computes from, as it arrives: parts of M and of the last step's carry."""
        its, there = self.table, self._there(b)
        self._missing = [its.back] if its.copied else [there, its.back]
        sent = self._packed_there(b, engine, there)
        if its.copied:
            return sent
        arriving = self._send(sent)
        yield its.nbytes
        arriving.wait()
        return arriving.received

    def computed(self, b: SharedBucket, M: Tensor, polar_step: PolarStep) -> Tensor:
        """T, and the carry for the next step, as they are sent."""
        its = self.table
        if not its.owned:
            return torch.empty(0, dtype=its.dtype, device=b.key.device)

        def compute(received: Tensor, draw: Draw, out: Tensor | None) -> Tensor:
            M, carry = self._unpacked(b, received)
            carry = carry or b.map.init(len(M), b.key.m, b.key.n, b.key.device, b.key.dtype)
            return self._packed_back(b, *polar_step(M, carry, draw), out)

        draw = b.draw(its.owned)
        # The first step of a map with state differs from later steps: no carry has been received.
        repeats = b.key.resumed or not its.shapes
        if self._graph is None or not repeats:
            return compute(M, draw, None)
        return self._graph.run(compute, M, draw)

    def send_back(self, b: SharedBucket, T: Tensor) -> Waits:
        """This rank's parts of T by member, and of the carry by name."""
        arriving = self._send(T)
        yield self.table.nbytes
        return self._received_back(b, arriving.wait())

    def send_zeros(self, b: SharedBucket) -> Waits:
        """Zeros of the planned sizes."""
        its = self.table
        while self._missing:
            with _must_send():
                size = sum(self._missing[0].sizes)
                self._send(torch.zeros(size, dtype=its.dtype, device=b.key.device))
            yield its.nbytes

    def _there(self, b: SharedBucket) -> Way:
        """What travels before the map; carries do, too, if there was a step before."""
        return self.table.there if b.key.resumed else self.table.there_at_first

    def _send(self, flat: Tensor) -> collectives.Arriving:
        its, way = self.table, self._missing.pop(0)
        if its.copied:
            return collectives.share(flat, way.counts, its.ranks)
        return collectives.exchange(flat, way.sizes, way.counts, its.ranks)

    def _packed_there(self, b: SharedBucket, engine: Any, there: Way) -> Tensor:
        """This rank's parts of M and of the last step's carry."""
        its = self.table
        held = [
            {parts.M: M.reshape(b.pieces(i)[its.me].shape), **b.found(i, its.resumed_from(b))}
            for i, M in enumerate(engine.local_momenta(b))
        ]
        sent = []
        for item in there.sent:
            (i, k), part, name = its.matrices[item.j], its.mine[item.j], item.slot.name
            if name == parts.M:
                assert part is not None
                sent.append(held[i][name][part.in_tensor])
            else:
                sent.append(b.as_sent(name, held[i][name][k]))
        return collectives.packed([sent], its.dtype, b.key.device)

    def _unpacked(self, b: SharedBucket, received: Tensor) -> tuple[Tensor, MapState]:
        """M of the matrices that this rank computes, and what the last step left for them."""
        its, count, there = self.table, len(self.table.owned), self._there(b)
        M = torch.empty(count, b.key.m, b.key.n, dtype=its.dtype, device=b.key.device)
        carry = MapState(
            {
                name: M.new_empty(count, *shape, dtype=b.carried_dtype(name))
                for name, shape in its.resumed_from(b).items()
            }
        )
        of_rank = torch.split(received, there.counts)
        for item in there.received:
            whole = M if item.slot.name == parts.M else carry[item.slot.name]
            place = whole[its.row[item.j]][item.slot.at]
            place.copy_(_arrived(b, item, of_rank))
        return M, carry

    def _packed_back(
        self, b: SharedBucket, polar: Polar, left: MapState, out: Tensor | None
    ) -> Tensor:
        """The parts of T, and of the carry for the next step, that this rank sends."""
        its = self.table
        _check_carry(left, its.shapes)
        polar = at_assumed_norm(polar, b.map) if b.key.by_norm else polar
        sent = []
        for item in its.back.sent:
            name, row = item.slot.name, its.row[item.j]
            whole = left[name] if name in left else _of_T(name, polar)
            sent.append(b.as_sent(name, whole[row][item.slot.at]))
        return collectives.packed([sent], its.dtype, b.key.device, out)

    def _received_back(
        self, b: SharedBucket, of_rank: Sequence[Tensor]
    ) -> tuple[PartsOfT, PartsOfCarry]:
        """This rank's parts of T by member, and of the carry by name."""
        its = self.table
        left: PartsOfCarry = {name: (shape, []) for name, shape in its.shapes.items()}
        shapes = [b.pieces(i)[its.me].shape for i in range(len(b.members))]
        T = PartsOfT(shapes, [[] for _ in shapes])
        factors = list[Tensor]()
        for item in sorted(its.back.received, key=lambda item: item.j):
            X, name, part = _arrived(b, item, of_rank), item.slot.name, its.mine[item.j]
            if name in left:
                left[name][1].append(X)
                continue
            if name == parts.L:
                factors.append(X)
                continue
            assert part is not None
            T.parts[its.matrices[item.j][0]].append(
                (part.in_tensor, factors.pop() @ X if name == parts.R else X)
            )
        return T, left


def _of_T(name: str, polar: Polar) -> Tensor:
    """T, or one of its two factors."""
    if name == parts.T:
        return polar.dense
    assert polar.two_factors is not None
    return polar.two_factors[0 if name == parts.L else 1]


def _arrived(b: SharedBucket, item: Item, of_rank: Sequence[Tensor]) -> Tensor:
    """A slot's tensor, from what each rank has sent."""
    flat = of_rank[item.rank][item.start : item.start + item.slot.size]
    return b.as_computed(item.slot.name, flat).view(item.slot.shape)


def _check_carry(left: MapState, shapes: dict[str, tuple[int, ...]]) -> None:
    found = {name: tuple(tensor.shape[1:]) for name, tensor in left.items()}
    if found != shapes:
        raise ValueError(
            f"the map left tensors of shapes {found} for the next step: expected {shapes}, as for a "
            'matrix of zeros; with such a map use Muon(plan="gather")'
        )
