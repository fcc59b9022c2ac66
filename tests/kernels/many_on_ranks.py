"""Steps that two ranks share, on more matrices than one launch takes: main returns what each rank saw.

As in :mod:`tests.kernels.ranks`, gloo lets several ranks share one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.kernels.interpreter import compute_in_bfloat16, hasten
from torch import Tensor
from torch.nn import Parameter

import polarstep as ps
from polarstep import kernels

__all__ = ["CASES", "MOST", "main"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOST = 2
STEPS = 2
SHAPES = (
    (7, 16, 32),
    *[(16, 32)] * 3,
)  # a stack, of which each rank computes three at least, and others
SKETCH: dict[str, Any] = {"always_sketch": True, "inner": ps.NewtonSchulz(3, "quintic")}
WARM: dict[str, Any] = {"polar": ps.LowRank(4, 2, sketch=ps.Warm(), **SKETCH)}
# Plan and map of a case: T goes back as one matrix, as two factors, by its norm.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "owner, full space": ("owner", {"polar": ps.NewtonSchulz(2, "quintic"), "nonfinite": "skip"}),
    "owner, warm": ("owner", WARM | {"nonfinite": "skip"}),
    "owner, rms": (
        "owner",
        {
            "polar": ps.Deflated(ps.LowRank(4, 2, **SKETCH), ps.NewtonSchulz(1, "flat")),
            "shape_scale": "rms",
        },
    ),
    "replicated, warm": ("replicated", WARM),
    "owner, columns": ("owner", {"polar": ps.LowRank(4, 2, 0.5, **SKETCH)}),
}


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many matrices each call is given that may launch kernels, from here on."""
    found: list[int] = []

    def noting(call: Any, place: int) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            found.append(len(arguments[place]))
            return call(*arguments, **options)

        return noted

    steps = [(kind, "step") for kind in (ps.LowRank, ps.NewtonSchulz, ps.Deflated)]
    places = [*steps, (ps.NewtonSchulz, "lift")]
    before = [getattr(*place) for place in places]
    for (owner, name), call in zip(places, before, strict=True):
        setattr(owner, name, noting(call, 1))
    try:
        yield found
    finally:
        for place, call in zip(places, before, strict=True):
            setattr(*place, call)


@dataclass
class Laid:
    """How tensors lie on the ranks: as copies, or cut along their rows or columns."""

    rank: int
    ranks: int
    mesh: Any
    dim: int | None

    def __call__(self, X: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Shard

        if self.dim is None:
            return X.clone()
        part = X.chunk(self.ranks, self.dim)[self.rank].clone()
        return DTensor.from_local(part, self.mesh, [Shard(X.dim() + self.dim)], run_check=False)


def trained(plan: str, options: dict[str, Any], laid: Laid) -> list[Tensor]:
    """This rank's parts of the parameters after all steps."""
    g = torch.Generator().manual_seed(0)
    given = lambda shape: laid(torch.randn(shape, generator=g).to(DEVICE))  # noqa: E731
    params = [Parameter(given(shape)) for shape in SHAPES]
    group = torch.distributed.group.WORLD if laid.dim is None else None
    optimizer = ps.Muon(params, lr=0.1, plan=plan, process_group=group, **options)
    for _ in range(STEPS):
        for p in params:
            p.grad = given(p.shape)
        optimizer.step()
    assert all(f"; {plan} on" in route.polar for route in optimizer.routes)
    return [getattr(p, "to_local", lambda p=p: p)().detach() for p in params]


def main(rank: int, ranks: int, folder: Path) -> dict[str, dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh

    hasten()
    compute_in_bfloat16()
    mesh, usual, found = init_device_mesh(DEVICE, (ranks,)), kernels.MOST_MATRICES, {}
    for name, (plan, options) in CASES.items():
        dim = None if plan == "replicated" else -1 if "columns" in name else -2
        laid, ends, counts = Laid(rank, ranks, mesh, dim), [], []
        for most in (usual, MOST):
            kernels.MOST_MATRICES = most
            with counted() as given:
                ends.append(trained(plan, options, laid))
            counts.append(max(given))
        kernels.MOST_MATRICES = usual
        off = max(float((p - q).norm() / p.norm()) for p, q in zip(*ends, strict=True))
        found[name] = {"off": off, "most": counts}
    return found
