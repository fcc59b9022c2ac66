"""Count bytes and FLOPs of real steps: main returns what this rank received and multiplied."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.counting import Flops
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import polarstep as ps
from polarstep import rng
from polarstep.maps import Warm
from polarstep.ranks import collectives

SHAPES = {"tall": (4, 384, 128), "wide": (4, 128, 384)}
MAPS: dict[str, ps.PolarMap] = {
    "full space": ps.NewtonSchulz(5, "polar-express"),
    "h=½": ps.LowRank(16, 8, 0.5),
    "h=1": ps.LowRank(16, 8, 1),
    "warm": ps.LowRank(16, 8, 0, sketch=Warm()),
}
CARRYING: dict[str, ps.PolarMap] = {
    "auto's": ps.Deflated(ps.LowRank(16, 8, sketch=Warm()), ps.NewtonSchulz(1, "flat")),
}
PLANS = ("owner", "replicated", "gather")


@contextmanager
def received() -> Iterator[dict[str, float]]:
    """Bytes that this rank receives from others, by collective; a sum counts as a ring does it."""
    found = {"all-to-all": 0.0, "all-gather": 0.0, "maximum": 0.0, "status": 0.0}
    swap, reduce, gather = dist.all_to_all_single, dist.all_reduce, collectives.ALL_GATHER

    def counted_swap(out: Any, sent: Any, counts: Any, sizes: Any, **options: Any) -> Any:
        me = dist.get_rank(options["group"])
        found["all-to-all"] += sum(count for i, count in enumerate(counts) if i != me)
        return swap(out, sent, counts, sizes, **options)

    def counted_reduce(values: Any, **options: Any) -> Any:
        # What ranks agree on before a step is in float64, and no matrix here is.
        kind = "status" if values.dtype == torch.float64 else "maximum"
        ranks = dist.get_world_size(options["group"])
        found[kind] += 2 * (ranks - 1) / ranks * values.numel() * values.element_size()
        return reduce(values, **options)

    def counted_gather(out: Any, sent: Any, **options: Any) -> Any:
        found["all-gather"] += out.numel() - sent.numel()
        return gather(out, sent, **options)

    dist.all_to_all_single, dist.all_reduce = counted_swap, counted_reduce
    collectives.ALL_GATHER = counted_gather
    try:
        yield found
    finally:
        dist.all_to_all_single, dist.all_reduce = swap, reduce
        collectives.ALL_GATHER = gather


# A mesh makes groups of processes, which takes longer than a step of a small case.
mesh_of = functools.cache(init_device_mesh)


def counted(name: str, polar: ps.PolarMap, plan: str, copies: int = 1) -> Any:
    """Bytes and FLOPs of the second step of all matrices of a shape, of which there are ``copies``."""
    count, m, n = SHAPES[name]
    ranks = dist.get_world_size()
    mesh = mesh_of("cpu", (copies, ranks // copies))
    placed = [Replicate(), Replicate() if plan == "replicated" else Shard(0)]
    params = []
    for i in range(count):
        G = torch.randn(m, n, generator=rng.generator(name, i))
        params.append(nn.Parameter(distribute_tensor(G, mesh, placed)))
        params[-1].grad = params[-1].detach()
    optimizer = ps.Muon(params, lr=0.1, polar=polar, plan=plan)
    optimizer.step()
    with received() as found, Flops() as flops:
        optimizer.step()
    return found, flops.total, str(optimizer.routes)


def no_tiles() -> bool:
    """Products in float32 take all entries of a symmetric product."""
    return False


@mock.patch("polarstep.ops.cpu.has_tiles", no_tiles)
def flops_of_one(m: int, n: int, polar: ps.PolarMap) -> int:
    """FLOPs of the products of a matrix's second step in one process, as torch counts them."""
    p = nn.Parameter(torch.randn(m, n, generator=rng.generator("one")))
    p.grad = p.detach().clone()
    optimizer = ps.Muon([p], lr=0.1, polar=polar)
    optimizer.step()
    with Flops() as flops:
        optimizer.step()
    return flops.total


def order(plan: str, **options: Any) -> list[str]:
    """What a step of two buckets does in turn: it sends, it computes, it waits for what was sent."""
    mesh = mesh_of("cpu", (dist.get_world_size(),))
    placed = [Replicate()] if plan == "replicated" else [Shard(0)]
    params = []
    for shape in ((16, 24), (20, 32)):
        for i in range(dist.get_world_size()):  # each rank owns one matrix of each bucket
            G = torch.randn(shape, generator=rng.generator("order", i, *shape))
            params.append(nn.Parameter(distribute_tensor(G, mesh, placed)))
            params[-1].grad = params[-1].detach()
    polar = ps.LowRank(4, 2, 0, always_sketch=True)
    optimizer, events = ps.Muon(params, lr=0.1, polar=polar, plan=plan, **options), []
    optimizer.step()  # the first step has one more exchange: whether all ranks have these parameters

    def noted(word: str, call: Any) -> Any:
        def calling(*arguments: Any, **options: Any) -> Any:
            events.append(word)
            return call(*arguments, **options)

        return calling

    places = [
        (collectives, "meet"),
        (collectives, "exchange"),
        (collectives, "share"),
        (collectives.Arriving, "wait"),
    ]
    places += [(ps.LowRank, "step")]
    before = [getattr(*place) for place in places]
    words = ["meet", "send", "send", "wait", "compute"]
    for place, call, word in zip(places, before, words, strict=True):
        setattr(*place, noted(word, call))
    try:
        optimizer.step()
    finally:
        for place, call in zip(places, before, strict=True):
            setattr(*place, call)
    return events


def cases(ranks: int) -> list[tuple[str, str, str]]:
    """Plan, map and shape.

    Every plan counts every map with one of the two numbers of ranks: those that copy matrices with two,
    which is cheaper, and the others with four. Both numbers count each plan with a dense map, if the
    plan has it, and with one that carries a basis.
    """
    copying = ("replicated", "gather")
    return [
        (plan, name, shape)
        for plan in PLANS
        for name in MAPS
        for shape in SHAPES
        if ranks == 2 or plan not in copying or name in ("full space", "warm")
        if ranks == 4 or plan in copying or name != "h=½"
    ]


def copied_cases() -> list[tuple[str, str, str]]:
    """Plan, map and shape of the cases with two copies of every matrix, each in two parts."""
    maps = ("full space", "h=1", "warm")
    return [case for case in cases(4) if case[0] == "owner" and case[1] in maps]


def carrying_cases() -> list[tuple[str, str, str]]:
    """Plan, map and shape of the cases of deflated maps, whose carries travel with M and T."""
    return [(p, name, s) for p in ("owner", "replicated") for name in CARRYING for s in SHAPES]


@mock.patch("polarstep.ops.cpu.has_tiles", no_tiles)
def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {("order", plan): order(plan) for plan in PLANS}
    found["in a window"] = order("owner", bytes_in_flight=1)
    for plan, name, shape in cases(ranks):
        found[plan, name, shape] = counted(shape, MAPS[name], plan)
    for plan, name, shape in copied_cases() if ranks == 4 else ():
        found["copied", plan, name, shape] = counted(shape, MAPS[name], plan, copies=2)
    for plan, name, shape in carrying_cases():
        found[plan, name, shape] = counted(shape, CARRYING[name], plan)
    return found
