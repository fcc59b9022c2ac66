"""QK-clip on ranks: sharded weights, and copies."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.spectra import gaussian
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import polarstep as ps

__all__ = ["RANKS", "alone", "main"]

RANKS = 4
HEADS, WIDTH = 3, 18  # six rows a head, which four ranks do not share evenly


def layers() -> nn.Sequential:
    """q and k, with biases."""
    found = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    for i, p in enumerate(found.parameters()):
        p.data = gaussian(*p.shape, seed=i).float()
    return found


def seen(rank: int) -> Tensor:
    """The largest logits in the batch of a rank."""
    return torch.tensor([[400.0, 10.0, 90.0], [20.0, 10.0, 900.0], [1.0, 30.0, 2.0]])[rank % 3]


def alone() -> list[Tensor]:
    q, k = found = layers()
    ps.qk_clip(q, k, torch.stack([seen(rank) for rank in range(RANKS)]).amax(dim=0))
    return [p.detach() for p in found.parameters()]


def main(rank: int, ranks: int, folder: Path) -> dict[str, list[Tensor]]:
    flat = init_device_mesh("cpu", (ranks,))
    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "parts"))
    ended = {}
    for way in ("FSDP2", "HSDP", "columns", "copies"):
        found = layers()
        options = {}
        if way == "columns":
            for layer in found:
                cut = distribute_tensor(layer.weight.detach(), grid, [Replicate(), Shard(1)])
                layer.weight = nn.Parameter(cut)
        elif way == "copies":
            options["process_group"] = torch.distributed.group.WORLD
        else:
            fully_shard(found, mesh=flat if way == "FSDP2" else grid)
        q, k = found
        ps.qk_clip(q, k, seen(rank), **options)
        ended[way] = [
            p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
            for p in found.parameters()
        ]
    return ended
