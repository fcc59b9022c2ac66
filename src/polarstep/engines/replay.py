"""Steps of kernels that are planned once and, on a GPU, replayed as CUDA graphs.

There is no arithmetic here. After the first steps, all launches of a step are captured as one CUDA
graph, and each later step is one replay. Whatever changes from step to step lies in tensors that the
graph reads: addresses, momenta, learning rates and decays, random numbers, carries. The host never waits
for the device here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch

from polarstep import kernels
from polarstep.bucket import BucketKey, Member, PolarHook, in_parts, members_of
from polarstep.engines.fused import (
    FusedBucket,
    can_tabulate,
    has_momentum_like,
    readable,
    runs_by_kernels,
)
from polarstep.engines.replay_plan import (
    ReplayPlan,
    fill_tables,
    goes_on,
    gradients,
    key_of,
    still_lies,
)
from polarstep.gradients import Work
from polarstep.groups import Group
from polarstep.state import State

__all__ = ["ReplayedStep", "Step"]

# Takes the step of a bucket, which calls hooks.
Step = Callable[[FusedBucket, tuple[PolarHook, ...]], None]

# Bytes of M in a bucket, two for each entry; a larger bucket is processed in parts.
LARGEST_BUCKET = 512 * 2**20
# Buckets run on this many streams. The CIFAR-10 filters, too small to fill an H200, took 222 µs on
# two streams and 149 µs on four, in full space with seven steps. Large buckets share the first two:
# they gain nothing from more streams, and each stream in use holds the work space of a bucket.
STREAMS = 4
STREAMS_OF_LARGE_BUCKETS = 2
LARGE_BUCKET = 64 * 2**20
# Where other parameters have gradients from step to step (two losses in turn, layers that are left out)
# so many plans are kept, each with its graph and carries. A plan that has not come again is dropped at
# once: where layers are left out at random, hardly any plan comes again.
MOST_PLANS = 4
# A plan is also dropped after this many steps without it, as after the first phase of a training.
STEPS_WITHOUT = 100


class ReplayedStep:
    """The plans of an optimizer's steps, kept from step to step."""

    def __init__(self) -> None:
        self._plan = ReplayPlan((), [], [], [], [])  # of the last step
        self._others: list[ReplayPlan] = []  # earlier plans that may come again, the latest first
        self._made: deque[Any] = deque(maxlen=MOST_PLANS)  # the keys of the last plans made
        self._steps = 0
        self._streams_of: dict[torch.device, list[torch.cuda.Stream]] = {}

    @property
    def buckets(self) -> dict[tuple[BucketKey, int], FusedBucket]:
        """The buckets of the last step, by signature and part."""
        return self._plan.buckets

    @property
    def graphs(self) -> dict[tuple[bool, ...], list[torch.cuda.CUDAGraph]]:
        """The captured graphs; a key says for each bucket whether the step draws random numbers."""
        return self._plan.replays.graphs

    def __call__(
        self, works: list[Work], state: State, step: Step, hooks: tuple[PolarHook, ...] = ()
    ) -> set[int]:
        """Take the steps of the parameters that the kernels can update, and return their ids."""
        plan = self._plan_for(works, state)
        if plan.runs:
            self._run(plan, works, state, step, hooks)
        return {id(works[w].params[i]) for w, indices in enumerate(plan.fused) for i in indices}

    def _run(
        self,
        plan: ReplayPlan,
        works: list[Work],
        state: State,
        step: Step,
        hooks: tuple[PolarHook, ...],
    ) -> None:
        grads, lying = gradients(plan, works)
        fill_tables(plan, lying)
        first, finite = works[0].group["step"], {id(work.group): work.finite for work in works}
        for bucket, offset in zip(plan.runs, plan.offsets, strict=True):
            bucket.prepare(finite, state, first + offset, recalls=plan.recalls)
        kind = tuple(bucket.draws for bucket in plan.runs)
        plan.replays.count(kind, [bucket.place() for bucket in plan.runs])
        if hooks:
            for bucket in plan.runs:
                step(bucket, hooks)
        else:
            launch, beside = partial(self._launch, plan, step), self._graph_beside(plan)
            plan.replays.run(kind, launch, plan.devices, repeats=plan.repeats, beside=beside)
        for bucket in plan.runs:
            bucket.settle(state)
        if plan.entries and plan.recalls:
            plan.carried = plan.carried_in(state)
        del grads  # copies among them had to live until all was launched

    def _launch(self, plan: ReplayPlan, step: Step, device: torch.device) -> None:
        """Take the steps of the buckets on one device, on a GPU side by side.

        The small products of one bucket do not fill a GPU; a few buckets at a time do better.
        """
        buckets = plan.runs_on(device)
        if device.type != "cuda" or len(buckets) == 1:
            for bucket in buckets:
                step(bucket, ())
            return
        here = torch.cuda.current_stream(device)
        streams = self._streams(device)
        for stream in streams:
            stream.wait_stream(here)
        for bucket, lane in zip(
            buckets, _lanes([bucket.nbytes for bucket in buckets]), strict=True
        ):
            with torch.cuda.stream(streams[lane]):
                step(bucket, ())
        for stream in streams:
            here.wait_stream(stream)

    def _graph_beside(self, plan: ReplayPlan) -> torch.cuda.CUDAGraph | None:
        """A graph of another plan on the same GPU. Two plans never run at once and can share memory."""
        if len(plan.devices) != 1:
            return None
        for other in self._others:
            if other.devices == plan.devices and other.replays.graphs:
                return next(iter(other.replays.graphs.values()))[0]
        return None

    def _streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        if device not in self._streams_of:
            streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
            self._streams_of[device] = streams
        return self._streams_of[device]

    def _plan_for(self, works: list[Work], state: State) -> ReplayPlan:
        can_read = [_can_read(work) for work in works]
        key: tuple[Any, ...] = ()
        if any(True in each for each in can_read):
            key = tuple(
                key_of(work, works[0], can) for work, can in zip(works, can_read, strict=True)
            )
        self._steps += 1
        known = (each for each in (self._plan, *self._others) if each.key == key)
        plan = next((p for p in known if still_lies(p, state) and goes_on(p, state)), None)
        if plan is None:
            plan = self._planned(key, works, can_read, state)
            plan.comes_again = key in self._made
            self._made.append(key)
            listed = {id(work.group): _listed(work.group) for work in works}
            plan.listed = {id(group): listed[id(group)] for group in plan.groups}
            # Parameters that were taken out of their group are let go with the plans that had them.
            self._others = [each for each in self._others if each.listed.items() <= listed.items()]
            self._plan.comes_again &= self._plan.listed.items() <= listed.items()
        else:
            plan.comes_again = True
        self._keep(plan)
        return plan

    def _keep(self, plan: ReplayPlan) -> None:
        """Take ``plan`` for this step; drop others that have not come again, or not for a while."""
        others = [self._plan, *self._others] if plan is not self._plan else self._others
        self._others = [
            other
            for other in others
            if other is not plan
            and other.key != plan.key
            and other.comes_again
            and other.last > self._steps - STEPS_WITHOUT
        ][: MOST_PLANS - 1]
        self._plan, plan.last = plan, self._steps

    def _planned(
        self, key: tuple[Any, ...], works: list[Work], can_read: list[list[bool]], state: State
    ) -> ReplayPlan:
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
            return ReplayPlan(key, fused, [], [], [])
        # A plan that may come again needs its buckets: their tables have its parameters.
        free = {} if self._plan.comes_again else self._plan.buckets
        plan = ReplayPlan(key, fused, [], [], params)
        for place, run, offset in _runs(members, works[0].group["step"], free):
            plan.buckets[place] = run
            plan.runs.append(run)
            plan.offsets.append(offset)
        fits = still_lies(plan, state)
        assert fits
        return plan


def _can_read(work: Work) -> list[bool]:
    """For each gradient, whether the group asks for kernels and they can read it, or a copy of it."""
    if not any(runs_by_kernels(work.group, device) for device in {p.device for p in work.params}):
        return [False] * len(work.params)
    return [readable(G, p) for p, G in zip(work.params, work.grads, strict=True)]


def _listed(group: Group) -> tuple[int, ...]:
    return tuple(map(id, group["params"]))


def _runs(
    members: list[tuple[BucketKey, Member]],
    first: int,
    free: dict[tuple[BucketKey, int], FusedBucket],
) -> Iterator[tuple[tuple[BucketKey, int], FusedBucket, int]]:
    """Each bucket's signature and part, the bucket, and the offset of its step.

    Buckets of the same signature in ``free`` are used again.
    """
    buckets: dict[BucketKey, list[Member]] = {}
    for signature, member in members:
        # A bucket outlives its step, so its signature holds the step relative to the first work.
        if signature.step is not None:
            signature = replace(signature, step=signature.step - first)
        buckets.setdefault(signature, []).append(member)
    for signature, together in buckets.items():
        most = min(LARGEST_BUCKET // (2 * signature.m * signature.n), kernels.MOST_MATRICES)
        for part, chunk in enumerate(in_parts(together, lambda member: member.count, most)):
            count = sum(member.count for member in chunk)
            bucket = free.get((signature, part))
            if bucket is None or bucket.count != count:
                bucket = FusedBucket(signature, chunk)
            yield (signature, part), bucket.of(chunk), signature.step or 0


def _lanes(sizes: list[int]) -> list[int]:
    """The stream of each bucket, by the bytes of its M: large buckets from 0 up, small from 3 down.

    >>> _lanes([2**20] * 5), _lanes([2**27] * 3), _lanes([2**20, 2**27])
    ([3, 2, 1, 0, 3], [0, 1, 0], [3, 0])
    """
    large = cycle(range(STREAMS_OF_LARGE_BUCKETS))
    small = cycle(reversed(range(STREAMS)))
    return [next(large) if size >= LARGE_BUCKET else next(small) for size in sizes]
