"""What a plan costs: bytes that a rank receives and FLOPs that it runs, as formulas.

Everything here is for one step of ``count`` matrices of m×n on N ranks, and needs no process group.
Bytes are the mean over the ranks; all ranks have the mean if shards have one size and N divides the
number of matrices. An exchange among N ranks is counted as a ring: for a sum of x numbers that all ranks
get, a rank receives 2(N − 1)/N·x numbers, and (N − 1)/N·x for a gathering. The ranks may hold several
copies of the matrices (HSDP). Then S = N/copies ranks hold the parts of a copy. ``sharded`` and
``gather`` stay within a copy, so that N is S there, and owners are taken from all N ranks.

    local        nothing
    gather       M:                     (N − 1)/N·mn
    owner        M there:               (S − 1)/S·mn/N            from the owner's own copy
                 T back:                (N − 1)/N·mn/S            or the two factors of T's part
    replicated   T to all:              (N − 1)/N·mn              or its two factors, ℓ(m + n)
                 a warm sketch:         ℓ·max(m, n) more numbers of M and of T, with an owner too
    sharded      sums of ℓ columns:     2(N − 1)/N·ℓ·d for every product that is summed over the shards,
                                        with d the side that is not cut, and ℓ(ℓ + 1)/2 numbers for
                                        every Gram matrix

So ``sharded`` receives less than ``owner`` where (1 + h)·ℓ < d_sharded/N at equal precision. FLOPs are
those of matrix products, as ``torch.utils.flop_counter`` counts them on a CPU in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from polarstep import flops, products
from polarstep.polar import Deflated, LowRank, NewtonSchulz, PolarMap, Warm
from polarstep.polar.containing import Containing
from polarstep.polar.rest_norm import vectors_shape
from polarstep.sketch import Gaussian

__all__ = [
    "AUTO",
    "BY_OWNERS",
    "FINAL_PASSES",
    "PLANS",
    "WITHIN_A_COPY",
    "AskedPlan",
    "Plan",
    "SharedMatrices",
    "Side",
    "bytes_received",
    "check_plan",
    "factor_width",
    "flops_per_rank",
    "product_flops",
    "sharded_reason",
    "whole_flops",
]

Plan = Literal["local", "sharded", "owner", "replicated", "gather"]
PLANS: tuple[Plan, ...] = get_args(Plan)
AskedPlan = Literal["auto"] | Plan  # what a user may ask for
AUTO: AskedPlan = "auto"
Side = Literal["rows", "columns"]  # what the ranks have cut
# Plans that stay among the ranks of one copy. The other plans use the ranks of all copies.
WITHIN_A_COPY: tuple[Plan, ...] = ("sharded", "gather")
# Plans in which one rank computes a matrix for all ranks.
BY_OWNERS: tuple[Plan, ...] = ("owner", "replicated")
# Passes of Cholesky-QR for the basis Q; between power iterations one pass is enough.
FINAL_PASSES = 2
_OPS = products.of(torch.device("cpu"))


@dataclass(frozen=True)
class SharedMatrices:
    """``count`` matrices of m×n, and the N ranks that share the work on them."""

    m: int
    n: int
    count: int
    ranks: int
    sharded: Side = "rows"
    """Which side of the matrices the ranks have cut."""
    copies: int = 1
    """How many copies of the matrices the ranks hold; a divisor of N."""

    def __post_init__(self) -> None:
        if self.ranks % self.copies:
            raise ValueError(
                f"copies={self.copies} with ranks={self.ranks}: expected a divisor of the ranks, as "
                "every copy lies on as many"
            )

    @property
    def cut_side(self) -> int:
        """The length of the side that the ranks have cut."""
        return self.m if self.sharded == "rows" else self.n

    @property
    def whole_side(self) -> int:
        """The length of the other side."""
        return self.n if self.sharded == "rows" else self.m

    def shards(self, plan: Plan) -> int:
        """S, the number of ranks that hold the parts of one copy."""
        return 1 if plan == "replicated" else self.ranks // self.copies

    def partners(self, plan: Plan) -> int:
        """The number of ranks that exchange anything in a step."""
        return self.shards(plan) if plan in WITHIN_A_COPY else self.ranks


@dataclass(frozen=True)
class _Chain:
    """The products of a sketched map on shards, in the order of Algorithm 1."""

    summed: int  # products whose result is summed over the ranks: the other side × ℓ numbers
    rough: int  # bases of sharded columns between two products: one pass each
    final: int  # passes for Q itself, where its rows are sharded
    small: int  # Gram matrices for the inner map


def check_plan(plan: object) -> None:
    """Raise for a plan that is neither in :data:`PLANS` nor ``"auto"``."""
    if plan != AUTO and plan not in PLANS:
        raise ValueError(f"plan={plan!r}: expected one of {', '.join((AUTO, *PLANS))}")


def bytes_received(
    plan: Plan,
    its: SharedMatrices,
    polar: PolarMap,
    *,
    itemsize: int = 2,
    sum_itemsize: int = 4,
    step: int = 1,
    by_norm: bool = False,
) -> float:
    """Bytes that a rank receives in one step of the matrices.

    Args:
        plan: one of :data:`PLANS`.
        its: the matrices, and the ranks that share them.
        polar: the map.
        itemsize: bytes of a number of M and T on the way: 2 on a GPU, where a step rounds to bfloat16
            anyway, 4 on a CPU.
        sum_itemsize: bytes of a number of a sum.
        step: the step, as a warm sketch takes more products at the first one.
        by_norm: whether steps are scaled by ‖T‖_F, as with ``lr_scale="rms"``. Ranks that hold parts of
            the long side then receive one more number for each matrix, ‖T‖²_F.
    """
    m, n, count, shards, ranks = its.m, its.n, its.count, its.shards(plan), its.partners(plan)
    if ranks == 1 or plan == "local":
        return 0.0
    polar = polar.on(m, n, torch.device("cpu"))
    others = (ranks - 1) / ranks
    if plan == "gather":
        return count * others * m * n * itemsize
    if plan == "sharded":
        each = _sharded_bytes(its, polar, itemsize, sum_itemsize, step, by_norm)
        return count * others * each
    width, carried = factor_width(polar), _carried(polar, m, n)
    if plan == "replicated":
        return count * others * itemsize * (min(m * n, (width or m * n) * (m + n)) + carried)
    rows, columns = (m / shards, n) if its.sharded == "rows" else (m, n / shards)
    there = (shards - 1) / shards * (m * n + carried) / ranks
    back = min(rows * columns, (width or m * n) * (rows + columns)) + carried / shards
    return count * itemsize * (there + others * back)


def _sharded_bytes(
    its: SharedMatrices,
    polar: PolarMap,
    itemsize: int,
    sum_itemsize: int,
    step: int,
    by_norm: bool,
) -> int:
    """Bytes of what all ranks exchange of one matrix by Algorithm 1 on shards."""
    reason = sharded_reason(polar)
    if reason is not None:
        raise ValueError(f"plan='sharded' with {polar!r}: {reason}; expected another plan")
    assert isinstance(polar, LowRank)
    chain, ell = _chain(polar, its, step), polar.width
    triangle = ell * (ell + 1) // 2
    passes = chain.rough + chain.final
    summed = chain.summed * ell * its.whole_side * (sum_itemsize + itemsize)  # a sum, then a basis
    triangles = 2 * triangle * (passes + chain.small) + passes  # a pass has a flag for each matrix
    scale = 2 + by_norm * chain.small  # the largest entry of each matrix, and its ‖T‖²_F
    start = 0  # a warm start, of which each rank holds a part
    if isinstance(polar.finder, Warm) and step > 0 and not chain.small:
        start = ell * its.whole_side * itemsize
    return summed + start + (triangles + scale) * sum_itemsize


def flops_per_rank(plan: Plan, its: SharedMatrices, polar: PolarMap, *, step: int = 1) -> float:
    """FLOPs of the products that the busiest rank runs in one step; with ``"gather"`` each runs all."""
    m, n, count, ranks = its.m, its.n, its.count, its.partners(plan)
    polar = polar.on(m, n, torch.device("cpu"))
    one = product_flops(polar, m, n, step=step)
    if plan == "gather" or ranks == 1:
        return float(count * one)
    busiest = -(-count // ranks)
    if plan == "sharded":
        return _sharded_flops(polar, its, step)
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


def sharded_reason(polar: PolarMap) -> str | None:
    """Why Algorithm 1 on shards does not run ``polar``; ``None`` where it does."""
    if not isinstance(polar, LowRank):
        return "not a low-rank map"
    fresh = polar.finder.fresh_sketch
    if fresh is None:
        return f"no rule for {type(polar.finder).__name__} on shards"
    if not isinstance(fresh.sketch, Gaussian):
        return f"{type(fresh.sketch).__name__} needs whole columns"
    inner = polar.inner
    if not isinstance(inner, NewtonSchulz) or inner.dtype is not None or not inner.ignores_scale:
        return "the inner map has no Gram form"
    return None


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
        _square(_OPS, ell, d0 if on_short else d1, FINAL_PASSES if last else 1)
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


def _sharded_flops(polar: PolarMap, its: SharedMatrices, step: int) -> float:
    """FLOPs of the busiest rank: 1/N of every large product, and the small work of its own matrices.

    The inner map of a matrix and its bases of summed columns are not divided: one rank computes them.
    """
    assert isinstance(polar, LowRank)
    d0, d1, ell = min(its.m, its.n), max(its.m, its.n), polar.width
    ranks = its.partners("sharded")
    chain, busiest = _chain(polar, its, step), -(-its.count // ranks)
    each = (_products(polar, step) + 2) * flops.matmul(d0, ell, d1)
    passes = chain.rough + chain.final
    each += passes * 2 * flops.matmul(its.cut_side, ell, ell)
    inner = polar.inner
    assert isinstance(inner, NewtonSchulz)
    small = _inner_flops(inner, ell, d1)
    basis = _square(_OPS, ell, its.whole_side, 1)
    if chain.small:  # B is sharded: its Gram matrix and W·B are shared work
        lift = flops.matmul(ell, d1, ell) + flops.matmul(ell, ell, d1)
        small, each = _small_flops(inner, ell), each + lift
        orths = max(0, chain.summed - 1) * basis + (chain.summed > 0) * FINAL_PASSES * basis
    else:
        orths = (chain.summed - 1) * basis
    return its.count * each / ranks + busiest * (small + orths)


def _chain(polar: LowRank, its: SharedMatrices, step: int) -> _Chain:
    """How many results of each kind are exchanged. Products alternate sides, the short side last."""
    short_cut = (its.sharded == "rows") == (its.m <= its.n)
    ends = _bases(_products(polar, step))
    on_short, on_long = (sum(short == side for short, _ in ends) for side in (True, False))
    if short_cut:
        final = FINAL_PASSES if on_short else 0
        return _Chain(summed=on_long + 1, rough=max(0, on_short - 1), final=final, small=0)
    return _Chain(summed=on_short, rough=on_long, final=0, small=1)


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


def _square(ops: products.Products, ell: int, long: int, passes: int) -> int:
    """Gram matrices of ℓ columns of length ``long``."""
    return passes * ops.symmetric_flops(ell, long, torch.float32)


def _carried(polar: PolarMap, m: int, n: int) -> int:
    """Numbers that a map carries from step to step for a matrix, without those of a transform."""
    if isinstance(polar, LowRank):
        return polar.width * max(m, n) if isinstance(polar.finder, Warm) else 0
    if isinstance(polar, Deflated) and polar.rest is None:
        return _carried(polar.head, m, n) + math.prod(vectors_shape(m, n))
    if isinstance(polar, Containing):
        return _carried(polar.inside(m, n, torch.device("cpu")), m, n)
    return 0
