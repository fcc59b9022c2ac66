"""The plans by which ranks share a step: what each costs, and which one a parameter takes.

A plan says which rank computes a matrix, and so what ranks exchange. For matrices of m×n on N ranks, a
rank receives for each matrix, on average,

    plan         computed by                 of M                    of T
    local        the rank that has it        nothing                 nothing
    owner        one rank                    (S − 1)/S·mn/N          (N − 1)/N·mn/S
    replicated   one rank; all have M        nothing                 (N − 1)/N·mn
    gather       every rank                  (N − 1)/N·mn            nothing

The ranks may hold several copies of the matrices (HSDP). Then S = N/copies ranks hold the parts of a
copy: an owner gets M from its own copy, and ``gather`` stays within a copy, so that N is S there. A part
of T may come as its two factors, ℓ(rows + columns) numbers. A map that carries a warm sketch sends
ℓ·max(m, n) more numbers of M and of T.

All ranks receive the mean if shards have one size and N divides the number of matrices. FLOPs are those
of :mod:`polarstep.flops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from polarstep import flops
from polarstep.maps import LowRank, PolarMap, Warm
from polarstep.maps.base import Containing
from polarstep.matrix import MatrixView
from polarstep.ranks.layout import Layout
from polarstep.ranks.parts import factor_width, wire_dtype
from polarstep.transforms import Transform, followed

__all__ = [
    "AUTO",
    "BY_OWNERS",
    "FLOPS_PER_BYTE",
    "PLANS",
    "AskedPlan",
    "Choice",
    "Plan",
    "SharedMatrices",
    "Side",
    "bytes_received",
    "check_plan",
    "chosen_plan",
    "flops_per_rank",
]

Plan = Literal["local", "owner", "replicated", "gather"]
PLANS: tuple[Plan, ...] = get_args(Plan)
AskedPlan = Literal["auto"] | Plan  # what a user may ask for
AUTO: AskedPlan = "auto"
# Plans in which one rank computes a matrix for all ranks.
BY_OWNERS: tuple[Plan, ...] = ("owner", "replicated")
Side = Literal["rows", "columns"]  # what the ranks have cut
# FLOPs that a device runs in the time in which a rank receives a byte: about 500 TFLOP/s in bfloat16
# and 400 GB/s between the GPUs of a node, and 50 GFLOP/s and 2 GB/s between processes on CPUs.
FLOPS_PER_BYTE = {"cuda": 1250.0, "cpu": 25.0}
_CPU = torch.device("cpu")


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


def bytes_received(plan: Plan, its: SharedMatrices, polar: PolarMap, *, itemsize: int = 2) -> float:
    """Bytes that a rank receives in one step of the matrices.

    Args:
        plan: one of :data:`PLANS`.
        its: the matrices, and the ranks that share them.
        polar: the map.
        itemsize: bytes of a number of M and T on the way: 2 on a GPU, where a step rounds to bfloat16
            anyway, 4 on a CPU.
    """
    m, n, S, N = its.m, its.n, its.shards(plan), its.partners(plan)
    if N == 1 or plan == "local":
        return 0.0
    others = (N - 1) / N
    if plan == "gather":
        return its.count * others * m * n * itemsize
    polar = polar.on(m, n, _CPU)
    carried = _carried(polar, m, n)
    rows, columns = (m / S, n) if its.cut == "rows" else (m, n / S)
    width = factor_width(polar) or m * n
    there = (S - 1) / S * (m * n + carried) / N
    back = min(rows * columns, width * (rows + columns)) + carried / S
    return its.count * itemsize * (there + others * back)


def flops_per_rank(plan: Plan, its: SharedMatrices, polar: PolarMap) -> float:
    """FLOPs that the busiest rank runs in one step."""
    m, n, S = its.m, its.n, its.shards(plan)
    polar = polar.on(m, n, _CPU)
    one, width = polar.flops(m, n), factor_width(polar)
    if plan not in BY_OWNERS:
        dividing = S if plan == "local" else 1
        return float(-(-its.count // dividing) * one)
    # Each rank multiplies the two factors of its part of T.
    lift = 0 if width is None else flops.matmul(m, width, n)
    return -(-its.count // its.ranks) * (one - lift) + its.count * lift / S


def _carried(polar: PolarMap, m: int, n: int) -> int:
    """Numbers that a map carries from step to step for a matrix, without those of a transform."""
    if isinstance(polar, LowRank):
        return polar.width * max(m, n) if isinstance(polar.finder, Warm) else 0
    if isinstance(polar, Containing):
        return _carried(polar.inside(m, n, _CPU), m, n)
    return 0


@dataclass(frozen=True)
class Choice:
    """A plan for the matrices of one parameter, and what it costs; ``str`` is for the routing table."""

    plan: Plan
    ranks: int
    nbytes: float  # that a rank receives for this parameter in a step
    why: str

    def __str__(self) -> str:
        if self.plan == "local":
            return f"local on {self.ranks} ranks" if self.ranks > 1 else "local"
        return f"{self.plan} on {self.ranks} ranks, {self.nbytes / 2**20:.3g} MiB: {self.why}"


def check_plan(plan: object) -> None:
    """Raise for a plan that is neither in :data:`PLANS` nor ``"auto"``."""
    if plan != AUTO and plan not in PLANS:
        raise ValueError(f"plan={plan!r}: expected one of {', '.join((AUTO, *PLANS))}")


def chosen_plan(
    p: Tensor,
    layout: Layout,
    view: MatrixView,
    polar: PolarMap,
    asked: AskedPlan = AUTO,
    transform: Transform | None = None,
) -> Choice:
    """The plan for the matrices of ``p``: ``asked`` where it is possible, else the cheapest.

    ``polar`` is the map of the group, before it is resolved for a shape, and ``transform`` is the
    group's change of T, which needs whole matrices.
    """
    costs = _costs(p, layout, view, polar, transform)
    if asked in BY_OWNERS:  # one of the two is possible: parts have owners, and copies have owners
        asked = next((plan for plan in BY_OWNERS if plan in costs), asked)
    price = {plan: cost for plan, (_, cost) in costs.items()}
    best = min(price, key=price.__getitem__)
    if asked in costs:
        best, why = asked, "as asked"
    else:
        others = [f"{plan} {costs[plan][0] / 2**20:.3g} MiB" for plan in costs if plan != best]
        why = "the cheapest" + (f" (beside {', '.join(others)})" if others else "")
        if asked != AUTO:
            why += f"; {asked} is not possible here"
    return Choice(best, len(layout.ranks), costs[best][0], why)


def _costs(
    p: Tensor, layout: Layout, view: MatrixView, polar: PolarMap, transform: Transform | None
) -> dict[Plan, tuple[float, float]]:
    """For every plan that is possible, the bytes that a rank receives, and a price in FLOPs."""
    ranks, shards = len(layout.ranks), len(layout.peers)
    if ranks == 1:
        return {"local": (0.0, 0.0)}
    # How many ranks divide the work on a matrix, or on a stack of experts, among themselves. The owners
    # of all parameters share the work, so a share need not be a whole matrix.
    possible: dict[Plan, int] = {"gather": 1}
    if layout.holds_whole_matrices(view):
        possible = {"local": shards if layout.cut else 1}
    if layout.pieces(view) is not None:
        possible["owner" if layout.cut else "replicated"] = ranks
    size = wire_dtype(polar, p.dtype, p.device).itemsize
    flops_per_byte = FLOPS_PER_BYTE.get(p.device.type, FLOPS_PER_BYTE["cuda"])
    costs: dict[Plan, tuple[float, float]] = {}
    for plan, dividing in possible.items():
        nbytes = work = 0.0
        for count, m, n in view.shapes:
            its = followed(polar.on(m, n, p.device), transform)
            shared = SharedMatrices(m, n, count, ranks, _cut_side(layout, view), ranks // shards)
            itemsize = p.dtype.itemsize if plan == "gather" else size
            nbytes += bytes_received(plan, shared, its, itemsize=itemsize)
            work += count * its.flops(m, n)
        costs[plan] = nbytes, work / dividing + flops_per_byte * nbytes
    return costs


def _cut_side(layout: Layout, view: MatrixView) -> Side:
    """Which side of its matrices the ranks have cut; rows, if they have cut both or neither."""
    pieces = layout.pieces(view)
    if pieces is None or view.is_cut:
        return "rows"
    has_rows = ((0, view.batch), (0, view.rows))
    only_columns = all((piece.batch, piece.rows) == has_rows for piece in pieces)
    return "columns" if only_columns and layout.cut else "rows"
