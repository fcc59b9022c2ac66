"""A Muon step on a GPU: all matrices of one shape in a few launches.

The phases are those of :mod:`polarstep.optim.phases`, and so is what they compute; here they run on
a bucket of matrices of one shape, wherever they lie in memory (:mod:`polarstep.optim.bucket`). This
file says which parameters can go that way and which bucket each matrix belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.optim.bucket import DeviceBucket, Member, Signature
from polarstep.optim.groups import Group
from polarstep.optim.phases import PolarHook, Work, ensure_buffers

__all__ = ["FusedStep", "can_fuse", "divide"]

State = dict[Tensor, dict[str, Any]]

# M of a bucket takes two bytes an entry; a larger bucket is worked off in parts.
LARGEST_BUCKET = 512 * 2**20
# A vector load wants addresses like these.
ALIGNMENT = 16


def divide(works: Iterable[Work], state: State) -> tuple[list[Work], list[Work]]:
    """``works`` in two parts: what the kernels can do, and what is left for plain torch."""
    fused, plain = [], []
    for work in works:
        can = [
            can_fuse(work.group, p, grad, state[p].get("momentum_buffer"))
            for p, grad in zip(work.params, work.grads, strict=True)
        ]
        fused.append(work.select([i for i, yes in enumerate(can) if yes]))
        plain.append(work.select([i for i, yes in enumerate(can) if not yes]))
    return fused, plain


def can_fuse(group: Group, p: Tensor, grad: Tensor, buffer: Tensor | None) -> bool:
    """Whether the kernels can work on this parameter where it lies."""
    if not group["fused"] or not kernels.available(p.device):
        return False
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.is_cuda:
        return False  # its value is not known here without waiting
    tensors = [p, grad] if buffer is None else [p, grad, buffer]
    return (
        p.dtype in (torch.float32, torch.bfloat16)
        and all(t.dtype == p.dtype and t.is_contiguous() for t in tensors)
        and all(t.data_ptr() % ALIGNMENT == 0 for t in tensors)
        and (p.shape[-1] * p.element_size()) % ALIGNMENT == 0
    )


class FusedStep:
    """The buckets of an optimizer, kept from step to step."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[Signature, int, int], DeviceBucket] = {}

    def __call__(
        self, works: Iterable[Work], state: State, hooks: Iterable[PolarHook] = ()
    ) -> None:
        """Update every parameter of ``works``, all of which :func:`can_fuse` has passed."""
        for work in works:
            ensure_buffers(work, state)
        for (signature, step), members in _by_bucket(works).items():
            for part, chunk in enumerate(_chunks(members, signature)):
                count = sum(member.count for member in chunk)
                key = (signature, part, count)
                if key not in self._buckets:
                    self._buckets[key] = DeviceBucket(signature, count)
                self._buckets[key].run(chunk, state, step, hooks)


def _by_bucket(works: Iterable[Work]) -> dict[tuple[Signature, int], list[Member]]:
    buckets: dict[tuple[Signature, int], list[Member]] = {}
    for work in works:
        group = work.group
        for index, (p, view) in enumerate(zip(work.params, work.views, strict=True)):
            offset = 0
            for block, (count, m, n) in enumerate(view.shapes):
                stride = m * n if len(view.shapes) == 1 else view.rows * n
                member = Member(work, index, block, count, offset, stride)
                offset += m * n
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
                buckets.setdefault((signature, group["step"]), []).append(member)
    return buckets


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
