"""What people run in practice: a learning rate that warms up and cools down, momentum likewise.

A curve is a small frozen object that maps a step to a number; :class:`Annealed` is the torch LR
scheduler that applies one to ``lr`` and one to ``momentum``::

    scheduler = Annealed(optimizer, lr=Trapezoid(total=1000, warmup=50, cooldown=400),
                         momentum=MomentumRamp(total=1000, start=0.85, warmup=200, cooldown=50))

Curves of the learning rate multiply each group's own rate. Those of the momentum lead from a
starting value up to each group's own momentum, so that a group keeps what it was given as its peak.
None of this is in the theorems, whose η and β are constant (:mod:`polarstep.theory.schedules`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Annealed", "MomentumRamp", "Stages", "Trapezoid", "nanogpt"]


@dataclass(frozen=True)
class Trapezoid:
    """Linear warm-up to 1, a plateau, and a linear cool-down to ``floor`` at step ``total``.

    Step k has factor (k + 1)/warmup while warming up, so the first step moves.

    >>> curve = Trapezoid(total=10, warmup=2, cooldown=4, floor=0.2)
    >>> [round(curve(k), 2) for k in (0, 1, 5, 6, 8, 10, 12)]
    [0.5, 1.0, 1.0, 1.0, 0.6, 0.2, 0.2]
    """

    total: int
    warmup: int = 0
    cooldown: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_ramps(self.total, self.warmup, self.cooldown)
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"floor={self.floor}: expected a fraction of the learning rate, 0 to 1"
            )

    def __call__(self, step: int) -> float:
        """The factor of the learning rate at ``step``, counted from 0."""
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return rise + (self.floor - rise) * _fall(step, self.total, self.cooldown)


@dataclass(frozen=True)
class Stages:
    """Stages of equal length with a factor each, then a cool-down from the factor to ``floor``.

    Raising the batch during a run calls for a higher rate with it; this is how the paper's nanoGPT
    run does it. In the cool-down the factor of the stage fades into ``floor``, not in proportion.

    >>> curve = Stages(total=9, factors=(1.0, 1.5, 2.0), cooldown=3, floor=0.5)
    >>> [curve(k) for k in (0, 2, 3, 5, 6, 9, 20)]
    [1.0, 1.0, 1.5, 1.5, 2.0, 0.5, 0.5]
    """

    total: int
    factors: tuple[float, ...]
    cooldown: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_ramps(self.total, 0, self.cooldown)
        if not self.factors or any(factor <= 0 for factor in self.factors):
            raise ValueError(f"factors={self.factors}: expected one positive factor per stage")

    def __call__(self, step: int) -> float:
        """The factor of the learning rate at ``step``, counted from 0."""
        count = len(self.factors)
        ends = [round(self.total * (i + 1) / count) for i in range(count - 1)]
        factor = self.factors[sum(step >= end for end in ends)]
        return factor + (self.floor - factor) * _fall(step, self.total, self.cooldown)


@dataclass(frozen=True)
class MomentumRamp:
    """Momentum from ``start`` up to the group's own over ``warmup`` steps, back over ``cooldown``.

    Early gradients soon point elsewhere, so a short memory serves at first; at the end a short
    memory lets the weights settle.
    """

    total: int
    start: float = 0.85
    warmup: int = 0
    cooldown: int = 0

    def __post_init__(self) -> None:
        _check_ramps(self.total, self.warmup, self.cooldown)
        if not 0 <= self.start < 1:
            raise ValueError(f"start={self.start}: expected a momentum 0 ≤ β < 1; 0.85 is usual")

    def __call__(self, step: int, peak: float) -> float:
        """The momentum at ``step`` of a group whose own is ``peak``."""
        rise = min(1.0, step / self.warmup) if self.warmup else 1.0
        weight = min(rise, 1 - _fall(step, self.total, self.cooldown))
        return self.start + (peak - self.start) * weight


class Annealed(LRScheduler):
    """A torch scheduler that drives ``lr`` and ``momentum`` of every group by curves.

    Call ``step()`` once after each ``optimizer.step()``. Groups without a ``momentum`` (AdamW's)
    keep what they have. Its ``state_dict`` holds numbers only; the curves are code, and are given
    again when the scheduler is built for a resume.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr: Callable[[int], float] | None = None,
        momentum: MomentumRamp | None = None,
        last_epoch: int = -1,
    ) -> None:
        if lr is None and momentum is None:
            raise ValueError("nothing to anneal: give a curve for lr, for momentum or for both")
        self.lr_curve, self.momentum_curve = lr, momentum
        for group in optimizer.param_groups:
            if last_epoch == -1 and "momentum" in group:
                group.setdefault("initial_momentum", group["momentum"])
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The learning rate of every group at the current step; sets their momentum as well."""
        step = self.last_epoch
        if self.momentum_curve is not None:
            for group in self.optimizer.param_groups:
                if "initial_momentum" in group:
                    group["momentum"] = self.momentum_curve(step, group["initial_momentum"])
        factor = 1.0 if self.lr_curve is None else self.lr_curve(step)
        return [float(base) * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer and the curves."""
        kept = super().state_dict()
        return {k: v for k, v in kept.items() if k not in ("lr_curve", "momentum_curve")}


def nanogpt(optimizer: Optimizer, scheduled: int = 1450, extension: int = 40) -> Annealed:
    """The schedule of the paper's nanoGPT run, for any length.

    Three stages of a third each with learning-rate factors 1, 1.52 and 1.73 (the batch grows 8, 16,
    24), a linear cool-down over the last 60% of ``scheduled`` steps to 0.15, held for ``extension``
    steps; momentum from 0.85 over the first 20% and back over the last 50 steps. Facts from the
    paper's appendix and from its authors' public code, which follows modded-nanogpt.
    """
    total = scheduled + extension
    return Annealed(
        optimizer,
        lr=Stages(scheduled, (1.0, 1.52, 1.73), cooldown=round(0.6 * scheduled), floor=0.15),
        momentum=MomentumRamp(
            total, start=0.85, warmup=round(0.2 * total), cooldown=min(50, round(0.2 * total))
        ),
    )


def _fall(step: int, total: int, cooldown: int) -> float:
    """How far the cool-down is: 0 before it, 1 from step ``total`` on."""
    if cooldown == 0:
        return 0.0
    return min(1.0, max(0.0, (step - (total - cooldown)) / cooldown))


def _check_ramps(total: int, warmup: int, cooldown: int) -> None:
    if total < 1 or warmup < 0 or cooldown < 0 or warmup + cooldown > total:
        raise ValueError(
            f"total={total}, warmup={warmup}, cooldown={cooldown}: expected steps ≥ 0 with "
            "warmup + cooldown ≤ total; shorten one of the ramps"
        )
