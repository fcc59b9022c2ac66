"""Measured rates of a model whose parameters lie in parts and in copies on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.routing.sample_models import SmallGPT
from tests.spectra import gaussian
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import polarstep as ps

__all__ = ["WAYS", "main", "model", "stepped"]

WAYS = ("fully_shard", "HSDP", "columns of the head")
STEPS = 2
Ended = tuple[dict[str, float], dict[str, Tensor]]


def model() -> nn.Module:
    """A GPT of float64 with 50 rows in the embedding, which four ranks do not share evenly."""
    net = SmallGPT("untied").double()
    for i, p in enumerate(net.parameters()):
        p.data = gaussian(*p.shape, seed=i) / (3 + i)
    return net


def stepped(net: nn.Module, place: Callable[[Tensor, Tensor], Tensor] = lambda G, p: G) -> Ended:
    """The factors of all groups, and the parameters, after a few steps."""
    optimizer = ps.muon_for(net)
    for step in range(STEPS):
        for i, p in enumerate(net.parameters()):
            p.grad = place(gaussian(*p.shape, seed=100 * step + i), p)
        optimizer.step()
    factors = {group["name"]: group["lr_factor"] for group in optimizer.param_groups}
    whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p  # noqa: E731
    return factors, {name: whole(p.detach()) for name, p in net.named_parameters()}


def main(rank: int, ranks: int, folder: Path) -> dict[str, Ended]:
    """:func:`stepped` for each of :data:`WAYS`."""
    flat = init_device_mesh("cpu", (ranks,))
    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "parts"))
    found = {}
    for way in WAYS:
        net = model()
        if way == "columns of the head":
            placements = [Replicate(), Shard(1)]
            net.head.weight = nn.Parameter(
                distribute_tensor(net.head.weight.detach(), grid, placements)
            )
        else:
            fully_shard(net, mesh=flat if way == "fully_shard" else grid)
        found[way] = stepped(net, _placed)
    return found


def _placed(G: Tensor, p: Any) -> Tensor:
    return distribute_tensor(G, p.device_mesh, p.placements) if hasattr(p, "placements") else G
