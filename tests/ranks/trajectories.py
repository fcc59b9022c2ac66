"""Train small networks in every way that ranks can share them, and compare with one process.

There is one network for each map. All of them train together, each in a group of one optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tests.own_parts import RULES, SignDescent
from torch import Tensor, nn

import polarstep as ps
from polarstep import rng
from polarstep.maps import Warm
from polarstep.ranks.plans import PLANS

__all__ = ["MAPS", "PLANS", "SIZES", "WAYS", "Networks", "cases", "main", "maps_of", "reference"]

STEPS = 3
BATCH = 48
# Rows: even, 9 (empty on the last of four ranks), 18 (uneven on four), 18 of a square matrix.
SIZES = (8, 32, 9, 18, 18)


def sketched(**options: Any) -> ps.LowRank:
    """A map of few inner steps: ranks share the work around them, and each takes them alone."""
    few = {"power": 0, "always_sketch": True, "inner": ps.NewtonSchulz(3, "quintic")}
    return ps.LowRank(4, 2, **(few | options))


MAPS: dict[str, dict[str, Any]] = {
    "full space": {"weight_decay": 0.1},
    "h=0": {"polar": sketched(), "nesterov": False},
    "h=½": {"polar": sketched(power=0.5)},
    "h=1": {"polar": sketched(power=1), "lr": torch.tensor(0.02)},
    "spectral": {"polar": sketched(inner=ps.NewtonSchulz(9, "cubic", "spectral"))},
    "Kaczmarz": {"polar": sketched(sketch=ps.Kaczmarz())},
    "warm": {"polar": sketched(sketch=Warm()), "nonfinite": "skip"},
    "deflated": {"polar": ps.Deflated(sketched(), ps.NewtonSchulz(2, "quintic"))},
    "by its norm": {
        "polar": ps.Deflated(sketched(), ps.NewtonSchulz(1, "quintic")),
        "shape_scale": "rms",
    },
    "sketched, by its norm": {
        "polar": sketched(inner=ps.NewtonSchulz(9, "cubic", "spectral")),
        "shape_scale": "rms",
    },
    "warm, by its norm": {"polar": sketched(sketch=Warm(), power=1), "shape_scale": "rms"},
    "exact inside": {"polar": sketched(inner=ps.Exact()), "momentum": 0.5},
    "rows of a sketch": {"polar": sketched(), "transform": ps.NormalizedRows()},
    **RULES,
    "SGD": {"algorithm": "sgd", "lr": 0.1},
    "a rule of one's own": {"algorithm": SignDescent.algorithm, "lr": 0.01},
}
# Where one rank has the whole matrix it applies any map as one process does. What is left to differ is
# a state, the norm of an update, and a step without a map or with two.
OF_WHOLE = ("full space", "warm", "deflated", "by its norm", "warm, by its norm", "rows")


class Networks(nn.Module):
    """A network for each map, in one module, as tensor parallelism and FSDP take it."""

    def __init__(self, maps: tuple[str, ...] = tuple(MAPS), sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__()
        self.maps = maps
        self.each = nn.ModuleList(network(sizes) for _ in maps)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([network(x) for network in self.each])


def network(sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layer = nn.Linear(a, b, bias=False, dtype=torch.float64)
        g = rng.generator("layer", i)
        layer.weight.data = torch.randn(b, a, generator=g, dtype=torch.float64) / a**0.5
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """This rank's slice of the batch."""
    g = rng.generator("batch", step)
    x = torch.randn(BATCH, SIZES[0], generator=g, dtype=torch.float64)
    y = torch.randn(BATCH, SIZES[-1], generator=g, dtype=torch.float64)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


@dataclass(frozen=True)
class Way:
    """A way to share the network: how it is sharded, and how many slices the batch has.

    Its plans are told by the number of ranks. "auto" takes one of the other plans for each matrix, and
    with "local" ranks share nothing: neither is run with both numbers of ranks.
    """

    shard: Callable[[nn.Module, Any], nn.Module]
    mesh: Callable[[int], tuple[tuple[int, ...], tuple[str, ...]]]
    plans: dict[int, tuple[str, ...]]
    slices: Callable[[int], int] = lambda ranks: ranks
    replicated: bool = False


def _ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh)


def _fsdp_columns(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    even = {id(p) for p in model.parameters() if p.shape[1] % mesh.size() == 0}
    by = lambda p: Shard(1) if id(p) in even else Shard(0)  # noqa: E731
    return fully_shard(model, mesh=mesh, shard_placement_fn=by)


def _tp(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    by = {"each.*.0": ColwiseParallel(), "each.*.2": RowwiseParallel()}
    parallelize_module(model, mesh, by)
    return model


def _tp_fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(_tp(model, mesh), mesh=mesh["dp"])


EACH = ("owner", "gather")
WAYS: dict[str, Way] = {
    "ddp": Way(
        _ddp,
        lambda n: ((n,), ("dp",)),
        {2: ("auto", "local"), 4: ("replicated",)},
        replicated=True,
    ),
    "fsdp": Way(_fsdp, lambda n: ((n,), ("dp",)), {2: ("owner", "gather"), 4: ("auto", *EACH)}),
    "fsdp, columns": Way(_fsdp_columns, lambda n: ((n,), ("dp",)), {2: ("owner",), 4: ("owner",)}),
    "hsdp": Way(_fsdp, lambda n: ((2, n // 2), ("copy", "dp")), {4: EACH}),
    "tp": Way(_tp, lambda n: ((n,), ("tp",)), {2: ("auto", "owner"), 4: EACH}, slices=lambda n: 1),
    "tp+fsdp": Way(
        _tp_fsdp, lambda n: ((n // 2, 2), ("dp", "tp")), {4: EACH}, slices=lambda n: n // 2
    ),
}


def cases(ranks: int) -> list[tuple[str, str]]:
    """Way and plan of every case."""
    return [(name, plan) for name, way in WAYS.items() for plan in way.plans.get(ranks, ())]


def maps_of(ranks: int, name: str, plan: str) -> tuple[str, ...]:
    """The maps of a case: all of them, or with four ranks those to which the plan can matter."""
    if ranks == 4 and (plan == "gather" or (plan == "owner" and name != "fsdp")):
        return OF_WHOLE
    return tuple(MAPS)


def optimizer_of(model: nn.Module, **options: Any) -> ps.Muon:
    networks = model.module if hasattr(model, "module") else model
    groups = [
        {"params": list(network.parameters()), **MAPS[name]}
        for network, name in zip(networks.each, networks.maps, strict=True)
    ]
    return ps.Muon(groups, lr=0.02, **options)


def train(
    model: nn.Module, optimizer: ps.Muon, rank: int = 0, ranks: int = 1, steps: range = range(STEPS)
) -> None:
    for step in steps:
        x, y = batch(step, rank, ranks)
        optimizer.zero_grad()
        (model(x) - y).square().mean((1, 2)).sum().backward()
        optimizer.step()


def whole(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def reference() -> list[Tensor]:
    """The parameters after all steps of one process."""
    model = Networks()
    train(model, optimizer_of(model))
    return whole(model)


def shared(
    way: Way, ranks: int, maps: tuple[str, ...] = tuple(MAPS), values: list[Tensor] | None = None
) -> nn.Module:
    """The networks as ranks share them, with their first values or those that are given."""
    model = Networks(maps)
    for p, value in zip(model.parameters(), values or (), strict=values is not None):
        p.data = value.clone()
    return way.shard(model, mesh_of(*way.mesh(ranks)))


@functools.cache
def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """The mesh of these sizes, which all cases share: it takes long to make groups of processes."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def parts(model: nn.Module) -> list[Tensor]:
    """This rank's part of every parameter. Nothing is sent."""
    return [getattr(p, "to_local", lambda p=p: p)().detach() for p in model.parameters()]


def slice_of(way: Way, rank: int, ranks: int) -> tuple[int, int]:
    slices = way.slices(ranks)
    return rank * slices // ranks, slices


def run(name: str, plan: str, rank: int, ranks: int) -> tuple[list[Tensor], ps.Muon]:
    """This rank's parts of the parameters after all steps, and the optimizer."""
    way = WAYS[name]
    model = shared(way, ranks, maps_of(ranks, name, plan))
    group = torch.distributed.group.WORLD if way.replicated else None
    optimizer = optimizer_of(model, plan=plan, process_group=group)
    train(model, optimizer, *slice_of(way, rank, ranks))
    return parts(model), optimizer


def per_map(values: list[Any], maps: tuple[str, ...] = tuple(MAPS)) -> dict[str, list[Any]]:
    """One value for each parameter, by the map of its network."""
    each = len(values) // len(maps)
    return {name: values[i * each : (i + 1) * each] for i, name in enumerate(maps)}


def main(rank: int, ranks: int, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """How far the parameters of every case end from those of one process, and their plans.

    The file ``reference.pt`` beside ``folder`` has the parameters of one process. They are cut as the
    trained ones are, and each rank compares its own parts.
    """
    known = torch.load(folder.parent / "reference.pt")
    expected = {
        name: per_map(parts(shared(way, ranks, values=known)))
        for name, way in WAYS.items()
        if ranks in way.plans
    }
    found = {}
    for name, plan in cases(ranks):
        params, optimizer = run(name, plan, rank, ranks)
        maps = maps_of(ranks, name, plan)
        pairs = zip(params, [q for each in maps for q in expected[name][each]], strict=True)
        off = [float((p - q).abs().max()) if p.numel() else 0.0 for p, q in pairs]
        found[name, plan] = {
            "off": per_map(off, maps),
            "routes": per_map([route.polar for route in optimizer.routes], maps),
        }
    return found
