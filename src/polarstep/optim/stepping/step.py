"""Equation (1) of the paper for one bucket of matrices, written once.

For every matrix X with gradient G:

    C ← βC + G,    M = βC + G (Nesterov) or M = C (Polyak),    X ← X − η·scale·T(M).

:func:`launch` runs the phases momentum → polar → transform → update. A :class:`Matrices` knows
where the matrices are stored and how to read and write them: as tensors
(:mod:`polarstep.optim.stepping.by_tensors`), or tables of addresses for kernels
(:mod:`polarstep.optim.stepping.by_tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from polarstep.optim.stepping.collect import Member, Signature
from polarstep.polar import Carry, Draw, Polar, PolarMap
from polarstep.polar.result import Captured, Factors
from polarstep.undisturbed import on_device

__all__ = ["Bucket", "Matrices", "PolarHook", "launch", "show"]


class Matrices(Protocol):
    """G, C and X of the matrices in a bucket, wherever they are stored."""

    def momentum(self) -> Tensor:
        """``C ← βC + G`` in place, and M as one batch (count, m, n)."""

    def update(self, polar: Polar) -> None:
        """``X ← (1 − ηλ)X − η·scale·T``: decoupled weight decay, then the step."""


@dataclass(frozen=True)
class Bucket:
    """The matrices of one shape that went through a polar map together.

    A hook must not change it: ``M`` may be the momentum buffer itself.
    """

    map: PolarMap
    step: int  # the largest, if groups have taken different numbers of steps
    generator_key: tuple[int | str, ...]
    names: tuple[str, ...]  # the parameter of each matrix of the batch
    params: tuple[Tensor, ...]
    M: Tensor  # (batch, m, n)
    T: Tensor  # (batch, m, n)
    factors: Factors | None = None  # if the map works in a subspace
    captured: Captured | None = None  # if T is more than what the map found in a subspace


PolarHook = Callable[[Bucket], None]


def launch(
    polar_map: PolarMap, matrices: Matrices, carry: Carry, draw: Draw
) -> tuple[Polar, Carry]:
    """Run one step of a bucket; return T as it was applied, and the carry for the next step."""
    M = matrices.momentum()
    polar, left = polar_map.step_on_many(M, carry, draw)
    matrices.update(polar)
    return polar, left


def show(
    hooks: Iterable[PolarHook],
    signature: Signature,
    members: list[Member],
    polar: Polar,
) -> None:
    """Call the hooks with M and T of a step."""
    owners = [member for member in members for _ in range(member.count)]
    step = max(member.group["step"] for member in members)
    with on_device(signature.device):
        bucket = Bucket(
            signature.polar,
            step,
            signature.drawn_at(step)[1],
            tuple(member.name for member in owners),
            tuple(member.param for member in owners),
            polar.M,
            polar.dense.to(polar.M.dtype),
            polar.factors,
            polar.captured,
        )
        for hook in hooks:
            hook(bucket)
