"""From a config to one optimizer for the whole model, and to what its step costs.

nanoGPT: Muon on the hidden matrices, AdamW on embedding and head. CIFAR-10: Muon on the filters,
SGD with Nesterov momentum on biases and head. The AdamW and SGD baselines are torch's own, on every
parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import polarstep as ps
from polarstep.experiments.config import ImageData, OptimizerConfig, PolarConfig, RunConfig
from polarstep.experiments.schedule import Schedule
from polarstep.flops import ADAMW, SGD_NESTEROV, Workload, ledger, newton_schulz
from polarstep.models.convnet import ConvNet
from polarstep.models.gpt import GPT

__all__ = ["ScheduledOptimizer", "build_optimizer", "build_polar", "optimizer_gflops"]

Model = GPT | ConvNet

WHITENING_PORTION = 3 / 8
"""The whitening bias is trained for the first three of Airbench's eight epochs."""


def build_polar(config: PolarConfig, benchmark: str) -> ps.PolarMap:
    """The polar map of a config. PolarExpress takes the coefficients the paper prints for it."""
    if config.solver == "exact":
        inner: ps.PolarMap = ps.Exact()
    else:
        coefficients = {
            "empirical": "jordan",
            "polar-express": f"polar-express-{benchmark}",
        }.get(config.solver, config.solver)
        inner = ps.NewtonSchulz(config.steps, coefficients, delta=config.delta)
    if config.rank is None:
        return inner
    sketch = ps.Kaczmarz() if config.sketch == "kaczmarz" else ps.Gaussian()
    power = int(config.power) if config.power.is_integer() else config.power
    return ps.LowRank(config.rank, config.oversample, power, sketch=sketch, inner=inner)


@dataclass(frozen=True)
class Peak:
    """What a parameter group's schedule scales: its learning rate and, for Muon, its momentum."""

    lr: float
    momentum: float | None = None
    portion: float = 1.0


@dataclass(frozen=True)
class ScheduledOptimizer:
    """An optimizer whose groups follow a schedule; ``peaks`` are in the order of the groups."""

    optimizer: Optimizer
    peaks: tuple[Peak, ...]
    schedule: Schedule

    def set_step(self, step: int, stage_lr: float = 1.0) -> None:
        """Give every group its learning rate and momentum for ``step``."""
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak.lr * self.schedule.lr(step, stage_lr, peak.portion)
            if peak.momentum is not None:
                group["momentum"] = self.schedule.momentum(step, peak.momentum)


def build_optimizer(model: Model, config: RunConfig, schedule: Schedule) -> ScheduledOptimizer:
    """The optimizer of ``config`` for ``model``."""
    if config.rule.algorithm == "muon":
        groups = _gpt_groups(model) if isinstance(model, GPT) else _cnn_groups(model)
        return _muon(groups, config, schedule)
    return _baseline(model, config, schedule)


def _gpt_groups(model: GPT) -> dict[str, list[tuple[str, Tensor]]]:
    groups: dict[str, list[tuple[str, Tensor]]] = {"matrix": [], "embedding": [], "head": []}
    for name, p in model.named_parameters():
        role = {"embedding": "embedding", "head": "head"}.get(name.split(".")[0], "matrix")
        groups[role].append((name, p))
    return groups


def _cnn_groups(model: ConvNet) -> dict[str, list[tuple[str, Tensor]]]:
    groups: dict[str, list[tuple[str, Tensor]]] = {
        "matrix": [],
        "whitening": [],
        "vector": [],
        "head": [],
    }
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.ndim == 4:
            groups["matrix"].append((name, p))
        elif name.startswith("head"):
            groups["head"].append((name, p))
        else:
            groups["whitening" if name.startswith("whitening") else "vector"].append((name, p))
    return groups


def _muon(
    groups: dict[str, list[tuple[str, Tensor]]], config: RunConfig, schedule: Schedule
) -> ScheduledOptimizer:
    settings = config.optimizer
    lrs = _other_lrs(settings)
    param_groups: list[dict[str, Any]] = [{"params": groups["matrix"]}]
    peaks = [Peak(settings.lr, momentum=settings.momentum)]
    for role, params in groups.items():
        if role == "matrix" or not params:
            continue
        lr = lrs[role]
        peaks.append(Peak(lr, portion=WHITENING_PORTION if role == "whitening" else 1.0))
        param_groups.append({"params": params, "lr": lr} | _other_rule(config, lr))
    optimizer = ps.Muon(
        param_groups,
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=config.rule.nesterov,
        polar=build_polar(settings.polar, config.benchmark),
        weight_decay=settings.weight_decay,
        lr_scale=settings.lr_scale,
        seed=config.seed,
    )
    if settings.normalize_filters:
        filters = [p for _, p in groups["matrix"]]
        optimizer.register_step_pre_hook(lambda *_: normalize_filters(filters))
    return ScheduledOptimizer(optimizer, tuple(peaks), schedule)


def _other_lrs(settings: OptimizerConfig) -> dict[str, float]:
    return {
        "embedding": settings.embedding_lr,
        "head": settings.head_lr,
        "vector": settings.vector_lr,
        "whitening": settings.vector_lr,
    }


def _other_rule(config: RunConfig, lr: float) -> dict[str, Any]:
    """The options of what Muon leaves to AdamW (nanoGPT) or to SGD (CIFAR-10)."""
    settings = config.optimizer
    if isinstance(config.data, ImageData):
        decay = settings.decay_per_image * config.data.batch_size
        return {
            "algorithm": "sgd",
            "momentum": settings.other_momentum,
            "nesterov": True,
            "weight_decay": decay / lr if lr else 0.0,
        }
    return {
        "algorithm": "adamw",
        "betas": (settings.other_momentum, settings.beta2),
        "eps": settings.eps,
        "weight_decay": 0.0,
    }


def _baseline(model: Model, config: RunConfig, schedule: Schedule) -> ScheduledOptimizer:
    """AdamW or SGD on everything; on CIFAR-10 SGD keeps Airbench's rates for biases and head."""
    settings = config.optimizer
    groups = _gpt_groups(model) if isinstance(model, GPT) else _cnn_groups(model)
    separate = isinstance(model, ConvNet) and config.rule.algorithm == "sgd"
    lrs = _other_lrs(settings)
    param_groups: list[dict[str, Any]] = []
    peaks = []
    for role, params in groups.items():
        if not params:
            continue
        own = role != "matrix" and separate
        lr = lrs[role] if own else settings.lr
        portion = WHITENING_PORTION if role == "whitening" else 1.0
        group: dict[str, Any] = {"params": params, "lr": lr}
        if own and isinstance(config.data, ImageData):
            group["weight_decay"] = settings.decay_per_image * config.data.batch_size / lr
        param_groups.append(group)
        peaks.append(Peak(lr, portion=portion))
    fused = True if next(model.parameters()).is_cuda else None
    if config.rule.algorithm == "adamw":
        optimizer: Optimizer = torch.optim.AdamW(
            param_groups,
            lr=settings.lr,
            betas=(settings.momentum, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=fused,
        )
    else:
        optimizer = torch.optim.SGD(
            param_groups,
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.momentum > 0,
            weight_decay=settings.weight_decay,
            fused=fused,
        )
    return ScheduledOptimizer(optimizer, tuple(peaks), schedule)


@torch.no_grad()
def normalize_filters(filters: list[Tensor]) -> None:
    """Rescale each filter bank to Frobenius norm √out, as Airbench's Muon does before its update."""
    norms = torch._foreach_norm(filters)
    scales = [len(p) ** 0.5 / norm for p, norm in zip(filters, norms, strict=True)]
    torch._foreach_mul_(filters, scales)


def optimizer_gflops(model: Model, config: RunConfig) -> float:
    """GFLOPs per optimizer step in the paper's convention, from the shapes of the model."""
    polar = config.optimizer.polar
    shapes = model.matrix_shapes()
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    work = Workload.from_shapes(
        config.recipe,
        shapes,
        elementwise=total - sum(m * n for m, n in shapes),
        # The methods that do not sketch do not look at the rank.
        rank=polar.rank or 1,
        oversample=polar.oversample,
        power=polar.power,
        steps=polar.steps,
        companion=ADAMW if isinstance(model, GPT) else SGD_NESTEROV,
    )
    spent: float = sum(ledger(work, config.method).values())
    if config.rule.algorithm == "muon":
        spent += _other_solver(polar, config, shapes)
    return spent / 1e9


def _other_solver(polar: PolarConfig, config: RunConfig, shapes: list[tuple[int, int]]) -> float:
    """What the solver costs beyond the ledger's quintic: cubic steps are cheaper."""
    inner = build_polar(polar, config.benchmark)
    width = None
    if isinstance(inner, ps.LowRank):
        width, inner = inner.width, inner.inner
    difference = 0.0
    for m, n in shapes:
        k = m if width is None else min(m, width)
        difference += inner.flops(k, n) - newton_schulz(k, n, polar.steps)
    return difference
