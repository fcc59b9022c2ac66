"""The training loop, which serves both benchmarks and all methods.

A run is a pure function of its config. A checkpoint holds the step, the time and the lengths of the
logs, so that a run killed at any moment can be resumed as if it had not been interrupted: lines
logged after the last checkpoint are cut off and written again, with the same numbers.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Protocol

import torch

from polarstep.storage import JsonLines, StorageError
from polarstep_lab.config import ConfigError, RunConfig
from polarstep_lab.records import record
from polarstep_lab.records.directory import RunLock, check_directory, claim_directory
from polarstep_lab.records.environment import record_environment
from polarstep_lab.records.record import MetricRow, Result, RunIdentity, RunRecord, Status
from polarstep_lab.training.checkpoint import Progress, resume_from, save_checkpoint
from polarstep_lab.training.gamma_log import GammaLog
from polarstep_lab.training.images import ImageTask
from polarstep_lab.training.interrupt import Interrupt
from polarstep_lab.training.language import LanguageTask
from polarstep_lab.training.noise_log import NoiseLog
from polarstep_lab.training.optimizers import (
    ScheduledOptimizer,
    build_optimizer,
    optimizer_gflops,
)
from polarstep_lab.training.ranks import Ranks, Vote, first_failure
from polarstep_lab.training.schedule import Schedule
from polarstep_lab.training.tasks import Task, Validation
from polarstep_lab.training.timing import StepTimer

__all__ = ["Interrupted", "Observer", "StopTraining", "train"]


class Observer(Protocol):
    """Something that watches a run: a progress bar, TensorBoard, a tuner that may prune it."""

    def start(self, config: RunConfig, steps: int, step: int) -> None:
        """The run begins, or goes on after ``step`` steps."""

    def row(self, row: MetricRow) -> None:
        """A line of metrics was written. Raising :class:`StopTraining` ends the run."""

    def advance(self, step: int) -> None:
        """``step`` steps are done."""

    def end(self, result: Result | None) -> None:
        """The run has ended; ``None`` where it was interrupted or failed."""


class StopTraining(Exception):
    """Raised by an observer to end a run early, with the status ``"stopped"``."""


class Interrupted(Exception):
    """The run was stopped by a signal, after writing its checkpoint."""

    def __init__(self, directory: Path, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}; the checkpoint is in {directory}")
        self.directory, self.step, self.steps = directory, step, steps


class _Diverged(Exception):
    """The loss is not a finite number."""


class _Wish(IntFlag):
    """What a rank wants after a step; the ranks do what the greatest wish says."""

    GO_ON = 0
    SAVE = 1
    STOP = 2


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _unsaid(text: str) -> None:
    """Say nothing: rank 0 speaks for all."""


def train(
    config: RunConfig,
    directory: Path,
    *,
    identity: RunIdentity | None = None,
    resume: bool = False,
    force: bool = False,
    observers: Sequence[Observer] = (),
    tell: Callable[[str], object] = _to_stderr,
    ranks: Ranks | None = None,
) -> Result:
    """Run ``config`` in ``directory`` and return its result, which is also written there.

    ``resume`` goes on with an unfinished run where there is one. ``force`` replaces a run. ``tell``
    is called with what a user should know and no error is: what ``force`` is about to remove, or
    that the newest checkpoint is damaged.

    ``ranks`` are the processes that make this run together (:mod:`polarstep_lab.training.ranks`).
    All of them call this function. Rank 0 alone writes into ``directory``, calls ``observers``, which
    may then not raise :class:`StopTraining`, and calls ``tell``.

    Raises :class:`Interrupted` after a Ctrl-C, with the checkpoint written, and whatever went
    wrong otherwise, with what was recorded so far intact.
    """
    identity, ranks = identity or identify(config), ranks or Ranks()
    if not ranks.first:
        observers, tell = (), _unsaid
    if ranks.parallel == "fsdp" and config.runtime.noise.points is not None:
        raise ConfigError(
            f"runtime.noise.points={config.runtime.noise.points} with --parallel fsdp: expected "
            "null, as gradients of whole batches are measured on one device; take --parallel ddp, or "
            "a single process"
        )
    device = ranks.device(config.runtime.device)
    with ExitStack() as held:

        def lock() -> None:
            held.enter_context(RunLock(directory, identity.label))
            check_directory(directory, identity, resume=resume, force=force)

        def claim() -> bool:
            return claim_directory(directory, identity, resume=resume, force=force, tell=tell)

        ranks.from_first(lock)
        task = build_task(
            config, device, ranks
        )  # before the claim: bad data must not replace a run
        goes_on = ranks.from_first(claim)
        run = _Run.begin(config, directory, task, device, tuple(observers), goes_on, tell, ranks)
        return run.to_the_end()


def identify(config: RunConfig) -> RunIdentity:
    """The identity of a run that no command was given for."""
    return RunIdentity(
        recipe=config.recipe,
        benchmark=config.benchmark,
        method=config.method,
        seed=config.seed,
        config=config.to_dict(),
    )


def build_task(config: RunConfig, device: torch.device, ranks: Ranks | None = None) -> Task:
    """The benchmark of ``config``, with data loaded and the model on ``device``."""
    if config.benchmark == "nanogpt":
        return LanguageTask.build(config, device, ranks)
    return ImageTask.build(config, device, ranks)


@dataclass
class _Run:
    """A run in progress."""

    config: RunConfig
    directory: Path
    task: Task
    scheduled: ScheduledOptimizer
    ranks: Ranks
    timer: StepTimer
    metrics: JsonLines | None
    """The log of the run; None on all ranks but the first."""
    gamma: GammaLog | None
    noise: NoiseLog | None
    observers: tuple[Observer, ...]
    step: int
    seconds_before: float
    began: float
    saved: float
    last: Validation | None = None

    @classmethod
    def begin(
        cls,
        config: RunConfig,
        directory: Path,
        task: Task,
        device: torch.device,
        observers: tuple[Observer, ...],
        goes_on: bool,
        tell: Callable[[str], object],
        ranks: Ranks,
    ) -> _Run:
        """Build the optimizer, and take up the checkpoint where there is one."""
        schedule = Schedule(config.schedule, task.steps)
        scheduled = build_optimizer(task.model, config, schedule)
        progress = Progress()
        if goes_on:
            progress = resume_from(
                directory, task.model, scheduled.optimizer, config.to_dict(), device, tell, ranks
            )
        if progress.step > task.steps:
            raise StorageError(
                f"the checkpoint in {directory} was taken after step {progress.step}, but the run "
                f"has {task.steps} steps: the data has changed; start anew with --force"
            )
        ranks.from_first(
            lambda: record_environment(
                directory / record.ENVIRONMENT, device, task.data, ranks.count, ranks.parallel
            )
        )
        metrics = directory / record.METRICS
        now = time.perf_counter()
        run = cls(
            config=config,
            directory=directory,
            task=task,
            scheduled=scheduled,
            ranks=ranks,
            timer=StepTimer(device, cycle=config.optimizer.polar.keep),
            metrics=JsonLines(metrics, progress.metrics_bytes) if ranks.first else None,
            gamma=GammaLog.attach(
                directory / record.GAMMA if ranks.first else None,
                progress.gamma_bytes,
                config.runtime.monitor_every,
                scheduled.optimizer,
            ),
            noise=NoiseLog.attach(
                directory / record.NOISE, progress.noise_bytes, config, task, ranks
            ),
            observers=observers,
            step=progress.step,
            seconds_before=progress.seconds,
            began=now,
            saved=now,
        )
        for observer in observers:
            observer.start(config, task.steps, progress.step)
        return run

    @property
    def seconds(self) -> float:
        """Time spent on this run, without the pauses between a stop and its resume."""
        return self.seconds_before + time.perf_counter() - self.began

    def to_the_end(self) -> Result:
        """Train, write the result, and tell the observers how it ended."""
        result = None
        try:
            result = self._train()
        except (Interrupted, StorageError):
            raise
        except Exception as error:
            _, message = first_failure(error)
            if self.ranks.first:
                failed = self._result("failed", math.nan, message)
                with contextlib.suppress(StorageError, OSError):
                    failed.save(self.directory)
            raise
        finally:
            for log in (self.metrics, self.gamma, self.noise):
                if log is not None:
                    log.close()
            for observer in self.observers:
                observer.end(result)
        return result

    def _train(self) -> Result:
        """Train until the last step, or until the run is stopped or diverges."""
        try:
            with Interrupt(patient=self.ranks.count > 1) as interrupt:
                vote = Vote(self.ranks)
                self.task.model.train()
                if self.step == 0:
                    self._validate()
                while self.step < self.task.steps:
                    self._measure()
                    self._one_step()
                    decision = vote.cast(self._wish(interrupt))
                    if decision & _Wish.SAVE:
                        self._checkpoint()
                    if decision & _Wish.STOP:
                        vote.close()
                        self._checkpoint()
                        raise Interrupted(self.directory, self.step, self.task.steps)
                vote.close()
                self._measure()
                if self.config.runtime.keep_checkpoint:
                    self._checkpoint()
                self.last = self.last or self.ranks.from_first(self._last_recorded)
                value = self.task.final(self.last)
                result = self.ranks.from_first(lambda: self._result("finished", value))
        except _Diverged as reason:
            message = str(reason)
            result = self.ranks.from_first(lambda: self._result("diverged", math.nan, message))
        except StopTraining as reason:
            self._checkpoint()
            result = self._result("stopped", math.nan, str(reason))
        self.ranks.from_first(lambda: self._settle(result))
        return result

    def _settle(self, result: Result) -> None:
        """Write the result, and remove the checkpoints that are not wanted any more."""
        assert self.metrics is not None
        self.metrics.sync()
        result.save(self.directory)
        if not self.config.runtime.keep_checkpoint:
            (self.directory / record.CHECKPOINT).unlink(missing_ok=True)
        if not self.config.runtime.keep_checkpoint or result.status != "stopped":
            (self.directory / record.PREVIOUS_CHECKPOINT).unlink(missing_ok=True)

    def _measure(self) -> None:
        """Measure the gradient noise if it is due; the time this takes is not counted."""
        if self.noise is not None:
            self.began += self.noise.measure(self.step)

    def _one_step(self) -> None:
        """One update, and whatever is due after it: a log line, a validation."""
        task, optimizer = self.task, self.scheduled.optimizer
        with self.timer.span("step"):
            self.scheduled.set_step(self.step, task.stage_lr(self.step))
            loss = task.backward(self.step)
            with self.timer.span("optimizer"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        done = self.step == task.steps
        if done or self.step == 1 or self.step % self.config.runtime.log_every == 0:
            self._log(self.ranks.total(loss).item())
        if done or self.step % self.config.evaluation.every == 0:
            self._validate()
        for observer in self.observers:
            observer.advance(self.step)

    def _wish(self, interrupt: Interrupt) -> _Wish:
        """What to do after a step: stop after a signal, or save by rank 0's clock."""
        wish = _Wish.STOP if interrupt.pending else _Wish.GO_ON
        now = time.perf_counter()
        due = now - self.saved >= self.config.runtime.checkpoint_seconds
        if not due or not self.ranks.first or self.step == self.task.steps:
            return wish
        self.saved = now  # asked for once, though several ranks save a step later
        return wish | _Wish.SAVE

    def _log(self, loss: float) -> None:
        """Write a training row; a loss that is not finite ends the run."""
        self._write(
            MetricRow(
                step=self.step,
                kind="train",
                loss=loss,
                lr=self._lr,
                seconds=self.seconds,
                step_ms=self.timer.read("step"),
                optimizer_ms=self.timer.read("optimizer"),
                **self.task.consumed(self.step),
            )
        )
        self._check(loss, "training")

    def _validate(self) -> None:
        """Write a validation row."""
        self.last = self.task.validate()
        self._write(
            MetricRow(
                step=self.step,
                kind="val",
                loss=self.last.loss,
                lr=self._lr,
                seconds=self.seconds,
                perplexity=self.last.perplexity,
                accuracy=self.last.accuracy,
                **self.task.consumed(self.step),
            )
        )
        self._check(self.last.loss, "validation")

    @property
    def _lr(self) -> float:
        """The method's learning rate at the step just made."""
        step = max(0, self.step - 1)
        rate = self.scheduled.schedule.lr(step, self.task.stage_lr(step))
        return self.config.optimizer.lr * rate

    def _write(self, row: MetricRow) -> None:
        if self.metrics is not None:
            self.metrics.write(row.to_dict())
        for observer in self.observers:
            observer.row(row)

    def _check(self, loss: float, kind: str) -> None:
        if not math.isfinite(loss):
            raise _Diverged(
                f"the {kind} loss is {loss} at step {self.step}: lower the learning rate "
                f"(optimizer.lr={self.config.optimizer.lr:g})"
            )

    def _checkpoint(self) -> None:
        """Write the state to resume from, after the logs, whose lengths it records."""
        progress = Progress(
            step=self.step,
            seconds=self.seconds,
            metrics_bytes=self.metrics.sync() if self.metrics is not None else 0,
            gamma_bytes=self.gamma.length if self.gamma is not None else 0,
            noise_bytes=self.noise.length if self.noise is not None else 0,
        )
        save_checkpoint(
            self.directory / record.CHECKPOINT,
            self.task.model,
            self.scheduled.optimizer,
            progress,
            self.config.to_dict(),
            self.ranks,
        )
        self.saved = time.perf_counter()

    def _last_recorded(self) -> Validation:
        """The last validation of a run that was killed between its last step and its result."""
        row = RunRecord.load(self.directory).rows("val")[-1]
        return Validation(row.loss, row.perplexity, row.accuracy)

    def _validated(self) -> float | None:
        """The perplexity or the accuracy of the last validation."""
        if self.last is None:
            return None
        return self.last.perplexity if self.last.accuracy is None else self.last.accuracy

    def _result(self, status: Status, value: float, message: str = "") -> Result:
        """The result as of now; times are medians over the logged rows."""
        rows = RunRecord.load(self.directory).rows("train")
        return Result(
            metric=self.task.metric,
            value=value,
            status=status,
            steps=self.step,
            optimizer_gflops_per_step=optimizer_gflops(self.task.model, self.config),
            optimizer_ms_per_step=_median([row.optimizer_ms for row in rows]),
            step_ms=_median([row.step_ms for row in rows]),
            message=message,
            validation=self._validated(),
        )


def _median(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan
