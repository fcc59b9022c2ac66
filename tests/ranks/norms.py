"""Steps by ``shape_scale="rms"`` on momentum of few directions, over ranks and in one process."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.spectra import with_singular_values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import polarstep as ps

__all__ = ["CASES", "MAPS", "SHAPES", "SPECTRA", "main", "moved"]

SHAPES = ((18, 40), (40, 18), (20, 20))
HEAD = ps.LowRank(10, 2, 0, inner=ps.NewtonSchulz(5, "quintic"), always_sketch=True)
MAPS: dict[str, ps.PolarMap] = {
    "sketched": HEAD,
    "warm": ps.LowRank(10, 2, 0, sketch=ps.Warm(), always_sketch=True),
    "rest lifted": ps.Deflated(HEAD, ps.NewtonSchulz(1, "flat")),
}
# How many directions are there, and how far the first four tower over the others.
SPECTRA = {"four of 100": (18, 100.0), "rank one": (1, 1.0), "rank two": (2, 1.0), "zero": (0, 1.0)}
PLANS = {"owner": (0, 1), "gather": (0,), "replicated": (None,)}
CASES = [(plan, cut, name) for plan, cuts in PLANS.items() for cut, name in product(cuts, MAPS)]
STEPS = 2


def gradient(shape: tuple[int, int], spectrum: str) -> Tensor:
    """The same at every step, so that all momentum has its spectrum."""
    there, leading = SPECTRA[spectrum]
    sigma = torch.zeros(min(shape), dtype=torch.float64)
    sigma[:there] = 1
    sigma[:4] *= leading
    return with_singular_values(sigma, *shape, seed=len(spectrum))


def moved(
    name: str, shape_scale: Any = "rms", place: Any = lambda G: G, **options: Any
) -> list[Any]:
    """How far matrices of each shape and spectrum move in the last of their steps."""
    gradients = [place(gradient(*each)) for each in product(SHAPES, SPECTRA)]
    params = [nn.Parameter(torch.zeros_like(G)) for G in gradients]
    optimizer = ps.Muon(params, lr=1.0, polar=MAPS[name], shape_scale=shape_scale, **options)
    before: list[Tensor] = []
    for _ in range(STEPS):
        before = [p.detach().clone() for p in params]
        for p, G in zip(params, gradients, strict=True):
            p.grad = G.clone()
        optimizer.step()
    return [p.detach() - old for p, old in zip(params, before, strict=True)]


def main(rank: int, ranks: int, folder: Path) -> dict[tuple[str, int | None, str], list[Tensor]]:
    """:func:`moved` of every case."""
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}
    for plan, cut, name in CASES:
        placed = [Replicate() if cut is None else Shard(cut)]
        steps = moved(
            name,
            place=lambda G, placed=placed: distribute_tensor(G, mesh, placed),
            plan=plan,
            process_group=dist.group.WORLD if cut is None else None,
        )
        found[plan, cut, name] = [step.full_tensor() for step in steps]
    return found
