"""Tuning on the validation loss: TPE with pruning, in a study that several workers may share."""

from __future__ import annotations

from polarstep.experiments.tune.result import best_recipe, trial_table, write_recipe, write_tuned
from polarstep.experiments.tune.study import StudySpec
from polarstep.experiments.tune.training import TrainingObjective, study_of
from polarstep.experiments.tune.workers import Objective, Progress, Pruned, tune

__all__ = [
    "Objective",
    "Progress",
    "Pruned",
    "StudySpec",
    "TrainingObjective",
    "best_recipe",
    "study_of",
    "trial_table",
    "tune",
    "write_recipe",
    "write_tuned",
]
