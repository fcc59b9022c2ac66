"""Save and load optimizers at other numbers of ranks, with every option of torch's checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from tests.ranks.trajectories import (
    MAPS,
    SIZES,
    Networks,
    batch,
    mesh_of,
    optimizer_of,
    whole,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import polarstep as ps
from polarstep import rng, stale_momentum

# Steps before a run is saved, and in all.
SAVED_AFTER, ENDS_AFTER = 1, 3
# Steps of the networks whose gradient ends: with a gradient, until they are saved, and in all. With a
# momentum of 0.1 they rest after 12 steps without a gradient, and after 19 if their peak is forgotten.
MOVED, SAVED, ENDED = 3, 10, 18
CARRYING = ("full space", "warm", "rows", "second moment of G")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "offload": {"cpu_offload": True},
    "full, offload": {"full_state_dict": True, "cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
}
# Options and plan of every run: every option with one plan, and every plan with the default options.
RUNS = [*((name, "auto") for name in OPTIONS), ("default", "owner")]


def loaded(ranks: int, source: int) -> list[tuple[str, str]]:
    """Options and plan of the runs that go on.

    With as many ranks as saved it, a file is read by the same code as with others, and needs less of it.
    """
    return [run for run in RUNS if ranks != source or run[0] == "default"]


class WithUnused(Networks):
    """The networks, and a matrix that gets no gradient until the steps after the save."""

    def __init__(self) -> None:
        super().__init__(CARRYING, SIZES[:-1])  # without the square matrix
        self.unused = nn.Linear(18, 10, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.unused.weight.copy_(torch.linspace(-1, 1, 180).view(10, 18))
        self.late = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.late:
            y = torch.cat([y, self.unused(y[:1]).square().mean().expand_as(y[:1])])
        return y


def built(plan: str = "auto", *, sharded: bool) -> tuple[nn.Module, Any]:
    from torch.distributed.fsdp import fully_shard

    model = WithUnused()
    if sharded:
        fully_shard(model, mesh=mesh_of((torch.distributed.get_world_size(),), ("dp",)))
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


def give_zeros(p: Tensor) -> None:
    if p.grad is None:
        p.grad = torch.zeros_like(p)


def reference() -> list[Tensor]:
    """The weights of one process; the gradient that comes late is zero before, as in a checkpoint."""
    model, optimizer = built(sharded=False)
    optimizer.register_step_pre_hook(lambda *_: give_zeros(model.unused.weight))
    go(model, optimizer, range(SAVED_AFTER))
    go(model, optimizer, range(SAVED_AFTER, ENDS_AFTER), late=True)
    return whole(model)


class Resting(nn.Module):
    """Matrices and experts that get no gradient after the first steps; some momentum in eight bits."""

    def __init__(self, *, sharded: bool) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        for name, shape in (
            ("matrix", (9, 12)),
            ("experts", (5, 6, 8)),
            ("matrix_in_bits", (9, 128)),
            ("experts_in_bits", (5, 6, 128)),
        ):
            X = torch.zeros(shape, dtype=torch.float64)
            if sharded:
                mesh = mesh_of((torch.distributed.get_world_size(),), ("dp",))
                X = distribute_tensor(X, mesh, [Shard(0)])
            self.register_parameter(name, nn.Parameter(X))
        groups = [
            {"params": [self.matrix, self.experts]},
            {"params": [self.matrix_in_bits, self.experts_in_bits], "momentum_dtype": torch.int8},
        ]
        self.optimizer = ps.Muon(groups, lr=0.1, momentum=0.1)

    def go(self, steps: range) -> None:
        from torch.distributed.tensor import distribute_tensor

        for step in steps:
            for name, p in self.named_parameters():
                G = torch.zeros(p.shape, dtype=p.dtype)
                if step < MOVED:
                    G = torch.randn(p.shape, generator=rng.generator(name, step), dtype=p.dtype)
                if hasattr(p, "placements"):
                    G = distribute_tensor(G, p.device_mesh, p.placements)
                p.grad = G
            self.optimizer.step()


def resting(path: Path) -> dict[str, float]:
    """How far a run ends from one that was not interrupted, and how far it moves when it is to rest."""
    known = Resting(sharded=False)
    known.go(range(ENDED))
    second = Resting(sharded=True)
    load(second, second.optimizer, StateDictOptions(), path)
    second.go(range(SAVED, ENDED))
    pairs = zip(whole(second), whole(known), strict=True)
    off = max(float((p - q).abs().max()) for p, q in pairs)
    before = whole(second)
    second.go(range(ENDED, ENDED + 1))
    moved = max(float((p - q).abs().max()) for p, q in zip(whole(second), before, strict=True))
    return {"off": off, "moved": moved}


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


def gathers_in_order() -> bool:
    """Whether torch gathers an uneven last dimension into a contiguous tensor.

    In torch 2.9 the gathered tensor has gaps. ``broadcast_from_rank0`` then sends it with the gaps, and
    other ranks than the first load wrong numbers, whatever the optimizer.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks = torch.distributed.get_world_size()
    mesh = mesh_of((ranks,), ("dp",))
    X = distribute_tensor(torch.zeros(1, 2, 2 * ranks - 1), mesh, [Shard(2)])
    return bool(X.full_tensor().is_contiguous())


def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    """Save after the first step; load what was saved here, or at another number of ranks; go on.

    What this number of ranks has saved in an earlier launch is not saved again.
    """
    warnings.simplefilter("ignore")
    shared = folder.parent / "saved"
    is_first = not (shared / f"resting-{ranks}").exists()
    shared.mkdir(exist_ok=True)
    torch.distributed.barrier()  # no rank saves before all have looked

    def path_of(name: str, plan: str, ranks: int) -> Path:
        return shared / f"{name}-{plan}-{ranks}".replace(", ", "-")

    known, found = reference(), {}
    source = int((folder / "source").read_text(encoding="utf-8"))
    for plan in ("auto", "owner") if is_first else ():
        model, optimizer = built(plan, sharded=True)
        go(model, optimizer, range(SAVED_AFTER), rank, ranks)
        for name in (name for name, its_plan in RUNS if its_plan == plan):
            save(model, optimizer, StateDictOptions(**OPTIONS[name]), path_of(name, plan, ranks))
    for name, plan in loaded(ranks, source):
        model, optimizer = built(plan, sharded=True)
        load(model, optimizer, StateDictOptions(**OPTIONS[name]), path_of(name, plan, source))
        go(model, optimizer, range(SAVED_AFTER, ENDS_AFTER), rank, ranks, late=True)
        off = [(p - q).abs().max() for p, q in zip(whole(model), known, strict=True)]
        found[name, plan] = float(torch.stack(off).max())
    with mock.patch.object(stale_momentum, "EVERY", 2):
        if is_first:
            fading = Resting(sharded=True)
            fading.go(range(SAVED))
            save(fading, fading.optimizer, StateDictOptions(), shared / f"resting-{ranks}")
        found["resting"] = resting(shared / f"resting-{source}")
    found["gathers in order"] = gathers_in_order()
    return found
