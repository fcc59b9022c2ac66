"""Tuning on the validation loss: TPE with pruning, in a study that several workers may share."""

from __future__ import annotations

from polarstep_lab.tune.result import (
    best_recipe,
    check_recipe,
    check_tuned,
    trial_table,
    write_recipe,
    write_tuned,
)
from polarstep_lab.tune.study import StudySpec
from polarstep_lab.tune.training import TrainingObjective, study_of
from polarstep_lab.tune.workers import Objective, Pruned, StudyProgress, tune

__all__ = [
    "Objective",
    "Pruned",
    "StudyProgress",
    "StudySpec",
    "TrainingObjective",
    "best_recipe",
    "check_recipe",
    "check_tuned",
    "study_of",
    "trial_table",
    "tune",
    "write_recipe",
    "write_tuned",
]
