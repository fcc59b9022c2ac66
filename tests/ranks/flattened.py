"""What ``muon_for`` and a step say to FSDP1, on each of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import polarstep as ps

RANKS = 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )


def flattened(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    options = {"use_orig_params": True} | options
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def train(model: nn.Module, optimizer: ps.Muon) -> None:
    for step in range(2):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def refusal(attempt: Any) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return ""


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    whole = ShardingStrategy.NO_SHARD
    found = {}
    ignored = network()
    found["some cut"] = refusal(
        lambda: ps.muon_for(flattened(ignored, ignored_modules=[ignored[2]]))
    )
    inner = network()
    inner[0] = flattened(inner[0])
    found["inside"] = refusal(lambda: ps.muon_for(inner))
    found["one vector"] = refusal(
        lambda: ps.muon_for(flattened(network(), use_orig_params=False, sharding_strategy=whole))
    )
    found["parameters"] = refusal(lambda: ps.Muon(flattened(network()).parameters()))
    later = network()
    before = ps.muon_for(later)
    found["wrapped later"] = refusal(lambda: train(flattened(later), before))
    kept = flattened(network(), sharding_strategy=whole)
    train(kept, ps.muon_for(kept))
    found["whole"] = [p.detach().clone() for p in kept.parameters()]
    return found
