"""Steps of 16-bit parameters whose state is kept in float32, over ranks and in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.spectra import gaussian
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import polarstep as ps
from polarstep.ranks.layout import local

__all__ = ["CASES", "main", "stepped"]

# 9 rows are uneven on two ranks, so a number of v does not always begin at a multiple of four bytes.
SHAPES = ((9, 16), (16, 9), (9, 16))
CASES: dict[str, tuple[str, int | None]] = {
    "owner": ("owner", 0),
    "owner, columns": ("owner", 1),
    "gather": ("gather", 0),
    "replicated": ("replicated", None),
}
STEPS = 3


def stepped(dtype: torch.dtype, place: Any = lambda X: X, **options: Any) -> list[dict[str, Any]]:
    """The state and the value of each parameter after some steps: three matrices and two vectors."""
    rows = ps.NormalizedRows(0.999)
    matrices = [nn.Parameter(place(gaussian(*shape).to(dtype))) for shape in SHAPES]
    vectors = [nn.Parameter(place(gaussian(9, 4).to(dtype))) for _ in range(2)]
    optimizer = ps.Muon(
        [
            {"params": matrices, "polar": ps.NewtonSchulz(5, "quintic"), "transform": rows},
            {"params": vectors[:1], "algorithm": "adamw"},
            {"params": vectors[1:], "algorithm": "sgd"},
        ],
        lr=1e-2,
        **options,
    )
    for k in range(STEPS):
        for i, p in enumerate((*matrices, *vectors)):
            p.grad = place((1e-4 * gaussian(*p.shape, seed=10 * k + i)).to(dtype))
        optimizer.step()
        for p in matrices if k == 0 else ():
            local(optimizer.state[p]["rows"]).fill_(1)  # 0.999 is 1 in bfloat16
    return [
        {"value": _whole(p.detach())}
        | {name: _whole(X) for name, X in optimizer.state[p].items() if isinstance(X, Tensor)}
        for p in (*matrices, *vectors)
    ]


def _whole(X: Tensor) -> Tensor:
    return X.full_tensor() if isinstance(X, DTensor) else X


def main(rank: int, ranks: int, folder: Path) -> dict[tuple[str, torch.dtype], Any]:
    """:func:`stepped` of every case."""
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}
    for name, (plan, cut) in CASES.items():
        placed = [Replicate() if cut is None else Shard(cut)]
        for dtype in (torch.bfloat16, torch.float16):
            found[name, dtype] = stepped(
                dtype,
                place=lambda X, placed=placed: distribute_tensor(X, mesh, placed),
                plan=plan,
                process_group=dist.group.WORLD if cut is None else None,
            )
    return found
