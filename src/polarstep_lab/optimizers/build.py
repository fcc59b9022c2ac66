"""From a config to one optimizer for the whole model, and to what its step costs.

nanoGPT: Muon on the hidden matrices, AdamW on embedding and head. CIFAR-10: Muon on the filters,
SGD with Nesterov momentum on biases and head. The AdamW and SGD baselines are torch's own, on every
parameter. A peer stands in the place of Muon (:mod:`polarstep_lab.optimizers.peers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import polarstep as ps
from polarstep.ranks.layout import local, whole
from polarstep_lab.config import ImageData, PolarConfig, RunConfig
from polarstep_lab.flops import ADAMW, SGD_NESTEROV, Workload, ledger, muon_ledger, newton_schulz
from polarstep_lab.models.convnet import ConvNet
from polarstep_lab.models.gpt import GPT
from polarstep_lab.optimizers.peers import Peer, beside_adamw, find_peer
from polarstep_lab.optimizers.schedule import RunSchedule
from polarstep_lab.study import named_map

__all__ = [
    "Peak",
    "ScheduledOptimizer",
    "build_optimizer",
    "build_polar",
    "cycle_of",
    "optimizer_gflops",
]

Model = GPT | ConvNet

WHITENING_PORTION = 3 / 8
"""The whitening bias is trained for the first three of Airbench's eight epochs."""
WHITENING_BIAS = "whitening.bias"

MOMENTUM = {"float32": None, "bfloat16": torch.bfloat16, "int8": torch.int8}
SKETCHES: dict[str, Callable[[], Any]] = {
    "gaussian": ps.Gaussian,
    "kaczmarz": ps.Kaczmarz,
    "kaczmarz-filled": partial(ps.Kaczmarz, fill=True),
    "warm": ps.Warm,
}
# FLOPs per entry of normalized rows: mean square, division, norms before and after, rescaling.
ROWS = 2 + 1 + 2 + 2 + 1


def build_polar(config: PolarConfig, benchmark: str) -> ps.PolarMap:
    """The polar map of a config."""
    if config.auto is not None:
        return ps.Auto(config.auto)
    if config.map is not None:
        return named_map(config.map)
    if config.solver == "exact":
        inner: ps.PolarMap = ps.Exact()
    else:
        coefficients = {
            "empirical": "jordan",
            "polar-express": f"polar-express-{benchmark}",
            "polar-express-default": "polar-express",
        }.get(config.solver, config.solver)
        # A name that NewtonSchulz does not know is an error when the map is built.
        inner = ps.NewtonSchulz(config.steps, coefficients, delta=config.delta)  # type: ignore[arg-type]
    if config.rank is None:
        return inner
    sketch = SKETCHES[config.sketch]()
    power = int(config.power) if float(config.power).is_integer() else config.power
    # A study of sketching sketches also where that does not pay, as small matrices on a GPU.
    head = ps.LowRank(
        config.rank,
        config.oversample,
        power,
        sketch=sketch,
        inner=inner,
        always_sketch=True,
    )
    if config.rest == "dropped":
        return head
    return ps.Deflated(head, ps.NewtonSchulz(1, "flat"), full=inner, float8=config.float8)


@dataclass(frozen=True)
class Peak:
    """What a parameter group's schedule scales: its learning rate and, for Muon, its momentum.

    ``key`` is what the group calls its momentum.
    """

    lr: float
    momentum: float | None = None
    portion: float = 1.0
    key: str = "momentum"


@dataclass(frozen=True)
class ScheduledOptimizer:
    """An optimizer whose groups follow a schedule; ``peaks`` are in the order of the groups."""

    optimizer: Optimizer
    peaks: tuple[Peak, ...]
    schedule: RunSchedule

    def set_step(self, step: int, stage_lr: float = 1.0) -> None:
        """Give every group its learning rate and momentum for ``step``."""
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak.lr * self.schedule.lr(step, stage_lr, peak.portion)
            if peak.momentum is not None:
                group[peak.key] = self.schedule.momentum(step, peak.momentum)


def build_optimizer(model: Model, config: RunConfig, schedule: RunSchedule) -> ScheduledOptimizer:
    """The optimizer of ``config`` for ``model``."""
    if config.rule.peer is not None:
        return _peer(find_peer(config.rule.peer), model, config, schedule)
    if config.rule.algorithm == "muon":
        optimizer: Optimizer = _muon(model, config)
    else:
        optimizer = _baseline(model, config)
    peaks = tuple(
        Peak(
            lr=group["lr"],
            momentum=group["momentum"] if group.get("algorithm") == "muon" else None,
            portion=WHITENING_PORTION if group["param_names"] == [WHITENING_BIAS] else 1.0,
        )
        for group in optimizer.param_groups
    )
    return ScheduledOptimizer(optimizer, peaks, schedule)


def cycle_of(config: RunConfig) -> int:
    """The number of steps after which the work of an optimizer's step repeats."""
    peer = config.rule.peer
    return 1 if peer is None else find_peer(peer).cycle


def _peer(peer: Peer, model: Model, config: RunConfig, schedule: RunSchedule) -> ScheduledOptimizer:
    """A peer on the matrices that would be Muon's, and AdamW on the rest."""
    optimizer = beside_adamw(peer, _muon(model, config), config.optimizer)
    first, *others = optimizer.param_groups
    key = peer.momentum
    matrices = Peak(float(first["lr"]))
    if key is not None:
        matrices = replace(matrices, momentum=first[key], key=key)
    peaks = (matrices, *(Peak(group["lr"]) for group in others))
    return ScheduledOptimizer(optimizer, peaks, schedule)


def _muon(model: Model, config: RunConfig) -> ps.Muon:
    """Muon where it belongs, and AdamW (nanoGPT) or SGD (CIFAR-10) for the rest."""
    settings = config.optimizer
    if config.rule.polar == "default":
        return ps.muon_for(
            model,
            settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            seed=config.seed,
        )
    optimizer = ps.muon_for(
        model,
        settings.lr,
        momentum=settings.momentum,
        nesterov=config.rule.nesterov,
        polar=build_polar(settings.polar, config.benchmark),
        weight_decay=settings.weight_decay,
        shape_scale=settings.shape_scale,
        transform=ps.NormalizedRows() if settings.normalize_rows else None,
        momentum_dtype=MOMENTUM[settings.momentum_dtype],
        rounding=settings.rounding,
        others=_other(settings.vector_lr, config),
        embeddings=_other(settings.embedding_lr, config),
        heads=_other(settings.head_lr, config),
        rules=[(WHITENING_BIAS, None)] if isinstance(model, ConvNet) else [],
        seed=config.seed,
    )
    if isinstance(model, ConvNet):
        # The whitening bias has a group of its own, because its learning rate ends sooner.
        rule = _other(settings.vector_lr, config)
        group = {"params": [(WHITENING_BIAS, model.whitening.bias)], "algorithm": rule.algorithm}
        optimizer.add_param_group(group | asdict(rule))
    if settings.normalize_filters:
        filters = list(optimizer.param_groups[0]["params"])
        optimizer.register_step_pre_hook(lambda *_: _normalize_filters(filters))
    return optimizer


def _other(lr: float, config: RunConfig) -> ps.AdamW | ps.SGD:
    """The rule, at this learning rate, for what is not Muon's."""
    settings = config.optimizer
    if isinstance(config.data, ImageData):
        # Airbench gives the decay of a step, learning rate included.
        decay = settings.decay_per_image * config.data.batch_size / lr if lr else 0.0
        return ps.SGD(lr, momentum=settings.other_momentum, nesterov=True, weight_decay=decay)
    return ps.AdamW(lr, betas=(settings.other_momentum, settings.beta2), eps=settings.eps)


def _baseline(model: Model, config: RunConfig) -> Optimizer:
    """AdamW or SGD on everything; on CIFAR-10 biases and head keep Airbench's rates."""
    settings = config.optimizer
    own_rates = {"embedding.weight": settings.embedding_lr, "head.weight": settings.head_lr}
    groups: dict[str, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        role = "rest"
        if isinstance(config.data, ImageData) and p.ndim < 4:
            role = (
                "head" if name.startswith("head.") else name if name == WHITENING_BIAS else "bias"
            )
        elif isinstance(model, GPT) and own_rates.get(name):
            role = name
        groups.setdefault(role, {"params": []})["params"].append((name, p))
    if isinstance(model, GPT):
        for role in groups.keys() - {"rest"}:
            groups[role]["lr"] = own_rates[role]
    if isinstance(config.data, ImageData):
        decay = settings.decay_per_image * config.data.batch_size
        for role in groups.keys() - {"rest"}:
            lr = settings.head_lr if role == "head" else settings.vector_lr
            # torch's SGD adds its decay to the gradient, Airbench's includes the learning rate;
            # the authors give AdamW, whose decay is decoupled, the same number as it is.
            own = decay / lr if lr and config.rule.algorithm == "sgd" else decay
            groups[role] |= {"lr": lr, "weight_decay": own}
    fused = True if next(model.parameters()).is_cuda else None
    common: dict[str, Any] = {
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "fused": fused,
    }
    if config.rule.algorithm == "adamw":
        return torch.optim.AdamW(
            list(groups.values()),
            betas=(settings.momentum, settings.beta2),
            eps=settings.eps,
            **common,
        )
    return torch.optim.SGD(
        list(groups.values()),
        momentum=settings.momentum,
        nesterov=settings.momentum > 0,
        **common,
    )


@torch.no_grad()
def _normalize_filters(filters: list[Tensor]) -> None:
    """Rescale each filter bank to Frobenius norm √out, as Airbench's Muon does before its update."""
    # With one norm at a time a GPU would need two launches a filter, a twentieth of a whole step.
    norms = [whole(norm) for norm in torch._foreach_norm(filters)]
    torch._foreach_div_(norms, [len(p) ** 0.5 for p in filters])
    torch._foreach_div_([local(p) for p in filters], norms)


def optimizer_gflops(model: Model, config: RunConfig, device: torch.device | None = None) -> float:
    """GFLOPs per optimizer step in the paper's convention, from the shapes of the model.

    With ``optimizer.polar.auto`` they are those of the maps that are chosen on ``device``, by default a
    CPU. NaN for a peer, whose work is not counted.
    """
    polar, rule = config.optimizer.polar, config.rule
    if rule.peer is not None:
        return math.nan
    warm = polar.rank is not None and polar.sketch == "warm"
    shapes = model.matrix_shapes()
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    work = Workload.from_shapes(
        config.recipe,
        shapes,
        elementwise=total - sum(m * n for m, n in shapes),
        # Any number will do for methods that do not sketch: they do not read the rank.
        rank=polar.rank or 1,
        oversample=polar.oversample,
        power=0 if warm else polar.power,  # the power iterations of a warm sketch are earlier steps
        steps=polar.steps,
        companion=ADAMW if isinstance(model, GPT) else SGD_NESTEROV,
    )
    if config.optimizer.normalize_rows:
        work = replace(work, extra=ROWS)
    if rule.algorithm != "muon":
        return sum(ledger(work, config.method).values()) / 1e9
    if polar.map is not None:
        mine = named_map(polar.map)
        spent = muon_ledger(
            work, nesterov=rule.nesterov, polar=lambda _, m, n: {"polar map": mine.flops(m, n)}
        )
        return sum(spent.values()) / 1e9
    if polar.auto is not None:
        auto, on = ps.Auto(polar.auto), device or torch.device("cpu")
        spent = muon_ledger(
            work,
            nesterov=rule.nesterov,
            polar=lambda _, m, n: {"polar map": auto.on(m, n, on).flops(m, n)},
        )
        return sum(spent.values()) / 1e9
    sketch = None
    if polar.rank is not None:
        sketch = "kaczmarz" if polar.sketch.startswith("kaczmarz") else "gaussian"
    paper = sum(muon_ledger(work, nesterov=rule.nesterov, sketch=sketch).values())
    return (paper + _other_solver(work, config, shapes) + _rest(config, shapes)) / 1e9


def _rest(config: RunConfig, shapes: list[tuple[int, int]]) -> float:
    """What keeping the rest costs beyond the sketched head."""
    polar = config.optimizer.polar
    head = build_polar(replace(polar, rest="dropped", float8=False), config.benchmark)
    kept = build_polar(polar, config.benchmark)
    return sum(kept.flops(m, n) - head.flops(m, n) for m, n in shapes)


def _other_solver(work: Workload, config: RunConfig, shapes: list[tuple[int, int]]) -> float:
    """What the solver costs beyond the ledger's quintic: cubic steps are cheaper."""
    polar = config.optimizer.polar
    inner = build_polar(replace(polar, rank=None, rest="dropped", float8=False), config.benchmark)
    sketched = polar.rank is not None and work.sketched
    difference = 0.0
    for m, n in shapes:
        k = min(m, work.width) if sketched else m
        difference += inner.flops(k, n) - newton_schulz(k, n, polar.steps)
    return difference
