"""A trial as a training run: its validation losses are the reports, the last one is its value.

Only the validation split is looked at. The final figure of a run, the test perplexity or the test
accuracy, plays no part.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polarstep_lab.config import RunConfig, with_overrides
from polarstep_lab.methods import find_method
from polarstep_lab.recipes import find_recipe, resolve, search_space
from polarstep_lab.records.record import MetricRow, Result
from polarstep_lab.train.run import Interrupted, StopTraining, train
from polarstep_lab.tune.study import Pruner, StudySpec
from polarstep_lab.tune.workers import Pruned

__all__ = ["TrainingObjective", "study_of"]


def study_of(
    recipe: str,
    method: str,
    storage: Path,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    pruner: Pruner = "median",
) -> StudySpec:
    """The study of a method over what its recipe marks for tuning.

    Its first trial is what the recipe's function gives, where that lies within the ranges: not what
    an earlier study found, whose trials would then count for this one.
    """
    found = find_method(method)
    space = search_space(recipe, found)
    plain = with_overrides(find_recipe(recipe).build(found), overrides or {}).to_dict()
    start = {key: float(_leaf(plain, key)) for key in space}
    inside = all(space[key].low <= value <= space[key].high for key, value in start.items())
    return StudySpec(
        storage=storage,
        recipe=recipe,
        method=found.slug,
        space=space,
        start=start if inside else {},
        overrides=dict(overrides or {}),
        seed=seed,
        pruner=pruner,
    )


@dataclass(frozen=True)
class TrainingObjective:
    """Trains a recipe with the values of a trial, in a folder that is thrown away."""

    recipe: str
    method: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __call__(
        self, overrides: Mapping[str, float], report: Callable[[int, float], None]
    ) -> float:
        """Train, and return the last validation loss, or NaN where the run diverged."""
        values = {**self.overrides, **overrides, "runtime.keep_checkpoint": False}
        config = resolve(self.recipe, self.method, self.seed, values)
        reporter = _Reporter(report)
        with tempfile.TemporaryDirectory(prefix="polarstep-trial-") as folder:
            try:
                result = train(config, Path(folder) / "run", observers=[reporter])
            except Interrupted as interrupted:
                raise KeyboardInterrupt from interrupted
        if reporter.pruned is not None:
            raise reporter.pruned
        return reporter.last if result.status == "finished" else math.nan


class _Reporter:
    """An observer that passes validations on, and ends the run where the trial is pruned."""

    def __init__(self, report: Callable[[int, float], None]) -> None:
        self.report = report
        self.count = 0
        self.last = math.nan
        self.pruned: Pruned | None = None

    def start(self, config: RunConfig, steps: int, step: int) -> None:
        """Do nothing: there is nothing to prepare."""

    def row(self, row: MetricRow) -> None:
        """Report a validation, except that before the first step, which is the same for all trials."""
        if row.kind != "val" or row.step == 0:
            return
        self.last = row.loss
        self.count += 1
        try:
            self.report(self.count, row.loss)
        except Pruned as reason:
            self.pruned = reason
            raise StopTraining(f"pruned: {reason}") from reason

    def advance(self, step: int) -> None:
        """Do nothing: only validations are reported."""

    def end(self, result: Result | None) -> None:
        """Do nothing: there is nothing to clean up."""


def _leaf(data: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        data = data[key]
    return data
