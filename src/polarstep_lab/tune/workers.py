"""Workers that spend a study's budget of trials, in this process or in several.

A trial asks for values, trains with them while it reports validation losses, and tells how it
ended. Ctrl-C, or a kill, loses no more than the trials under way: their values go back to the queue,
and the same command continues the study.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import optuna
import torch
from optuna.trial import TrialState

from polarstep_lab.config import ConfigError
from polarstep_lab.train.interrupt import ctrl_c_blocked
from polarstep_lab.tune.study import (
    DONE,
    StudySpec,
    at_work,
    best_trial,
    count,
    give_back,
    reseed,
)

__all__ = ["Objective", "Pruned", "StudyProgress", "tune"]


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
class StudyProgress:
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
    on_progress: Callable[[StudyProgress], object] = lambda _: None,
    stop: Callable[[], object] | None = None,
) -> StudyProgress:
    """Bring the study to ``trials`` trials in all, those it already has included.

    Workers are processes. With ``stop`` they are threads of this process, for an objective that
    trains elsewhere and only waits here; ``stop`` makes it raise KeyboardInterrupt in all threads.
    """
    if trials < 1:
        raise ConfigError(f"trials={trials}: expected at least 1, the runs of a study")
    if workers < 1:
        raise ConfigError(f"workers={workers}: expected at least 1, the trials that run at a time")
    worker = _Worker(spec, objective, trials)
    with at_work(spec) as study:
        workers = min(workers, trials - count(study, *DONE))
        if stop is not None and workers > 0:
            _in_threads(study, worker, workers, on_progress, stop)
        elif workers == 1:
            worker.spend(study, on_report=lambda: on_progress(_progress(study, trials)))
        elif workers > 1:
            _in_processes(study, worker, workers, on_progress)
        final = _progress(study, trials)
        on_progress(final)
        return final


@dataclass(frozen=True)
class _Worker:
    """Runs trials of a study until its budget is spent."""

    spec: StudySpec
    objective: Objective
    trials: int
    index: int = 0

    def spend(
        self,
        study: optuna.Study,
        asking: AbstractContextManager[Any] = nullcontext(),  # noqa: B008
        on_report: Callable[[], object] = lambda: None,
    ) -> None:
        """Run trials until all of the budget is spent or under way, here or in another process.

        ``asking`` is held from counting the trials to claiming one, by one worker at a time.
        """
        while True:
            with asking:
                if count(study, *DONE, TrialState.RUNNING) >= self.trials:
                    return
                reseed(study, self.spec, self.index)
                trial = study.ask()
            self._run(study, trial, on_report)

    def _run(
        self, study: optuna.Study, trial: optuna.Trial, on_report: Callable[[], object]
    ) -> None:
        """Run one trial to its end, and tell the study how it ended."""

        def report(number: int, loss: float) -> None:
            if not math.isfinite(loss):
                raise Pruned("diverged")
            trial.report(loss, number)
            on_report()
            if trial.should_prune():
                raise Pruned("behind the others")

        started = time.perf_counter()
        try:
            overrides = {
                key: trial.suggest_float(key, space.low, space.high, log=space.log)
                for key, space in self.spec.space.items()
            }
            on_report()
            value = self.objective(overrides, report)
            if not math.isfinite(value):
                raise Pruned("diverged")
        except Pruned as reason:
            trial.set_user_attr("ended", str(reason))
            study.tell(trial, state=TrialState.PRUNED)
        except KeyboardInterrupt:
            give_back(study, trial.number)
            raise
        except BaseException:
            study.tell(trial, state=TrialState.FAIL)
            raise
        else:
            trial.set_user_attr("seconds", round(time.perf_counter() - started, 3))
            study.tell(trial, value)
        on_report()


def _in_processes(
    study: optuna.Study,
    worker: _Worker,
    workers: int,
    on_progress: Callable[[StudyProgress], object],
) -> None:
    # Spawned, not forked: torch's thread pools do not survive a fork.
    context = multiprocessing.get_context("spawn")
    asking = context.Lock()
    threads = max(1, torch.get_num_threads() // workers)
    team = [
        context.Process(target=_work, args=(replace(worker, index=index), asking, threads))
        for index in range(workers)
    ]
    try:
        with ctrl_c_blocked():  # its workers are sent SIGTERM instead
            for process in team:
                process.start()
        while running := [process.sentinel for process in team if process.is_alive()]:
            on_progress(_progress(study, worker.trials))
            multiprocessing.connection.wait(running, timeout=0.5)
    finally:
        alive = [process for process in team if process.pid is not None and process.is_alive()]
        for process in alive:  # after an interrupt
            process.terminate()
        for process in alive:
            process.join(timeout=10)
            process.kill()
            process.join()
    failed = [process.exitcode for process in team if process.exitcode]
    if failed:
        raise ChildProcessError(
            f"{len(failed)} of {workers} workers ended with exit codes {failed}; their output above "
            "says why. Finished trials are kept; the same command continues the study"
        )


def _in_threads(
    study: optuna.Study,
    worker: _Worker,
    workers: int,
    on_progress: Callable[[StudyProgress], object],
    stop: Callable[[], object],
) -> None:
    asking = threading.Lock()
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            with suppress(KeyboardInterrupt), at_work(worker.spec) as own:
                replace(worker, index=index).spend(own, asking)
        except BaseException as error:
            failures.append(error)

    team = [threading.Thread(target=work, args=(index,)) for index in range(workers)]
    for thread in team:
        thread.start()
    try:
        for thread in team:
            while thread.is_alive():
                on_progress(_progress(study, worker.trials))
                thread.join(timeout=0.5)
    except BaseException:
        stop()
        raise
    finally:
        for thread in team:
            thread.join()
    if failures:
        raise failures[0]


def _work(worker: _Worker, asking: AbstractContextManager[Any], threads: int) -> None:
    """The life of a worker process. SIGTERM ends it, and its trial is given back."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(threads)
    with suppress(KeyboardInterrupt), at_work(worker.spec) as study:
        worker.spend(study, asking)


def _progress(study: optuna.Study, total: int) -> StudyProgress:
    best = best_trial(study)
    return StudyProgress(
        done=count(study, *DONE),
        total=total,
        running=count(study, TrialState.RUNNING),
        pruned=count(study, TrialState.PRUNED),
        best=best.value if best else None,
        best_overrides=dict(best.params) if best else {},
    )
