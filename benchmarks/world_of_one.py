"""What does a step cost with FSDP2 in a world of one rank, against the same step without it?

    python benchmarks/world_of_one.py                   # the whole step on a GPU, with NCCL
    python benchmarks/world_of_one.py --host            # the host's work alone, on any machine
    python benchmarks/world_of_one.py --host --profile  # and where it goes

Both steps should cost the same: every parameter is whole on the one rank, and the sharded parameters
run the same kernels. What differs is work of the host: reading local tensors of ``DTensor`` objects,
and asking which plan a parameter has. ``--host`` measures that work alone. It plans the steps of a GPU
on a CPU and launches nothing.

The two optimizers take turns, so that a machine that slows down slows down both.
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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import polarstep as ps
from polarstep import kernels, muon, rng
from polarstep.engines.fused import FusedBucket
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
REPEATS = 300


def model_of(shapes: list[tuple[int, int, int]], device: torch.device) -> nn.Module:
    """A module with a linear layer for every matrix."""
    layers = [
        nn.Linear(n, m, bias=False, device=device) for count, m, n in shapes for _ in range(count)
    ]
    return nn.Sequential(*layers)


def optimizer_of(model: nn.Module, polar: ps.PolarMap) -> ps.Muon:
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


def measured(device: torch.device, options: Any) -> None:
    """Print a line for each map."""
    shapes = SMALL if options.host else WORKLOADS["nanoGPT"].shapes
    print(f"{'milliseconds a step':30} {'plain':>8} {'FSDP2':>8} {'ratio':>7}")
    for name, polar in MAPS.items():
        if options.only not in name:
            continue
        plain, sharded = (model_of(shapes, device) for _ in range(2))
        fully_shard(sharded)
        both = [optimizer_of(model, polar) for model in (plain, sharded)]
        alone, of_one = median_times(both, device, options.repeats)
        print(f"{name:30} {alone:8.3f} {of_one:8.3f} {of_one / alone:7.2f}")
        if options.profile:
            show_profile(both[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--host", action="store_true", help="the host's work alone")
    parser.add_argument("--profile", action="store_true", help="where the sharded step spends time")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--only", default="", help="a part of the name of a map")
    options = parser.parse_args()
    if not options.host and not torch.cuda.is_available():
        parser.error("there is no GPU: expected --host, which measures the host's work alone")
    device = torch.device("cpu" if options.host else "cuda")
    print(f"nanoGPT's 64 matrices, {machine(device)}")
    with tempfile.NamedTemporaryFile() as store:
        backend = "gloo" if options.host else "nccl"
        dist.init_process_group(backend, init_method=f"file://{store.name}", rank=0, world_size=1)
        try:
            if options.host:
                with without_launches():
                    measured(device, options)
            else:
                measured(device, options)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
