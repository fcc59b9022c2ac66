"""Workers that spend a study's budget of trials, in this process or in several.

A trial asks for values, trains with them while it reports validation losses, and tells how it
ended. Ctrl-C, or a kill, loses no more than the trials under way: their values go back to the queue,
and the same command continues the study.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Any, Protocol

import optuna
import torch
from optuna.trial import TrialState

from polarstep_lab.config import ConfigError
from polarstep_lab.tune.study import (
    StudySpec,
    best_trial,
    count_claimed,
    count_done,
    give_back,
    open_study,
    reseed,
    revive_lost_trials,
    worker_mark,
)

__all__ = ["Objective", "Progress", "Pruned", "tune"]


class Pruned(Exception):
    """Raised into an objective by its ``report``: this trial is behind and should stop."""


class Objective(Protocol):
    """What a trial does: train with ``overrides``, report as it goes, return the final loss.

    ``report(number, loss)`` takes the number of the validation and its loss, and may raise
    :class:`Pruned`. A loss that is not finite ends the trial as diverged.
    """

    def __call__(
        self, overrides: Mapping[str, float], report: Callable[[int, float], None]
    ) -> float:
        """The final validation loss."""
        ...


@dataclass(frozen=True)
class Progress:
    """Where a study stands."""

    done: int
    total: int
    running: int
    pruned: int
    best: float | None
    best_overrides: Mapping[str, Any]


def tune(
    spec: StudySpec,
    objective: Objective,
    trials: int,
    workers: int = 1,
    on_progress: Callable[[Progress], object] = lambda _: None,
) -> Progress:
    """Bring the study to ``trials`` trials in all, those it already has included."""
    if trials < 1:
        raise ConfigError(f"trials={trials}: expected at least 1")
    if workers < 1:
        raise ConfigError(f"workers={workers}: expected at least 1")
    study = open_study(spec)
    revive_lost_trials(study)
    left = trials - count_done(study)
    if left > 0 and workers == 1:
        for _ in range(left):
            if count_claimed(study) >= trials:  # someone else works on the study, too
                break
            _one_trial(study, spec, 0, objective, lambda: on_progress(_progress(study, trials)))
    elif left > 0:
        _in_processes(study, spec, objective, trials, min(workers, left), on_progress)
    final = _progress(study, trials)
    on_progress(final)
    return final


def _in_processes(
    study: optuna.Study,
    spec: StudySpec,
    objective: Objective,
    trials: int,
    workers: int,
    on_progress: Callable[[Progress], object],
) -> None:
    # Spawned, not forked: torch's thread pools do not survive a fork.
    context = multiprocessing.get_context("spawn")
    tickets = context.Value("i", trials - count_done(study))
    threads = max(1, torch.get_num_threads() // workers)
    team = [
        context.Process(target=_work, args=(spec, index, objective, tickets, threads))
        for index in range(workers)
    ]
    for process in team:
        process.start()
    try:
        while any(process.is_alive() for process in team):
            on_progress(_progress(study, trials))
            time.sleep(0.5)
    except KeyboardInterrupt:
        for process in team:  # the terminal has sent them the interrupt as well
            process.join(timeout=10)
        raise
    finally:
        for process in team:
            if process.is_alive():
                process.terminate()
            process.join()
        revive_lost_trials(study)
    failed = [process.exitcode for process in team if process.exitcode]
    if failed:
        raise ChildProcessError(
            f"{len(failed)} of {workers} workers ended with exit codes {failed}; their output above "
            "says why. Finished trials are kept; the same command continues the study"
        )


def _work(
    spec: StudySpec,
    index: int,
    objective: Objective,
    tickets: Synchronized[int],
    threads: int,
) -> None:
    """The life of a worker process: one trial for each ticket, until there are none."""
    torch.set_num_threads(threads)
    study = open_study(spec, index)
    try:
        while True:
            with tickets.get_lock():
                if tickets.value <= 0:
                    return
                tickets.value -= 1
            _one_trial(study, spec, index, objective, lambda: None)
    except KeyboardInterrupt:
        return


def _one_trial(
    study: optuna.Study,
    spec: StudySpec,
    worker: int,
    objective: Objective,
    on_report: Callable[[], object],
) -> None:
    reseed(study, spec, worker)
    trial = study.ask()
    trial.set_user_attr("worker", worker_mark())
    overrides = {
        key: trial.suggest_float(key, space.low, space.high, log=space.log)
        for key, space in spec.space.items()
    }
    on_report()

    def report(number: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise Pruned("diverged")
        trial.report(loss, number)
        on_report()
        if trial.should_prune():
            raise Pruned("behind the others")

    started = time.perf_counter()
    try:
        value = objective(overrides, report)
        if not math.isfinite(value):
            raise Pruned("diverged")
    except Pruned as reason:
        trial.set_user_attr("ended", str(reason))
        study.tell(trial, state=TrialState.PRUNED)
    except KeyboardInterrupt:
        give_back(study, trial)
        raise
    except BaseException:
        study.tell(trial, state=TrialState.FAIL)
        raise
    else:
        trial.set_user_attr("seconds", round(time.perf_counter() - started, 3))
        study.tell(trial, value)
    on_report()


def _progress(study: optuna.Study, total: int) -> Progress:
    trials = study.get_trials(deepcopy=False)
    best = best_trial(study)
    return Progress(
        done=count_done(study),
        total=total,
        running=sum(trial.state == TrialState.RUNNING for trial in trials),
        pruned=sum(trial.state == TrialState.PRUNED for trial in trials),
        best=best.value if best else None,
        best_overrides=dict(best.params) if best else {},
    )
