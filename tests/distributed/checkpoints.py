"""Save and load optimizers at other numbers of ranks, with every option of torch's checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tests.distributed.trajectories import MAPS, STEPS, Networks, batch, optimizer_of, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

HALF = 2
CARRYING = ("full space", "warm", "kept", "rows")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "offload": {"cpu_offload": True},
    "full, offload": {"full_state_dict": True, "cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
}


class WithUnused(Networks):
    """The networks, and a matrix that gets no gradient until the second half."""

    def __init__(self) -> None:
        super().__init__(CARRYING)
        self.unused = nn.Linear(12, 10, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.unused.weight.copy_(torch.linspace(-1, 1, 120).view(10, 12))
        self.late = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.late:
            y = torch.cat([y, self.unused(y[:1]).square().mean().expand_as(y[:1])])
        return y


def built(plan: str = "auto", *, sharded: bool) -> tuple[nn.Module, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = WithUnused()
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, plan=plan)
    warm = MAPS["warm"] | {"params": [model.unused.weight]}
    optimizer.add_param_group(warm)
    return model, optimizer


def go(
    model: Any, optimizer: Any, steps: range, rank: int = 0, ranks: int = 1, *, late: bool = False
) -> None:
    model.late = late
    for step in steps:
        x, y = batch(step, rank, ranks)
        optimizer.zero_grad()
        out = model(x)
        loss = (out[: len(model.each)] - y).square().mean((1, 2)).sum()
        if late:
            loss = loss + out[-1].mean()
        loss.backward()
        optimizer.step()


def reference() -> list[Tensor]:
    model, optimizer = built(sharded=False)
    go(model, optimizer, range(HALF))
    go(model, optimizer, range(HALF, STEPS), late=True)
    return whole(model)


def save(model: Any, optimizer: Any, options: StateDictOptions, path: Path) -> None:
    both = get_state_dict(model, optimizer, options=options)
    content = dict(zip(("model", "optimizer"), both, strict=True))
    if options.full_state_dict:
        if torch.distributed.get_rank() == 0:
            torch.save(content, path.with_suffix(".pt"))
        torch.distributed.barrier()
    else:
        dcp.save(content, checkpoint_id=path)


def load(model: Any, optimizer: Any, options: StateDictOptions, path: Path) -> None:
    if options.full_state_dict:
        content: Any = {"model": {}, "optimizer": {}}
        if torch.distributed.get_rank() == 0 or not options.broadcast_from_rank0:
            content = torch.load(path.with_suffix(".pt"), weights_only=True)
    else:
        both = get_state_dict(model, optimizer, options=options)
        content = dict(zip(("model", "optimizer"), both, strict=True))
        dcp.load(content, checkpoint_id=path)
    # Not set_state_dict: with nothing to load on other ranks than 0 it leaves out the model there.
    set_model_state_dict(model, content["model"], options=options)
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Save after half of the steps; load what was saved here, or at another number of ranks; go on."""
    warnings.simplefilter("ignore")
    shared = folder.parent / "saved"
    if rank == 0:
        shared.mkdir(exist_ok=True)
    torch.distributed.barrier()
    known, found = reference(), {}
    source = (folder / "source").read_text(encoding="utf-8")
    for name, options in OPTIONS.items():
        for plan in ("auto", "owner") if name == "default" else ("auto",):
            told = StateDictOptions(**options)
            label = f"{name}-{plan}".replace(", ", "-")
            model, optimizer = built(plan, sharded=True)
            go(model, optimizer, range(HALF), rank, ranks)
            save(model, optimizer, told, shared / f"{label}-{ranks}")
            model, optimizer = built(plan, sharded=True)
            load(model, optimizer, told, shared / f"{label}-{source}")
            go(model, optimizer, range(HALF, STEPS), rank, ranks, late=True)
            off = [(p - q).abs().max() for p, q in zip(whole(model), known, strict=True)]
            found[name, plan] = float(torch.stack(off).max())
    return found
