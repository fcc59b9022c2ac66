"""Steps on a GPU that are planned once and replayed as CUDA graphs.

After the first steps, all launches of a step are captured as one CUDA graph, and each later step is one
replay. Whatever changes from step to step lies in tensors that the graph reads: addresses, momenta,
learning rates and decays, random numbers, carries. The host never waits for the device here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle

import torch

from polarstep import kernels
from polarstep.optim.groups import Group, is_transposed
from polarstep.optim.stepping.by_tables import (
    TableBucket,
    can_tabulate,
    has_momentum_like,
    readable,
)
from polarstep.optim.stepping.collect import Member, Signature, State, Work, in_parts, members_of
from polarstep.optim.stepping.replay_plan import (
    Plan,
    Run,
    fill_tables,
    goes_on,
    gradients,
    key_of,
    still_lies,
)
from polarstep.optim.stepping.step import PolarHook, show
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


class ReplayedStep:
    """The buckets of an optimizer, kept from step to step."""

    def __init__(self) -> None:
        self.buckets: dict[tuple[Signature, int], TableBucket] = {}
        self._streams_of: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._plan = Plan((), [], [], [], [])

    @property
    def graphs(self) -> dict[tuple[bool, ...], list[torch.cuda.CUDAGraph]]:
        """The captured graphs; a key says for each bucket whether the step draws random numbers."""
        return self._plan.replays.graphs

    def __call__(
        self, works: list[Work], state: State, hooks: tuple[PolarHook, ...] = ()
    ) -> set[int]:
        """Update the parameters that the kernels can update, and return their ids."""
        self._plan = plan = self._plan_for(works, state)
        if plan.runs:
            self._run(plan, works, state, hooks)
        return {id(works[w].params[i]) for w, indices in enumerate(plan.fused) for i in indices}

    def _run(
        self, plan: Plan, works: list[Work], state: State, hooks: tuple[PolarHook, ...]
    ) -> None:
        grads = gradients(plan, works)  # copies among them must live until all is launched
        fill_tables(plan, grads)
        first = works[0].group["step"]
        now = [
            (bucket, _of_now(members, works), first + offset)
            for (bucket, members), offset in zip(plan.runs, plan.offsets, strict=True)
        ]
        for bucket, members, at in now:
            bucket.prepare(members, state, at, recalls=plan.recalls)
        kind = tuple(bucket.draws for bucket, _ in plan.runs)
        plan.replays.count(kind, [bucket.place() for bucket, _ in plan.runs])
        if hooks:
            for bucket, members, at in now:
                signature = replace(bucket.signature, step=at)
                show(hooks, signature, members, bucket.key, bucket.launch(shown=True))
        else:
            launch = partial(self._launch, plan)
            plan.replays.run(kind, launch, plan.devices, repeats=plan.repeats)
        for bucket, members, _ in now:
            bucket.settle(members, state)
        if plan.entries and plan.recalls:
            plan.carried = plan.carried_in(state)

    def _launch(self, plan: Plan, device: torch.device) -> None:
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

    def _plan_for(self, works: list[Work], state: State) -> Plan:
        can_read = [
            [readable(G, p) for p, G in zip(work.params, work.grads, strict=True)] for work in works
        ]
        key = tuple(
            key_of(work, works[0], can) for work, can in zip(works, can_read, strict=True)
        )
        plan = self._plan
        if key == plan.key and still_lies(plan, state) and goes_on(plan, state):
            return plan
        fused, params, members = [], [], []
        for work, can in zip(works, can_read, strict=True):
            fused.append(
                [
                    i
                    for i, (p, yes) in enumerate(zip(work.params, can, strict=True))
                    if yes and can_tabulate(work.group, p) and has_momentum_like(p, state[p])
                ]
            )
            lasting = work.without_gradients()
            for i in fused[-1]:
                params.append(work.params[i])
                members += list(members_of(lasting, i, state))
        if not members:
            return Plan(key, fused, [], [], [])
        first = works[0].group["step"]
        idle = [work.group for work in works if not work.params]
        runs = list(self._runs(members, first, idle))
        plan = Plan(key, fused, [run for run, _ in runs], [offset for _, offset in runs], params)
        fits = still_lies(plan, state)
        assert fits
        return plan

    def _runs(
        self, members: list[tuple[Signature, Member]], first: int, idle: list[Group]
    ) -> Iterator[tuple[Run, int]]:
        """Each bucket with its members and the offset of its step.

        Buckets of groups that are ``idle``, without a gradient at this step, are kept. Buckets of
        earlier maps and seeds are dropped to free their memory.
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
            most = min(LARGEST_BUCKET // (2 * signature.m * signature.n), kernels.MOST_MATRICES)
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
