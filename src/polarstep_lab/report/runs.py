"""All runs below some folders as one frame: for each run a line with its result and its times."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from polarstep_lab.paper import ABLATED_METHOD, ABLATIONS, TABLE_2, Published
from polarstep_lab.records.archive import ARCHIVE, split_path
from polarstep_lab.records.record import UNREADABLE, RunRecord, RunSpec, find_runs
from polarstep_lab.wording import plural

__all__ = [
    "METRICS",
    "RUN_COLUMNS",
    "STATUSES",
    "TIMES",
    "Metric",
    "Runs",
    "at_a_time",
    "collect_runs",
    "data_of",
    "setting_of",
    "settings_in",
]

STATUSES = ("finished", "diverged", "failed", "stopped", "unfinished")


class Metric(NamedTuple):
    """A final metric: its key in records, its name in tables, its better direction, its decimals."""

    key: str
    name: str
    higher_is_better: bool
    decimals: int


METRICS = {
    metric.key: metric
    for metric in (
        Metric("test_accuracy", "Test accuracy", True, 4),
        Metric("test_perplexity", "Test perplexity", False, 2),
        Metric("val_perplexity", "Validation perplexity", False, 2),
    )
}
"""The metrics that a run may be judged by. Older nanoGPT records have a validation perplexity only."""

STEP_TIMES = ["optimizer_ms_per_step", "step_ms"]
TIMES = [*STEP_TIMES, "run_seconds"]
"""The columns of measured times: of the optimizer and of a whole step, and of the whole run."""

RUN_COLUMNS = [
    "run", "benchmark", "recipe", "method", "ablation_axis", "ablation_value", "seed", "status",
    "metric", "value", "steps", "optimizer_gflops_per_step", *TIMES, "device", "message", "command",
]  # fmt: skip
"""The columns of ``runs.csv``."""

_MORE_COLUMNS = ["record", "setting", "besides", "paper", "began", "ended"]
_FLOATS = ["value", "optimizer_gflops_per_step", *TIMES, "began", "ended"]
_DTYPES = {"seed": int, "steps": "Int64", **dict.fromkeys(_FLOATS, float)}


@dataclass(frozen=True)
class Runs:
    """The runs found, a line for each, and a notice for each run that could not be read.

    Beside :data:`RUN_COLUMNS` the frame has ``record``, the complete :class:`RunRecord`; ``setting``,
    equal for runs that differ in their seed alone; ``besides``, what an ablation set beside the value it
    varies; ``paper``, the published figure; ``began`` and ``ended``. Runs that chose the rate of a study
    are left out.
    """

    frame: pd.DataFrame
    notices: tuple[str, ...] = ()


def collect_runs(paths: Sequence[Path | str]) -> Runs:
    """Read every run at or below ``paths``, from directories and archives alike.

    A run or an archive that cannot be read becomes a notice, and does not keep the others from being
    reported. Names are relative to ``paths``, so that the same records give the same report on every
    machine.
    """
    lines: dict[Path, dict[str, Any]] = {}
    notices = []
    for root in map(Path, paths):

        def leave_out(path: Path, error: Exception, root: Path = root) -> None:
            inside = split_path(path)
            place = inside[0] if inside else path
            reason = str(error).replace(str(place), _name(place, root))
            notices.append(f"{_name(path, root)} is left out: {reason}")

        for directory in (found for found in find_runs([root], leave_out) if found not in lines):
            name = "/".join(part for part in _name(directory, root).split("/") if part != ARCHIVE)
            try:
                record = RunRecord.load(directory)
                if record.spec.study.get("rate") != "chooses":
                    lines[directory] = {"run": name, **_line(record)}
            except UNREADABLE as error:
                leave_out(directory, error)
    columns = [*RUN_COLUMNS, *_MORE_COLUMNS]
    frame = pd.DataFrame([*lines.values()], columns=columns, dtype=object).astype(_DTYPES)
    frame = frame.sort_values(["seed", "run"], ignore_index=True)
    return Runs(frame, tuple(notices))


def _name(path: Path, root: Path) -> str:
    """The name of a run or an archive in a report: its path from the folder ``root`` on."""
    top = root.parent if root.name == ARCHIVE else root
    return "/".join(part for part in (top.name, *path.relative_to(root).parts) if part)


def _line(run: RunRecord) -> dict[str, Any]:
    """The line of a run in the frame, without its name."""
    spec, ablation, result = run.spec, run.spec.ablation, run.result
    began = _began(run)
    of_run = ("benchmark", "recipe", "method", "seed", "command")
    of_result = ("metric", "value", "steps", "optimizer_gflops_per_step", *STEP_TIMES, "message")
    return {
        **{key: getattr(spec, key) for key in of_run},
        **({key: getattr(result, key) for key in of_result} if result else {}),
        "ablation_axis": ablation and ablation.axis,
        "ablation_value": ablation and ablation.value,
        "status": run.status,
        "run_seconds": run.seconds,
        "device": _device(run),
        "record": run,
        "setting": setting_of(run) + data_of(run.environment),
        "besides": _set_beside_axis(spec),
        "paper": _published(spec),
        "began": began,
        # The end is as early as the record's whole seconds allow, so that a run does not overlap with
        # the next one in turn.
        "ended": began - 1 + run.seconds if run.seconds > 1 else math.nan,
    }


# --- what was run ---------------------------------------------------------------------------------


def setting_of(run: RunRecord) -> str:
    """What determines a run apart from its seed, as a string to compare.

    The device and how often the run logged are left out; times are kept apart by device elsewhere.
    """
    return json.dumps(settings_in(run.spec.config), sort_keys=True, default=str)


def settings_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config that determine its result, by dotted path.

    >>> settings_in({"seed": 1, "data": {"batch": 8}, "runtime": {"device": "cpu", "compile": None}})
    {'data.batch': 8, 'runtime.compile': None}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        inner = settings_in(value) if isinstance(value, Mapping) else {}
        found |= {f"{key}.{name}": v for name, v in inner.items()} if inner else {key: value}
    kept = ("runtime.precision", "runtime.compile")
    return {
        k: v for k, v in found.items() if k in kept or not f"{k}.".startswith(("seed.", "runtime."))
    }


def data_of(environment: Mapping[str, Any]) -> str:
    """Digests of the text or the images that a run read, as far as its record has them."""
    return " ".join(str(environment.get(key, "")) for key in ("data_digest", "held_out_digest"))


def _set_beside_axis(run: RunSpec) -> str:
    """The overrides of an ablation besides its axis, as text; seed and runtime settings are left out."""
    if run.ablation is None:
        return ""
    shown = [
        f"{key.removeprefix('optimizer.polar.')}={value}"
        for key, value in sorted(run.overrides.items())
        if not f"{key}.".startswith(("runtime.", "seed."))
        and key.split(".")[-1] != run.ablation.axis
    ]
    return ", ".join(shown)


_HARMLESS = ("seed", "runtime.", "data.root", "evaluation.every")
"""Overrides that say where and how to run, not what: the setting is still the recipe's."""


def _published(run: RunSpec) -> Published | None:
    """The figure for a run in exactly the setting of Table 2 or of the authors' ablations.

    Shards may lie anywhere, but must be FineWeb's: on other text a perplexity is another quantity.
    """

    def harmless(key: str, value: object) -> bool:
        if key in ("data.train", "data.val"):
            given = value if isinstance(value, list | tuple) else [value]
            return all("fineweb" in str(pattern).lower() for pattern in given)
        return key.startswith(_HARMLESS)

    if run.recipe != run.benchmark or not all(harmless(*item) for item in run.overrides.items()):
        return None
    if run.ablation is None:
        return TABLE_2[run.benchmark].get(run.method)
    if (run.benchmark, run.method) != ("cifar10", ABLATED_METHOD):
        return None
    axis, value = run.ablation.axis, run.ablation.value
    return ABLATIONS.get(axis, {}).get(value) if isinstance(value, int | str) else None


# --- how it was timed -----------------------------------------------------------------------------


def _device(run: RunRecord) -> str:
    """The name of the device of a run; for a CPU also the number of threads."""
    environment = run.environment
    name = str(environment.get("device_name") or environment.get("device") or "unknown device")
    threads = environment.get("threads")
    on_cpu = str(environment.get("device", "")).startswith("cpu")
    return f"{name}, {plural(threads, 'thread')}" if on_cpu and threads else name


def _began(run: RunRecord) -> float:
    """The latest time at which a run can have begun: records round it down to whole seconds."""
    try:
        return datetime.fromisoformat(str(run.environment.get("started"))).timestamp() + 1
    except ValueError:
        return math.nan


def at_a_time(runs: pd.DataFrame) -> int:
    """The largest number of ``runs`` that were under way at the same time."""
    spans = runs[["began", "ended"]].dropna()
    if spans.empty:
        return 1
    changes = pd.concat([pd.Series(1, spans["began"]), pd.Series(-1, spans["ended"])])
    return max(1, int(changes.groupby(level=0).sum().cumsum().max()))
