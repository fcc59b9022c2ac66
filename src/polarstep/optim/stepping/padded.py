"""Small matrices of many different shapes as a few batches, padded with zeros.

A bucket of one small matrix takes as many calls of torch as a bucket of a hundred, and each call takes
some microseconds. For a map that ignores zero rows and columns
(:attr:`polarstep.polar.PolarMap.ignores_zeros`), T of a padded matrix is T of the matrix, padded. So
where a step on a CPU has many buckets of small matrices, shapes are rounded up to multiples of eight,
and matrices that then have the same shape are one batch.

Padding changes the order of additions inside products, and so the last bits of T. A step with fewer
than 32 small shapes is not padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from polarstep.optim.stepping.collect import Member, Signature, in_parts, momentum_dtype
from polarstep.optim.stepping.low_precision import is_compensated
from polarstep.optim.stepping.step import PolarHook, launch, show
from polarstep.optim.stepping.target import Target
from polarstep.polar import Carry, Draw, Polar, PolarMap

__all__ = ["step_padded"]

# Fewer buckets of small matrices than this are processed one by one.
MANY = 32
# Each side of a matrix is rounded up to a multiple of this.
MULTIPLE = 8
# A matrix with a longer side is not small: its products take longer than the calls of torch.
LONGEST = 128
# Bytes of M in a batch. A batch that fits in the cache of a core is faster than a larger batch.
LARGEST = 2**20

Buckets = dict[tuple[Signature, bool], list[Member]]


@dataclass(frozen=True)
class _Bucket:
    """The matrices of one shape inside a padded batch."""

    signature: Signature
    members: list[Member]

    @property
    def count(self) -> int:
        return sum(member.count for member in self.members)


def step_padded(
    buckets: Buckets, target_of: Callable[[Member], Target], hooks: tuple[PolarHook, ...]
) -> Buckets:
    """Update the small matrices, if there are many shapes of them; return all other buckets."""
    small = {key: members for key, members in buckets.items() if _can_pad(*key, members)}
    if len(small) < MANY:
        return buckets
    batches: dict[tuple[PolarMap, torch.dtype, int, int], list[_Bucket]] = {}
    for (its, _), members in small.items():
        rows, columns = (-(-side // MULTIPLE) * MULTIPLE for side in sorted((its.m, its.n)))
        batch = batches.setdefault((its.polar, its.dtype, rows, columns), [])
        batch.append(_Bucket(its, members))
    for (_, dtype, rows, columns), together in batches.items():
        most = LARGEST // (rows * columns * dtype.itemsize)
        for part in in_parts(together, lambda bucket: bucket.count, most):
            padded = _Padded(part, rows, columns, target_of)
            polar, _ = launch(part[0].signature.polar, padded, Carry(), Draw())
            if hooks:
                padded.show(hooks, polar)
    return {key: members for key, members in buckets.items() if key not in small}


def _can_pad(signature: Signature, sharded: bool, members: list[Member]) -> bool:
    its = signature
    return (
        max(its.m, its.n) <= LONGEST
        and not sharded
        and its.device.type == "cpu"
        and its.polar.ignores_zeros
        and all(
            len(member.view.shapes) == 1
            and member.view.in_turn
            and not is_compensated(member.group, member.param)
            and member.param.is_contiguous()
            and not isinstance(member.group["lr"], Tensor)
            for member in members
        )
    )


class _Padded:
    """G, C and X of matrices of several shapes; M and T are wide and padded with zeros."""

    def __init__(
        self,
        buckets: list[_Bucket],
        rows: int,
        columns: int,
        target_of: Callable[[Member], Target],
    ) -> None:
        self._buckets = buckets
        self._shape = rows, columns
        self._members = [member for bucket in buckets for member in bucket.members]
        self._targets = [target_of(member) for member in self._members]
        ends = list(accumulate(member.count for member in self._members))
        self._places = list(zip([0, *ends[:-1]], ends, strict=True))

    def _parts(self, X: Tensor) -> list[Tensor]:
        """The part of the padded batch ``X`` that belongs to each member, oriented as its X."""
        parts = []
        for member, (first, end) in zip(self._members, self._places, strict=True):
            _, m, n = member.view.shapes[0]
            wide = m <= n
            parts.append(X[first:end, :m, :n] if wide else X[first:end, :n, :m].mT)
        return parts

    def momentum(self) -> Tensor:
        """``C ← βC + G``, and M of all members as one batch."""
        p = self._members[0].param
        shape = self._places[-1][1], *self._shape
        M = torch.zeros(shape, dtype=momentum_dtype(p.dtype), device=p.device)
        for target, part in zip(self._targets, self._parts(M), strict=True):
            if target.writes_momentum():
                target.write_momentum(part)
            else:
                part.copy_(target.momentum(0))
        return M

    def update(self, polar: Polar) -> None:
        """``X ← (1 − ηλ)X − η·scale·T``; T is scaled for all members at once."""
        sizes = [target.sizes()[0] for target in self._targets]
        T = polar.dense
        counts = torch.tensor([member.count for member in self._members], device=T.device)
        each = torch.tensor(sizes, dtype=T.dtype, device=T.device).repeat_interleave(counts)
        T = T * each[:, None, None]
        alike: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for target, part in zip(self._targets, self._parts(T), strict=True):
            params, updates = alike.setdefault(target.remains(), ([], []))
            params.append(target.p.view(part.shape))
            updates.append(part)
        for remains, (params, updates) in alike.items():
            if remains != 1.0:
                torch._foreach_mul_(params, remains)
            torch._foreach_add_(params, updates)

    def show(self, hooks: tuple[PolarHook, ...], polar: Polar) -> None:
        """Call the hooks for every bucket, with its own M and T."""
        M, T = self._parts(polar.M), self._parts(polar.dense)
        first = 0
        for bucket in self._buckets:
            end = first + len(bucket.members)
            whole = Polar(torch.cat(M[first:end]), torch.cat(T[first:end]))
            show(hooks, bucket.signature, bucket.members, whole)
            first = end
