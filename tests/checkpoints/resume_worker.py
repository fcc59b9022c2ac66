"""Train a few networks from a checkpoint, in a process of its own with FOLDER and THREADS."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from polarstep import Exact, Kaczmarz, LowRank, Muon, NewtonSchulz, rng
from polarstep.maps import Warm

CASES = {
    "default": {},
    "exact, Polyak": {"polar": Exact(), "nesterov": False},
    "Gaussian": {"polar": LowRank(3, 2, always_sketch=True)},
    "Kaczmarz": {"polar": LowRank(3, 2, 0.5, Kaczmarz(), orth="products", always_sketch=True)},
    "warm": {"polar": LowRank(3, 2, sketch=Warm(), always_sketch=True)},
    "warm, bfloat16": {
        "polar": LowRank(3, 2, sketch=Warm(), always_sketch=True),
        "dtype": torch.bfloat16,
    },
    "tensor lr, skip": {"lr": torch.tensor(0.03), "nonfinite": "skip"},
    "custom": {"polar": NewtonSchulz(3, ((1.5, -0.5),), 9.0, torch.float64, "gram")},
}
HALF, WHOLE = 3, 6


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Matrices, an expert stack, a fused projection, vectors, and one that gets no gradient."""
    shapes = [(8, 12), (8, 12), (12, 8), (2, 8, 12), (9, 4), (5,), (6,), (8, 12)]
    return [
        nn.Parameter(torch.randn(shape, generator=rng.generator("resume", i)).to(dtype))
        for i, shape in enumerate(shapes)
    ]


def optimizer_of(params: list[nn.Parameter], options: dict[str, object]) -> Muon:
    """Three algorithms, a split and the parameter without a gradient."""
    groups = [
        {"params": [*params[:4], params[7]]},
        {"params": [params[4]], "split_sizes": (5, 4), "lr": 0.1},
        {"params": [params[5]], "algorithm": "adamw"},
        {"params": [params[6]], "algorithm": "sgd"},
    ]
    return Muon(groups, weight_decay=0.1, **options)  # type: ignore[arg-type]


def train(params: list[nn.Parameter], optimizer: Muon, first: int, last: int) -> None:
    """Steps ``first`` to ``last`` with gradients that depend on the step and on the weights."""
    for step in range(first, last):
        for i, p in enumerate(params[:7]):
            noise = torch.randn(p.shape, generator=rng.generator("gradient", i, step))
            p.grad = (p.detach() + noise.to(p.dtype)).to(p.dtype)
        optimizer.step()


def start(name: str) -> tuple[list[nn.Parameter], Muon]:
    """The network and optimizer of a case."""
    options = dict(CASES[name])
    dtype = options.pop("dtype", torch.float32)
    assert isinstance(dtype, torch.dtype)
    params = parameters(dtype)
    return params, optimizer_of(params, options)


def resume(folder: Path) -> None:
    """Finish every case from its checkpoint and write the result beside it."""
    for number, name in enumerate(CASES):
        checkpoint = torch.load(folder / f"{number}.half.pt")  # weights_only, torch's default
        params, optimizer = start(name)
        for p, saved in zip(params, checkpoint["params"], strict=True):
            p.data.copy_(saved)
        optimizer.load_state_dict(checkpoint["optimizer"])
        train(params, optimizer, HALF, WHOLE)
        final = {"params": [p.data for p in params], "optimizer": optimizer.state_dict()}
        torch.save(final, folder / f"{number}.whole.pt")


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    resume(Path(sys.argv[1]))
