"""The plan of a step on a GPU: its buckets, the tables that its kernels read, and its captured graphs.

There is no arithmetic here. A plan says which parameters the kernels can update in place, and which
bucket (:mod:`polarstep.engines.fused`) each matrix belongs to. It is kept from step to step,
so that a step of a thousand parameters does not spend its time in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polarstep.bucket import BucketKey
from polarstep.engines.fused import ALIGNMENT, FusedBucket, lies_like, offsets
from polarstep.engines.graphs import Replays
from polarstep.gradients import Work
from polarstep.groups import Group, is_by_norm, scale_of
from polarstep.kernels import shared_table
from polarstep.state import State, entry, momentum_of, recalled

__all__ = ["ReplayPlan", "fill_tables", "goes_on", "gradients", "key_of", "still_lies"]

# Options of a group that decide in which bucket its matrices are, or whether kernels can update them.
OPTIONS = (
    "polar",
    "transform",
    "seed",
    "nesterov",
    "momentum_rule",
    "fused",
    "rounding",
    "momentum_dtype",
)

Shape = tuple[int, int, torch.device]


@dataclass
class ReplayPlan:
    """The buckets of a step, valid as long as ``key`` is the same, and the captured graphs."""

    key: tuple[Any, ...]
    fused: list[list[int]]  # indices of parameters, per work
    runs: list[FusedBucket]
    offsets: list[int]  # each bucket's step minus the first work's step
    params: list[Tensor]  # the parameters behind the buckets, in the order of ``fused``
    lying: list[int] = field(default_factory=list)  # addresses of X and C of every parameter
    rows: list[list[list[int]]] = field(default_factory=list)  # what these are in the tables
    gradients: list[int] = field(default_factory=list)  # addresses of G of every parameter
    scalars: list[tuple[Any, ...]] = field(default_factory=list)  # group by group
    tables: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)
    carried: list[int] = field(default_factory=list)  # ids of the last step's carried tensors
    recalls: bool = True  # whether this step's carries are other tensors than the last step's
    buckets: dict[tuple[BucketKey, int], FusedBucket] = field(default_factory=dict)
    # The ids of the groups, and of their parameters.
    listed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    comes_again: bool = False  # whether there was a step with this key before
    last: int = 0  # the number of the last step that took this plan
    replays: Replays = field(default_factory=Replays)  # kinds: which buckets draw random numbers

    @cached_property
    def strides(self) -> list[tuple[int, ...]]:
        """The strides of the parameters, which their gradients and momenta must have."""
        return [p.stride() for p in self.params]

    @cached_property
    def corners(self) -> list[list[tuple[int, int]]]:
        """For each bucket the parameter of every matrix, and the matrix's first byte in it."""
        at = {id(p): index for index, p in enumerate(self.params)}
        return [
            [(at[id(m.param)], offset) for m in bucket.members for offset in offsets(m)]
            for bucket in self.runs
        ]

    @cached_property
    def entries(self) -> list[tuple[Tensor, list[str]]]:
        """The parameters and keys under which the optimizer's state holds the buckets' carries."""
        found: dict[int, tuple[Tensor, list[str]]] = {}
        for bucket in self.runs:
            for member in bucket.members if bucket.carries else ():
                _, keys = found.setdefault(id(member.param), (member.param, []))
                keys += [entry(name, member.block) for name in bucket.key.polar.traits.carries]
        return list(found.values())

    def carried_in(self, state: State) -> list[int]:
        """The ids of the tensors that ``state`` now holds under :attr:`entries`."""
        found: list[int] = []
        for p, keys in self.entries:
            known = state[p]  # hashing a parameter takes longer than looking up its keys
            found += [id(known.get(key)) for key in keys]
        return found

    @property
    def repeats(self) -> bool:
        """Whether later steps make the same launches.

        The first step of a map with state does not repeat: it puts its carry into new memory.
        """
        return all(b.key.resumed or not b.carries for b in self.runs)

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of the parameters."""
        return list({id(m.group): m.group for b in self.runs for m in b.members}.values())

    @cached_property
    def shapes(self) -> list[list[Shape]]:
        """The shapes of the matrices in each group, and their devices."""
        found: dict[int, dict[Shape, None]] = {id(group): {} for group in self.groups}
        for bucket in self.runs:
            for m in bucket.members:
                found[id(m.group)][_shape(bucket)] = None
        return [list(shapes) for shapes in found.values()]

    @cached_property
    def devices(self) -> list[torch.device]:
        """The devices of the buckets."""
        return list({bucket.key.device: None for bucket in self.runs})

    def runs_on(self, device: torch.device) -> list[FusedBucket]:
        """The buckets on one device."""
        return [bucket for bucket in self.runs if bucket.key.device == device]


def still_lies(plan: ReplayPlan, state: State) -> bool:
    """Whether the kernels can work on X and C of every parameter where they lie now; notes where.

    The strides of C are compared at every step: a state may be replaced between two steps, and from a
    checkpoint a filter in ``channels_last`` may come with its momentum in another order.
    """
    lying = []
    for p, stride in zip(plan.params, plan.strides, strict=True):
        C = momentum_of(p, state[p], p.dtype)
        if C.stride() != stride:
            return False
        lying += [p.data_ptr(), C.data_ptr()]
    if lying != plan.lying:
        for p in plan.params:
            if not (lies_like(p, p) and lies_like(state[p]["momentum_buffer"], p)):
                return False
        plan.lying, plan.rows = lying, []
    return True


def gradients(plan: ReplayPlan, works: list[Work]) -> tuple[list[Tensor], list[int]]:
    """G of every parameter, copied where the kernels cannot read it as it lies, and the addresses.

    As a view of a bucket of DDP or FSDP2 a gradient may begin at any entry, and an expression like
    ``(A.T @ B).T`` has strides of its own. The copies are this step's, as memory of that size is kept
    for no longer.
    """
    grads = [works[w].grads[i] for w, indices in enumerate(plan.fused) for i in indices]
    lying = [G.data_ptr() for G in grads]
    shifted, strided = list[int](), list[int]()
    for at, (G, stride, first) in enumerate(zip(grads, plan.strides, lying, strict=True)):
        if G.stride() != stride:
            strided.append(at)
        elif first % ALIGNMENT:
            shifted.append(at)
    # Apart, because torch copies a list at once only if it has equal strides.
    for odd in (shifted, strided):
        if odd:
            copies = [torch.empty_like(plan.params[at]) for at in odd]
            torch._foreach_copy_(copies, [grads[at] for at in odd])
            for at, copy in zip(odd, copies, strict=True):
                grads[at], lying[at] = copy, copy.data_ptr()
    return grads, lying


def fill_tables(plan: ReplayPlan, lying: list[int]) -> None:
    """Refill the buckets' tables of addresses and scalars where anything has changed.

    The gradients begin at the addresses ``lying``. :func:`still_lies` has noted where X and C begin.
    """
    if not plan.rows:
        plan.rows = _lasting_rows(plan)
        plan.gradients = []
    if lying != plan.gradients:
        plan.gradients = lying
        rows = {
            id(bucket): [[lying[i] + first for i, first in corners], *others]
            for bucket, corners, others in zip(plan.runs, plan.corners, plan.rows, strict=True)
        }
        for bucket, part in _tabulated(plan, lambda bucket: rows[id(bucket)], torch.int64):
            bucket.addresses = part
    scalars = [
        (float(group["lr"]), group["momentum"], group["weight_decay"], _scales(group, shapes))
        for group, shapes in zip(plan.groups, plan.shapes, strict=True)
    ]
    if scalars != plan.scalars:
        plan.scalars = scalars
        by_group = dict(zip(map(id, plan.groups), scalars, strict=True))

        def scalars_of(bucket: FusedBucket) -> list[list[float]]:
            rows: list[list[float]] = [[], [], []]
            for member in bucket.members:
                lr, beta, decay, scales = by_group[id(member.group)]
                step = lr * scales[_shape(bucket)]
                for row, value in zip(rows, (beta, 1 - lr * decay, step), strict=True):
                    row += [value] * member.count
            return rows

        for bucket, part in _tabulated(plan, scalars_of, torch.float32):
            bucket.scalars = part


def _lasting_rows(plan: ReplayPlan) -> list[list[list[int]]]:
    """For each bucket the addresses of C and of X, and the entries from row to row, of each matrix."""
    found = []
    for bucket, corners in zip(plan.runs, plan.corners, strict=True):
        X, C = ([plan.lying[2 * i + which] + first for i, first in corners] for which in (0, 1))
        strides = [m.view.cols for m in bucket.members for _ in range(m.count)]
        bucket.strided = any(stride != bucket.key.n for stride in strides)
        found.append([C, X, strides])
    return found


def _tabulated(
    plan: ReplayPlan,
    rows_of: Callable[[FusedBucket], Sequence[Sequence[float]]],
    dtype: torch.dtype,
) -> Iterator[tuple[FusedBucket, Tensor]]:
    """The table of every bucket, on its device, with one copy to each device."""
    for device in plan.devices:
        there = plan.runs_on(device)
        table = plan.tables.get((device, dtype), torch.empty(0, device=device))
        plan.tables[device, dtype], parts = shared_table(
            table, [rows_of(bucket) for bucket in there], dtype
        )
        yield from zip(there, parts, strict=True)


def _scales(group: Group, shapes: list[Shape]) -> dict[Shape, float]:
    """The scale of every shape, asked anew, as a user's ``shape_scale`` function may change."""
    return {(m, n, device): scale_of(group, device)(m, n) for m, n, device in shapes}


def _shape(bucket: FusedBucket) -> Shape:
    its = bucket.key
    return its.m, its.n, its.device


def key_of(work: Work, first: Work, readable: list[bool]) -> tuple[Any, ...]:
    """What a plan depends on: parameters, their memory layout, and the options that decide buckets.

    ``readable`` says which gradients the kernels can read, as they lie or in a copy.

    Ids alone are not enough: ``model.to(...)`` may change precision and layout and keep the id, and any
    option may be written to a group between two steps.
    """
    group, lr = work.group, work.group["lr"]
    return (
        id(group),
        *(group[option] for option in OPTIONS),
        is_by_norm(group),
        group["step"] - first.group["step"],
        lr.device if isinstance(lr, Tensor) else None,
        work.finite is not None,
        *((id(p), p.dtype, p.device, p.stride()) for p in work.params),
        *readable,
        *work.views,
    )


def goes_on(plan: ReplayPlan, state: State) -> bool:
    """Whether ``state`` has carries for exactly the buckets that were planned to resume.

    Also notes whether they are the tensors that the last step left.
    """
    plan.recalls = not plan.carried or plan.carried != plan.carried_in(state)
    if not plan.recalls:
        return all(bucket.key.resumed for bucket in plan.runs if bucket.carries)
    for bucket in plan.runs:
        its = bucket.key
        for member in bucket.members if bucket.carries else ():
            of_parameter, count = state[member.param], member.count
            known = recalled(of_parameter, member.block, its.polar, count, its.m, its.n)
            if (known is not None) != its.resumed:
                return False
    return True
