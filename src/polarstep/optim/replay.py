"""Steps on a GPU that are planned once and replayed as CUDA graphs.

There is no arithmetic here. A plan says which parameters the kernels can update in place, and which
bucket (:mod:`polarstep.optim.by_tables`) each matrix belongs to. It is kept from step to step, so
that a step of a thousand parameters does not spend its time in Python.

After the first steps all launches of a step are captured as one CUDA graph, and a step is then one
replay. What changes from step to step lies in tensors that the graph reads: addresses, momenta,
learning rates and decays, random numbers, carries. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from polarstep.cuda_graphs import captured
from polarstep.kernels.pointers import shared_table
from polarstep.optim.by_tables import TableBucket, addresses, can_tabulate, lies_like
from polarstep.optim.carried import entry, recalled
from polarstep.optim.collect import Member, Signature, State, Work, in_parts, members_of
from polarstep.optim.groups import Group, is_by_norm, is_transposed, scale_of
from polarstep.optim.low_precision import momentum_of
from polarstep.optim.step import PolarHook, show
from polarstep.optim.transforms import followed

__all__ = ["ReplayedStep"]

# Bytes of M in a bucket, two for each entry; a larger bucket is processed in parts.
LARGEST_BUCKET = 512 * 2**20
# Buckets run on this many streams. The CIFAR-10 filters, too small to fill an H200, took 222 µs on
# two streams and 149 µs on four, in full space with seven steps. Large buckets share the first two:
# they gain nothing from more streams, and each stream in use holds the work space of a bucket.
STREAMS = 4
STREAMS_OF_LARGE_BUCKETS = 2
LARGE_BUCKET = 64 * 2**20
# A step is captured after this many steps of its kind, when all its kernels are compiled. Launching
# the kernels one by one takes milliseconds of Python.
STEPS_BEFORE_CAPTURE = 1

Run = tuple[TableBucket, list[Member]]
Shape = tuple[int, int, torch.device]


@dataclass
class _Plan:
    """The buckets of a step, valid as long as ``key`` is the same, and the captured graphs."""

    key: tuple[Any, ...]
    fused: list[list[int]]  # indices of parameters, per work
    runs: list[Run]
    offsets: list[int]  # each run's step minus the first work's step
    addresses: list[int] = field(default_factory=list)  # of X, G and C of every parameter
    scalars: list[tuple[Any, ...]] = field(default_factory=list)  # group by group
    tables: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)
    carried: list[int] = field(default_factory=list)  # ids of the last step's carried tensors
    places: list[tuple[int, ...]] = field(default_factory=list)  # TableBucket.place of every run
    # Since ``places`` last changed, for each kind of step (which buckets draw random numbers): how
    # many such steps there were, and their graphs, one for each device.
    steps: dict[tuple[bool, ...], int] = field(default_factory=dict)
    graphs: dict[tuple[bool, ...], list[torch.cuda.CUDAGraph]] = field(default_factory=dict)

    @cached_property
    def params(self) -> list[Tensor]:
        """The parameters behind the buckets."""
        return list({id(m.param): m.param for _, members in self.runs for m in members}.values())

    @cached_property
    def entries(self) -> list[tuple[Tensor, str]]:
        """The parameters and keys under which the optimizer's state holds the buckets' carries."""
        return [
            (member.param, entry(name, member.block))
            for bucket, members in self.runs
            for name in bucket.signature.polar.carries
            for member in members
        ]

    def carried_in(self, state: State) -> list[int]:
        """The ids of the tensors that ``state`` now holds under :attr:`entries`."""
        return [id(state[p].get(key)) for p, key in self.entries]

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of the parameters."""
        return list({id(m.group): m.group for _, members in self.runs for m in members}.values())

    @cached_property
    def shapes(self) -> list[list[Shape]]:
        """The shapes of the matrices in each group, and their devices."""
        found: dict[int, dict[Shape, None]] = {id(group): {} for group in self.groups}
        for bucket, members in self.runs:
            for m in members:
                found[id(m.group)][_shape(bucket)] = None
        return [list(shapes) for shapes in found.values()]

    @cached_property
    def devices(self) -> list[torch.device]:
        """The devices of the buckets."""
        return list({bucket.signature.device: None for bucket, _ in self.runs})

    def runs_on(self, device: torch.device) -> list[Run]:
        """The buckets on one device."""
        return [run for run in self.runs if run[0].signature.device == device]


class ReplayedStep:
    """The buckets of an optimizer, kept from step to step."""

    def __init__(self) -> None:
        self.buckets: dict[tuple[Signature, int], TableBucket] = {}
        self._streams_of: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._plan = _Plan((), [], [], [])

    @property
    def graphs(self) -> dict[tuple[bool, ...], list[torch.cuda.CUDAGraph]]:
        """The captured graphs, by which buckets draw random numbers."""
        return self._plan.graphs

    def __call__(
        self, works: list[Work], state: State, hooks: tuple[PolarHook, ...] = ()
    ) -> set[int]:
        """Update the parameters that the kernels can update, and return their ids."""
        self._plan = plan = self._plan_for(works, state)
        if plan.runs:
            self._run(plan, works, state, hooks)
        return {id(works[w].params[i]) for w, indices in enumerate(plan.fused) for i in indices}

    def _run(
        self, plan: _Plan, works: list[Work], state: State, hooks: tuple[PolarHook, ...]
    ) -> None:
        _fill_tables(plan, works, state)
        first = works[0].group["step"]
        now = [
            (bucket, _of_now(members, works), first + offset)
            for (bucket, members), offset in zip(plan.runs, plan.offsets, strict=True)
        ]
        recalls = not plan.carried or plan.carried != plan.carried_in(state)
        for bucket, members, at in now:
            bucket.prepare(members, state, at, recalls=recalls)
        places = [bucket.place() for bucket, _ in plan.runs]
        if places != plan.places:
            plan.places, plan.steps, plan.graphs = places, {}, {}
        kind = tuple(bucket.draws for bucket, _ in plan.runs)
        plan.steps[kind] = plan.steps.get(kind, 0) + 1
        if hooks:
            for bucket, members, at in now:
                signature = replace(bucket.signature, step=at)
                show(hooks, signature, members, bucket.key, bucket.launch())
        elif kind in plan.graphs:
            for graph in plan.graphs[kind]:
                graph.replay()
        elif _can_capture(plan, kind):
            plan.graphs[kind] = self._capture(plan)
        else:
            for device in plan.devices:
                self._launch(plan, device)
        for bucket, members, _ in now:
            bucket.settle(members, state)
        if plan.entries and (recalls or not plan.carried):
            plan.carried = plan.carried_in(state)

    def _launch(self, plan: _Plan, device: torch.device) -> None:
        """Launch the buckets on one device, on a GPU side by side.

        The small products of one bucket do not fill a GPU; a few buckets at a time do better.
        """
        buckets = [bucket for bucket, _ in plan.runs_on(device)]
        if device.type != "cuda" or len(buckets) == 1:
            for bucket in buckets:
                bucket.launch()
            return
        here = torch.cuda.current_stream(device)
        streams = self._streams(device)
        for stream in streams:
            stream.wait_stream(here)
        for bucket, lane in zip(
            buckets, _lanes([bucket.nbytes for bucket in buckets]), strict=True
        ):
            with torch.cuda.stream(streams[lane]):
                bucket.launch()
        for stream in streams:
            here.wait_stream(stream)

    def _streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        if device not in self._streams_of:
            streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
            self._streams_of[device] = streams
        return self._streams_of[device]

    def _capture(self, plan: _Plan) -> list[torch.cuda.CUDAGraph]:
        """Capture a step, a graph for each device, and run it."""
        others = next(iter(plan.graphs.values()), [None] * len(plan.devices))
        graphs = []
        for device, other in zip(plan.devices, others, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(device), captured(graph, beside=other):
                self._launch(plan, device)
            graph.replay()
            graphs.append(graph)
        return graphs

    def _plan_for(self, works: list[Work], state: State) -> _Plan:
        key = tuple(_key(work, works[0]) for work in works)
        plan = self._plan
        if (
            key == plan.key
            and all(
                lies_like(works[w].grads[i], works[w].params[i])
                for w, indices in enumerate(plan.fused)
                for i in indices
            )
            and _goes_on(plan, state)
        ):
            return plan
        fused, members = [], []
        for work in works:
            can = [
                lies_like(grad, p) and can_tabulate(work.group, p, state[p].get("momentum_buffer"))
                for p, grad in zip(work.params, work.grads, strict=True)
            ]
            fused.append([i for i, yes in enumerate(can) if yes])
            for i in fused[-1]:
                momentum_of(work.params[i], state[work.params[i]], work.params[i].dtype)
                members += list(members_of(work, i, state))
        if not members:
            return _Plan(key, fused, [], [])
        first = works[0].group["step"]
        idle = [work.group for work in works if not work.params]
        runs = list(self._runs(members, first, idle))
        return _Plan(key, fused, [run for run, _ in runs], [offset for _, offset in runs])

    def _runs(
        self, members: list[tuple[Signature, Member]], first: int, idle: list[Group]
    ) -> Iterator[tuple[Run, int]]:
        """Each bucket with its members and the offset of its step.

        Buckets of groups that are ``idle`` at this step are kept; buckets of earlier maps and seeds
        are dropped to free their memory.
        """
        buckets: dict[Signature, list[Member]] = {}
        for signature, member in members:
            # A bucket outlives its step, so its signature holds the step relative to the first
            # work.
            lasting = replace(signature, step=signature.step - first)
            buckets.setdefault(lasting, []).append(member)
        before = self.buckets
        self.buckets = {
            (its, part): bucket
            for (its, part), bucket in before.items()
            if any(_could_own(group, its) for group in idle)
        }
        for signature, together in buckets.items():
            most = LARGEST_BUCKET // (2 * signature.m * signature.n)
            for part, chunk in enumerate(in_parts(together, lambda member: member.count, most)):
                count = sum(member.count for member in chunk)
                bucket = before.get((signature, part))
                if bucket is None or bucket.count != count:
                    bucket = TableBucket(signature, count)
                self.buckets[signature, part] = bucket
                yield (bucket, chunk), signature.step


def _could_own(group: Group, its: Signature) -> bool:
    """Whether matrices of ``group`` may be in a bucket with the signature ``its``."""
    polar = group["polar"].on(its.m, its.n, its.device)
    polar = followed(polar, group["transform"], transposed=is_transposed(group))
    return group["seed"] == its.seed and polar == its.polar


def _of_now(members: list[Member], works: list[Work]) -> list[Member]:
    """The members of a plan with the work of this step, whose flags are new."""
    if members[0].work.finite is None:
        return members
    by_group = {id(work.group): work for work in works}
    return [replace(member, work=by_group[id(member.group)]) for member in members]


def _lanes(sizes: list[int]) -> list[int]:
    """The stream of each bucket, by the bytes of its M: large buckets from 0 up, small from 3 down.

    >>> _lanes([2**20] * 5), _lanes([2**27] * 3), _lanes([2**20, 2**27])
    ([3, 2, 1, 0, 3], [0, 1, 0], [3, 0])
    """
    large = cycle(range(STREAMS_OF_LARGE_BUCKETS))
    small = cycle(reversed(range(STREAMS)))
    return [next(large) if size >= LARGE_BUCKET else next(small) for size in sizes]


def _can_capture(plan: _Plan, kind: tuple[bool, ...]) -> bool:
    """Whether later steps of this kind will make the same launches, with all kernels compiled.

    A step that draws no numbers has no kernel that a step with numbers lacks. The first step of a
    map with state is not captured: it puts its carry into new memory, which a replay would not do.
    """
    if any(its.polar.carries and not its.resumed for its in (b.signature for b, _ in plan.runs)):
        return False
    covered = any(
        all(draws or not wanted for wanted, draws in zip(kind, other, strict=True))
        for other in plan.graphs
    )
    compiled = covered or plan.steps[kind] > STEPS_BEFORE_CAPTURE
    return compiled and all(device.type == "cuda" for device in plan.devices)


def _fill_tables(plan: _Plan, works: list[Work], state: State) -> None:
    """Refill the buckets' tables of addresses and scalars where anything has changed."""
    grads = {id(p): G for work in works for p, G in zip(work.params, work.grads, strict=True)}
    lying = [
        tensor.data_ptr()
        for p in plan.params
        for tensor in (p, grads[id(p)], momentum_of(p, state[p], p.dtype))
    ]
    if lying != plan.addresses:
        plan.addresses = lying
        first = {id(p): lying[3 * i : 3 * i + 3] for i, p in enumerate(plan.params)}

        def addresses_of(bucket: TableBucket, members: list[Member]) -> list[list[int]]:
            X, G, C = (
                [at for m in members for at in addresses(m, first[id(m.param)][which])]
                for which in range(3)
            )
            strides = [m.view.cols for m in members for _ in range(m.count)]
            bucket.strided = any(stride != bucket.signature.n for stride in strides)
            return [G, C, X, strides]

        for bucket, part in _tabulated(plan, addresses_of, torch.int64):
            bucket.addresses = part
    scalars = [
        (float(group["lr"]), group["momentum"], group["weight_decay"], _scales(group, shapes))
        for group, shapes in zip(plan.groups, plan.shapes, strict=True)
    ]
    if scalars != plan.scalars:
        plan.scalars = scalars
        by_group = dict(zip(map(id, plan.groups), scalars, strict=True))

        def scalars_of(bucket: TableBucket, members: list[Member]) -> list[list[float]]:
            rows: list[list[float]] = [[], [], []]
            for member in members:
                lr, beta, decay, scales = by_group[id(member.group)]
                step = lr * scales[_shape(bucket)]
                for row, value in zip(rows, (beta, 1 - lr * decay, step), strict=True):
                    row += [value] * member.count
            return rows

        for bucket, part in _tabulated(plan, scalars_of, torch.float32):
            bucket.scalars = part


def _tabulated(
    plan: _Plan,
    rows_of: Callable[[TableBucket, list[Member]], Sequence[Sequence[float]]],
    dtype: torch.dtype,
) -> Iterator[tuple[TableBucket, Tensor]]:
    """The table of every bucket, on its device, with one copy to each device."""
    for device in plan.devices:
        there = plan.runs_on(device)
        table = plan.tables.get((device, dtype), torch.empty(0, device=device))
        plan.tables[device, dtype], parts = shared_table(
            table, [rows_of(*run) for run in there], dtype
        )
        yield from zip([bucket for bucket, _ in there], parts, strict=True)


def _scales(group: Group, shapes: list[Shape]) -> dict[Shape, float]:
    """The scale of every shape, asked anew, as a user's ``lr_scale`` function may change."""
    return {(m, n, device): scale_of(group, device)(m, n) for m, n, device in shapes}


def _shape(bucket: TableBucket) -> Shape:
    its = bucket.signature
    return its.m, its.n, its.device


def _key(work: Work, first: Work) -> tuple[Any, ...]:
    """What a plan depends on: parameters, their memory layout, and the options that decide buckets.

    Ids alone are not enough: ``model.to(...)`` may change precision and layout and keep the id.
    """
    group = work.group
    return (
        id(group),
        *(group[option] for option in ("polar", "transform", "seed", "nesterov", "fused")),
        is_by_norm(group),
        group["step"] - first.group["step"],
        isinstance(group["lr"], Tensor),
        work.finite is not None,
        *((id(p), p.dtype, p.device, p.stride()) for p in work.params),
        *work.views,
    )


def _goes_on(plan: _Plan, state: State) -> bool:
    """Whether ``state`` has carries for exactly the buckets that were planned to resume."""
    if plan.carried and plan.carried == plan.carried_in(state):
        return all(bucket.signature.resumed for bucket, _ in plan.runs if bucket.carries)
    for bucket, members in plan.runs:
        its = bucket.signature
        for member in members if bucket.carries else ():
            of_parameter, count = state[member.param], member.count
            known = recalled(of_parameter, member.block, its.polar, count, its.m, its.n)
            if (known is not None) != its.resumed:
                return False
    return True
