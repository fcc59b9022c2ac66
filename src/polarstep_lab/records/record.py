"""What a run leaves behind: a directory from which a report can be made without anything else.

::

    config.json        recipe, method, seed, overrides, the complete config, the command
    environment.json   versions, device, git commit, start time
    metrics.jsonl      one line per logged training step or validation, as they come
    gamma.jsonl        γ and ν of sampled steps, where the run was monitored
    noise.jsonl        the noise of the gradient at points of the run, where it was measured
    *.jsonl            whatever else was measured along the run
    result.json        written once, at the end: the metric, its status, cost per step
    checkpoint.pt      the latest state to resume from
    checkpoint.previous.pt   the state before, until the run has ended
    .polarstep-run.json      marks a run directory; the first file that a run writes

Numbers are kept in full precision, times as far as a clock can tell. A value that is not finite is
stored as ``null`` and read back as NaN. A run killed in the middle of a line leaves that line
incomplete; readers drop it.

``polarstep pack`` puts all but the checkpoints of many directories into one file
(:mod:`polarstep_lab.records.archive`). :func:`find_runs` and :meth:`RunRecord.load` make no
difference between a directory and a run in an archive.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from polarstep.checked_values import is_number
from polarstep_lab.config import completed
from polarstep_lab.records.archive import ARCHIVE, archived_runs, read_archived, split_path
from polarstep_lab.storage import StorageError, read_json, read_lines, write_json

__all__ = [
    "UNREADABLE",
    "Ablation",
    "MetricRow",
    "Result",
    "RunRecord",
    "RunSpec",
    "find_runs",
    "read_files",
]

MARK = ".polarstep-run.json"
CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
GAMMA = "gamma.jsonl"
NOISE = "noise.jsonl"
RESULT = "result.json"
CHECKPOINT = "checkpoint.pt"
PREVIOUS_CHECKPOINT = "checkpoint.previous.pt"
LOCK = ".lock"
STOP = "stop"
"""The file that asks a run to write its checkpoint and end; a text in it is the reason of its result."""

UNREADABLE = (StorageError, OSError, LookupError, TypeError, ValueError)
"""What is raised where a run or an archive is damaged; readers of many runs go on to the next."""

Status = Literal["finished", "diverged", "stopped", "failed"]
RowKind = Literal["train", "val"]
BenchmarkName = Literal["nanogpt", "cifar10"]
MetricName = Literal["val_perplexity", "test_perplexity", "test_accuracy"]


@dataclass(frozen=True)
class Ablation:
    """Which setting an ablation varies, and its value in this run."""

    axis: str
    value: int | float | str


@dataclass(frozen=True)
class RunSpec:
    """``config.json``: what was run, completely enough to run it again."""

    recipe: str
    benchmark: BenchmarkName
    method: str
    seed: int
    config: Mapping[str, Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    ablation: Ablation | None = None
    study: Mapping[str, Any] = field(default_factory=dict)
    """The study of the run: its ``name``, the ``variant``, what that is compared ``against``, what chose
    its ``rate``, and the text of the ``program`` that defines the study. Empty for a run of its own."""
    command: str = ""

    @classmethod
    def load(cls, directory: Path) -> RunSpec:
        """Read ``config.json`` of a run directory."""
        return cls.from_dict(read_json(directory / CONFIG), directory / CONFIG)

    @classmethod
    def from_dict(cls, raw: Any, path: Path) -> RunSpec:
        """A spec from the content of the ``config.json`` at ``path``."""
        _require_object(raw, path)
        try:
            ablation = raw.get("ablation")
            values = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
            values["config"] = completed(values.get("config"))
            _require_types(values)
            return cls(**values | {"ablation": Ablation(**ablation) if ablation else None})
        except (AttributeError, TypeError) as error:
            raise StorageError(
                f"{path} is not the config of a run: {error}; restore the file, or leave this run out"
            ) from error

    @property
    def label(self) -> str:
        """The run in a few words, for messages."""
        return f"{self.method}, seed {self.seed}"

    def save(self, directory: Path) -> None:
        """Write the mark of a run directory, then ``config.json``."""
        write_json(directory / MARK, {"format": "polarstep-run"})
        write_json(directory / CONFIG, asdict(self))


@dataclass(frozen=True)
class MetricRow:
    """One line of ``metrics.jsonl``.

    ``seconds`` counts time spent training since the run began, pauses between a stop and its
    resume left out. ``tokens`` or ``images`` counts what has been consumed up to this step.
    """

    step: int
    kind: RowKind
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
        """The row as a JSON object, without the fields that do not apply to it.

        Times are rounded to what a clock can tell: 0.1 ms of a run, a microsecond of a step.
        """
        row = {name: value for name, value in asdict(self).items() if value is not None}
        row |= {name: round(row[name], digits) for name, digits in _TIME_DIGITS.items()}
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
        _require_types(known)
        return cls(**known)


_TIME_DIGITS = {"seconds": 4, "step_ms": 3, "optimizer_ms": 3}
TIME_FIELDS = tuple(_TIME_DIGITS)
"""Fields of a row that measure time: all others are the same after a kill and a resume."""


@dataclass(frozen=True)
class Result:
    """``result.json``: how a run ended.

    ``value`` is the figure that the run is judged by, on the test data, and ``validation`` the last
    figure of the same kind on the validation data. In records of earlier versions ``"val_perplexity"``
    is the metric: there was no test text, and the value is the last validation's.
    """

    metric: MetricName
    value: float
    status: Status
    steps: int
    optimizer_gflops_per_step: float
    optimizer_ms_per_step: float
    step_ms: float
    message: str = ""
    validation: float | None = None

    @classmethod
    def load(cls, directory: Path) -> Result | None:
        """Read ``result.json``, or ``None`` where the run has not ended."""
        path = directory / RESULT
        return cls.from_dict(read_json(path), path) if path.exists() else None

    @classmethod
    def from_dict(cls, raw: Any, path: Path) -> Result:
        """A result from the content of the ``result.json`` at ``path``."""
        _require_object(raw, path)
        values = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        for name in ("value", "optimizer_gflops_per_step", "optimizer_ms_per_step", "step_ms"):
            if values.get(name) is None:
                values[name] = math.nan
        try:
            _require_types(values)
            return cls(**values)
        except TypeError as error:
            raise StorageError(
                f"{path} is not the result of a run ({error}): restore the file, or leave this run out"
            ) from error

    def save(self, directory: Path) -> None:
        """Write ``result.json``."""
        write_json(directory / RESULT, asdict(self))


@dataclass(frozen=True)
class RunRecord:
    """Everything a run directory, or an archive, says about a run."""

    directory: Path
    spec: RunSpec
    environment: Mapping[str, Any]
    metrics: tuple[MetricRow, ...]
    result: Result | None
    logs: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    """What was measured beside the metrics, by the name of its file: ``logs["gamma"]``."""

    @classmethod
    def load(cls, directory: Path | str) -> RunRecord:
        """Read a run directory or a run in an archive, finished or not."""
        directory = Path(directory)
        return cls.from_files(directory, read_files(directory))

    @classmethod
    def from_files(cls, directory: Path, files: Mapping[str, Any]) -> RunRecord:
        """The record of the run in ``directory``, whose files were read already."""
        if CONFIG not in files:  # a directory has one, an archive may have been edited
            raise StorageError(
                f"{directory} has no {CONFIG}: restore the archive, or pack it again"
            )
        ended = RESULT in files
        logs = {Path(name).stem: tuple(rows) for name, rows in files.items() if _is_log(name)}
        metrics = logs.pop(Path(METRICS).stem, ())
        found = cls(
            directory=directory,
            spec=RunSpec.from_dict(files[CONFIG], directory / CONFIG),
            environment=_environment(files.get(ENVIRONMENT, {}), directory / ENVIRONMENT),
            metrics=_metric_rows(metrics, directory / METRICS),
            result=Result.from_dict(files[RESULT], directory / RESULT) if ended else None,
            logs=logs,
        )
        found._require_whole_metrics()
        return found

    def _require_whole_metrics(self) -> None:
        """Raise if the run has finished, and its metrics end before its last step.

        Metrics are on disk before the result is written, so a kill does not lead to this.
        """
        last = self.metrics[-1].step if self.metrics else None
        if self.result is None or self.result.status != "finished" or last == self.result.steps:
            return
        where = "without a step" if last is None else f"at step {last}"
        raise StorageError(
            f"{self.directory / METRICS} ends {where}, but the run finished after step "
            f"{self.result.steps}: the file was cut or replaced; restore it, or leave this run out"
        )

    @property
    def seconds(self) -> float:
        """Wall-clock time of the whole run, up to its last row."""
        return self.metrics[-1].seconds if self.metrics else math.nan

    @property
    def status(self) -> Status | Literal["unfinished"]:
        """How the run ended, or ``"unfinished"``."""
        return self.result.status if self.result else "unfinished"

    def rows(self, kind: RowKind) -> list[MetricRow]:
        """The training rows or the validation rows, in order."""
        return [row for row in self.metrics if row.kind == kind]


def read_files(directory: Path) -> dict[str, Any]:
    """The JSON files of a run, by name: objects, and lists of rows for ``.jsonl`` files."""
    inside = split_path(directory)
    if inside is not None:
        return read_archived(*inside)
    if not (directory / CONFIG).exists():
        raise StorageError(
            f"{directory} is not a run directory: it has no {CONFIG}; give the folder of a run, as "
            "`polarstep list` shows them"
        )
    documents = (directory / name for name in (CONFIG, ENVIRONMENT, RESULT))
    files = {path.name: read_json(path) for path in documents if path.exists()}
    return files | {path.name: read_lines(path) for path in sorted(directory.glob("*.jsonl"))}


def find_runs(
    paths: Iterable[Path | str], notify: Callable[[Path, Exception], None] | None = None
) -> list[Path]:
    """All runs at or below the given paths, in directories and in archives, sorted, each once.

    A folder without the mark is not a run. A path that *is* such a folder is
    returned all the same, so that reading it says what is wrong. With ``notify``, an archive below the
    paths that cannot be read is handed to it, with the error, in place of raising the error.
    """
    found: set[Path] = set()
    seen: set[str] = set()
    for path in map(Path, paths):
        inside = split_path(path / CONFIG)
        if inside is not None:  # an archive, or a folder or a run within one
            found.update(run for run in archived_runs(inside[0]) if run.is_relative_to(path))
            continue
        if not path.exists():
            raise StorageError(f"{path} does not exist: give a run, an archive or a folder of runs")
        for folder, names in _folders(path, seen):
            if CONFIG in names and (folder == path or MARK in names):
                found.add(folder)
            if ARCHIVE in names:
                try:
                    found.update(archived_runs(folder / ARCHIVE))
                except UNREADABLE as error:
                    if notify is None:
                        raise
                    notify(folder / ARCHIVE, error)
    return sorted(found)


def _folders(path: Path, seen: set[str]) -> Iterator[tuple[Path, set[str]]]:
    """Each folder at or below ``path`` with the names of its files; symbolic links are followed.

    A folder that is in ``seen``, or that was reached before by another path, is passed over. Links
    come last, so that a folder with a path of its own has that path.
    """
    folders, links = [path], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        real = os.path.realpath(folder)
        if real in seen or not folder.is_dir():
            continue
        seen.add(real)
        names = set()
        with suppress(PermissionError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    (links if entry.is_symlink() else folders).append(folder / entry.name)
                else:
                    names.add(entry.name)
        yield folder, names


def _require_object(raw: Any, path: Path) -> dict[str, Any]:
    """``raw``, the content of the file at ``path``, or an error where it is no JSON object."""
    if not isinstance(raw, dict):
        raise StorageError(
            f"{path} holds {json.dumps(raw)[:40]}, expected a JSON object: the file was replaced or "
            "damaged; restore it, or leave this run out"
        )
    return raw


def _environment(raw: Any, path: Path) -> dict[str, Any]:
    """The content of the ``environment.json`` at ``path``, whose packages are an object."""
    environment = _require_object(raw, path)
    try:
        _require_types({"packages": environment.get("packages", {})})
    except TypeError as error:
        raise StorageError(
            f"{path} is not the environment of a run ({error}): restore the file, or leave this run out"
        ) from error
    return environment


_TEXTS = ("kind", "message", "recipe", "method", "command")
_OBJECTS = ("config", "overrides", "ablation", "packages", "study")
_ONE_OF = {
    "benchmark": get_args(BenchmarkName),
    "metric": get_args(MetricName),
    "status": get_args(Status),
}
_MAY_BE_MISSING = ("tokens", "images", "validation", "ablation")


def _require_types(values: Mapping[str, Any]) -> None:
    """Raise TypeError if a value of a record, by its name, is none that its field can have."""
    for name, value in values.items():
        if value is None and name in _MAY_BE_MISSING:
            continue
        if name in _ONE_OF:
            fits, words = value in _ONE_OF[name], f"one of {', '.join(_ONE_OF[name])}"
        elif name in _TEXTS:
            fits, words = isinstance(value, str), "text"
        elif name in _OBJECTS:
            fits, words = isinstance(value, Mapping), "an object"
        elif name == "seed":
            fits, words = type(value) is int, "an integer"
        else:
            fits, words = is_number(value), "a number"
        if not fits:
            raise TypeError(f"{name} is {json.dumps(value)[:40]}, expected {words}")


def _metric_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> tuple[MetricRow, ...]:
    """The rows of the ``metrics.jsonl`` at ``path``."""
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(MetricRow.from_dict(row))
        except TypeError as error:
            raise StorageError(
                f"{path}, line {number}, is not a row of metrics ({error}): restore the file, or "
                "leave this run out"
            ) from error
    return tuple(found)


def _is_log(name: str) -> bool:
    return name.endswith(".jsonl")
