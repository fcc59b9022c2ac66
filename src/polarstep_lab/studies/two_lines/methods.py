"""The optimizers of this study, and the grids in which each looks for its best options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

import polarstep as ps

__all__ = ["METHODS", "Method"]

BETAS = (0.9, 0.95)
RATE = 0.02
"""At which a search begins."""
RELATIVE = 0.15
"""The rate of an embedding or a head, over the root mean square of its entries: that of the recipe."""
VECTORS = 3e-3
"""The rate of gains and biases: that of the recipe."""


@dataclass(frozen=True)
class Method:
    """An optimizer with its options, and for each option the values a search may take.

    ``ladders`` are in the order in which options are chosen. A search begins at ``start``.
    """

    title: str
    build: Callable[..., list[Optimizer]]
    start: Mapping[str, float] = field(default_factory=dict)
    ladders: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    warm_up: float = 0.0


Roles = dict[str, list[nn.Parameter]]


def routed(model: nn.Module) -> tuple[list[nn.Parameter], Roles]:
    """The matrices for Muon, and the other parameters by role, as this package routes them."""
    matrices: list[nn.Parameter] = []
    others: Roles = {}
    for group in ps.muon_for(model).param_groups:
        if group["algorithm"] == "muon":
            matrices += group["params"]
        else:
            others.setdefault(group["role"], []).extend(group["params"])
    return matrices, others


def size(parameters: list[nn.Parameter]) -> float:
    """The root mean square of the entries of the first parameter; 0.02 for one of zeros."""
    with torch.no_grad():
        return float(parameters[0].square().mean().sqrt()) or 0.02


def rates(others: Roles, factor: float) -> dict[str, float]:
    """The rate of each role."""
    return {
        role: factor * (VECTORS if role == "vector" else RELATIVE * size(parameters))
        for role, parameters in others.items()
    }


def default(model: nn.Module, **options: Any) -> list[Optimizer]:
    """What two lines give; fine-tuning may take another ``lr``."""
    return [ps.muon_for(model, **options)]


def ours(polar: Literal["auto"] | None) -> Callable[..., list[Optimizer]]:
    """The recipe of ``muon_for`` at another rate, another decay, or in full space."""

    def build(model: nn.Module, lr: float, weight_decay: float) -> list[Optimizer]:
        return [ps.muon_for(model, lr=lr, polar=polar, weight_decay=weight_decay)]

    return build


def adamw(model: nn.Module, lr: float, weight_decay: float) -> list[Optimizer]:
    """torch's AdamW; vectors do not decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return [torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=parameters[0].is_cuda or None)]


def torch_muon(model: nn.Module, lr: float, others: float, weight_decay: float) -> list[Optimizer]:
    """torch's Muon for hidden matrices, torch's AdamW at a rate of its own for all else."""
    matrices, by_role = routed(model)
    rest = [p for parameters in by_role.values() for p in parameters]
    first = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay)
    fused = matrices[0].is_cuda or None
    return [first, torch.optim.AdamW(rest, lr=others, betas=BETAS, weight_decay=0.0, fused=fused)]


def normuon(model: nn.Module, lr: float, others: float, weight_decay: float) -> list[Optimizer]:
    """dion's NorMuon for hidden matrices, torch's AdamW for all else.

    ``others`` multiplies AdamW's rates, which are those of :func:`rates`.
    """
    import dion

    matrices, by_role = routed(model)
    on_gpu = matrices[0].is_cuda
    first = dion.NorMuon(
        [{"params": matrices}],
        lr=lr,
        weight_decay=weight_decay,
        use_triton=on_gpu,
        flatten=True,
        nesterov=True,
    )
    each = rates(by_role, others)
    groups = [{"params": parameters, "lr": each[role]} for role, parameters in by_role.items()]
    return [
        first,
        torch.optim.AdamW(groups, betas=BETAS, eps=1e-10, weight_decay=0.0, fused=on_gpu or None),
    ]


MUON_RATES = (
    0.0005,
    0.001,
    0.002,
    0.0035,
    0.005,
    0.007,
    0.01,
    0.014,
    0.02,
    0.028,
    0.04,
    0.056,
    0.08,
    0.112,
    0.16,
    0.224,
)
ADAMW_RATES = (6.25e-5, 1.25e-4, *(5e-4 * 2**k for k in range(-1, 10)))
MUON_DECAYS = (0.0, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)
OUR_START = {"lr": RATE, "weight_decay": 0.05}
OUR_LADDERS = {"lr": MUON_RATES, "weight_decay": MUON_DECAYS}
METHODS = {
    "default": Method("`muon_for(model)`", default),
    "ours": Method("ours, `auto`", ours("auto"), OUR_START, OUR_LADDERS),
    "ours-full": Method("ours, full space", ours(None), OUR_START, OUR_LADDERS),
    "adamw": Method(
        "AdamW",
        adamw,
        start={"lr": 0.001, "weight_decay": 0.1},
        ladders={
            "lr": ADAMW_RATES,
            "weight_decay": (0.0, 0.03, 0.1, 0.3, 1.0),
        },
        warm_up=0.05,
    ),
    "torch-muon": Method(
        "torch.optim.Muon and AdamW",
        torch_muon,
        start={"lr": RATE, "others": 0.001, "weight_decay": 0.05},
        ladders={
            "lr": MUON_RATES,
            "others": (3e-4, 0.001, 0.003, 0.01),
            "weight_decay": MUON_DECAYS,
        },
    ),
    "normuon": Method(
        "dion's NorMuon and AdamW",
        normuon,
        start={"lr": RATE, "others": 1.0, "weight_decay": 0.05},
        ladders={
            "lr": MUON_RATES,
            "others": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
            "weight_decay": MUON_DECAYS,
        },
    ),
}
