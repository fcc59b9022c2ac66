"""Take the steps of the table with the ``polarstep`` that Python finds, and write down what came out.

``python -m tests.frozen.steps SELECTION PATTERN FILE`` is one side of ``python -m tests.frozen``.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.frozen.rows import Row, rows
from torch import Tensor

import polarstep as ps

RANKS = 2
# C rests where it has faded at a step that 64 divides. The steps of a row begin shortly before one.
FIRST_STEP, LATER_STEP = 63, 128


def parameters(row: Row, rank: int = 0) -> list[torch.nn.Parameter]:
    """The parameters of a row: those that Muon steps, and three vectors for AdamW and SGD."""
    g = torch.Generator().manual_seed(7)
    found = []
    for shape in [*row.shapes, (5,), (20,), (3,)]:
        X = torch.randn(shape, generator=g, dtype=torch.float64).to(row.dtype)
        if row.layout == "channels_last" and X.dim() == 4:
            X = X.contiguous(memory_format=torch.channels_last)
        found.append(torch.nn.Parameter(placed(X, row)))
    return found


def placed(X: Tensor, row: Row) -> Tensor:
    """``X`` as the ranks share it."""
    if row.layout not in ("rows", "columns", "stack"):
        return X
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    return distribute_tensor(X, mesh, [Shard(1 if row.layout == "columns" and X.dim() > 1 else 0)])


def optimizer_of(row: Row, params: list[torch.nn.Parameter]) -> ps.Muon:
    *matrices, first, second, third = params
    last = len(matrices) - 1
    common = {"lr": 0.1, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0, "seed": 3}
    common |= {"shape_scale": "spectral", "fused": True}
    groups: list[dict[str, Any]] = [
        {"params": matrices[:last]},
        {"params": matrices[last:], "lr": torch.tensor(0.05) if row.steps == 5 else 0.05},
        {"params": [first, second], "algorithm": "adamw", "lr": 0.01, "betas": (0.9, 0.95)},
        {"params": [third], "algorithm": "sgd", "lr": 0.01, "momentum": 0.9},
    ]
    more: dict[str, Any] = {}
    if row.layout == "copies":
        more["process_group"] = torch.distributed.group.WORLD
    options = common | row.make() | row.options | more
    if "shape_scale" not in inspect.signature(ps.Muon).parameters:  # the tree before the house
        options["lr_scale"] = options.pop("shape_scale")
    optimizer = ps.Muon(groups, **options)
    for group in optimizer.param_groups[:2]:
        group["step"] = FIRST_STEP
    return optimizer


def give_gradients(row: Row, params: list[torch.nn.Parameter], step: int) -> None:
    """Gradients of one step: one is missing, one zero, one partly zero; a NaN where it is skipped."""
    rests = row.name.endswith("rests")
    for i, p in enumerate(params):
        g = torch.Generator().manual_seed(100 * step + i)
        G = torch.randn(p.shape, generator=g, dtype=torch.float64) * row.size
        if i == 0 and step == 1 and len(params) > 4:
            p.grad = None
            continue
        if i == 1 and (step == 2 or (rests and step > 1)):
            G.zero_()
        if step == 3 and G.dim() > 2 and len(G):
            G[0].zero_()
        if i == 0 and step == 2 and row.options.get("nonfinite") == "skip":
            G.view(-1)[:1] = torch.nan
        grad = placed(G.to(row.dtype), row)
        p.grad = torch.empty_like(p).copy_(grad) if type(grad) is Tensor else grad


def taken(row: Row) -> list[dict[str, Tensor]]:
    """X and the state of every parameter after each step of a row, and sums of what a hook saw."""
    params = parameters(row)
    optimizer = optimizer_of(row, params)
    found: list[dict[str, Tensor]] = []
    seen: dict[str, Tensor] = {}

    def hook(bucket: Any) -> None:
        at = len(seen)
        seen[f"M {at}"] = bucket.M.double().sum((-2, -1))
        seen[f"T {at}"] = bucket.T.double().square().sum((-2, -1))

    for step in range(row.steps):
        if step == 3:
            checkpoint = optimizer.state_dict()
            optimizer = optimizer_of(row, params)
            optimizer.load_state_dict(checkpoint)
            if row.layout != "copies" and row.steps == 5:
                optimizer.register_polar_hook(hook)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
            if row.name.endswith("rests") and group["algorithm"] == "muon" and step == 4:
                group["step"] = LATER_STEP
        give_gradients(row, params, step)
        optimizer.step()
        found.append(noted(optimizer, params) | {f"hook, {key}": X for key, X in seen.items()})
        seen.clear()
    return found


def noted(optimizer: ps.Muon, params: list[torch.nn.Parameter]) -> dict[str, Tensor]:
    """Copies of X and of every tensor in the state, whole: plans cut what maps carry in other parts."""
    found = {}
    for i, p in enumerate(params):
        found[f"X of parameter {i}"] = whole(p)
        for key, value in sorted(optimizer.state.get(p, {}).items()):
            found[f"{key} of parameter {i}"] = whole(value)
    for i, group in enumerate(optimizer.param_groups[:2]):
        found[f"step of group {i}"] = torch.tensor(group["step"])
    return {key: X.detach().clone() for key, X in found.items()}


def whole(X: Tensor) -> Tensor:
    return X.full_tensor() if hasattr(X, "full_tensor") else X


def all_taken(selection: str, pattern: str) -> dict[str, Any]:
    """For each row its steps, or the error that it raised."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for row in rows(selection):
        if pattern in f"{selection}: {row.name}":
            try:
                found[row.name] = taken(row)
            except Exception as error:
                found[row.name] = f"{type(error).__name__}: {error}"
    return found


def _rank(rank: int, pattern: str, file: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}.store", rank=rank, world_size=RANKS
    )
    torch.save(all_taken("ranks", pattern), f"{file}.{rank}")
    torch.distributed.destroy_process_group()


def main(selection: str, pattern: str, file: str) -> None:
    if selection == "ranks":
        torch.multiprocessing.start_processes(
            _rank, (pattern, file), nprocs=RANKS, start_method="fork"
        )
        each = [torch.load(f"{file}.{rank}") for rank in range(RANKS)]
        found = {
            f"{name}, rank {r}": steps for r, its in enumerate(each) for name, steps in its.items()
        }
    else:
        if selection == "kernels":
            from tests.kernels import interpreter

            interpreter.hasten()
            interpreter.compute_in_bfloat16()
        found = all_taken(selection, pattern)
    torch.save({"polarstep": str(Path(ps.__file__).resolve()), "rows": found}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
