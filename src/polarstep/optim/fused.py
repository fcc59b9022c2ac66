"""A Muon step on a GPU: all matrices of one shape in a few launches.

The phases are those of :mod:`polarstep.optim.phases`, and so is what they compute; here they run on
a bucket of matrices of one shape, wherever they lie in memory (:mod:`polarstep.optim.bucket`). This
file says which parameters can go that way and which bucket each matrix belongs to. The answer is
kept from step to step: a step of a thousand parameters should not spend its time in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.optim.bucket import DeviceBucket, Member, Signature
from polarstep.optim.groups import Group
from polarstep.optim.phases import PolarHook, State, Work, ensure_buffers

__all__ = ["FusedStep", "can_fuse"]

# M of a bucket takes two bytes an entry; a larger bucket is worked off in parts.
LARGEST_BUCKET = 512 * 2**20
# Captured buckets run on this many streams.
STREAMS = 2
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
    return (
        p.dtype in (torch.float32, torch.bfloat16)
        and (p.shape[-1] * p.element_size()) % ALIGNMENT == 0
        and _suits(p, p)
        and (buffer is None or _suits(buffer, p))
    )


def _suits(tensor: Tensor, p: Tensor) -> bool:
    return tensor.dtype == p.dtype and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


@dataclass(frozen=True)
class _Plan:
    """Who is updated how, as long as ``key`` is the same."""

    key: tuple[Any, ...]
    fused: list[list[int]]  # indices of parameters, per work
    plain: list[list[int]]
    runs: list[tuple[DeviceBucket, list[Member]]]


class FusedStep:
    """The buckets of an optimizer, kept from step to step."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[Signature, int], DeviceBucket] = {}
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self._plan = _Plan((), [], [], [])

    def __call__(
        self, works: list[Work], state: State, hooks: tuple[PolarHook, ...] = ()
    ) -> list[Work]:
        """Update the parameters that the kernels can reach; return the work that is left."""
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
        return [work.select(left) for work, left in zip(works, plan.plain, strict=True)]

    def _run(
        self,
        plan: _Plan,
        state: State,
        finite: dict[Tensor, Tensor],
        hooks: tuple[PolarHook, ...],
    ) -> None:
        captured = sum(bucket.is_captured for bucket, _ in plan.runs)
        for place, (bucket, members) in enumerate(plan.runs):
            beside = bucket.is_captured and captured > 1 and not hooks
            with self._stream(bucket.signature.device, place) if beside else nullcontext():
                bucket.run(members, state, finite, hooks)
        for (device, _), stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _stream(self, device: torch.device, place: int) -> torch.cuda.StreamContext:
        """A stream beside the current one, for a captured bucket.

        The small products of one bucket do not fill a GPU; two buckets at a time do better.
        """
        key = (device, place % STREAMS)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams[key].wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._streams[key])

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
        return _Plan(key, fused, plain, list(self._runs(members)))

    def _runs(
        self, members: list[tuple[Signature, Member]]
    ) -> Iterator[tuple[DeviceBucket, list[Member]]]:
        buckets: dict[tuple[Signature, int], list[Member]] = {}
        for signature, member in members:
            buckets.setdefault((signature, member.group["step"]), []).append(member)
        for (signature, _), together in buckets.items():
            for part, chunk in enumerate(_chunks(together, signature)):
                count = sum(member.count for member in chunk)
                bucket = self._buckets.get((signature, part))
                if bucket is None or bucket.count != count:
                    # One bucket a shape: where other experts have gradients at every step, keeping
                    # a graph and its memory for each number of them would fill the GPU.
                    bucket = self._buckets[signature, part] = DeviceBucket(signature, count)
                yield bucket, chunk


def _key(work: Work, first: Work) -> tuple[Any, ...]:
    """What a plan depends on: the parameters and the options that decide their buckets."""
    group = work.group
    return (
        id(group),
        *(group[option] for option in ("polar", "seed", "nesterov", "fused", "layout")),
        group["split_sizes"],
        group["step"] - first.group["step"],
        isinstance(group["lr"], Tensor),
        work.finite is not None,
        *map(id, work.params),
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


def _chunks(members: list[Member], signature: Signature) -> Iterator[list[Member]]:
    """Parts of a bucket whose M stays under LARGEST_BUCKET; a single parameter is not cut."""
    most = max(1, LARGEST_BUCKET // (2 * signature.m * signature.n))
    chunk: list[Member] = []
    for member in members:
        if chunk and sum(other.count for other in chunk) + member.count > most:
            yield chunk
            chunk = []
        chunk.append(member)
    yield chunk
