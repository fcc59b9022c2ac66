"""What a run leaves behind: a directory from which a report can be made without anything else.

::

    config.json        recipe, method, seed, overrides, the complete config, the command
    environment.json   versions, device, git commit, start time
    metrics.jsonl      one line per logged training step or validation, as they come
    gamma.jsonl        γ and ν of sampled steps, where the run was monitored
    result.json        written once, at the end: the metric, its status, cost per step
    checkpoint.pt      the latest state to resume from

Numbers are kept in full precision. A value that is not finite is stored as ``null`` and read back
as NaN. A run killed in the middle of a line leaves that line incomplete; readers drop it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from polarstep.storage import StorageError, read_json, write_json

__all__ = ["Ablation", "MetricRow", "Result", "RunIdentity", "RunRecord", "find_runs"]

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
GAMMA = "gamma.jsonl"
RESULT = "result.json"
CHECKPOINT = "checkpoint.pt"

Status = Literal["finished", "diverged", "stopped", "failed"]
Kind = Literal["train", "val"]


@dataclass(frozen=True)
class Ablation:
    """Which setting an ablation varies, and its value in this run."""

    axis: str
    value: int | float | str


@dataclass(frozen=True)
class RunIdentity:
    """``config.json``: what was run, completely enough to run it again."""

    recipe: str
    benchmark: Literal["nanogpt", "cifar10"]
    method: str
    seed: int
    config: Mapping[str, Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    group: str = "run"
    ablation: Ablation | None = None
    command: str = ""

    @classmethod
    def load(cls, directory: Path) -> RunIdentity:
        """Read ``config.json`` of a run directory."""
        path = directory / CONFIG
        raw = read_json(path)
        try:
            ablation = raw.get("ablation")
            values = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
            return cls(**values | {"ablation": Ablation(**ablation) if ablation else None})
        except (AttributeError, TypeError) as error:
            raise StorageError(f"{path} is not the config of a run: {error}") from error

    def save(self, directory: Path) -> None:
        """Write ``config.json``."""
        write_json(directory / CONFIG, asdict(self))


@dataclass(frozen=True)
class MetricRow:
    """One line of ``metrics.jsonl``.

    ``seconds`` counts time spent training since the run began, pauses between a stop and its
    resume left out. ``tokens`` or ``images`` counts what has been consumed up to this step.
    """

    step: int
    kind: Kind
    loss: float
    lr: float
    seconds: float
    step_ms: float = math.nan
    optimizer_ms: float = math.nan
    tokens: int | None = None
    images: int | None = None
    perplexity: float | None = None
    accuracy: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row as a JSON object, without the fields that do not apply to it."""
        row = {name: value for name, value in asdict(self).items() if value is not None}
        if self.kind == "val":  # a validation takes no step
            del row["step_ms"], row["optimizer_ms"]
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> MetricRow:
        """A row from its JSON object; keys this version does not know are left out."""
        known = {f.name: row[f.name] for f in fields(cls) if f.name in row}
        # Rows written before a divergence carry ``null`` for what was not finite.
        for name in ("loss", "lr", "seconds", "step_ms", "optimizer_ms", "perplexity", "accuracy"):
            if name in known and known[name] is None:
                known[name] = math.nan
        return cls(**known)


TIME_FIELDS = ("seconds", "step_ms", "optimizer_ms")
"""Fields of a row that measure time: all others are the same after a kill and a resume."""


@dataclass(frozen=True)
class Result:
    """``result.json``: how a run ended."""

    metric: Literal["val_perplexity", "test_accuracy"]
    value: float
    status: Status
    steps: int
    optimizer_gflops_per_step: float
    optimizer_ms_per_step: float
    step_ms: float
    message: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Result | None:
        """Read ``result.json``, or ``None`` where the run has not ended."""
        path = directory / RESULT
        if not path.exists():
            return None
        raw = read_json(path)
        values = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        for name in ("value", "optimizer_gflops_per_step", "optimizer_ms_per_step", "step_ms"):
            if values.get(name) is None:
                values[name] = math.nan
        try:
            return cls(**values)
        except TypeError as error:
            raise StorageError(f"{path} is not the result of a run: {error}") from error

    def save(self, directory: Path) -> None:
        """Write ``result.json``."""
        write_json(directory / RESULT, asdict(self))


@dataclass(frozen=True)
class RunRecord:
    """Everything a run directory says about its run."""

    directory: Path
    identity: RunIdentity
    environment: Mapping[str, Any]
    metrics: tuple[MetricRow, ...]
    result: Result | None
    gamma: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def load(cls, directory: Path | str) -> RunRecord:
        """Read a run directory, finished or not."""
        directory = Path(directory)
        if not (directory / CONFIG).exists():
            raise StorageError(f"{directory} is not a run directory: it has no {CONFIG}")
        environment = directory / ENVIRONMENT
        return cls(
            directory=directory,
            identity=RunIdentity.load(directory),
            environment=read_json(environment) if environment.exists() else {},
            metrics=tuple(MetricRow.from_dict(row) for row in read_lines(directory / METRICS)),
            result=Result.load(directory),
            gamma=tuple(read_lines(directory / GAMMA)),
        )

    @property
    def status(self) -> Status | Literal["unfinished"]:
        """How the run ended, or ``"unfinished"``."""
        return self.result.status if self.result else "unfinished"

    def rows(self, kind: Kind) -> list[MetricRow]:
        """The training rows or the validation rows, in order."""
        return [row for row in self.metrics if row.kind == kind]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; none where there is no file, without an incomplete last line."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    complete = lines[:-1]  # what follows the last newline is empty, or a line cut short by a kill
    rows = []
    for number, line in enumerate(complete, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise StorageError(f"{path}, line {number}, is not valid JSON: {error}") from error
    return rows


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """All run directories at or below the given paths, sorted, each once."""
    found: set[Path] = set()
    for path in map(Path, paths):
        if not path.exists():
            raise StorageError(f"{path} does not exist")
        found.update(config.parent for config in path.rglob(CONFIG) if (config.parent).is_dir())
    return sorted(found)
