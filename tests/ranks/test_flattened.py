"""FSDP1 leaves no matrix whole: it is refused, unless it cuts nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.ranks.launch import needs_gloo
from tests.ranks.twins import raised
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import polarstep as ps

pytestmark = needs_gloo
WHOLE = ShardingStrategy.NO_SHARD


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


def with_one_left() -> Any:
    model = network()
    return ps.muon_for(flattened(model, ignored_modules=[model[2]]))


def inside() -> Any:
    model = network()
    model[0] = flattened(model[0])
    return ps.muon_for(model)


def one_vector() -> Any:
    return ps.muon_for(flattened(network(), use_orig_params=False, sharding_strategy=WHOLE))


def parameters() -> Any:
    return ps.Muon(flattened(network()).parameters())


def wrapped_later() -> Any:
    model = network()
    optimizer = ps.muon_for(model)
    train(flattened(model), optimizer)


REFUSED: dict[Callable[[], Any], str] = {
    with_one_left: "model is a FullyShardedDataParallel (FSDP1)",
    inside: "model has at '0' a FullyShardedDataParallel (FSDP1)",
    one_vector: "model is a FullyShardedDataParallel (FSDP1)",
    parameters: "parameter 0 has shape (",
    wrapped_later: "",
}


def refusals() -> list[str]:
    return [raised(case) for case in REFUSED]


def test_fsdp1_is_refused_by_name_with_the_remedy(two) -> None:
    """It had one matrix left for Muon and sent all others to AdamW, as vectors, without a word."""
    for there in two(refusals):
        for words, start in zip(there, REFUSED.values(), strict=True):
            assert words.startswith(f"ValueError: {start}")
            assert "(FSDP1)" in words
            assert "expected FSDP2, torch.distributed.fsdp.fully_shard(model)" in words
            assert "NO_SHARD" in words


def uncut() -> list[Tensor]:
    """The parameters after the steps of a model that FSDP1 has not cut."""
    model = flattened(network(), sharding_strategy=WHOLE)
    train(model, ps.muon_for(model))
    return [p.detach().clone() for p in model.parameters()]


def test_fsdp1_that_cuts_nothing_takes_the_trajectory_of_the_plain_model(two) -> None:
    plain = network()
    train(plain, ps.muon_for(plain))
    for there in two(uncut):
        for p, start, q in zip(plain.parameters(), network().parameters(), there, strict=True):
            assert (p - start).abs().max() > 1e-4
            torch.testing.assert_close(q, p.detach(), atol=1e-6, rtol=0)
