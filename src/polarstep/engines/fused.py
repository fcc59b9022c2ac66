"""The engine of kernels, which find G, C and X of a bucket by tables of addresses, without copies.

    momentum   one kernel reads G and C and writes C and M; M is one batch in bfloat16
    update     one kernel reads and writes X; T = LR is multiplied out on the way, never stored

A :class:`FusedBucket` has the tables, and outlives a step. :meth:`FusedBucket.prepare` writes what
changes from step to step (random numbers, flags, a loaded carry). The bucket's step then only launches
kernels, which a CUDA graph can replay. :meth:`FusedBucket.settle` puts the carry into the optimizer's
state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from polarstep import kernels, rng
from polarstep.bucket import Bucket, BucketKey, Member, all_recalled
from polarstep.context import in_a_graph
from polarstep.groups import Group, view_of
from polarstep.maps import Draw, MapState, Polar
from polarstep.matrix import MatrixView
from polarstep.momentum import Momentum
from polarstep.ops import ops_of
from polarstep.ops.lazy import RowProduct, ScaledRows
from polarstep.rates import corrected
from polarstep.state import State, carried_dtype, entry, is_compensated, momentum_of, stored_dtype

__all__ = [
    "ALIGNMENT",
    "FUSED",
    "FusedBucket",
    "FusedEngine",
    "can_tabulate",
    "has_momentum_like",
    "lies_like",
    "offsets",
    "readable",
    "runs_by_kernels",
]

# Vector loads need addresses that are multiples of this many bytes.
ALIGNMENT = 16


def runs_by_kernels(group: Group, device: torch.device) -> bool:
    """Whether a group's steps on ``device`` may run by kernels, which have M in bfloat16."""
    rounds: bool = group["fused"] and group["polar"].traits.rounds_input
    return rounds and kernels.available(device)


def can_tabulate(group: Group, p: Tensor) -> bool:
    """Whether the kernels can update ``p`` in place, by its dtype, layout and group options."""
    if not runs_by_kernels(group, p.device):
        return False
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.is_cuda:
        return False  # reading its value would wait for the device
    if is_compensated(group, p) or stored_dtype(group, p) != p.dtype:
        return False  # a kernel writes X and C in the precision of X
    if type(group["momentum_rule"]) is not Momentum:
        return False  # the kernel has the momentum of equation (1)
    view = view_of(group, p)
    return (
        p.numel() > 0
        and view.in_rectangles
        and p.dtype in (torch.float32, torch.bfloat16)
        and all(count <= kernels.MOST_MATRICES for count, _, _ in view.shapes)
        and all(
            columns * p.element_size() % ALIGNMENT == 0
            for columns in (view.cols, *(n for _, _, n in view.shapes))
        )
        and _rows_in_turn(p, view)
        and lies_like(p, p)
    )


def _rows_in_turn(p: Tensor, view: MatrixView) -> bool:
    """Whether the rows of the matrices lie in memory one after the other.

    The rows of a ``channels_last`` filter do, with their columns permuted. T(MP) = T(M)P for a
    permutation P, so the step is the same with permuted columns, unless columns are cut into parts.
    """
    if p.is_contiguous():
        return True
    flattened = view.batch == 1 and view.rows == p.shape[0] and view.in_turn
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return flattened and p.dim() in formats and p.is_contiguous(memory_format=formats[p.dim()])


def readable(G: Tensor, p: Tensor) -> bool:
    """Whether the kernels can read the gradient of ``p``, as it lies or in a copy."""
    return (type(G) is Tensor or not is_traceable_wrapper_subclass(G)) and G.dtype == p.dtype


def lies_like(tensor: Tensor, p: Tensor) -> bool:
    """Whether the kernels can work on ``tensor`` in place: in the layout of ``p``, and aligned."""
    return (
        readable(tensor, p)
        and tensor.device == p.device
        and tensor.stride() == p.stride()
        and tensor.data_ptr() % ALIGNMENT == 0
    )


def has_momentum_like(p: Tensor, of_parameter: dict[str, Any]) -> bool:
    """Whether the kernels can update C, which is put in the precision and layout of ``p`` if it can be.

    A checkpoint that went through another format may have C of a ``channels_last`` filter in another
    order. While a graph is captured it stays there, as every replay would copy it again.
    """
    C = momentum_of(p, of_parameter, p.dtype)
    if not lies_like(C, p) and readable(C, p) and C.device == p.device and not in_a_graph():
        C = of_parameter["momentum_buffer"] = torch.empty_like(p).copy_(C)
    return lies_like(C, p)


def offsets(member: Member) -> list[int]:
    """The first bytes of a member's matrices, from the first byte of its parameter."""
    size = member.param.element_size()
    return [size * corner for corner in member.view.corners(member.block)]


class FusedBucket(Bucket):
    """The tensors of a bucket that outlive a step; its members have no gradients."""

    def __init__(self, key: BucketKey, members: list[Member]) -> None:
        super().__init__(key, members)
        self.count = sum(member.count for member in members)
        none = torch.empty(0, device=key.device)
        self.addresses = none  # (4, count): addresses of G, C and X, and entries from row to row
        self.strided = False  # whether some matrices are parts of wider ones
        self.scalars = none  # (3, count): β, 1 − ηλ, η·scale
        self.draws = False  # whether this step draws random numbers
        self.dtype = ops_of(key.device).dtype(torch.float32)  # of M and of products
        self.finite: Tensor | None = None  # (count,): zero where a gradient is not finite
        self.squares: Tensor | None = None  # (count, parts): the squares of M, added up in parts
        self._carry = MapState()
        self._parts: list[MapState] = []  # views of _carry in the optimizer's state
        self._numbers: Tensor | None = None
        self._drawn: tuple[int | str, ...] | None = None  # the key of _numbers

    @property
    def nbytes(self) -> int:
        """The bytes of M, which the memory of a step is proportional to."""
        return self.count * self.key.m * self.key.n * self.dtype.itemsize

    def place(self) -> tuple[int, ...]:
        """Addresses of the tensors that a step works on; a graph is bound to them."""
        ours = [self.addresses, self.scalars, *self._carry.values()]
        ours += [tensor for tensor in (self.finite, self._numbers) if tensor is not None]
        return tuple([tensor.data_ptr() for tensor in ours])

    @property
    def carries(self) -> bool:
        """Whether the map has state."""
        return bool(self.key.polar.traits.carries)

    def of(self, members: list[Member]) -> FusedBucket:
        """This bucket for ``members``; the carry stays with the parameters that were in it."""
        self.members = members
        self._carry, self._parts = MapState(), []
        return self

    def prepare(
        self, finite: dict[int, list[Tensor] | None], state: State, at: int, *, recalls: bool = True
    ) -> None:
        """Update flags, random numbers and the carry for step ``at``.

        ``finite`` has the flags of each group's parameters by the group's id.
        :func:`~polarstep.engines.replay_plan.fill_tables` fills the tables. ``recalls`` is false where
        the carry of the last step is known to be in place.
        """
        its = self.key
        if its.skips_nonfinite:
            flags = [
                of_group[member.index]
                for member in self.members
                if (of_group := finite[id(member.group)]) is not None
                for _ in range(member.count)
            ]
            stacked = torch.stack(flags).to(torch.float32)
            self.finite = stacked if self.finite is None else self.finite.copy_(stacked)
        if self.squares is None and its.polar.traits.uses_norm:
            from polarstep.kernels.momentum import parts_of

            shape = (self.count, parts_of(its.m, its.n))
            self.squares = torch.empty(shape, dtype=torch.float64, device=its.device)
        numbers, key = its.drawn_at(at)
        self.draws = numbers is not None
        if self.draws and key != self._drawn:
            self._drawn = key
            generator = rng.generator(*key, device=its.device)
            self._numbers = its.polar.numbers(its.m, its.n, generator, out=self._numbers)
        if not its.resumed:
            first = its.polar.init(self.count, its.m, its.n, its.device, self.dtype)
            self._carry, self._parts = first, []
        elif recalls:
            self._recall(state)

    def carry(self) -> MapState:
        """The last step's carry, where :meth:`prepare` has put it."""
        return self._carry

    def draw(self) -> Draw:
        """The numbers and flags that :meth:`prepare` has written."""
        return Draw(self._numbers if self.draws else None, self.finite, self.squares)

    def keep(self, left: MapState) -> None:
        """Copy the new carry to where a graph reads it, except for parameters that are skipped.

        It is kept in the wider of the precisions of M and of the parameters, to which torch casts a
        checkpoint that it loads, or in a narrower one. The map's ``wide_carries`` stay in float32.
        """
        if left is self._carry:
            return
        known, widest = self._carry, torch.promote_types(self.key.dtype, self.dtype)
        kept = {k: carried_dtype(self.key.polar, k, widest) for k in left}
        left = MapState(
            {k: t.to(kept[k]) if t.itemsize > kept[k].itemsize else t for k, t in left.items()}
        )
        if not _alike(known, left):
            # A copy: a carry may be a view of the random numbers, which are overwritten.
            self._carry, self._parts = MapState({k: t.clone() for k, t in left.items()}), []
            return
        for name, tensor in left.items():
            place = known[name]
            if tensor.data_ptr() == place.data_ptr():
                continue  # the map has written it there itself
            if self.finite is not None:
                flags = self.finite.reshape(-1, *[1] * (tensor.dim() - 1)) != 0
                tensor = torch.where(flags, tensor, place)
            place.copy_(tensor)

    def settle(self, state: State) -> None:
        """Put the carry for the next step into the optimizer's state, where checkpoints find it.

        Inside a CUDA graph of the user's own the carry is copied to where the graph reads it at the
        next replay.
        """
        names = self.key.polar.traits.carries
        if not names or self._parts:
            return
        self._parts = self._carry.split([member.count for member in self.members])
        for member, part in zip(self.members, self._parts, strict=True):
            of_parameter = state[member.param]
            for name in names:
                key = entry(name, member.block)
                known, value = of_parameter.get(key), part.get(name)
                if value is None:
                    of_parameter.pop(key, None)
                elif in_a_graph() and known is not None and known.shape == value.shape:
                    known.copy_(value)
                else:
                    of_parameter[key] = value

    def _recall(self, state: State) -> None:
        """Read the carry from the optimizer's state, unless it is in place already.

        It is copied to where graphs of this bucket read it, if it has the same shape and precision. The
        state of no other parameter is there (:meth:`of`).
        """
        known = all_recalled(self.key, self.members, state)
        ours = [id(tensor) for part in self._parts for tensor in part.values()]
        if ours and ours == [id(tensor) for carry in known for tensor in carry.values()]:
            return
        joined, self._parts = MapState.joined(known), []
        if _alike(joined, self._carry):
            for name, tensor in joined.items():
                self._carry[name].copy_(tensor)
        else:
            self._carry = joined


class FusedEngine:
    """Momentum and updates by kernels."""

    def momentum(self, b: FusedBucket) -> Tensor:
        """``C ← βC + G`` and M, in one pass over memory.

        Where squares of M would overflow or vanish, M is multiplied by a power of two.
        """
        from polarstep.kernels.momentum import momentum, to_unit_size

        its = b.key
        M = torch.empty(b.count, its.m, its.n, dtype=b.dtype, device=its.device)
        G, C, _, strides = b.addresses
        largest = momentum(
            G,
            C,
            b.scalars[0],
            M,
            element=its.dtype,
            nesterov=its.nesterov,
            finite=b.finite,
            strides=strides if b.strided else None,
            squares=b.squares,
        )
        if its.polar.traits.ignores_scale:
            to_unit_size(M, largest, b.squares)
        return M

    def update(self, b: FusedBucket, polar: Polar) -> None:
        """``X ← (1 − ηλ)X − η·scale·T`` in one pass over memory."""
        from polarstep.kernels.update import update, update_from_factors, update_from_rows

        _, _, X, distances = b.addresses
        strides = distances if b.strided else None
        _, remains, size = b.scalars
        if b.key.by_norm:
            size = corrected(size, polar, b.map)
        tables = (remains, size)
        where: dict[str, Any] = {
            "element": b.key.dtype,
            "finite": b.finite,
            "strides": strides,
        }
        T, two = polar.T, polar.two_factors
        if two is not None:
            update_from_factors(X, *two, *tables, **where)
        elif isinstance(T, RowProduct):
            update_from_rows(X, T.A, T.B, T.scale, T.alpha, *tables, **where)
        elif isinstance(T, ScaledRows):
            update(X, T.T, *tables, **where, rows=(T.factors, T.sizes))
        else:
            update(X, polar.dense, *tables, **where)


FUSED = FusedEngine()


def _alike(one: MapState, other: MapState) -> bool:
    """Whether two carries have the same names, shapes and precisions."""
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and one[name].dtype == other[name].dtype
        for name in one
    )
