"""What does a graph save an owner, which computes whole matrices between two exchanges?

    python benchmarks/owner_graph.py                 # two ranks that share one GPU
    python benchmarks/owner_graph.py --only warm     # one of the maps

Each rank has a half of the rows of nanoGPT's 64 matrices, and owns a half of the matrices
(``plan="owner"``). The ranks talk by gloo, since NCCL refuses two ranks on one GPU. gloo sends through
the memory of the host, which takes most of the step here and very little between GPUs. So beside the
whole step the table has the part that a graph replaces, from the parts of M that were received to the
parts of T that are sent: the time of the host, and the time on the GPU.

The two optimizers, with graphs and without (``fused=False``), take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import spawn

import polarstep as ps
from polarstep import rng
from polarstep.ranks.exchange import OverRanks
from step_workloads import WORKLOADS
from timing import machine, timing_event
from world_of_one import MAPS

RANKS = 2
DEVICE = torch.device("cuda", 0)
REPEATS = 20
FIRST_STEPS = 4  # a map with state is captured at its third step


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


def optimizer_of(polar: ps.PolarMap, rank: int, *, fused: bool) -> ps.Muon:
    """Muon for this rank's rows of all matrices, with gradients that stay the same."""
    mesh, params = init_device_mesh("cuda", (RANKS,)), []
    shapes = [(m, n) for count, m, n in WORKLOADS["nanoGPT"].shapes for _ in range(count)]
    for i, (m, n) in enumerate(shapes):
        g = rng.generator("gradient", i, rank, device=DEVICE)
        part = torch.randn(m // RANKS, n, generator=g, device=DEVICE)
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


def measured(rank: int, options: argparse.Namespace) -> None:
    """Print the times of each map, on the first rank."""
    tell = print if rank == 0 else lambda line: None
    tell(f"nanoGPT's 64 matrices, {RANKS} ranks by gloo, {machine(DEVICE)}")
    tell(f"{'milliseconds':28} {'':10} {'host':>8} {'GPU':>8} {'step':>8}")
    for name, polar in MAPS.items():
        if options.only not in name:
            continue
        optimizers = {
            word: optimizer_of(polar, rank, fused=fused)
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


def start(rank: int, store: str, options: argparse.Namespace) -> None:
    """Measure as one of the ranks."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        measured(rank, options)
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--only", default="", help="a part of the name of a map")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU: expected one, as graphs are captured on a GPU alone")
    with tempfile.TemporaryDirectory() as folder:
        spawn(start, (f"{folder}/store", options), nprocs=RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
