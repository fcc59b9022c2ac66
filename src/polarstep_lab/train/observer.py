"""What may watch a run while it is made, and how it ends the run early."""

from __future__ import annotations

from typing import Protocol

from polarstep_lab.config import RunConfig
from polarstep_lab.records.record import MetricRow, Result

__all__ = ["Observer", "StopTraining"]


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
