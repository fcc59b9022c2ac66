"""Which plan the matrices of a parameter take, by the bytes and FLOPs of the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polarstep import products
from polarstep.distributed import carries, ledger
from polarstep.distributed.layout import Layout, is_sharded
from polarstep.distributed.ledger import (
    AUTO,
    AskedPlan,
    Plan,
    SharedMatrices,
    Side,
    check_plan,
)
from polarstep.matrix import MatrixView
from polarstep.optim.stepping.collect import momentum_dtype
from polarstep.optim.transforms import Transform, followed
from polarstep.polar import LowRank, PolarMap, Warm
from polarstep.polar.orthonormal import resolved

__all__ = ["Choice", "asked_of", "chosen_plan", "cut_side", "wire_dtype"]

# FLOPs that a device runs in the time in which a rank receives a byte: about 500 TFLOP/s in bfloat16
# and 400 GB/s between the GPUs of a node, and 50 GFLOP/s and 2 GB/s between processes on CPUs.
FLOPS_PER_BYTE = {"cuda": 1250.0, "cpu": 25.0}


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
    if asked == "replicated" and "owner" in costs:
        asked = "owner"
    if asked == "owner" and "replicated" in costs:
        asked = "replicated"
    cost = FLOPS_PER_BYTE.get(p.device.type, FLOPS_PER_BYTE["cuda"])

    def price(plan: Plan) -> float:
        nbytes, flops = costs[plan]
        return flops + cost * nbytes

    if asked in costs:
        return Choice(asked, len(layout.ranks), costs[asked][0], "as asked")
    best = min(costs, key=price)
    others = [f"{plan} {costs[plan][0] / 2**20:.3g} MiB" for plan in costs if plan != best]
    why = "the cheapest" + (f" (beside {', '.join(others)})" if others else "")
    if asked != AUTO:
        why += f"; {asked} is not possible here"
    return Choice(best, len(layout.ranks), costs[best][0], why)


def _costs(
    p: Tensor, layout: Layout, view: MatrixView, polar: PolarMap, transform: Transform | None
) -> dict[Plan, tuple[float, float]]:
    """Bytes and FLOPs per rank of every plan that is possible."""
    if len(layout.ranks) == 1:
        return {"local": (0.0, 0.0)}
    pieces, is_whole = layout.pieces(view), layout.holds_whole_matrices(view)
    possible: list[Plan] = ["local"] if is_whole else ["gather"]
    if pieces is not None:
        possible.append("replicated" if layout.cut == () else "owner")
    side = cut_side(layout, view)
    maps = [followed(polar.on(m, n, p.device), transform) for _, m, n in view.shapes]
    if side is not None and _suits_shards(maps[0], layout, view, side, p):
        possible.append("sharded")
    size = wire_dtype(polar, p.dtype, p.device).itemsize
    total = max(p.dtype.itemsize, 4)
    copies = len(layout.ranks) // len(layout.peers)
    costs: dict[Plan, tuple[float, float]] = {}
    for plan in possible:
        nbytes = flops = 0.0
        for (count, m, n), its in zip(view.shapes, maps, strict=True):
            shared = SharedMatrices(m, n, count, len(layout.ranks), side or "rows", copies)
            nbytes += ledger.bytes_received(
                plan,
                shared,
                its,
                itemsize=size if plan != "gather" else p.dtype.itemsize,
                sum_itemsize=total,
            )
            # The owners of all parameters share the work, so a share need not be a whole matrix.
            flops += ledger.whole_flops(m, n, count, its) / _dividing(plan, layout)
        costs[plan] = (nbytes, flops)
    return costs


def _dividing(plan: Plan, layout: Layout) -> int:
    """How many ranks divide the FLOPs of a matrix, or of a stack of experts, among themselves."""
    if plan == "gather" or (plan == "local" and not layout.cut):
        return 1
    return len(layout.peers) if plan in ("sharded", "local") else len(layout.ranks)


def cut_side(layout: Layout, view: MatrixView) -> Side | None:
    """Which side of its matrices the ranks have cut; ``None`` if both or neither, or with ``splits``."""
    pieces = layout.pieces(view)
    if pieces is None or view.is_cut:
        return None
    whole = ((0, view.batch), (0, view.rows), (0, view.cols))
    cut = [
        any(span != size for span in spans)
        for spans, size in zip(
            zip(*((piece.batch, piece.rows, piece.cols) for piece in pieces), strict=True),
            whole,
            strict=True,
        )
    ]
    if cut == [False, True, False]:
        return "rows"
    return "columns" if cut == [False, False, True] else None


def _suits_shards(polar: PolarMap, layout: Layout, view: MatrixView, side: Side, p: Tensor) -> bool:
    """Whether Algorithm 1 runs on the shards of ``p``, with the result of one process."""
    if not is_sharded(p) or ledger.sharded_reason(polar) is not None:
        return False
    assert isinstance(polar, LowRank)
    if polar.carries and (layout.strided or not _cuts_carries(layout, view, side, p)):
        return False  # DTensor has no placement for a carry with such shards
    # Warm starts depend on the basis, and ``orth="products"`` makes another basis than Cholesky-QR.
    by_products = resolved(polar.finder.orth, p.dtype, p.device) == "products"
    return not (by_products and isinstance(polar.finder, Warm) and p.device.type == "cpu")


def _cuts_carries(layout: Layout, view: MatrixView, side: Side, p: Tensor) -> bool:
    """Whether a carry that lies along the cut side is cut where the matrix is.

    Six input channels of 3×3 filters on four ranks are 18, 18, 18 and 0 columns; a carry of 54 columns
    would be cut as 14, 14, 14 and 12.
    """
    pieces = layout.pieces(view)
    assert pieces is not None
    cut = [piece.rows if side == "rows" else piece.cols for piece in pieces]
    length = view.rows if side == "rows" else view.cols
    return cut == carries.spans(p, layout, 1, (1, length))


def wire_dtype(polar: PolarMap, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of M and T on the way: bfloat16 where the step rounds to it anyway."""
    dtype = momentum_dtype(dtype)
    fast = products.of(device).dtype(dtype)
    return fast if polar.rounds_input and fast.itemsize < dtype.itemsize else dtype


def asked_of(group: dict[str, Any], plan: AskedPlan) -> AskedPlan:
    """The plan that a group asks for, or ``plan``, the optimizer's."""
    asked: AskedPlan = group.get("plan") or plan
    check_plan(asked)
    return asked
