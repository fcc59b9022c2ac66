"""What a plan costs: bytes that a rank receives and FLOPs that it runs, as formulas.

Everything here is for one step of ``count`` matrices of m×n on N ranks, and needs no process group.
Bytes are the mean over the ranks; all ranks have the mean if shards have one size and N divides the
number of matrices. The ranks may hold several copies of the matrices (HSDP). Then S = N/copies ranks
hold the parts of a copy. ``gather`` stays within a copy, so that N is S there, and owners are taken from
all N ranks.

    local        nothing
    gather       M:                     (N − 1)/N·mn
    owner        M there:               (S − 1)/S·mn/N            from the owner's own copy
                 T back:                (N − 1)/N·mn/S            or the two factors of T's part
    replicated   T to all:              (N − 1)/N·mn              or its two factors, ℓ(m + n)
                 a warm sketch:         ℓ·max(m, n) more numbers of M and of T, with an owner too

FLOPs are those of matrix products, as ``torch.utils.flop_counter`` counts them on a CPU in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from polarstep import flops
from polarstep.maps import LowRank, NewtonSchulz, PolarMap, Warm
from polarstep.maps.base import Containing
from polarstep.ops import Products, ops_of

__all__ = [
    "AUTO",
    "BY_OWNERS",
    "PLANS",
    "AskedPlan",
    "Plan",
    "SharedMatrices",
    "Side",
    "bytes_received",
    "check_plan",
    "factor_width",
    "flops_per_rank",
    "product_flops",
    "whole_flops",
]

Plan = Literal["local", "owner", "replicated", "gather"]
PLANS: tuple[Plan, ...] = get_args(Plan)
AskedPlan = Literal["auto"] | Plan  # what a user may ask for
AUTO: AskedPlan = "auto"
Side = Literal["rows", "columns"]  # what the ranks have cut
# Plans in which one rank computes a matrix for all ranks.
BY_OWNERS: tuple[Plan, ...] = ("owner", "replicated")
# Passes of Cholesky-QR for the basis Q; between power iterations one pass is enough.
_FINAL_PASSES = 2
_OPS = ops_of(torch.device("cpu"))


@dataclass(frozen=True)
class SharedMatrices:
    """``count`` matrices of m×n, and the N ranks that share the work on them."""

    m: int
    n: int
    count: int
    ranks: int
    cut: Side = "rows"
    """Which side of the matrices the ranks have cut."""
    copies: int = 1
    """How many copies of the matrices the ranks hold; a divisor of N."""

    def __post_init__(self) -> None:
        if self.ranks % self.copies:
            raise ValueError(
                f"copies={self.copies} with ranks={self.ranks}: expected a divisor of the ranks, as "
                "every copy lies on as many"
            )

    def shards(self, plan: Plan) -> int:
        """S, the number of ranks that hold the parts of one copy."""
        return 1 if plan == "replicated" else self.ranks // self.copies

    def partners(self, plan: Plan) -> int:
        """The number of ranks that exchange anything in a step."""
        return self.shards(plan) if plan == "gather" else self.ranks


def check_plan(plan: object) -> None:
    """Raise for a plan that is neither in :data:`PLANS` nor ``"auto"``."""
    if plan != AUTO and plan not in PLANS:
        raise ValueError(f"plan={plan!r}: expected one of {', '.join((AUTO, *PLANS))}")


def bytes_received(plan: Plan, its: SharedMatrices, polar: PolarMap, *, itemsize: int = 2) -> float:
    """Bytes that a rank receives in one step of the matrices.

    Args:
        plan: one of :data:`PLANS`.
        its: the matrices, and the ranks that share them.
        polar: the map.
        itemsize: bytes of a number of M and T on the way: 2 on a GPU, where a step rounds to bfloat16
            anyway, 4 on a CPU.
    """
    m, n, count, shards, ranks = its.m, its.n, its.count, its.shards(plan), its.partners(plan)
    if ranks == 1 or plan == "local":
        return 0.0
    polar = polar.on(m, n, torch.device("cpu"))
    others = (ranks - 1) / ranks
    if plan == "gather":
        return count * others * m * n * itemsize
    width, carried = factor_width(polar), _carried(polar, m, n)
    if plan == "replicated":
        return count * others * itemsize * (min(m * n, (width or m * n) * (m + n)) + carried)
    rows, columns = (m / shards, n) if its.cut == "rows" else (m, n / shards)
    there = (shards - 1) / shards * (m * n + carried) / ranks
    back = min(rows * columns, (width or m * n) * (rows + columns)) + carried / shards
    return count * itemsize * (there + others * back)


def flops_per_rank(plan: Plan, its: SharedMatrices, polar: PolarMap, *, step: int = 1) -> float:
    """FLOPs of the products that the busiest rank runs in one step; with ``"gather"`` each runs all."""
    m, n, count, ranks = its.m, its.n, its.count, its.partners(plan)
    polar = polar.on(m, n, torch.device("cpu"))
    one = product_flops(polar, m, n, step=step)
    if plan == "gather" or ranks == 1:
        return float(count * one)
    busiest = -(-count // ranks)
    width = factor_width(polar)
    if plan in BY_OWNERS and width is not None:
        lift = flops.matmul(m, width, n)
        shared = lift * (1 if plan == "replicated" else 1 / its.shards(plan))
        return busiest * (one - lift) + count * shared
    return float(busiest * one)


def whole_flops(m: int, n: int, count: int, polar: PolarMap, step: int = 1) -> float:
    """FLOPs of the products of one process that has all matrices."""
    return flops_per_rank("gather", SharedMatrices(m, n, count, ranks=1), polar, step=step)


def factor_width(polar: PolarMap) -> int | None:
    """ℓ of a map whose T is two factors; ``None`` where T is dense."""
    return polar.width if isinstance(polar, LowRank) else None


def product_flops(polar: PolarMap, m: int, n: int, step: int = 1) -> int:
    """FLOPs of the matrix products of one call on a CPU in float32, two for each multiply-add.

    Factorizations are not counted, as ``torch.utils.flop_counter`` does not count them.
    """
    polar = polar.on(m, n, torch.device("cpu"))
    if isinstance(polar, NewtonSchulz):
        return polar.product_flops(m, n)
    if not isinstance(polar, LowRank):
        return polar.flops(m, n)
    d0, d1, ell = min(m, n), max(m, n), polar.width
    product = flops.matmul(d0, ell, d1)
    count = _products(polar, step)
    bases = sum(
        _square(_OPS, ell, d0 if on_short else d1, _FINAL_PASSES if last else 1)
        for on_short, last in _bases(count)
    )
    inner = polar.inner
    if not isinstance(inner, NewtonSchulz):
        return (count + 2) * product + bases + product_flops(inner, ell, d1)
    lifted = _inner_flops(inner, ell, d1)
    if not isinstance(polar.finder, Warm) and inner.uses_gram(ell, d1):
        # A factored T multiplies Q by W, and not W by B.
        lifted += flops.matmul(d0, ell, ell) - flops.matmul(ell, ell, d1)
    return (count + 2) * product + bases + lifted


def _inner_flops(inner: NewtonSchulz, ell: int, n: int) -> int:
    """The inner map of an ℓ×n matrix; in the Gram form without a restart before the last step."""
    if not inner.uses_gram(ell, n) or inner.delta != "frobenius":
        return inner.product_flops(ell, n)
    return _small_flops(inner, ell) + _square(_OPS, ell, n, 1) + flops.matmul(ell, ell, n)


def _small_flops(inner: NewtonSchulz, ell: int) -> int:
    """W from a Gram matrix: Horner's rule in every step, and W ← PW, G ← PGP in all but the last."""
    polynomials = inner.polynomials
    powers = sum(len(polynomial) - 2 for polynomial in polynomials)
    return (powers + 3 * (len(polynomials) - 1)) * _square(_OPS, ell, ell, 1)


def _bases(count: int) -> list[tuple[bool, bool]]:
    """For each of ``count`` products: whether it ends on the short side, and whether it is the last.

    >>> _bases(3)
    [(True, False), (False, False), (True, True)]
    """
    return [((count - i) % 2 == 1, i == count - 1) for i in range(count)]


def _products(polar: LowRank, step: int) -> int:
    """Products with M or its transpose that make the basis of ``step``, the sketch included."""
    finder = polar.finder
    if isinstance(finder, Warm):
        return 1 if step > 0 else flops.power_products(finder.power) + 1
    fresh = finder.fresh_sketch
    return 1 if fresh is None else flops.power_products(fresh.power) + 1


def _square(ops: Products, ell: int, long: int, passes: int) -> int:
    """Gram matrices of ℓ columns of length ``long``."""
    return passes * ops.symmetric_flops(ell, long, torch.float32)


def _carried(polar: PolarMap, m: int, n: int) -> int:
    """Numbers that a map carries from step to step for a matrix, without those of a transform."""
    if isinstance(polar, LowRank):
        return polar.width * max(m, n) if isinstance(polar.finder, Warm) else 0
    if isinstance(polar, Containing):
        return _carried(polar.inside(m, n, torch.device("cpu")), m, n)
    return 0
