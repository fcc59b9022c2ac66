"""Parameters on ranks, and beside them the same parameters in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import polarstep as ps
from polarstep import rng
from polarstep.maps import Draw, MapState, Polar

__all__ = [
    "WARM",
    "Broken",
    "Twins",
    "distributed",
    "given",
    "matrix",
    "mesh_of",
    "placed_as",
    "raised",
    "whole",
]

WARM = ps.LowRank(4, 2, 0, sketch=ps.Warm(), always_sketch=True)


@dataclass(frozen=True)
class Broken(ps.PolarMap):
    """A map that fails on rank 1."""

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        if dist.get_rank() == 1:
            raise ValueError("this map is broken")
        return Polar(M, M), carry

    def flops(self, m: int, n: int) -> int:
        return 1


@functools.cache
def mesh_of(*sizes: int) -> Any:
    """A mesh, which all tests share, as it takes long to make its groups; ``mesh_of()`` is a line."""
    if not sizes:
        sizes = (dist.get_world_size(),)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def given(name: str, shape: tuple[int, ...], step: int = 0) -> Tensor:
    """Random entries by name, the same on all ranks."""
    return torch.randn(*shape, generator=rng.generator(name, step), dtype=torch.float64)


def distributed(X: Tensor, mesh: Any, placements: Any) -> Any:
    """``X``, which all ranks have, as a ``DTensor``. Nothing is sent, so one rank may do it alone."""
    return distribute_tensor(X, mesh, placements, src_data_rank=None)


def matrix(name: str, *placements: Any, mesh: Any = None, shape: tuple[int, ...] = (8, 12)) -> Any:
    """A parameter on ``mesh``, by default the line of all ranks."""
    return nn.Parameter(distributed(given(name, shape), mesh or mesh_of(), placements))


def placed_as(p: Any, G: Tensor) -> Any:
    """``G`` placed as ``p`` is."""
    return distributed(G, p.device_mesh, p.placements) if isinstance(p, DTensor) else G


def whole(X: Any) -> Tensor:
    """``X`` with the parts of all ranks."""
    return (X.full_tensor() if isinstance(X, DTensor) else X).detach()


def raised(call: Callable[[], object]) -> str:
    """The error of ``call`` in words, or "nothing"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Twins:
    """Parameters of some shapes placed on ranks, their twins in one process, and their optimizers.

    Without placements every rank has plain copies.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        *placements: Any,
        mesh: Any = None,
        plan: str = "auto",
        dtype: torch.dtype = torch.float64,
        place: Callable[[Tensor], Any] | None = None,
        **options: Any,
    ) -> None:
        def placed(X: Tensor) -> Any:
            return distributed(X, mesh or mesh_of(), placements) if placements else X.clone()

        self._place = place or placed
        starts = [given(f"parameter {i}", shape).to(dtype) for i, shape in enumerate(shapes)]
        self.params = [nn.Parameter(self._place(X)) for X in starts]
        self.twins = [nn.Parameter(X.clone()) for X in starts]
        is_copied = not isinstance(self.params[0], DTensor)
        group = dist.group.WORLD if is_copied else None
        given_to_both = {"lr": 0.1} | options
        self.ours = ps.Muon(self.params, plan=plan, process_group=group, **given_to_both)  # type: ignore[arg-type]
        self.one = ps.Muon(self.twins, **given_to_both)
        self.number = 0

    def step(
        self,
        change: Callable[[int, Tensor], object] = lambda i, G: None,
        *,
        missing: Collection[int] = (),
        absent: Collection[int] = (),
    ) -> None:
        """A step of both; ``change(i, G)`` may write into the gradient of parameter i.

        This rank has no gradient of the parameters ``missing``, and nobody has one of those ``absent``.
        """
        for i, (p, q) in enumerate(zip(self.params, self.twins, strict=True)):
            G = given(f"gradient {i}", tuple(q.shape), self.number).to(q.dtype)
            change(i, G)
            p.grad = None if i in missing or i in absent else self._place(G)
            q.grad = None if i in absent else G
        self.number += 1
        self.ours.step()
        self.one.step()

    def off(self) -> float:
        """How far parameters and states are off, at most."""
        found = []
        for p, q in zip(self.params, self.twins, strict=True):
            mine, its = self.ours.state.get(p, {}), self.one.state.get(q, {})
            pairs = [(whole(p), q.detach()), *((whole(mine[key]), its[key]) for key in its)]
            found += [(a.view(b.shape).double() - b.double()).abs().max() for a, b in pairs]
        return float(torch.stack(found).max())

    def off_of_values(self) -> float:
        """How far parameters alone are off, at most."""
        pairs = zip(self.params, self.twins, strict=True)
        return max(float((whole(p) - q).detach().abs().max()) for p, q in pairs)
