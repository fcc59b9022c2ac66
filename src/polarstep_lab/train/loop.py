"""The training loop, which serves both benchmarks and all methods."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path

from polarstep_lab.config import RunConfig
from polarstep_lab.optimizers.build import ScheduledOptimizer
from polarstep_lab.records import record
from polarstep_lab.records.record import STOP, MetricRow, Result, Status
from polarstep_lab.storage import StorageError
from polarstep_lab.train.checkpoint import save_checkpoint
from polarstep_lab.train.interrupt import Interrupt, Interrupted
from polarstep_lab.train.logs import RunLogs
from polarstep_lab.train.observers import Observer, StopTraining
from polarstep_lab.train.outcome import last_recorded, result_of, write_result
from polarstep_lab.train.ranks import Ranks, StopVote, first_failure
from polarstep_lab.train.tasks import Task, Validation
from polarstep_lab.train.timing import StepTimer

__all__ = ["Loop"]


class _Diverged(Exception):
    """The loss is not a finite number."""


class _Wish(IntFlag):
    """What a rank wants after a step; the ranks do what the greatest wish says."""

    GO_ON = 0
    SAVE = 1
    STOP = 2


@dataclass
class Loop:
    """A run in progress, after ``step`` steps that took ``seconds_before`` seconds."""

    config: RunConfig
    directory: Path
    task: Task
    scheduled: ScheduledOptimizer
    ranks: Ranks
    timer: StepTimer
    logs: RunLogs
    observers: tuple[Observer, ...]
    step: int
    seconds_before: float
    began: float = field(default_factory=time.perf_counter)
    saved: float = field(default_factory=time.perf_counter)
    last: Validation | None = None
    interrupt: Interrupt = field(init=False)

    def __post_init__(self) -> None:
        self.interrupt = Interrupt(patient=self.ranks.count > 1)

    @property
    def seconds(self) -> float:
        """Time spent on this run, without the pauses between a stop and its resume."""
        return self.seconds_before + time.perf_counter() - self.began

    def to_the_end(self) -> Result:
        """Train, write the result, and tell the observers how it ended.

        A signal during the last evaluation, or at the step that diverges, raises :class:`Interrupted`
        after the result is written. Several ranks make a single run, which has then ended anyway.
        """
        result = None
        try:
            result = self._train()
            if self.interrupt.pending and self.ranks.count == 1:
                raise Interrupted(self.directory, self.step, self.task.steps, ended=True)
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
            self.logs.close()
            for observer in self.observers:
                observer.end(result)
        return result

    def _train(self) -> Result:
        """Train until the last step, or until the run is stopped or diverges."""
        try:
            with self.interrupt:
                vote = StopVote(self.ranks)
                self.task.model.train()
                if self.step == 0:
                    self._validate()
                while self.step < self.task.steps:
                    self._measure()
                    self._one_step()
                    decision = vote.cast(self._wish())
                    if decision & _Wish.SAVE:
                        self._checkpoint()
                    if decision & _Wish.STOP:
                        vote.close()
                        if reason := self.ranks.on_rank_zero(self._asked_to_stop):
                            raise StopTraining(reason)
                        self._checkpoint()
                        raise Interrupted(self.directory, self.step, self.task.steps)
                vote.close()
                self._measure()
                if self.config.runtime.keep_checkpoint:
                    self._checkpoint()
                self.last = self.last or self.ranks.on_rank_zero(
                    lambda: last_recorded(self.directory, self.step)
                )
                if self.last is None:
                    self._validate()
                assert self.last is not None
                value = self.task.test_metric(self.last)
                result = self.ranks.on_rank_zero(lambda: self._result("finished", value))
        except _Diverged as reason:
            message = str(reason)
            result = self.ranks.on_rank_zero(lambda: self._result("diverged", math.nan, message))
        except StopTraining as reason:
            self._checkpoint()
            message = str(reason)
            result = self.ranks.on_rank_zero(lambda: self._result("stopped", math.nan, message))
        self.ranks.on_rank_zero(lambda: self._write_result(result))
        return result

    def _write_result(self, result: Result) -> None:
        """Write the result, after the metrics are on disk."""
        assert self.logs.metrics is not None
        self.logs.metrics.sync()
        write_result(self.directory, result, self.config.runtime.keep_checkpoint)

    def _measure(self) -> None:
        """Measure the gradient noise if it is due; the time this takes is not counted."""
        if self.logs.noise is not None:
            self.began += self.logs.noise.measure(self.step)

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

    def _wish(self) -> _Wish:
        """What to do after a step: stop by a signal or the file ``stop``, save by rank 0's clock."""
        asked = self.ranks.first and (self.directory / STOP).exists()
        wish = _Wish.STOP if self.interrupt.pending or asked else _Wish.GO_ON
        now = time.perf_counter()
        due = now - self.saved >= self.config.runtime.checkpoint_seconds
        if not due or not self.ranks.first or self.step == self.task.steps:
            return wish
        self.saved = now  # asked for once, though several ranks save a step later
        return wish | _Wish.SAVE

    def _asked_to_stop(self) -> str:
        """The reason in the file ``stop``, which is removed: a run that goes on is not to stop again."""
        file = self.directory / STOP
        reason = file.read_text(encoding="utf-8").strip() if file.exists() else ""
        file.unlink(missing_ok=True)
        return reason

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
        self.logs.write(row)
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
        save_checkpoint(
            self.directory / record.CHECKPOINT,
            self.task.model,
            self.scheduled.optimizer,
            self.logs.progress(self.step, self.seconds),
            self.config.to_dict(),
            self.ranks,
        )
        self.saved = time.perf_counter()

    def _result(self, status: Status, value: float, message: str = "") -> Result:
        """The result as of now."""
        return result_of(
            self.directory,
            self.config,
            self.task,
            self.step,
            self.last,
            status,
            value,
            message,
        )
