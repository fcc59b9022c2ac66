"""What may watch a run in its own process: a progress bar, TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from polarstep_lab.config import RunConfig
from polarstep_lab.records.record import MetricRow, Result

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Observer", "StopTraining", "TensorBoard"]


class Observer(Protocol):
    """Something that watches a run."""

    def start(self, config: RunConfig, steps: int, step: int) -> None:
        """The run begins, or goes on after ``step`` steps."""

    def row(self, row: MetricRow) -> None:
        """A line of metrics was written. Raising :class:`StopTraining` ends the run."""

    def advance(self, step: int) -> None:
        """``step`` steps are done."""

    def end(self, result: Result | None) -> None:
        """The run has ended; ``None`` where it was interrupted or failed."""


class StopTraining(Exception):
    """Raised to end a run early, with the status ``"stopped"``: it was asked to stop, and why."""


class TensorBoard:
    """An observer that writes event files into a folder, in addition to the record of the run."""

    def __init__(self, folder: Path) -> None:
        """Write into ``folder``."""
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def start(self, config: RunConfig, steps: int, step: int) -> None:
        """Open the event file; when a run is resumed, discard steps after its checkpoint."""
        from torch.utils.tensorboard import SummaryWriter

        purge = step + 1 if step else None
        self._writer = SummaryWriter(str(self._folder), purge_step=purge)

    def row(self, row: MetricRow) -> None:
        """Write the row's figures."""
        assert self._writer is not None
        for name in ("loss", "perplexity", "accuracy", "lr", "step_ms", "optimizer_ms"):
            value = getattr(row, name)
            if value is not None:
                self._writer.add_scalar(f"{row.kind}/{name}", value, row.step)

    def advance(self, step: int) -> None:
        """Nothing to do."""

    def end(self, result: Result | None) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
