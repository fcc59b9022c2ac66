"""The logs that a run writes, each continued where the checkpoint left it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.optim import Optimizer

from polarstep_lab.config import RunConfig
from polarstep_lab.records import record
from polarstep_lab.records.record import MetricRow
from polarstep_lab.storage import JsonLines
from polarstep_lab.training.checkpoint import RunProgress
from polarstep_lab.training.gamma_log import GammaLog
from polarstep_lab.training.noise_log import NoiseLog
from polarstep_lab.training.ranks import Ranks
from polarstep_lab.training.tasks import Task

__all__ = ["RunLogs"]


@dataclass(frozen=True)
class RunLogs:
    """The open logs of a run: its metrics and, where they are measured, γ with ν and gradient noise.

    Rank 0 alone writes metrics; on the other ranks ``metrics`` is ``None``.
    """

    metrics: JsonLines | None
    gamma: GammaLog | None
    noise: NoiseLog | None

    @classmethod
    def open(
        cls,
        directory: Path,
        progress: RunProgress,
        config: RunConfig,
        task: Task,
        optimizer: Optimizer,
        ranks: Ranks,
    ) -> RunLogs:
        """Open the logs in ``directory`` and cut off what was written after ``progress``."""
        metrics, gamma = directory / record.METRICS, directory / record.GAMMA
        every = config.runtime.monitor_every
        return cls(
            JsonLines(metrics, progress.metrics_bytes) if ranks.first else None,
            GammaLog.attach(gamma if ranks.first else None, progress.gamma_bytes, every, optimizer),
            NoiseLog.attach(directory / record.NOISE, progress.noise_bytes, config, task, ranks),
        )

    def write(self, row: MetricRow) -> None:
        """Add a line to the metrics."""
        if self.metrics is not None:
            self.metrics.write(row.to_dict())

    def progress(self, step: int, seconds: float) -> RunProgress:
        """What a checkpoint after ``step`` steps records, with the metrics safely on disk."""
        return RunProgress(
            step=step,
            seconds=seconds,
            metrics_bytes=self.metrics.sync() if self.metrics is not None else 0,
            gamma_bytes=self.gamma.length if self.gamma is not None else 0,
            noise_bytes=self.noise.length if self.noise is not None else 0,
        )

    def close(self) -> None:
        """Close all logs."""
        for log in (self.metrics, self.gamma, self.noise):
            if log is not None:
                log.close()
