"""Train matrices that two ranks share, by the kernels, and compare with one process.

The ranks talk by gloo, which sends what lies on a GPU through the memory of the host. So several ranks
may share one GPU, which NCCL refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.kernels.interpreter import compute_in_bfloat16, hasten
from torch import Tensor
from torch.nn import Parameter

import polarstep as ps

__all__ = ["MAPS", "PLANS", "main"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 6 if DEVICE == "cuda" else 2  # a GPU captures its steps after the fourth
SHAPES = ((32, 48), (32, 48), (48, 32))
SKETCH = {"always_sketch": True, "inner": ps.NewtonSchulz(3, "quintic")}
MAPS: dict[str, dict[str, Any]] = {
    "full space": {"weight_decay": 0.1},
    "warm": {"polar": ps.LowRank(12, 4, sketch=ps.Warm(), **SKETCH)},
    "deflated": {
        "polar": ps.Deflated(ps.LowRank(12, 4, **SKETCH), ps.NewtonSchulz(1, "flat")),
        "transform": ps.NormalizedRows(),
    },
}
# How the parameters lie on the ranks, and the plan that is asked for.
PLANS = (("copies", "local"), ("copies", "replicated"), ("parts", "owner"), ("parts", "gather"))


def matrix(i: int, step: int) -> Tensor:
    """Parameter ``i`` at step -1, and its gradient at others."""
    return torch.randn(SHAPES[i], generator=torch.Generator().manual_seed(10 * step + i + 10)).to(
        DEVICE
    )


def trained(options: dict[str, Any], laid: Any, **more: Any) -> tuple[list[Tensor], ps.Muon]:
    """Parameters that ``laid`` puts on the ranks, after all steps, and the optimizer."""
    params = [Parameter(laid(matrix(i, -1))) for i in range(len(SHAPES))]
    optimizer = ps.Muon(params, lr=0.02, **options, **more)
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = laid(matrix(i, step))
        optimizer.step()
    return params, optimizer


def main(rank: int, ranks: int, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """By plan and map: how far this rank's part is from one process, and what the routes say."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    hasten()
    compute_in_bfloat16()
    mesh = init_device_mesh(DEVICE, (ranks,))

    def part(X: Tensor) -> Tensor:
        return X.chunk(ranks)[rank].clone()

    def in_parts(X: Tensor) -> Tensor:
        return DTensor.from_local(part(X), mesh, [Shard(0)], run_check=False)

    found = {}
    for name, options in MAPS.items():
        alone, _ = trained(options, lambda X: X)
        for way, plan in PLANS:
            copies = way == "copies"
            more = {"process_group": torch.distributed.group.WORLD} if copies else {}
            params, optimizer = trained(
                options, Tensor.clone if copies else in_parts, plan=plan, **more
            )
            here = [p.detach() if copies else p.to_local().detach() for p in params]
            expected = [p.detach() if copies else part(p.detach()) for p in alone]
            found[plan, name] = {
                "off": max(
                    float((p - q).norm() / q.norm()) for p, q in zip(here, expected, strict=True)
                ),
                "routes": [route.polar for route in optimizer.routes],
                "fused": sum(bucket.count for bucket in optimizer._replayed.buckets.values()),
            }
    return found
