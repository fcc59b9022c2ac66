"""Learning-rate and momentum curves for practice: warm-up, plateau, cool-down.

A curve is a small frozen object that maps a step, counted from 0, to a number. :class:`Annealed`
is a torch LR scheduler that applies a curve to ``lr`` and another to ``momentum``::

    scheduler = Annealed(optimizer, lr=Trapezoid(total=1000, warmup=50, cooldown=0.4),
                         momentum=MomentumRamp(total=1000, start=0.85, warmup=200, cooldown=50))

A learning-rate curve multiplies the rate of each group. A momentum curve leads from a starting
value up to the momentum that each group was given. The theorems prove nothing about such curves:
their η and β are constant (:mod:`polarstep.theory.schedules`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polarstep.theory.checks import is_scalar

__all__ = ["Annealed", "MomentumRamp", "Stages", "Trapezoid", "nanogpt"]

EXAMPLE = "as in Trapezoid(total=1000, warmup=50) and MomentumRamp(total=1000, start=0.85)"


@dataclass(frozen=True)
class Trapezoid:
    """Linear warm-up to a peak, a plateau, and a linear cool-down to ``floor`` at step ``total``.

    ``warmup`` is a number of steps, ``cooldown`` a fraction of ``total``. With c = cooldown and

        left(k) = min(1, (1 − k/total)/c)   (0 after step ``total``, 1 where c = 0),

    step k has the factor left·peak + (1 − left)·floor, multiplied by (k + 1)/warmup while k <
    warmup: the first step already moves.

    >>> curve = Trapezoid(total=10, warmup=2, cooldown=0.4, floor=0.2)
    >>> [round(curve(k), 2) for k in (0, 1, 5, 6, 8, 10, 12)]
    [0.5, 1.0, 1.0, 1.0, 0.6, 0.2, 0.2]
    """

    total: float
    warmup: int = 0
    cooldown: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_steps(total=self.total, warmup=self.warmup)
        _check_numbers(cooldown=self.cooldown, floor=self.floor)
        if not 0 <= self.cooldown <= 1:
            raise ValueError(
                f"cooldown={self.cooldown}: expected a fraction of the {self.total:g} steps, 0 to 1; "
                "0.4 cools down over the last 40%"
            )
        if not 0 <= self.floor < math.inf:
            raise ValueError(
                f"floor={self.floor}: expected a factor of the learning rate, 0 or more, as 0.1"
            )

    def __call__(self, step: int, peak: float = 1.0) -> float:
        """The factor of the learning rate at ``step``; ``peak`` is the factor of the plateau."""
        left = 1.0
        if self.cooldown:
            left = min(1.0, (1 - min(1.0, step / self.total)) / self.cooldown)
        factor = left * peak + (1 - left) * self.floor
        if step < self.warmup:
            factor *= (step + 1) / self.warmup
        return factor


@dataclass(frozen=True)
class Stages:
    """Stages of equal length, each with its factor, under one cool-down to ``floor``.

    A batch that grows during a run calls for a learning rate that grows with it, as in the paper's
    nanoGPT run. The cool-down is as in :class:`Trapezoid`, with the stage's factor as the peak.

    >>> curve = Stages(total=9, factors=(1.0, 1.5, 2.0), cooldown=1 / 3, floor=0.5)
    >>> [round(curve(k), 2) for k in (0, 2, 3, 5, 6, 9, 20)]
    [1.0, 1.0, 1.5, 1.5, 2.0, 0.5, 0.5]
    """

    total: int
    factors: tuple[float, ...]
    cooldown: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        self._shape()
        listed = isinstance(self.factors, Sequence) and not isinstance(self.factors, str)
        numbers = listed and all(is_scalar(f) and 0 < f < math.inf for f in self.factors)
        if not numbers or not self.factors:
            raise ValueError(
                f"factors={self.factors!r}: expected one positive factor per stage, as (1.0, 1.5, 2.0)"
            )

    def __call__(self, step: int) -> float:
        """The factor of the learning rate at ``step``."""
        count = len(self.factors)
        ends = [round(self.total * (i + 1) / count) for i in range(count - 1)]
        return self._shape()(step, peak=self.factors[sum(step >= end for end in ends)])

    def _shape(self) -> Trapezoid:
        return Trapezoid(self.total, 0, self.cooldown, self.floor)


@dataclass(frozen=True)
class MomentumRamp:
    """Momentum from ``start`` up to the group's own over ``warmup`` steps, and back over ``cooldown``.

    With ``peak`` the group's own momentum, it is start + (peak − start)·min(1, k/warmup, (total −
    k)/cooldown) at step k. Early gradients are soon out of date, which favours a short memory; at the
    end a short memory lets the weights settle.
    """

    total: int
    start: float = 0.85
    warmup: float = 0
    cooldown: float = 0

    def __post_init__(self) -> None:
        _check_steps(total=self.total, warmup=self.warmup, cooldown=self.cooldown)
        _check_numbers(start=self.start)
        if not 0 <= self.start < 1:
            raise ValueError(f"start={self.start}: expected a momentum 0 ≤ β < 1; 0.85 is usual")

    def __call__(self, step: int, peak: float) -> float:
        """The momentum at ``step`` of a group with momentum ``peak``; ``peak`` if below ``start``."""
        if self.start >= peak:
            return peak
        rise = min(1.0, step / self.warmup) if self.warmup else 1.0
        left = min(1.0, max(0, self.total - step) / self.cooldown) if self.cooldown else 1.0
        return self.start + (peak - self.start) * min(rise, left)


class Annealed(LRScheduler):
    """A torch scheduler that sets ``lr`` and ``momentum`` of every group from curves.

    Call ``step()`` once after each ``optimizer.step()``. The ``momentum`` curve leaves groups
    without that setting, such as AdamW's, alone. Groups that are added during a run, as layers that
    were frozen before, follow the curves from the next ``step()`` on, from the rates they came with.
    The ``state_dict`` holds numbers only: to resume, build the scheduler with the same curves and
    load it.
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
        for name, curve in (("lr", lr), ("momentum", momentum)):
            if curve is not None and not callable(curve):
                raise TypeError(
                    f"{name}={curve!r}: expected a curve, a function of the step, as "
                    f"{'Trapezoid' if name == 'lr' else 'MomentumRamp'}(total=1000)"
                )
        self.lr_curve, self.momentum_curve = lr, momentum
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The learning rate of every group at the current step; sets their momentum as well."""
        step = self.last_epoch
        if self.momentum_curve is not None:
            for group in self.optimizer.param_groups:
                if "momentum" in group:
                    # Groups from a checkpoint that was saved without this scheduler have no such key.
                    peak = group.setdefault("initial_momentum", group["momentum"])
                    group["momentum"] = self.momentum_curve(step, peak)
        # torch knows the groups of when the scheduler was made; add_param_group may have made more.
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", float(group["lr"])))
        factor = 1.0 if self.lr_curve is None else self.lr_curve(step)
        return [float(base) * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer and the curves."""
        kept = super().state_dict()
        return {k: v for k, v in kept.items() if k not in ("lr_curve", "momentum_curve")}


def nanogpt(optimizer: Optimizer, scheduled: int = 1450, extension: int = 40) -> Annealed:
    """The schedule of the paper's nanoGPT run, for any length.

    Learning rate: three stages of a third each with factors 1, 1.52 and 1.73 (the batch grows as
    8 : 16 : 24), and a linear cool-down over the last 60% of ``scheduled`` steps to 0.15, which is
    kept for ``extension`` more steps. Momentum: up from 0.85 over the first 20% of all steps, and
    back over the last 50 steps, or over the last 20% if that is less. The numbers are from the
    paper's appendix and its authors' public code, which follows modded-nanogpt.
    """
    total = scheduled + extension
    return Annealed(
        optimizer,
        lr=Stages(scheduled, (1.0, 1.52, 1.73), cooldown=0.6, floor=0.15),
        momentum=MomentumRamp(total, start=0.85, warmup=0.2 * total, cooldown=min(50, 0.2 * total)),
    )


def _check_numbers(**values: float) -> None:
    for name, value in values.items():
        if not is_scalar(value):
            raise TypeError(f"{name}={value!r}: expected a number, {EXAMPLE}")


def _check_steps(total: float, **ramps: float) -> None:
    _check_numbers(total=total, **ramps)
    if not 0 < total < math.inf:
        raise ValueError(f"total={total}: expected a positive number of steps, {EXAMPLE}")
    for name, steps in ramps.items():
        if not 0 <= steps < math.inf:
            raise ValueError(f"{name}={steps}: expected a number of steps, 0 or more, {EXAMPLE}")
