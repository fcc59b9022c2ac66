"""Train one small network in every way that ranks can share it; main returns how far each ends from one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import polarstep as ps
from polarstep import rng
from polarstep.polar import Warm

STEPS = 4
BATCH = 48
# Rows: even, 9 (empty on the last of four ranks), 18 (uneven on four), square, even.
SIZES = (8, 32, 9, 18, 18, 12)
Mesh = Callable[[nn.Module, int], None]


def sketched(**options: Any) -> ps.LowRank:
    return ps.LowRank(4, 2, **({"power": 0, "always_sketch": True} | options))


MAPS: dict[str, dict[str, Any]] = {
    "full space": {"weight_decay": 0.1},
    "h=0": {"polar": sketched(), "nesterov": False},
    "h=½": {"polar": sketched(power=0.5)},
    "h=1": {"polar": sketched(power=1), "lr": torch.tensor(0.02)},
    "spectral": {"polar": sketched(inner=ps.NewtonSchulz(9, "cubic", "spectral"))},
    "Kaczmarz": {"polar": sketched(sketch=ps.Kaczmarz())},
    "warm": {"polar": sketched(sketch=Warm()), "nonfinite": "skip"},
    "kept": {"polar": sketched(keep=2)},
    "deflated": {"polar": ps.Deflated(sketched(), ps.NewtonSchulz(2, "quintic"))},
    "rows": {"transform": ps.NormalizedRows()},
}


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(zip(SIZES, SIZES[1:], strict=False)):
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
    """A way to share the network: how it is sharded, and how many slices the batch has."""

    shard: Callable[[nn.Module, Any], nn.Module]
    mesh: Callable[[int], tuple[tuple[int, ...], tuple[str, ...]]]
    plans: tuple[str, ...]
    slices: Callable[[int], int] = lambda ranks: ranks
    fewest: int = 2
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
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def _tp_fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(_tp(model, mesh), mesh=mesh["dp"])


SHARDED = ("auto", "sharded", "owner", "gather")
WAYS: dict[str, Way] = {
    "ddp": Way(_ddp, lambda n: ((n,), ("dp",)), ("auto", "replicated", "local"), replicated=True),
    "fsdp": Way(_fsdp, lambda n: ((n,), ("dp",)), SHARDED),
    "fsdp, columns": Way(_fsdp_columns, lambda n: ((n,), ("dp",)), ("sharded", "owner")),
    "hsdp": Way(_fsdp, lambda n: ((2, n // 2), ("copy", "dp")), SHARDED, fewest=4),
    "tp": Way(_tp, lambda n: ((n,), ("tp",)), SHARDED, slices=lambda n: 1),
    "tp+fsdp": Way(
        _tp_fsdp, lambda n: ((n // 2, 2), ("dp", "tp")), SHARDED, slices=lambda n: n // 2, fewest=4
    ),
}


def cases(ranks: int) -> list[tuple[str, str, str]]:
    """Way, plan and map of every case."""
    return [
        (name, plan, each)
        for name, way in WAYS.items()
        if ranks >= way.fewest
        for plan in way.plans
        for each in MAPS
    ]


def optimizer_of(model: nn.Module, name: str, **options: Any) -> ps.Muon:
    return ps.Muon(model.named_parameters(), **({"lr": 0.02} | MAPS[name] | options))


def train(
    model: nn.Module, optimizer: ps.Muon, rank: int = 0, ranks: int = 1, first: int = 0
) -> None:
    for step in range(first, STEPS):
        x, y = batch(step, rank, ranks)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def reference(name: str) -> list[Tensor]:
    model = network()
    train(model, optimizer_of(model, name))
    return whole(model)


def shared(way: Way, ranks: int) -> tuple[nn.Module, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    sizes, names = way.mesh(ranks)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return way.shard(network(), mesh), mesh


def slice_of(way: Way, rank: int, ranks: int) -> tuple[int, int]:
    slices = way.slices(ranks)
    return rank * slices // ranks, slices


def run(name: str, plan: str, each: str, rank: int, ranks: int) -> dict[str, Any]:
    way = WAYS[name]
    model, _ = shared(way, ranks)
    group = torch.distributed.group.WORLD if way.replicated else None
    optimizer = optimizer_of(model, each, plan=plan, process_group=group)
    train(model, optimizer, *slice_of(way, rank, ranks))
    return {"params": whole(model), "routes": [route.polar for route in optimizer.routes]}


def main(rank: int, ranks: int, folder: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    known = {name: reference(name) for name in MAPS}
    start = [p.detach() for p in network().parameters()]
    found = {}
    for case in cases(ranks):
        result = run(*case, rank, ranks)
        off = [(p - q).abs().max() for p, q in zip(result["params"], known[case[2]], strict=True)]
        moved = [(p - q).abs().max() for p, q in zip(start, known[case[2]], strict=True)]
        found[case] = {
            "off": float(torch.stack(off).max()),
            "moved": float(torch.stack(moved).min()),
            "routes": result["routes"],
        }
    return found
