"""Train a sharded network (FSDP2) on two ranks: main returns what each rank ended with."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import torch
from tests.own_parts import SignDescent
from torch import Tensor, nn

from polarstep import SGD, LowRank, Muon, NewtonSchulz, muon_for, rng
from polarstep.certificate import Monitor
from polarstep.maps import Warm

RANKS = 2
STEPS = 3
RESUMED = 1  # the step before which the optimizer is made anew from its checkpoint
WATCHED = "Gaussian"
POISONED = 1  # the step at which a gradient has an infinity
CASES: dict[str, dict[str, Any]] = {
    "default": {"weight_decay": 0.1},
    "Polyak, SGD": {"nesterov": False, "others": SGD(lr=0.1)},
    "a rule of one's own": {"others": SignDescent(lr=0.01)},
    "Gaussian": {"polar": LowRank(4, 2, always_sketch=True)},
    "warm": {"polar": LowRank(4, 2, sketch=Warm(), always_sketch=True)},
    "tensor lr": {"lr": torch.tensor(0.03), "weight_decay": 0.1},
    "skip, warm": {
        "nonfinite": "skip",
        "weight_decay": 0.1,
        "polar": LowRank(4, 2, sketch=Warm(), always_sketch=True),
    },
}


def network() -> nn.Sequential:
    """Shards of unequal size, equal and unequal splits, and filters."""
    layers = [
        nn.Conv1d(1, 15, 16, bias=False),
        nn.Flatten(),
        nn.Linear(15, 24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.Linear(24, 5),
    ]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(
                torch.randn(p.shape, generator=rng.generator("sharded", i)) / p[0].numel() ** 0.5
            )
    return model


def train(model: nn.Module, name: str) -> tuple[Muon, list[dict[str, Any]]]:
    """The optimizer after all steps, and what a monitor saw in the case it looks at."""
    optimizer, rows = optimizer_of(model, name), []
    for step in range(STEPS):
        x = torch.randn(8, 1, 16, generator=rng.generator("batch", step))
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        if step == POISONED and CASES[name].get("nonfinite") == "skip":
            for p in model.parameters():
                if p.shape == (24, 24):
                    poison(p.grad)
        if step == RESUMED:
            checkpoint = copy.deepcopy(optimizer.state_dict())
            optimizer = optimizer_of(model, name)
            optimizer.load_state_dict(checkpoint)
            if name == WATCHED:
                rows = Monitor(optimizer, every=1).rows
        optimizer.step()
    return optimizer, rows


def optimizer_of(model: nn.Module, name: str) -> Muon:
    # Rows are normalized by kernels wherever these run, and here they only would be let to run.
    splits = {"2.weight": 2, "4.weight": (17, 7)}
    # Buckets in one part, in many.
    bytes_in_flight = 2**29 if list(CASES).index(name) % 2 else 1
    return muon_for(
        model, splits=splits, transform=None, bytes_in_flight=bytes_in_flight, **CASES[name]
    )


def poison(grad: Tensor | None) -> None:
    """An infinity in the first entry, which only one rank has."""
    if hasattr(grad, "to_local"):
        if torch.distributed.get_rank() == 0:
            grad.to_local()[0, 0] = math.inf
    elif grad is not None:
        grad[0, 0] = math.inf


def refusal(p: Tensor) -> str:
    """What a polar map says to a sharded matrix."""
    try:
        NewtonSchulz()(p.detach())
    except (TypeError, ValueError) as error:
        return str(error)
    return "none"


def whole(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """What a rank ended with, case by case, and under "refusals" what maps say to its shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ["TRITON_INTERPRET"] = "1"  # kernels would run if they were let
    mesh = init_device_mesh("cpu", (ranks,))
    model = network()
    found: dict[str, Any] = {}
    for name in CASES:
        model = network()
        fully_shard(model, mesh=mesh)
        optimizer, rows = train(model, name)
        bases = [
            getattr(v, "full_tensor", lambda v=v: v)()
            for s in optimizer.state.values()
            for k, v in s.items()
            if "basis" in k
        ]
        found[name] = {
            "params": whole(model),
            "bases": bases,
            "rows": rows,
            "shards": [p.to_local().shape[0] for p in model.parameters()],
            "routes": str(optimizer.routes),
        }
    return found | {"refusals": [refusal(p) for p in model.parameters() if p.ndim > 1]}
