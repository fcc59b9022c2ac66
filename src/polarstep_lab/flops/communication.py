"""What a step of Muon costs each of N ranks, plan by plan: bytes received and FLOPs.

The formulas are those of :mod:`polarstep.ranks.plans`. This module says how a workload lies on
a mesh, which plans the mesh allows, and which plan each shape takes. Costs are those on GPUs: M and T
are sent in bfloat16; today's ``gather`` sends M in float32. Only Muon's matrices are counted, and only
the optimizer's own step: the gradients are exchanged before it, by DDP or FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from polarstep import LowRank, NewtonSchulz
from polarstep.maps import PolarMap
from polarstep.ranks.plans import (
    FLOPS_PER_BYTE,
    Plan,
    SharedMatrices,
    Side,
    bytes_received,
    flops_per_rank,
)
from polarstep_lab.flops.workload import CIFAR10, EIGHT_B, NANOGPT, Workload

__all__ = [
    "MESHES",
    "Mesh",
    "MeshName",
    "RankCost",
    "Share",
    "Stored",
    "costs",
    "maps_of",
    "mesh_of",
    "shares",
]

MeshName = Literal["ddp", "fsdp", "hsdp", "tp"]
MESHES: tuple[MeshName, ...] = ("ddp", "fsdp", "hsdp", "tp")

NODE = 8
"""GPUs of a node: with hsdp, parameters are sharded within a node and copied to the others."""

WIRE, STATE = 2, 4
"""Bytes of a number of M or T on the way, and of a parameter."""


@dataclass(frozen=True)
class Stored:
    """Matrices as a model stores them, rows × columns, and the side that tensor parallelism cuts."""

    m: int
    n: int
    count: int
    by_tensor: Side = "rows"


_STORED: Mapping[str, tuple[Stored, ...]] = {
    # Queries, keys, values and the output projection; the MLP's two matrices, the spare pair included.
    NANOGPT.name: (
        Stored(768, 768, 30),
        Stored(768, 768, 10, "columns"),
        Stored(3072, 768, 12),
        Stored(768, 3072, 12, "columns"),
    ),
    CIFAR10.name: tuple(Stored(m, n, count) for (m, n), count in CIFAR10.matrices),
    # Queries; the output projection; keys and values; gate and up; down.
    EIGHT_B.name: (
        Stored(4096, 4096, 32),
        Stored(4096, 4096, 32, "columns"),
        Stored(1024, 4096, 64),
        Stored(14336, 4096, 64),
        Stored(4096, 14336, 32, "columns"),
    ),
}


@dataclass(frozen=True)
class Mesh:
    """``ranks`` ranks, of which ``shards`` have the parts of one copy of the parameters."""

    name: MeshName
    ranks: int
    shards: int

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that this mesh allows."""
        if self.ranks == 1:
            return ("local",)
        if self.shards == 1:
            return ("local", "replicated")
        return ("owner", "gather")


@dataclass(frozen=True)
class RankCost:
    """What a rank receives, and the FLOPs that the busiest rank runs, in one step."""

    nbytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: RankCost) -> RankCost:
        return RankCost(self.nbytes + other.nbytes, self.flops + other.flops)


@dataclass(frozen=True)
class Share:
    """Matrices of one shape: what each possible plan costs, and which plan they take."""

    matrices: Stored
    by_plan: Mapping[Plan, RankCost]
    chosen: Plan


def mesh_of(name: MeshName, ranks: int) -> Mesh:
    """The mesh of that name; ``hsdp`` shards over the greatest divisor of ``ranks`` up to 8."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: expected at least 1")
    within = next(k for k in range(min(NODE, ranks), 0, -1) if ranks % k == 0)
    shards = {"ddp": 1, "fsdp": ranks, "hsdp": within, "tp": ranks}
    return Mesh(name, ranks, shards[name])


def maps_of(workload: Workload) -> dict[str, PolarMap]:
    """The two maps of a workload: full space, and Algorithm 1 with its (s, p, h, q)."""
    inner = NewtonSchulz(workload.steps, "quintic")
    power = int(workload.power) if float(workload.power).is_integer() else workload.power
    low_rank = LowRank(workload.rank, workload.oversample, power, inner=inner, always_sketch=True)
    return {"full space": inner, f"low rank, ℓ = {workload.width}": low_rank}


def shares(workload: Workload, polar: PolarMap, mesh: Mesh) -> Iterator[Share]:
    """What each shape of ``workload`` costs on ``mesh``."""
    stored = _STORED.get(workload.name) or tuple(
        Stored(m, n, count) for (m, n), count in workload.matrices
    )
    for its in stored:
        by_plan = {plan: _cost(plan, its, polar, mesh) for plan in mesh.plans}
        yield Share(its, by_plan, min(by_plan, key=lambda plan: _price(plan, its, polar, mesh)))


def costs(workload: Workload, polar: PolarMap, mesh: Mesh) -> dict[str, RankCost]:
    """Cost of the whole step by plan, and of the ``"chosen"`` plans together."""
    found = list(shares(workload, polar, mesh))
    total: dict[str, RankCost] = {
        plan: sum((share.by_plan[plan] for share in found), RankCost()) for plan in mesh.plans
    }
    total["chosen"] = sum((share.by_plan[share.chosen] for share in found), RankCost())
    return total


def _cost(plan: Plan, its: Stored, polar: PolarMap, mesh: Mesh) -> RankCost:
    side: Side = its.by_tensor if mesh.name == "tp" else "rows"
    copies = mesh.ranks // mesh.shards
    shared = SharedMatrices(its.m, its.n, its.count, mesh.ranks, side, copies)
    size = STATE if plan == "gather" else WIRE
    nbytes = bytes_received(plan, shared, polar, itemsize=size)
    return RankCost(nbytes, flops_per_rank(plan, shared, polar))


def _price(plan: Plan, its: Stored, polar: PolarMap, mesh: Mesh) -> float:
    """What the optimizer compares: FLOPs of an even share, plus bytes in FLOPs of the same time."""
    whole = its.count * polar.flops(its.m, its.n)
    dividing = {"local": 1, "gather": 1}.get(plan, mesh.ranks)
    return whole / dividing + FLOPS_PER_BYTE["cuda"] * _cost(plan, its, polar, mesh).nbytes
