"""Which plan the matrices of a parameter take, by the bytes and FLOPs of the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polarstep.maps import PolarMap
from polarstep.matrix import MatrixView
from polarstep.ops import ops_of
from polarstep.ranks import ledger
from polarstep.ranks.layout import Layout
from polarstep.ranks.ledger import (
    AUTO,
    AskedPlan,
    Plan,
    SharedMatrices,
    Side,
    check_plan,
)
from polarstep.state import momentum_dtype
from polarstep.transforms import Transform, followed

__all__ = ["Choice", "asked_of", "chosen_plan", "wire_dtype"]

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
    side = _cut_side(layout, view)
    maps = [followed(polar.on(m, n, p.device), transform) for _, m, n in view.shapes]
    size = wire_dtype(polar, p.dtype, p.device).itemsize
    copies = len(layout.ranks) // len(layout.peers)
    costs: dict[Plan, tuple[float, float]] = {}
    for plan in possible:
        nbytes = flops = 0.0
        for (count, m, n), its in zip(view.shapes, maps, strict=True):
            shared = SharedMatrices(m, n, count, len(layout.ranks), side, copies)
            itemsize = size if plan != "gather" else p.dtype.itemsize
            nbytes += ledger.bytes_received(plan, shared, its, itemsize=itemsize)
            # The owners of all parameters share the work, so a share need not be a whole matrix.
            flops += ledger.whole_flops(m, n, count, its) / _dividing(plan, layout)
        costs[plan] = (nbytes, flops)
    return costs


def _dividing(plan: Plan, layout: Layout) -> int:
    """How many ranks divide the FLOPs of a matrix, or of a stack of experts, among themselves."""
    if plan == "gather" or (plan == "local" and not layout.cut):
        return 1
    return len(layout.peers) if plan == "local" else len(layout.ranks)


def _cut_side(layout: Layout, view: MatrixView) -> Side:
    """Which side of its matrices the ranks have cut; rows, if they have cut both or neither."""
    pieces = layout.pieces(view)
    if pieces is None or view.is_cut:
        return "rows"
    only_columns = all(
        (piece.batch, piece.rows) == ((0, view.batch), (0, view.rows)) for piece in pieces
    ) and any(piece.cols != (0, view.cols) for piece in pieces)
    return "columns" if only_columns else "rows"


def wire_dtype(polar: PolarMap, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of M and T on the way: bfloat16 where the step rounds to it anyway."""
    dtype = momentum_dtype(dtype)
    fast = ops_of(device).dtype(dtype)
    return fast if polar.rounds_input and fast.itemsize < dtype.itemsize else dtype


def asked_of(group: dict[str, Any], plan: AskedPlan) -> AskedPlan:
    """The plan that a group asks for, or ``plan``, the optimizer's."""
    asked: AskedPlan = group.get("plan") or plan
    check_plan(asked)
    return asked
