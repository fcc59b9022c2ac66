"""Tuning on the validation loss: Optuna chooses values, and each trial is a run in a directory.

The trials are the study: Optuna's own is made from their directories whenever a search goes on, by
asking, reporting and pruning as when they were first made. Ctrl-C or a kill loses nothing but the steps
since the last checkpoints. With one worker an interrupted search tries the values that it would have
tried without the interruption.

A trial reports its validation losses, as its ``metrics.jsonl`` has them. One that falls behind is asked
to stop by the file ``stop``. Test perplexity and test accuracy play no part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import filelock
import optuna
from optuna.trial import TrialState

from polarstep.rng import key_to_seed
from polarstep_lab.config import ConfigError, with_overrides
from polarstep_lab.jobs.job import Job, plan_run
from polarstep_lab.jobs.local import Workers
from polarstep_lab.jobs.progress import MetricsTail
from polarstep_lab.methods import find_method
from polarstep_lab.recipes import Range, find_recipe, search_space
from polarstep_lab.records.directory import state_of
from polarstep_lab.records.record import STOP, Result, RunSpec
from polarstep_lab.storage import StorageError, read_json, refuse_unwritable, to_json, write_json

__all__ = [
    "Search",
    "Standing",
    "best_recipe",
    "check_recipe",
    "check_tuned",
    "opening_values",
    "search_of",
    "trials_of",
    "tune",
    "write_recipe",
    "write_tuned",
]

OPENING = 4
"""Trials before TPE and pruning set in."""

SEARCH = "search.json"
"""The file beside the trials that says what is searched."""

Pruner = Literal["median", "none"]


@dataclass(frozen=True)
class Search:
    """What is tuned, and how; two searches that are equal but for ``folder`` try the same values."""

    folder: Path
    recipe: str
    method: str
    space: Mapping[str, Range]
    start: Mapping[str, float] = field(default_factory=dict)
    """The first trial: what the recipe's function gives, so that tuning cannot end worse than that."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    pruner: Pruner = "median"

    def __post_init__(self) -> None:
        if not self.space:
            raise ConfigError(
                f"recipe {self.recipe!r} marks nothing to tune for {self.method}: expected a range "
                "for at least one setting in its search space"
            )
        if self.pruner not in ("median", "none"):
            raise ConfigError(f"pruner {self.pruner!r}: expected median or none")

    @property
    def identity(self) -> dict[str, Any]:
        """What may not change between the trials of one search."""
        space = {key: [r.low, r.high, r.log] for key, r in self.space.items()}
        found: dict[str, Any] = to_json(
            {
                "recipe": self.recipe,
                "method": self.method,
                "space": space,
                "overrides": dict(self.overrides),
                "seed": self.seed,
                "pruner": self.pruner,
            }
        )
        return found

    def trial(self, number: int) -> Path:
        """The directory of a trial."""
        return self.folder / f"trial-{number:03}"


@dataclass(frozen=True)
class Standing:
    """Where a search stands; ``best`` is the loss of its best trial that ran to the end."""

    done: int
    pruned: int
    best: float | None


def search_of(
    recipe: str,
    method: str,
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    pruner: Pruner = "median",
) -> Search:
    """The search of a method over what its recipe marks for tuning, in ``folder/RECIPE/METHOD``.

    The first trial is what the recipe's function gives, where that lies within the ranges: not what
    an earlier search found, whose trials would then count for this one.
    """
    found = find_method(method)
    space = search_space(recipe, found)
    plain = with_overrides(find_recipe(recipe).build(found), overrides or {}).to_dict()
    start = {key: float(_leaf(plain, key)) for key in space}
    inside = all(space[key].low <= value <= space[key].high for key, value in start.items())
    return Search(
        folder=folder / recipe / found.folder,
        recipe=recipe,
        method=found.slug,
        space=space,
        start=start if inside else {},
        overrides=dict(overrides or {}),
        seed=seed,
        pruner=pruner,
    )


def opening_values(search: Search) -> list[dict[str, float]]:
    """What is tried before there is anything to learn from: ``start``, then a spread.

    The spread is the additive recurrence of the generalized golden ratio (M. Roberts, "The
    Unreasonable Effectiveness of Quasirandom Sequences", 2018). With a budget of ten trials, random
    ones would too often fall beside each other; and every method opens alike.

    >>> search = Search(Path("s"), "r", "m", {"lr": Range(0.001, 1.0, log=True)}, {"lr": 0.02})
    >>> [round(values["lr"], 4) for values in opening_values(search)]
    [0.02, 0.0023, 0.1615, 0.0115]
    """
    ratio = 2.0
    for _ in range(40):  # the root of x^(d+1) = x + 1
        ratio = (1 + ratio) ** (1 / (len(search.space) + 1))
    opening = [dict(search.start)] if search.start else []
    while len(opening) < OPENING:
        number = len(opening) if search.start else len(opening) + 1
        shares = ((0.5 + number * ratio ** -(axis + 1)) % 1 for axis in range(len(search.space)))
        opening.append(
            {
                key: _at(space, share)
                for (key, space), share in zip(search.space.items(), shares, strict=True)
            }
        )
    return opening


def tune(
    search: Search,
    trials: int,
    workers: Workers,
    on_progress: Callable[[Standing], object] = lambda _: None,
) -> Standing:
    """Bring a search to ``trials`` trials in all, those it already has included."""
    if trials < 1:
        raise ConfigError(f"trials={trials}: expected at least 1, the runs of a search")
    with _locked(search):
        study = _Study(search)
        study.begin_again(trials)
        on_progress(study.standing)
        running: dict[Path, _Trial] = {}
        try:
            while study.waiting or running or len(study.trials) < trials:
                while len(running) < workers.count and (
                    study.waiting or len(study.trials) < trials
                ):
                    trial = study.waiting.pop(0) if study.waiting else study.ask()
                    running[trial.job.directory.absolute()] = trial
                    workers.start(trial.job)
                for job, outcome in workers.ended(0.3):
                    trial = running.pop(job.directory.absolute())
                    if outcome.error:
                        raise ConfigError(f"trial {trial.number} failed: {outcome.error}")
                    trial.read()
                    study.tell(trial)
                for trial in running.values():
                    if trial.read():
                        (trial.job.directory / STOP).write_text(trial.pruned, encoding="utf-8")
                on_progress(study.standing)
        except BaseException:
            workers.stop()
            raise
        return study.standing


class _Trial:
    """A trial under way: its reports, and whether they say that it is to end."""

    def __init__(self, number: int, trial: optuna.Trial, job: Job) -> None:
        self.number, self.job = number, job
        self.pruned = ""
        self._trial, self._tail = trial, MetricsTail(job)
        self._steps: list[int] = []
        self.last = math.nan

    def read(self) -> bool:
        """Report what the run has written since the last call; returns whether it is now to end.

        The validation before the first step is left out, which is the same for all trials.
        """
        before = self.pruned
        for row in self._tail.rows():
            if row.kind != "val" or row.step == 0 or row.step in self._steps or self.pruned:
                continue
            self._steps.append(row.step)
            self.last = row.loss
            if not math.isfinite(row.loss):
                self.pruned = "diverged"
                break
            self._trial.report(row.loss, len(self._steps))
            if self._trial.should_prune():
                self.pruned = "behind the others"
        return self.pruned != before

    def tell(self, study: optuna.Study) -> None:
        """Tell the study how the trial ended."""
        result = Result.load(self.job.directory)
        if result is not None and result.status == "diverged":
            self.pruned = self.pruned or "diverged"
        if self.pruned or result is None or result.status != "finished":
            self._trial.set_user_attr("ended", self.pruned)
            study.tell(self._trial, state=TrialState.PRUNED)
        else:
            study.tell(self._trial, self.last)


class _Study:
    """Optuna's study, in memory, of the trials in the folder of a search."""

    def __init__(self, search: Search) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._search, self._opening = search, opening_values(search)
        with _quietly():
            self.study = optuna.create_study(pruner=_pruner(search.pruner))
        self.waiting: list[_Trial] = []
        """Trials that were interrupted."""

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """All trials that were begun."""
        return self.study.get_trials(deepcopy=False)

    @property
    def standing(self) -> Standing:
        """Where the search stands."""
        complete = [trial for trial in self.trials if trial.state == TrialState.COMPLETE]
        pruned = sum(trial.state == TrialState.PRUNED for trial in self.trials)
        best = min((float(trial.values[0]) for trial in complete), default=None)
        return Standing(len(complete) + pruned, pruned, best)

    def begin_again(self, most: int | None = None) -> None:
        """Ask, report and tell for the trials that have a directory, in their order."""
        number = 0
        while most is None or number < most:
            directory = self._search.trial(number)
            if state_of(directory) == "empty":
                return
            trial = self.ask(RunSpec.load(directory).overrides)
            trial.read()
            result = Result.load(directory)
            if trial.pruned or (result is not None and result.status != "failed"):
                self.tell(trial)
            else:
                self.waiting.append(trial)
            number += 1

    def ask(self, known: Mapping[str, float] | None = None) -> _Trial:
        """The next trial, with the values it was begun with where they are known.

        The sampler is seeded by the number of trials there already are: a search that was interrupted
        tries the values it would have tried without the interruption.
        """
        search, number = self._search, len(self.trials)
        values = known or (self._opening[number] if number < len(self._opening) else None)
        if values is not None:
            self.study.enqueue_trial({key: float(values[key]) for key in search.space})
        name = f"{search.recipe}/{search.method}"
        seed = key_to_seed("tune", name, search.seed, number, 0) % 2**32
        with _quietly():
            self.study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=OPENING, multivariate=True, constant_liar=True, seed=seed
            )
        asked = self.study.ask()
        chosen = {
            key: asked.suggest_float(key, space.low, space.high, log=space.log)
            for key, space in search.space.items()
        }
        settings = {**search.overrides, **chosen, "runtime.keep_checkpoint": False}
        job = plan_run(search.recipe, search.method, search.seed, settings, search.trial(number))
        label = f"{find_method(search.method).name}, trial {number}"
        spec = replace(job.spec, study={"name": "tune", "variant": search.method})
        return _Trial(number, asked, replace(job, label=label, spec=spec))

    def tell(self, trial: _Trial) -> None:
        """Take down how a trial ended."""
        trial.tell(self.study)


@contextmanager
def _locked(search: Search) -> Iterator[None]:
    """Hold the folder of a search, which must be of this search."""
    refuse_unwritable(search.folder / SEARCH, "--study")
    search.folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(search.folder / ".search.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise StorageError(
            f"another process is tuning in {search.folder}: wait for it, or give another --study; for "
            "several trials at a time there is --workers"
        ) from None
    with lock:
        path = search.folder / SEARCH
        known = read_json(path) if path.exists() else search.identity
        if known != search.identity:
            changed = [key for key in search.identity if known.get(key) != search.identity[key]]
            raise ConfigError(
                f"{search.folder} already holds trials with another {', '.join(changed)} "
                f"({', '.join(str(known.get(key)) for key in changed)}): trials are comparable only "
                "under equal settings; choose another --study"
            )
        if not path.exists():
            write_json(path, search.identity)
        yield
    lock.release()


# --- what tuning leaves behind --------------------------------------------------------------------


def trials_of(search: Search) -> list[dict[str, Any]]:
    """All trials of a search: number, values tried, losses reported, and how each ended."""
    study = _Study(search)
    study.begin_again()
    return [
        {
            "trial": trial.number,
            "state": trial.state.name.lower(),
            "val_loss": trial.values[0] if trial.state == TrialState.COMPLETE else None,
            "overrides": dict(trial.params),
            "reported": {str(step): loss for step, loss in trial.intermediate_values.items()},
            "ended": trial.user_attrs.get("ended", ""),
        }
        for trial in study.trials
    ]


def best_recipe(search: Search, command: str = "") -> dict[str, Any]:
    """The best trial as a recipe, ``{"recipe", "method", "overrides"}``, with where it comes from."""
    trials = trials_of(search)
    complete = [trial for trial in trials if trial["state"] == "complete"]
    if not complete:
        raise ConfigError(
            f"no trial in {search.folder} ran to its end: raise --trials, or look at the ranges of its "
            "search space"
        )
    best = min(complete, key=lambda trial: trial["val_loss"])
    # Where the trials ran is no part of what they found.
    kept = {key: value for key, value in search.overrides.items() if not key.startswith("runtime.")}
    return {
        "recipe": search.recipe,
        "method": search.method,
        "overrides": {**kept, **best["overrides"]},
        "tuned": {
            "val_loss": best["val_loss"],
            "trial": best["trial"],
            "trials": sum(trial["state"] in ("complete", "pruned") for trial in trials),
            "seed": search.seed,
            "space": search.identity["space"],
            "pruner": search.pruner,
            "study": search.folder.name,
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
    """Add what a search found to a file of tuned values; the other methods' stay as they are.

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


def _at(space: Range, share: float) -> float:
    """The value a share of the way from the low end of a range to its high end."""
    if space.log:
        return float(space.low * (space.high / space.low) ** share)
    return space.low + (space.high - space.low) * share


def _leaf(data: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        data = data[key]
    return data


@contextmanager
def _quietly() -> Iterator[None]:
    """Without Optuna's warnings that parts of it are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _pruner(name: Pruner) -> optuna.pruners.BasePruner:
    if name == "median":
        # Nothing is pruned on its first validation: a high learning rate starts fast and ends badly.
        return optuna.pruners.MedianPruner(
            n_startup_trials=OPENING, n_warmup_steps=2, n_min_trials=3
        )
    return optuna.pruners.NopPruner()
