"""A Muon step on a GPU: all matrices of one shape in a few launches.

The phases are those of :mod:`polarstep.optim.phases`, and so is what they compute; here they run on
a bucket of matrices of one shape, wherever they lie in memory (:mod:`polarstep.optim.bucket`). This
file says which parameters can go that way and which bucket each matrix belongs to. The answer is
kept from step to step: a step of a thousand parameters should not spend its time in Python.

After a few steps the launches of all buckets are captured as one CUDA graph, and a step is then one
replay. What changes from step to step lies in tensors that the graph reads: addresses, momenta,
learning rates and decays, random numbers, warm starts. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from polarstep import kernels
from polarstep.cuda_graphs import captured
from polarstep.kernels.pointers import shared_table
from polarstep.matrix import MatrixView
from polarstep.optim.bucket import DeviceBucket, Member, Signature
from polarstep.optim.groups import Group, view_of
from polarstep.optim.phases import PolarHook, ensure_buffers, in_parts
from polarstep.optim.scaling import resolve_scale
from polarstep.optim.work import State, Work

__all__ = ["FusedStep", "can_fuse"]

# M of a bucket takes two bytes an entry; a larger bucket is worked off in parts.
LARGEST_BUCKET = 512 * 2**20
# Buckets run on this many streams: the CIFAR-10 filters, too small to fill an H200, took 222 µs on two
# and 149 on four, in full space with seven steps. Large ones share the first two: they gain nothing from
# more, and the work space of as many buckets as there are streams is held at once.
STREAMS = 4
STREAMS_OF_LARGE_BUCKETS = 2
LARGE_BUCKET = 64 * 2**20
# A step is captured after this many of its kind: all its kernels are compiled by then. Launched one by
# one it takes milliseconds of Python.
STEPS_BEFORE_CAPTURE = 1
# A vector load wants addresses like these.
ALIGNMENT = 16


def can_fuse(group: Group, p: Tensor, buffer: Tensor | None) -> bool:
    """Whether the kernels can work on this parameter where it lies, as far as it is concerned."""
    if not group["fused"] or not kernels.available(p.device):
        return False
    if not group["polar"].rounds_input:
        return False  # a bucket holds M in bfloat16
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.is_cuda:
        return False  # its value is not known here without waiting
    view = view_of(group, p)
    return (
        p.numel() > 0
        and p.dtype in (torch.float32, torch.bfloat16)
        and (view.cols * p.element_size()) % ALIGNMENT == 0
        and _rows_in_turn(p, view)
        and _suits(p, p)
        and (buffer is None or _suits(buffer, p))
    )


def _rows_in_turn(p: Tensor, view: MatrixView) -> bool:
    """Whether the rows of the matrices lie in memory one after the other.

    In ``channels_last`` those of a filter do, with the columns in another order. That is no matter:
    T(MP) = T(M)P for a permutation P, so the step is the same one, read in that order.
    """
    if p.is_contiguous():
        return True
    flattened = view.batch == 1 and view.rows == p.shape[0]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return flattened and p.dim() in formats and p.is_contiguous(memory_format=formats[p.dim()])


def _suits(tensor: Tensor, p: Tensor) -> bool:
    """Whether ``tensor`` lies in memory as ``p`` does; a ``DTensor`` and its like lie nowhere."""
    return (
        not is_traceable_wrapper_subclass(tensor)
        and tensor.dtype == p.dtype
        and tensor.stride() == p.stride()
        and tensor.data_ptr() % ALIGNMENT == 0
    )


@dataclass
class _Plan:
    """Who is updated how, as long as ``key`` is the same; and what the last step left on a GPU."""

    key: tuple[Any, ...]
    fused: list[list[int]]  # indices of parameters, per work
    plain: list[list[int]]
    runs: list[tuple[DeviceBucket, list[Member]]]
    addresses: list[int] = field(default_factory=list)  # of X, G and C, parameter by parameter
    scalars: list[tuple[Any, ...]] = field(default_factory=list)  # group by group
    tables: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)
    places: list[tuple[int, ...]] = field(default_factory=list)  # of what the launches work on
    # Since those are the same, by what buckets do at a step: how many such steps there were, and
    # what was captured of them, a graph for each device.
    steps: dict[tuple[bool, ...], int] = field(default_factory=dict)
    graphs: dict[tuple[bool, ...], list[torch.cuda.CUDAGraph]] = field(default_factory=dict)

    @cached_property
    def params(self) -> list[Tensor]:
        """The parameters behind the buckets."""
        return list({id(m.param): m.param for _, members in self.runs for m in members}.values())

    @cached_property
    def groups(self) -> list[Group]:
        """Their groups."""
        return list({id(m.group): m.group for _, members in self.runs for m in members}.values())

    @cached_property
    def shapes(self) -> list[list[tuple[int, int]]]:
        """The shapes of the matrices in each of them."""
        found: dict[int, dict[tuple[int, int], None]] = {id(group): {} for group in self.groups}
        for bucket, members in self.runs:
            for m in members:
                found[id(m.group)][bucket.signature.m, bucket.signature.n] = None
        return [list(shapes) for shapes in found.values()]

    @cached_property
    def devices(self) -> list[torch.device]:
        """Where the buckets are."""
        return list({bucket.signature.device: None for bucket, _ in self.runs})

    def runs_on(self, device: torch.device) -> list[tuple[DeviceBucket, list[Member]]]:
        """Those of one device."""
        return [run for run in self.runs if run[0].signature.device == device]


class FusedStep:
    """The buckets of an optimizer, kept from step to step."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[Signature, int], DeviceBucket] = {}
        self._streams_of: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._plan = _Plan((), [], [], [])

    def __call__(
        self, works: list[Work], state: State, hooks: tuple[PolarHook, ...] = ()
    ) -> list[Work]:
        """Update what can be; return the work that is left for the plain phases."""
        self._plan = plan = self._plan_for(works, state)
        if plan.runs:
            finite = {
                p: flag
                for work in works
                if work.finite is not None
                for p, flag in zip(work.params, work.finite, strict=True)
            }
            self._run(plan, state, finite, hooks)
        if not any(plan.fused):
            return works
        if not any(plan.plain):
            return []
        return [work.select(left) for work, left in zip(works, plan.plain, strict=True)]

    def _run(
        self,
        plan: _Plan,
        state: State,
        finite: dict[Tensor, Tensor],
        hooks: tuple[PolarHook, ...],
    ) -> None:
        _fill_tables(plan, state)
        for bucket, members in plan.runs:
            bucket.prepare(members, state, finite)
        places = [bucket.place() for bucket, _ in plan.runs]
        if places != plan.places:
            plan.places, plan.steps, plan.graphs = places, {}, {}
        kind = tuple(bucket.makes_basis for bucket, _ in plan.runs)
        plan.steps[kind] = plan.steps.get(kind, 0) + 1
        if hooks:
            for bucket, members in plan.runs:
                bucket.show(members, hooks, bucket.launch())
        elif kind in plan.graphs:
            for graph in plan.graphs[kind]:
                graph.replay()
        elif _can_capture(plan, kind):
            plan.graphs[kind] = self._capture(plan)
        else:
            for device in plan.devices:
                self._launch(plan, device)
        for bucket, members in plan.runs:
            bucket.settle(members, state)

    def _launch(self, plan: _Plan, device: torch.device) -> None:
        """The buckets on one device, on a GPU beside each other.

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
        if key == plan.key and all(
            _suits(works[w].grads[i], works[w].params[i])
            for w, indices in enumerate(plan.fused)
            for i in indices
        ):
            return plan
        fused, plain, members = [], [], []
        for work in works:
            can = [
                _suits(grad, p) and can_fuse(work.group, p, state[p].get("momentum_buffer"))
                for p, grad in zip(work.params, work.grads, strict=True)
            ]
            fused.append([i for i, yes in enumerate(can) if yes])
            plain.append([i for i, yes in enumerate(can) if not yes])
            ensure_buffers(work.select(fused[-1]), state)
            members += [member for i in fused[-1] for member in _members(work, i)]
        # The memory of maps and seeds that no group has any more is given back.
        used = {(work.group["polar"], work.group["seed"]) for work in works}
        self._buckets = {
            (its, part): bucket
            for (its, part), bucket in self._buckets.items()
            if (its.polar, its.seed) in used
        }
        return _Plan(key, fused, plain, list(self._runs(members)))

    def _runs(
        self, members: list[tuple[Signature, Member]]
    ) -> Iterator[tuple[DeviceBucket, list[Member]]]:
        buckets: dict[tuple[Signature, int], list[Member]] = {}
        for signature, member in members:
            buckets.setdefault((signature, member.group["step"]), []).append(member)
        for (signature, _), together in buckets.items():
            most = LARGEST_BUCKET // (2 * signature.m * signature.n)
            for part, chunk in enumerate(in_parts(together, lambda member: member.count, most)):
                count = sum(member.count for member in chunk)
                bucket = self._buckets.get((signature, part))
                if bucket is None or bucket.count != count:
                    # One bucket a shape: where other experts have gradients at every step, keeping
                    # the memory for each number of them would fill the GPU.
                    bucket = self._buckets[signature, part] = DeviceBucket(signature, count)
                yield bucket, chunk


def _lanes(sizes: list[int]) -> list[int]:
    """The stream of each bucket, by the bytes of its M: large ones from below, others from above.

    >>> _lanes([2**20] * 5), _lanes([2**27] * 3), _lanes([2**20, 2**27])
    ([3, 2, 1, 0, 3], [0, 1, 0], [3, 0])
    """
    large = cycle(range(STREAMS_OF_LARGE_BUCKETS))
    small = cycle(reversed(range(STREAMS)))
    return [next(large) if size >= LARGE_BUCKET else next(small) for size in sizes]


def _can_capture(plan: _Plan, kind: tuple[bool, ...]) -> bool:
    """Whether the launches of the next steps of this kind will be those of this one, all compiled.

    A step in a basis that is there launches nothing that one which makes a basis does not.
    """
    covered = any(
        all(makes or not wanted for wanted, makes in zip(kind, other, strict=True))
        for other in plan.graphs
    )
    compiled = covered or plan.steps[kind] > STEPS_BEFORE_CAPTURE
    return compiled and all(device.type == "cuda" for device in plan.devices)


def _fill_tables(plan: _Plan, state: State) -> None:
    """Tell the buckets where their matrices lie and how far they step, if anything has changed."""
    addresses = [
        tensor.data_ptr()
        for p in plan.params
        for tensor in (p, p.grad, state[p]["momentum_buffer"])
        if tensor is not None
    ]
    if addresses != plan.addresses:
        plan.addresses = addresses
        first = {id(p): addresses[3 * i : 3 * i + 3] for i, p in enumerate(plan.params)}

        def addresses_of(bucket: DeviceBucket, members: list[Member]) -> list[list[int]]:
            X, G, C = (
                [at for m in members for at in m.addresses(first[id(m.param)][which])]
                for which in range(3)
            )
            return [G, C, X]

        for bucket, part in _tabulated(plan, addresses_of, torch.int64):
            bucket.addresses = part
    scalars = [
        (float(group["lr"]), group["momentum"], group["weight_decay"], _scales(group, shapes))
        for group, shapes in zip(plan.groups, plan.shapes, strict=True)
    ]
    if scalars != plan.scalars:
        plan.scalars = scalars
        by_group = dict(zip(map(id, plan.groups), scalars, strict=True))

        def scalars_of(bucket: DeviceBucket, members: list[Member]) -> list[list[float]]:
            rows: list[list[float]] = [[], [], []]
            for member in members:
                lr, beta, decay, scales = by_group[id(member.group)]
                step = lr * scales[bucket.signature.m, bucket.signature.n]
                for row, value in zip(rows, (beta, 1 - lr * decay, step), strict=True):
                    row += [value] * member.count
            return rows

        for bucket, part in _tabulated(plan, scalars_of, torch.float32):
            bucket.scalars = part


def _tabulated(
    plan: _Plan,
    rows_of: Callable[[DeviceBucket, list[Member]], Sequence[Sequence[float]]],
    dtype: torch.dtype,
) -> Iterator[tuple[DeviceBucket, Tensor]]:
    """The rows of every bucket, on its device: one copy for all that are there."""
    for device in plan.devices:
        there = plan.runs_on(device)
        table = plan.tables.get((device, dtype), torch.empty(0, device=device))
        plan.tables[device, dtype], parts = shared_table(
            table, [rows_of(*run) for run in there], dtype
        )
        yield from zip([bucket for bucket, _ in there], parts, strict=True)


def _scales(group: Group, shapes: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """The scale of every shape, as a function of somebody's own gives it at this step."""
    scale = resolve_scale(group["lr_scale"])
    return {shape: scale(*shape) for shape in shapes}


def _key(work: Work, first: Work) -> tuple[Any, ...]:
    """What a plan depends on: the parameters and the options that decide their buckets."""
    group = work.group
    return (
        id(group),
        *(group[option] for option in ("polar", "seed", "nesterov", "fused")),
        group["step"] - first.group["step"],
        isinstance(group["lr"], Tensor),
        work.finite is not None,
        *map(id, work.params),
        *work.views,
    )


def _members(work: Work, index: int) -> Iterator[tuple[Signature, Member]]:
    p, view, group = work.params[index], work.views[index], work.group
    offset, size = 0, p.element_size()
    for block, (count, m, n) in enumerate(view.shapes):
        stride = m * n if len(view.shapes) == 1 else view.rows * n
        signature = Signature(
            group["polar"],
            group["seed"],
            m,
            n,
            p.dtype,
            p.device,
            group["nesterov"],
            work.finite is not None,
        )
        name = work.names[index]
        yield signature, Member(p, name, group, block, count, size * offset, size * stride)
        offset += m * n
