"""What tuning leaves behind: a recipe that runs, and all trials as a table to read.

The recipe file is ``{"recipe", "method", "overrides"}``, which ``polarstep run FILE`` accepts. The
file of tuned values that a recipe ships with, ``{"methods": {METHOD: {"overrides": …}}}``, collects
the same for several methods.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from polarstep_lab.config import ConfigError
from polarstep_lab.storage import StorageError, read_json, refuse_unwritable, write_json
from polarstep_lab.tune.study import DONE, StudySpec, best_trial, count, open_study

__all__ = [
    "best_recipe",
    "check_recipe",
    "check_tuned",
    "trial_table",
    "write_recipe",
    "write_tuned",
]


def best_recipe(spec: StudySpec, command: str = "") -> dict[str, Any]:
    """The best trial as a recipe, with where it comes from."""
    study = open_study(spec)
    best = best_trial(study)
    if best is None:
        raise ConfigError(
            f"the study {spec.name!r} has no trial that ran to its end: raise --trials, or look at "
            "the ranges of its search space"
        )
    # Where the trials ran is no part of what they found.
    kept = {key: value for key, value in spec.overrides.items() if not key.startswith("runtime.")}
    overrides = {**kept, **{key: best.params[key] for key in spec.space}}
    return {
        "recipe": spec.recipe,
        "method": spec.method,
        "overrides": overrides,
        "tuned": {
            "val_loss": best.value,
            "trial": best.number,
            "trials": count(study, *DONE),
            "seed": spec.seed,
            "space": spec.identity["space"],
            "pruner": spec.pruner,
            "study": spec.storage.name,
            "command": command,
        },
    }


def check_recipe(path: Path, recipe: str, method: str) -> None:
    """Raise if :func:`write_recipe` could not write the best trial of ``method`` to ``path``.

    A file that tuning did not write, or wrote for another method, is left alone.
    """
    refuse_unwritable(path, "--out")
    if path.exists():
        known = read_json(path)
        ours = isinstance(known, dict) and "tuned" in known
        if not ours or (known.get("recipe"), known.get("method")) != (recipe, method):
            raise StorageError(
                f"{path} exists and is not a tuned recipe of {recipe} for {method}: choose another "
                "--out, or move it away"
            )


def check_tuned(path: Path, recipe: str) -> None:
    """Raise if :func:`write_tuned` could not enter values of ``recipe`` into the file at ``path``."""
    refuse_unwritable(path, "--collect")
    if path.exists():
        known = read_json(path)
        if not isinstance(known, dict) or known.get("recipe") != recipe:
            raise StorageError(
                f"{path} exists and does not hold tuned values of {recipe}: choose another file, or "
                "move it away"
            )


def write_recipe(path: Path, recipe: dict[str, Any]) -> None:
    """Write a recipe file; one that tuning did not write is left alone."""
    check_recipe(path, recipe["recipe"], recipe["method"])
    write_json(path, recipe)


def write_tuned(path: Path, recipe: dict[str, Any]) -> None:
    """Add what a study searched to a file of tuned values; the other methods' stay as they are.

    Settings that all its trials shared, such as a shorter run, are noted and not taken over.
    """
    check_tuned(path, recipe["recipe"])
    new = {"recipe": recipe["recipe"], "methods": {}}
    content: dict[str, Any] = read_json(path) if path.exists() else new
    searched = recipe["tuned"]["space"]
    shared = {key: value for key, value in recipe["overrides"].items() if key not in searched}
    content["methods"][recipe["method"]] = {
        "overrides": {key: recipe["overrides"][key] for key in searched},
        "tuned": recipe["tuned"] | ({"under": shared} if shared else {}),
    }
    write_json(path, content)


def trial_table(spec: StudySpec) -> str:
    """All trials begun of a study as JSON lines: number, values tried, losses reported, how it ended."""
    lines = []
    for trial in open_study(spec).get_trials(deepcopy=False):
        if trial.state == TrialState.WAITING:
            continue
        row = {
            "trial": trial.number,
            "state": trial.state.name.lower(),
            "val_loss": trial.value if trial.state.name == "COMPLETE" else None,
            "overrides": dict(trial.params),
            "reported": {str(step): loss for step, loss in trial.intermediate_values.items()},
            "ended": trial.user_attrs.get("ended", ""),
        }
        lines.append(json.dumps(row, sort_keys=True))
    return "\n".join(lines) + "\n"
