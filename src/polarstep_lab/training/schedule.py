"""Learning rate, momentum and batch as pure functions of the step: nothing to save or restore."""

from __future__ import annotations

from dataclasses import dataclass

from polarstep_lab.config import ScheduleConfig, Stage

__all__ = ["Place", "Schedule", "place_in_stages"]


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run of ``steps`` steps."""

    config: ScheduleConfig
    steps: int

    def lr(self, step: int, peak: float = 1.0, portion: float = 1.0) -> float:
        """The learning-rate multiplier of ``step``, from 0.

        ``peak`` is the multiplier of the stage. A parameter group that is trained for a
        ``portion`` of the run only has the whole shape squeezed into it, then zero.
        """
        scheduled = (self.steps - self.config.extension) * portion
        if portion < 1 and step >= scheduled:
            return 0.0
        done = min(1.0, step / scheduled)
        left = min(1.0, (1 - done) / self.config.cooldown)
        rate = left * peak + (1 - left) * self.config.final
        if step < self.config.warmup:
            rate *= (step + 1) / self.config.warmup
        return rate

    def momentum(self, step: int, target: float) -> float:
        """Muon's momentum at ``step``."""
        start = self.config.momentum_start
        if start is None or start >= target:
            return target
        rise = self.config.momentum_warmup * self.steps
        warm = min(1.0, step / rise) if rise else 1.0
        fall = self.config.momentum_cooldown
        cool = min(1.0, (self.steps - step) / fall) if fall else 1.0
        return start + (target - start) * min(warm, cool)


@dataclass(frozen=True)
class Place:
    """Where a step stands in the stages of a language-model run.

    ``windows`` of the shards have been consumed before it, and ``tokens`` trained on.
    """

    stage: Stage
    windows: int
    tokens: int
    taken: int
    """How many windows this step takes; a window holds several sequences of a shorter stage."""


def place_in_stages(stages: tuple[Stage, ...], window: int, step: int) -> Place:
    """The place of ``step``; for the last step + 1, the totals of the run."""
    windows = tokens = 0
    for number, stage in enumerate(stages):
        taken = -(-stage.sequences // (window // stage.sequence_length))
        inside = min(step, stage.steps)
        windows += inside * taken
        tokens += inside * stage.sequences * stage.sequence_length
        step -= inside
        if step == 0 and (inside < stage.steps or number == len(stages) - 1):
            return Place(stage, windows, tokens, taken)
    raise ValueError(f"step {step} steps beyond the last stage")
