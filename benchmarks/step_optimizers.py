"""The optimizers whose steps are timed: AdamW, the peers, Muon by hand, and ours with several maps."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

import polarstep as ps

Make = Callable[[], torch.optim.Optimizer]

# Four steps with as much gain as seven steps of the paper's quintic.
INNER = ps.NewtonSchulz(4, "polar-express-sketch")

# Maps that are also timed with normalized rows.
WITH_ROWS = (
    "LowRank, Gaussian h=0",
    "LowRank, the paper's (h=1, q=7)",
    "full space, PolarExpress 5",
    "Deflated 56, warm, one step",
    "Deflated 120, warm, one step",
    "auto",
)


# Maps that sketch every shape, with ℓ a part of the short side.
HEADS = {"Deflated, ℓ = a sixth": 6, "Deflated, ℓ = an eighth": 8, "Deflated, ℓ = a twelfth": 12}
QUARTER = "LowRank, ℓ = a quarter"

# The rank that auto took in earlier records, which have it with normalized rows too.
EARLIER = "Deflated 48, warm, one step"

# Maps that are also timed with shape_scale="rms", which needs ‖T‖_F of every matrix.
WITH_RMS = ("full space, PolarExpress 5", "Deflated 120, warm, one step", "LowRank, Gaussian h=0")

# What follows the name of a map whose step has this option.
ROWS, RMS = ", rows normalized", ", update RMS of 0.2"

# Maps in another precision than the usual of a CPU with tiles: full space in float32, and a step on the
# rest with as many bits as all other products.
FULL_IN_FLOAT32 = "full space, PolarExpress 5, in float32"
ALL_BITS = "Deflated 120, warm, one step, float8=False"

# Rows that are timed only where they are asked for.
ASKED_FOR = (
    EARLIER + ROWS,
    FULL_IN_FLOAT32,
    ALL_BITS,
    *HEADS,
    QUARTER,
    *(name + ROWS for name in HEADS),
    *(name + RMS for name in WITH_RMS),
)


def forced(short: int) -> dict[str, Callable[[], ps.PolarMap]]:
    """The maps of :data:`HEADS` and :data:`QUARTER`, for matrices with this short side."""

    def head(part: int, **options: Any) -> ps.LowRank:
        width = -(-short // (16 * part)) * 16  # rounded up to a multiple of 16, as auto does
        return ps.LowRank(width - 8, 8, inner=INNER, always_sketch=True, **options)

    def lifted(part: int) -> ps.Deflated:
        return ps.Deflated(head(part, sketch=ps.Warm()), ps.NewtonSchulz(1, "flat"))

    made = {name: partial(lifted, part) for name, part in HEADS.items()}
    return made | {QUARTER: partial(head, 4, power=0)}


def maps(rank: int, oversample: int) -> dict[str, Callable[[], ps.PolarMap]]:
    """Functions that make the polar maps to compare, by their names in the table."""

    def low_rank(**options: Any) -> ps.LowRank:
        return ps.LowRank(rank, oversample, **options)

    def one_step(head: ps.LowRank) -> ps.Deflated:
        return ps.Deflated(head, ps.NewtonSchulz(1, "flat"))

    def warm(rank: int) -> ps.LowRank:
        return ps.LowRank(rank, 8, sketch=ps.Warm(), inner=INNER)

    return {
        "LowRank, warm": lambda: low_rank(sketch=ps.Warm(), inner=INNER),
        "LowRank, Gaussian h=0": lambda: low_rank(power=0, inner=INNER),
        "LowRank, Gaussian h=½": lambda: low_rank(power=0.5, inner=INNER),
        "LowRank, Kaczmarz h=½": lambda: low_rank(power=0.5, sketch=ps.Kaczmarz(), inner=INNER),
        "LowRank, the paper's (h=1, q=7)": low_rank,
        "LowRank, Gaussian h=1": lambda: low_rank(inner=INNER),
        "Deflated, warm, one step": lambda: one_step(low_rank(sketch=ps.Warm(), inner=INNER)),
        "Deflated 48, warm, one step": lambda: one_step(warm(48)),
        "Deflated 56, warm, one step": lambda: one_step(warm(56)),
        "Deflated 88, warm, one step": lambda: one_step(warm(88)),
        "Deflated 120, warm, one step": lambda: one_step(warm(120)),
        "Deflated 48, Gaussian h=1, one step": lambda: one_step(ps.LowRank(48, 8, inner=INNER)),
        "auto": lambda: ps.Auto(),
        "auto, cheap": lambda: ps.Auto("cheap"),
        "full space, PolarExpress 5": lambda: ps.NewtonSchulz(5, "polar-express"),
        "full space, quintic 7": lambda: ps.NewtonSchulz(7, "quintic"),
    }


def in_other_bits() -> dict[str, Callable[[], ps.PolarMap]]:
    """The maps of :data:`FULL_IN_FLOAT32` and :data:`ALL_BITS`."""

    def all_bits() -> ps.Deflated:
        head = ps.LowRank(120, 8, sketch=ps.Warm(), inner=INNER)
        return ps.Deflated(head, ps.NewtonSchulz(1, "flat"), float8=False)

    return {
        FULL_IN_FLOAT32: lambda: ps.NewtonSchulz(5, "polar-express", dtype=torch.float32),
        ALL_BITS: all_bits,
    }


def optimizers(
    params: list[Tensor], rank: int, oversample: int, device: torch.device, *, others: bool = True
) -> Iterator[tuple[str, Make]]:
    """Names of the table and functions that make the optimizers; AdamW is the first.

    The last rows are those of :data:`ASKED_FOR`, which the table does not have.
    ``others=False`` leaves out the peers and Muon by hand: AdamW and ours remain.
    """
    yield "AdamW, fused", lambda: torch.optim.AdamW(params, lr=1e-5, fused=True)
    if others and device.type == "cuda":  # most peers are bf16 only: minutes on most CPUs
        yield from peers(params)
    if others and device.type == "cpu":
        yield "a loop of Newton–Schulz 7", lambda: HandWritten(params, 7)
        yield "a loop of Newton–Schulz 5", lambda: HandWritten(params, 5)
        yield "a loop of batches, 7", lambda: Batched(params, 7)
    polars = maps(rank, oversample)
    whole = polars | forced(min(min(p.shape) for p in params))
    for name in polars:
        yield name, partial(_muon, params, polars[name])
    for name in (*WITH_ROWS, EARLIER, *HEADS):
        yield name + ROWS, partial(_muon, params, whole[name], transform=ps.NormalizedRows())
    for name in (*HEADS, QUARTER):
        yield name, partial(_muon, params, whole[name])
    for name, make in in_other_bits().items():
        yield name, partial(_muon, params, make)
    for name in WITH_RMS:
        yield name + RMS, partial(_muon, params, polars[name], shape_scale="rms")


def _muon(params: list[Tensor], polar: Callable[[], ps.PolarMap], **options: Any) -> ps.Muon:
    """Our optimizer with the map that ``polar`` makes."""
    return ps.Muon(params, lr=1e-5, polar=polar(), **options)


# Peers that are only timed, with the options that make them fastest: name, module, class, options.
ONLY_TIMED: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        "Muon of Emerging-Optimizers, SYRK",
        "emerging_optimizers.orthogonalized_optimizers.muon",
        "Muon",
        {"use_syrk": True},
    ),
    ("Muon of muonium", "muonium", "Muon", {}),
)

# dion's optimizers are also timed in dion's CUDA graph, with each of its sets of kernels.
IN_DIONS_GRAPH: dict[str, dict[str, Any]] = {
    ", CUDA graph": {},
    ", CUDA graph, Triton": {"use_triton": True},
    ", CUDA graph, gram-newton-schulz": {"use_gram_newton_schulz": True},
}


def peers(params: list[Tensor]) -> Iterator[tuple[str, Make]]:
    """Names and functions that make the peers; a peer that cannot be imported is printed instead."""
    from polarstep_lab.optimizers.peers import PEERS, load, search_folders

    for peer in PEERS.values():
        try:
            made = load(peer)
        except ValueError as missing:
            print(f"  left out: {peer.title}: {missing}", flush=True)
            continue
        yield peer.title, partial(made, params, lr=1e-5)
        if peer.package == "dion":
            for suffix, options in IN_DIONS_GRAPH.items():
                yield f"{peer.title}{suffix}", partial(_in_dions_graph, made, params, **options)
    search_folders()
    for title, module, attribute, options in ONLY_TIMED:
        try:
            made = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as missing:
            print(f"  left out: {title}: {missing}", flush=True)
        else:
            yield title, partial(made, params, lr=1e-5, **options)


def _in_dions_graph(made: Any, params: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    """The optimizer that ``made`` makes, in dion's CUDA graph."""
    from dion.cuda_graph import CudaGraphOptimizer

    return CudaGraphOptimizer(made(params, lr=1e-5, **options), warmup_steps=3)


class HandWritten(torch.optim.Optimizer):
    """Muon in ten lines: a float32 quintic for one parameter after another."""

    def __init__(self, params: list[Tensor], steps: int) -> None:
        super().__init__(params, {"steps": steps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                C = self.state[p].setdefault("C", torch.zeros_like(p))
                C.mul_(0.95).add_(p.grad)
                X = p.grad + 0.95 * C
                X = (X.T if X.shape[0] > X.shape[1] else X) / X.norm()
                for _ in range(group["steps"]):
                    A = X @ X.T
                    X = 1.875 * X + (-1.25 * A + 0.375 * A @ A) @ X
                p.add_(X.T if p.shape[0] > p.shape[1] else X, alpha=-1e-5)


class Batched(HandWritten):
    """Muon by hand in batches: all matrices of a shape at once, and additions within the products."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for (m, n), params in shapes.items():
                C = [self.state[p].setdefault("C", torch.zeros_like(p)) for p in params]
                # Every parameter that is timed has a gradient.
                grads = cast("list[Tensor]", [p.grad for p in params])
                torch._foreach_mul_(C, 0.95)
                torch._foreach_add_(C, grads)
                X = torch.stack(torch._foreach_add(grads, C, alpha=0.95))
                X = (X.mT if m > n else X) / X.flatten(1).norm(dim=1)[:, None, None]
                for _ in range(group["steps"]):
                    A = X @ X.mT
                    X = torch.baddbmm(
                        X, torch.baddbmm(A, A, A, beta=-1.25, alpha=0.375), X, beta=1.875
                    )
                torch._foreach_add_(params, list(X.mT if m > n else X), alpha=-1e-5)
