"""How a run ended: its result, from what it recorded, and what stays in its directory."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from polarstep_lab.config import RunConfig
from polarstep_lab.optimizers.build import optimizer_gflops
from polarstep_lab.records import record
from polarstep_lab.records.record import Result, RunRecord, Status
from polarstep_lab.train.tasks import Task, Validation

__all__ = ["last_recorded", "result_of", "write_result"]


def result_of(
    directory: Path,
    config: RunConfig,
    task: Task,
    step: int,
    last: Validation | None,
    status: Status,
    value: float,
    message: str = "",
) -> Result:
    """The result after ``step`` steps; times are medians over the training rows in ``directory``.

    ``value`` is the figure that the run is judged by. ``last`` is its last validation.
    """
    rows = RunRecord.load(directory).rows("train")
    validation = None
    if last is not None:
        validation = last.perplexity if last.accuracy is None else last.accuracy
    device = next(task.model.parameters()).device
    return Result(
        metric=task.metric,
        value=value,
        status=status,
        steps=step,
        optimizer_gflops_per_step=optimizer_gflops(task.model, config, device),
        optimizer_ms_per_step=_median([row.optimizer_ms for row in rows]),
        step_ms=_median([row.step_ms for row in rows]),
        message=message,
        validation=validation,
    )


def last_recorded(directory: Path, step: int) -> Validation | None:
    """The validation after ``step`` of a run that was killed between its last step and its result.

    ``None`` where its row was damaged on disk.
    """
    rows = [row for row in RunRecord.load(directory).rows("val") if row.step == step]
    return Validation(rows[-1].loss, rows[-1].perplexity, rows[-1].accuracy) if rows else None


def write_result(directory: Path, result: Result, keep_checkpoint: bool) -> None:
    """Write the result, and remove the checkpoints that are not wanted any more."""
    result.save(directory)
    if not keep_checkpoint:
        (directory / record.CHECKPOINT).unlink(missing_ok=True)
    if not keep_checkpoint or result.status != "stopped":
        (directory / record.PREVIOUS_CHECKPOINT).unlink(missing_ok=True)


def _median(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan
