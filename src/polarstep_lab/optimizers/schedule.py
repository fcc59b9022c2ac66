"""Learning rate, momentum and batch as pure functions of the step: nothing to save or restore."""

from __future__ import annotations

from dataclasses import dataclass

from polarstep.theory.annealing import MomentumRamp, Trapezoid
from polarstep_lab.config import ScheduleConfig, Stage

__all__ = ["PlaceInStages", "RunSchedule", "place_in_stages"]


@dataclass(frozen=True)
class RunSchedule:
    """The schedule of a run of ``steps`` steps, made of the core's curves."""

    config: ScheduleConfig
    steps: int

    def lr(self, step: int, peak: float = 1.0, portion: float = 1.0) -> float:
        """The learning-rate multiplier of ``step``, counted from 0.

        ``peak`` is the multiplier of the stage. A parameter group that is trained for a ``portion``
        of the run only has the whole curve squeezed into that portion, and zero after it.
        """
        scheduled = (self.steps - self.config.extension) * portion
        if portion < 1 and step >= scheduled:
            return 0.0
        settings = self.config
        curve = Trapezoid(scheduled, settings.warmup, settings.cooldown, settings.final)
        return curve(step, peak)

    def momentum(self, step: int, target: float) -> float:
        """Muon's momentum at ``step``; ``target`` is its value between the two ramps."""
        settings = self.config
        if settings.momentum_start is None:
            return target
        warmup = settings.momentum_warmup * self.steps
        ramp = MomentumRamp(self.steps, settings.momentum_start, warmup, settings.momentum_cooldown)
        return ramp(step, target)


@dataclass(frozen=True)
class PlaceInStages:
    """Where a step stands in the stages of a language-model run.

    ``windows`` and ``tokens`` count what the steps before it have consumed of the shards and
    trained on.
    """

    stage: Stage
    windows: int
    tokens: int
    taken: int
    """How many windows this step takes; in a stage of short sequences a window holds several."""


def place_in_stages(stages: tuple[Stage, ...], window: int, step: int) -> PlaceInStages:
    """The place of ``step``; for the step after the last, the totals of the run."""
    windows = tokens = 0
    for number, stage in enumerate(stages):
        taken = -(-stage.sequences // (window // stage.sequence_length))
        inside = min(step, stage.steps)
        windows += inside * taken
        tokens += inside * stage.sequences * stage.sequence_length
        step -= inside
        if step == 0 and (inside < stage.steps or number == len(stages) - 1):
            return PlaceInStages(stage, windows, tokens, taken)
    raise ValueError(f"step {step} steps beyond the last stage")
