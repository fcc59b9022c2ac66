"""Where the parts of a parameter lie: a ``DTensor``'s mesh and placements as boxes of indices.

A ``DTensor`` is read for its layout only, and all arithmetic is on local parts. Operations between two
``DTensor`` objects may lose the layout of their rows (``_StridedShard`` in torch 2.9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from polarstep.matrix import MatrixView
from polarstep.ranks import collectives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

__all__ = [
    "Layout",
    "Piece",
    "Span",
    "is_sharded",
    "local",
    "placed_by_matrix",
    "placed_like",
    "whole",
    "wrapped",
]

# Types that are never sharded; hasattr would take a microsecond to say so.
_PLAIN = (Tensor, nn.Parameter)

Span = tuple[int, int]


def is_sharded(X: object) -> TypeGuard[DTensor]:
    """Whether ``X`` is a ``DTensor``, without importing DTensor, which takes a second."""
    return type(X) not in _PLAIN and hasattr(X, "full_tensor")


def whole(X: Tensor) -> Tensor:
    """``X`` itself if it is not sharded, else the whole tensor, gathered from all ranks."""
    return X.full_tensor() if is_sharded(X) else X


def local(X: Tensor) -> Tensor:
    """This rank's part of ``X``, not copied, for elementwise operations in place.

    It is the same tensor at every call: plans and CUDA graphs of a step are bound to it. From torch 2.12
    on ``to_local()`` would make a new tensor for a parameter.
    """
    return X._local_tensor if is_sharded(X) else X


def placed_like(X: Tensor, p: Tensor) -> Tensor:
    """``X`` placed as ``p`` is; each rank keeps its part of a whole ``X``, and nothing is sent."""
    if not is_sharded(p):
        return X
    from torch.distributed.tensor import DTensor, Replicate

    if not is_sharded(X):
        everywhere = [Replicate()] * p.device_mesh.ndim
        X = DTensor.from_local(X, p.device_mesh, everywhere, run_check=False)
    return X if X.placements == p.placements else X.redistribute(placements=p.placements)


def placed_by_matrix(p: DTensor) -> tuple[Any, ...]:
    """The placements of a tensor with a row for each matrix of ``p``, which is cut between matrices.

    An axis of one rank may have ``Shard(1)`` for ``p``, where the other tensor has no such dimension.
    """
    from torch.distributed.tensor import Replicate

    dims = ((each, getattr(each, "dim", None)) for each in p.placements)
    return tuple(each if dim in (0, -p.dim()) else Replicate() for each, dim in dims)


def wrapped(X: Tensor, p: DTensor, placements: Any, shape: torch.Size | tuple[int, ...]) -> DTensor:
    """A ``DTensor`` of ``shape`` on the mesh of ``p`` with ``X`` as this rank's part, not copied."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size(shape)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        X, p.device_mesh, placements, run_check=False, shape=shape, stride=strides
    )


@dataclass(frozen=True)
class Piece:
    """A rank's part of a parameter that is read as matrices: spans of its batch, rows and columns."""

    batch: Span
    rows: Span
    cols: Span

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, rows, columns) of the part."""
        return _length(self.batch), _length(self.rows), _length(self.cols)


@dataclass(frozen=True)
class Layout:
    """The ranks that hold a parameter, and the box of indices that each of them holds."""

    ranks: tuple[int, ...]  # global ranks in ascending order, as in a process group
    me: int  # this rank's index in ``ranks``
    shape: tuple[int, ...]  # of the whole parameter
    boxes: tuple[tuple[Span, ...], ...]  # a span of each dimension, for each of ``ranks``
    replicas: tuple[Any, ...]  # ranks with the same value here hold different parts of one copy

    @staticmethod
    def of(p: Tensor, group: ProcessGroup | None = None) -> Layout | None:
        """The layout of ``p``; ``None`` if this process alone holds it.

        A plain tensor is taken to be replicated on all ranks of ``group``.
        """
        if is_sharded(p):
            return Layout.of_placements(p.device_mesh, p.placements, tuple(p.shape))
        if group is None:
            return None
        ranks = tuple(sorted(torch.distributed.get_process_group_ranks(group)))
        box = tuple((0, size) for size in p.shape)
        me = ranks.index(torch.distributed.get_rank())
        return Layout(ranks, me, tuple(p.shape), (box,) * len(ranks), tuple(range(len(ranks))))

    @staticmethod
    def of_placements(mesh: Any, placements: Any, shape: tuple[int, ...]) -> Layout:
        """The layout of a tensor of ``shape`` on ``mesh``."""
        key = (mesh, tuple(placements), shape)
        if key not in _KNOWN:
            _KNOWN[key] = _of_mesh(mesh, placements, shape)
        return _KNOWN[key]

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """The dimensions that are sharded."""
        return tuple(d for d in range(len(self.shape)) if len({box[d] for box in self.boxes}) > 1)

    @cached_property
    def has_copies(self) -> bool:
        """Whether several ranks hold the same part."""
        return len(set(self.replicas)) > 1

    @cached_property
    def parts(self) -> tuple[tuple[Span, ...], ...]:
        """The different parts that ranks hold, without empty ones, in an order that all ranks have."""
        filled = {box for box in self.boxes if all(start < stop for start, stop in box)}
        return tuple(sorted(filled))

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """Indices of the ranks that hold this rank's copy together, this rank included."""
        mine = self.replicas[self.me]
        return tuple(i for i, replica in enumerate(self.replicas) if replica == mine)

    def check_part(self, p: Tensor) -> None:
        """Raise if this rank's part of ``p`` has another shape than the layout says.

        Some ranks may have the right shape, so a step calls this where an error reaches all ranks.
        """
        mine = tuple(stop - start for start, stop in self.boxes[self.me])
        if is_sharded(p) and p.numel() and mine != tuple(p.to_local().shape):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} placed as {p.placements} has a part of shape "
                f"{tuple(p.to_local().shape)} on this rank: expected {mine}; shard it with fully_shard "
                "or distribute_tensor"
            )

    def pieces(self, view: MatrixView) -> tuple[Piece, ...] | None:
        """Each rank's part as spans of batch, rows and columns; ``None`` if some part is no such box."""
        if view not in self._pieces:
            self._pieces[view] = self._made(view)
        return self._pieces[view]

    @cached_property
    def _pieces(self) -> dict[MatrixView, tuple[Piece, ...] | None]:
        return {}

    def _made(self, view: MatrixView) -> tuple[Piece, ...] | None:
        shape = self.shape
        if not view.in_turn:
            return None  # a matrix lies in several pieces of memory
        if len(shape) > 2 and view.batch == 1 and view.rows == shape[0]:  # a filter
            if any(d > 1 for d in self.cut):
                return None
            area = math.prod(shape[2:])
            return tuple(
                Piece((0, 1), box[0], (box[1][0] * area, box[1][1] * area)) for box in self.boxes
            )
        last = len(shape) - 1
        if any(0 < d < last - 1 for d in self.cut):
            return None
        each = math.prod(shape[1:-2])
        return tuple(
            Piece(
                (0, 1) if last == 1 else (box[0][0] * each, box[0][1] * each),
                box[last - 1],
                box[last],
            )
            for box in self.boxes
        )

    def holds_whole_matrices(self, view: MatrixView) -> bool:
        """Whether every rank's part consists of whole matrices: a copy, or some experts of a stack."""
        if self.cut == (0,) and len(self.shape) == 3 and view.batch == self.shape[0]:
            # Carries are cut as Shard(0); where experts are unevenly spread, carries of split weights
            # would be cut elsewhere.
            even = self.shape[0] % len(self.peers) == 0
            return even or not view.is_cut
        return self.cut == ()


# Layouts by mesh, placements and shape. A dict, as torch.compile traces through functools.cache.
_KNOWN: dict[Any, Layout] = {}


def _of_mesh(mesh: Any, placements: Any, shape: tuple[int, ...]) -> Layout:
    sizes, ranks = tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist()
    cuts = _cuts(placements, sizes, shape)
    cutting = {axis for axes in cuts.values() for axis in axes}
    found = []
    for rank, at in zip(ranks, product(*map(range, sizes)), strict=True):
        box = [(0, size) for size in shape]
        for dim, axes in cuts.items():
            for axis in axes:
                box[dim] = _chunk(box[dim], at[axis], sizes[axis])
        replica = tuple(place for axis, place in enumerate(at) if axis not in cutting)
        found.append((rank, tuple(box), replica))
    ranks, boxes, replicas = zip(*sorted(found), strict=True)
    here = torch.distributed.get_rank()
    if here not in ranks:
        raise ValueError(
            f"a parameter of shape {shape} is on a mesh of ranks {ranks}, and this is rank {here}: "
            "expected parameters of which this rank has a part; leave it out of this rank's optimizer"
        )
    if mesh.ndim == 1:
        collectives.lend(ranks, mesh.get_group())
    return Layout(ranks, ranks.index(here), shape, boxes, replicas)


def _cuts(placements: Any, sizes: tuple[int, ...], shape: tuple[int, ...]) -> dict[int, list[int]]:
    """For each sharded dimension the axes of the mesh that cut it, in their order."""
    cuts: dict[int, list[int]] = {}
    later: list[tuple[int, int, int]] = []
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(
                f"a parameter is placed as {tuple(placements)}: expected shards or replicas; a Partial "
                "placement is a sum that is still to be made, so redistribute it first"
            )
        if placement.is_replicate():
            continue
        dim = placement.dim % len(shape)
        if hasattr(placement, "split_factor"):
            later.append((axis, dim, placement.split_factor))
        else:
            cuts.setdefault(dim, []).append(axis)
    for axis, dim, factor in later:
        before = math.prod(sizes[other] for other in cuts.get(dim, []))
        if factor != before or shape[dim] % (before * sizes[axis]):
            raise ValueError(
                f"a parameter of shape {tuple(shape)} is placed as {tuple(placements)} on a mesh of "
                f"{sizes}: expected a dimension {dim} that both axes cut evenly, because torch itself "
                "gathers uneven strided shards with their rows permuted; pad the dimension to a "
                f"multiple of {before * sizes[axis]}, or shard another dimension"
            )
        cuts.setdefault(dim, []).append(axis)
    return cuts


def _chunk(span: Span, index: int, count: int) -> Span:
    """The ``index``-th of ``count`` chunks of ``span``, as ``torch.chunk`` cuts.

    >>> [_chunk((0, 5), i, 4) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    start, stop = span
    each = -(-(stop - start) // count)
    return min(start + index * each, stop), min(start + (index + 1) * each, stop)


def _length(span: Span) -> int:
    return span[1] - span[0]
