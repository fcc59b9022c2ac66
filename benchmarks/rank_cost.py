"""What does a step cost the host on ranks, and what do CUDA graphs save an owner?

    python benchmarks/rank_cost.py one                   # FSDP2 on one rank, on a GPU, with NCCL
    python benchmarks/rank_cost.py one --host            # the host's work alone, on any machine
    python benchmarks/rank_cost.py one --host --profile  # and where it goes
    python benchmarks/rank_cost.py owner                 # two ranks that share one GPU
    python benchmarks/rank_cost.py owner --only warm     # one of the maps

``one`` compares a step with FSDP2 in a world of one rank with the same step without it. Both should cost
the same: every parameter is whole on the one rank, and the sharded parameters run the same kernels.
What differs is work of the host: reading local tensors of ``DTensor`` objects, and asking which plan a
parameter has. ``--host`` measures that work alone: it plans the steps of a GPU on a CPU and launches
nothing.

``owner`` gives each of two ranks a half of the rows of nanoGPT's 64 matrices, and half of the matrices
to own. The ranks talk by gloo, since NCCL refuses two ranks on one GPU, and gloo sends through the
memory of the host. So beside the whole step the table has the part that a graph replaces, from the
received parts of M to the parts of T that are sent: the time of the host, and the time on the GPU.

Optimizers that are compared take turns, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import spawn

import polarstep as ps
from polarstep import kernels, muon, rng
from polarstep.engines.fused import FusedBucket
from polarstep.ranks.exchange import OverRanks
from step_optimizers import INNER
from step_workloads import WORKLOADS
from timing import machine, timing_event

MAPS: dict[str, ps.PolarMap] = {
    "full space, PolarExpress 5": ps.NewtonSchulz(5, "polar-express"),
    "LowRank 200, warm": ps.LowRank(200, 8, sketch=ps.Warm(), inner=INNER),
    "Deflated 48, warm, flat": ps.Deflated(
        ps.LowRank(48, 8, sketch=ps.Warm(), inner=INNER), ps.NewtonSchulz(1, "flat")
    ),
}
# Matrices of the host's benchmark have nanoGPT's number and small sides: their values are not used.
SMALL = [(40, 64, 64), (24, 256, 64)]
REPEATS = {"one": 300, "owner": 20}
RANKS = 2
GPU = torch.device("cuda", 0)
FIRST_STEPS = 4  # a map with state is captured at its third step


def main() -> None:
    """The two commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["one", "owner"])
    parser.add_argument("--host", action="store_true", help="of one: the host's work alone")
    parser.add_argument(
        "--profile", action="store_true", help="of one: where a sharded step spends"
    )
    parser.add_argument("--repeats", type=int, help="steps that are timed")
    parser.add_argument("--only", default="", help="a part of the name of a map")
    options = parser.parse_args()
    options.repeats = options.repeats or REPEATS[options.what]
    if not torch.cuda.is_available() and not (options.what == "one" and options.host):
        parser.error("there is no GPU: expected `one --host`, which measures the host's work alone")
    if options.what == "owner":
        with tempfile.TemporaryDirectory() as folder:
            spawn(as_a_rank, (f"{folder}/store", options), nprocs=RANKS)  # type: ignore[no-untyped-call]
        return
    device = torch.device("cpu" if options.host else "cuda")
    print(f"nanoGPT's 64 matrices, {machine(device)}")
    with tempfile.NamedTemporaryFile() as store:
        backend = "gloo" if options.host else "nccl"
        dist.init_process_group(backend, init_method=f"file://{store.name}", rank=0, world_size=1)
        try:
            if options.host:
                with without_launches():
                    one_rank(device, options)
            else:
                one_rank(device, options)
        finally:
            dist.destroy_process_group()


# --- one rank -----------------------------------------------------------------------------------


def model_of(shapes: list[tuple[int, int, int]], device: torch.device) -> nn.Module:
    """A module with a linear layer for every matrix."""
    layers = [
        nn.Linear(n, m, bias=False, device=device) for count, m, n in shapes for _ in range(count)
    ]
    return nn.Sequential(*layers)


def muon_of(model: nn.Module, polar: ps.PolarMap) -> ps.Muon:
    """Muon for all parameters of ``model``, with gradients that stay the same."""
    for i, p in enumerate(model.parameters()):
        g = rng.generator("gradient", i, device=p.device)
        whole = torch.randn(p.shape, generator=g, device=p.device)
        p.grad = torch.zeros_like(p)
        local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        local.copy_(whole)
    return ps.Muon(model.parameters(), lr=0.02, polar=polar)


@contextmanager
def without_launches() -> Iterator[None]:
    """Plan steps as on a GPU, whatever the device, and launch no kernel."""

    def keep_state(b: FusedBucket, hooks: object) -> None:
        b.keep(b.carry())

    available, at_once = kernels.available, muon.at_once
    kernels.available = lambda device: True
    muon.at_once = keep_state
    try:
        yield
    finally:
        kernels.available = available
        muon.at_once = at_once


def median_times(optimizers: list[ps.Muon], device: torch.device, repeats: int) -> list[float]:
    """Median milliseconds of a step of each optimizer."""
    times: list[list[float]] = [[] for _ in optimizers]
    for _ in range(8):
        for optimizer in optimizers:
            optimizer.step()
    for _ in range(repeats):
        for optimizer, found in zip(optimizers, times, strict=True):
            found.append(_time(optimizer, device))
    return [statistics.median(found) for found in times]


def _time(optimizer: ps.Muon, device: torch.device) -> float:
    if device.type == "cpu":  # time of this thread, whatever else the machine does
        before = time.thread_time()
        optimizer.step()
        return (time.thread_time() - before) * 1e3
    start, end = timing_event(), timing_event()
    torch.cuda.synchronize()
    start.record()
    optimizer.step()
    end.record()
    torch.cuda.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def show_profile(optimizer: ps.Muon, repeats: int = 100) -> None:
    """Print the functions in which a step spends the most time."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(repeats):
        optimizer.step()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(22)


def one_rank(device: torch.device, options: Any) -> None:
    """Print a line for each map."""
    shapes = SMALL if options.host else WORKLOADS["nanoGPT"].shapes
    print(f"{'milliseconds a step':30} {'plain':>8} {'FSDP2':>8} {'ratio':>7}")
    for name, polar in MAPS.items():
        if options.only not in name:
            continue
        plain, sharded = (model_of(shapes, device) for _ in range(2))
        fully_shard(sharded)
        both = [muon_of(model, polar) for model in (plain, sharded)]
        alone, of_one = median_times(both, device, options.repeats)
        print(f"{name:30} {alone:8.3f} {of_one:8.3f} {of_one / alone:7.2f}")
        if options.profile:
            show_profile(both[1])


# --- owners -------------------------------------------------------------------------------------


@dataclass
class Times:
    """Milliseconds of each step: all of it, and the owners' part on the host and on the GPU."""

    steps: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    gpu: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return " ".join(
            f"{statistics.median(each):8.2f}" for each in (self.host, self.gpu, self.steps)
        )


def owner_of(polar: ps.PolarMap, rank: int, *, fused: bool) -> ps.Muon:
    """Muon for this rank's rows of all matrices, with gradients that stay the same."""
    mesh, params = init_device_mesh("cuda", (RANKS,)), []
    shapes = [(m, n) for count, m, n in WORKLOADS["nanoGPT"].shapes for _ in range(count)]
    for i, (m, n) in enumerate(shapes):
        g = rng.generator("gradient", i, rank, device=GPU)
        part = torch.randn(m // RANKS, n, generator=g, device=GPU)
        p, grad = (
            DTensor.from_local(X, mesh, [Shard(0)], run_check=False) for X in (part.clone(), part)
        )
        params.append(nn.Parameter(p))
        params[-1].grad = grad
    return ps.Muon(params, lr=0.02, polar=polar, plan="owner", fused=fused)


def timed_step(optimizer: ps.Muon, times: Times) -> None:
    """One step, with the time of the owners' part of all buckets."""
    run, host, events = OverRanks.computed, [0.0], []

    def timed(*arguments: Any) -> Any:
        start, end = timing_event(), timing_event()
        begun = time.perf_counter()
        start.record()
        result = run(*arguments)
        end.record()
        host[0] += time.perf_counter() - begun
        events.append((start, end))
        return result

    torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    with patch.object(OverRanks, "computed", timed):
        optimizer.step()
    torch.cuda.synchronize()
    times.steps.append((time.perf_counter() - begun) * 1e3)
    times.host.append(host[0] * 1e3)
    times.gpu.append(sum(start.elapsed_time(end) for start, end in events))


def owners(rank: int, options: argparse.Namespace) -> None:
    """Print the times of each map, on the first rank."""
    tell = print if rank == 0 else lambda line: None
    tell(f"nanoGPT's 64 matrices, {RANKS} ranks by gloo, {machine(GPU)}")
    tell(f"{'milliseconds':28} {'':10} {'host':>8} {'GPU':>8} {'step':>8}")
    for name, polar in MAPS.items():
        if options.only not in name:
            continue
        optimizers = {
            word: owner_of(polar, rank, fused=fused)
            for word, fused in (("launched", False), ("replayed", True))
        }
        times = {word: Times() for word in optimizers}
        for step in range(FIRST_STEPS + options.repeats):
            for word, optimizer in optimizers.items():
                timed_step(optimizer, times[word] if step >= FIRST_STEPS else Times())
        for word, found in times.items():
            tell(f"{name:28} {word:10} {found}")
        for p, q in zip(
            *(each.param_groups[0]["params"] for each in optimizers.values()), strict=True
        ):
            assert torch.equal(p.to_local(), q.to_local()), "a graph must not change the numbers"


def as_a_rank(rank: int, store: str, options: argparse.Namespace) -> None:
    """Measure as one of the ranks."""
    torch.cuda.set_device(GPU)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        owners(rank, options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
