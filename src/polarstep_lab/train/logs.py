"""The logs that a run writes, each continued where the checkpoint left it.

A log that was damaged on disk loses the lines that cannot be read and keeps the others: a run does not
give up its weights for a line of a log. The file as it was stays, as ``metrics.jsonl.damaged``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch.optim import Optimizer

import polarstep as ps
from polarstep.certificate import Monitor
from polarstep_lab.config import RunConfig
from polarstep_lab.records import record
from polarstep_lab.records.record import MetricRow
from polarstep_lab.storage import JsonLines, read_lines, write_atomically
from polarstep_lab.train.checkpoint import RunProgress
from polarstep_lab.train.noise_log import NoiseLog
from polarstep_lab.train.ranks import Ranks
from polarstep_lab.train.tasks import Task

__all__ = ["RunLogs"]


class GammaLog:
    """``gamma.jsonl``: γ and ν of sampled steps, written by a :class:`polarstep.certificate.Monitor`.

    Tail indices are left out: each compares two consecutive steps, and a run may be interrupted
    between them.
    """

    def __init__(self, path: Path | None, length: int, every: int, optimizer: ps.Muon) -> None:
        """Watch ``optimizer`` and continue the log after its first ``length`` bytes.

        Without a ``path`` the steps are measured and nothing is written: all ranks must watch, as
        the optimizer of a rank that is watched may take another path through its step.
        """
        if path is not None:
            JsonLines(path, length).close()  # drop rows written after the checkpoint
        self._path = path
        muon = {
            name
            for group in optimizer.param_groups
            if group["algorithm"] == "muon"
            for name in group["param_names"]
        }
        self._monitor = Monitor(optimizer, every, jsonl=path, select=muon.__contains__, tail=False)

    @classmethod
    def attach(
        cls, path: Path | None, length: int, every: int | None, optimizer: Optimizer
    ) -> GammaLog | None:
        """A log if ``every`` is given and the optimizer is Muon, else None."""
        if every is None or not isinstance(optimizer, ps.Muon):
            return None
        return cls(path, length, every, optimizer)

    @property
    def length(self) -> int:
        """The length of the log in bytes; its lines are flushed as they are written."""
        return 0 if self._path is None else self._path.stat().st_size

    def close(self) -> None:
        """Detach the monitor and close the log."""
        self._monitor.close()


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
        notify: Callable[[str], object],
    ) -> RunLogs:
        """Open the logs in ``directory`` and cut off what was written after ``progress``.

        ``notify`` is called with a message for each log that was damaged.
        """
        progress = ranks.on_rank_zero(lambda: _mend_logs(directory, progress, notify))
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


def _mend_logs(
    directory: Path, progress: RunProgress, notify: Callable[[str], object]
) -> RunProgress:
    """Mend the logs of the run in ``directory``; return ``progress`` with the lengths they have now.

    All of them are read here, before training, since the result cannot be made from a damaged one.
    """
    lengths = {
        record.METRICS: progress.metrics_bytes,
        record.GAMMA: progress.gamma_bytes,
        record.NOISE: progress.noise_bytes,
    }
    for name, length in lengths.items():
        lengths[name] = _mend(directory / name, length, progress.step, notify)
    for path in directory.glob("*.jsonl"):
        if path.name not in lengths:
            read_lines(path)
    return replace(
        progress,
        metrics_bytes=lengths[record.METRICS],
        gamma_bytes=lengths[record.GAMMA],
        noise_bytes=lengths[record.NOISE],
    )


def _mend(path: Path, length: int, step: int, notify: Callable[[str], object]) -> int:
    """Leave the rows up to ``step`` in the log at ``path``; return how many bytes they have.

    ``length`` is the length of the log at the checkpoint, which was taken after ``step`` steps. A log
    whose first ``length`` bytes are such rows is left as it is.
    """
    raw = path.read_bytes() if path.exists() else b""
    faults, rows = [], b""
    for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
        try:
            if _step_of(line, path.name) <= step:
                rows += line + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            faults.append(f"line {number}: {error}")
    if rows[:length] == raw[:length] and len(rows) >= length:
        return length
    told = "; ".join(faults) or "lines are missing"
    before = path.with_name(f"{path.name}.damaged")
    if raw and not before.exists():
        write_atomically(before, lambda file: file.write(raw))
    write_atomically(path, lambda file: file.write(rows))
    notify(
        f"{path} is damaged ({told}): the run goes on with its other lines, and {before.name} keeps "
        "the file as it was"
    )
    return len(rows)


def _step_of(line: bytes, name: str) -> int:
    """The step of a row of the log ``name``; an error where the line is no such row."""
    row = json.loads(line)
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise TypeError(f"{line[:40]!r} is not a row with a step")
    if name == record.METRICS:
        MetricRow.from_dict(row)
    return row["step"]
