"""From run directories to sections: which runs belong together.

A section is a recipe with its rows, the ablations apart. A run that cannot be read, or that was run
twice, becomes a notice: nothing found is dropped in silence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from polarstep.storage import StorageError
from polarstep_lab.ablations import AXES
from polarstep_lab.methods import all_methods
from polarstep_lab.records.archive import ARCHIVE
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.report.published import in_table_2, published
from polarstep_lab.report.rows import AblationSet, Row, Section
from polarstep_lab.report.timing import device_of, ran_alone, span_of

__all__ = ["RUN_COLUMNS", "Runs", "collect", "sections_of", "setting_of"]

RUN_COLUMNS = [
    "run", "benchmark", "recipe", "method", "ablation_axis", "ablation_value", "seed", "status",
    "metric", "value", "steps", "optimizer_gflops_per_step", "optimizer_ms_per_step", "step_ms",
    "run_seconds", "device", "message", "command",
]  # fmt: skip
"""The columns of ``runs.csv``."""

_ABLATION = ["ablation_axis", "ablation_value"]
_FLOATS = ("value", *RUN_COLUMNS[11:15], "began", "ended")
_DTYPES = {"seed": int, "steps": "Int64", **dict.fromkeys(_FLOATS, float)}


@dataclass(frozen=True)
class Runs:
    """The runs found, a line for each, and what kept others from being used.

    Beside :data:`RUN_COLUMNS` the frame has ``record``, the complete :class:`RunRecord`; ``setting``,
    which is equal for runs that differ in their seed alone; ``besides``, what was set for an ablation
    beside the value it varies; ``by_validation``, whether the value is a validation's; ``paper``, the
    published figure; ``began`` and ``ended``; and ``alone``, whether no other run shared the device.
    """

    frame: pd.DataFrame
    notices: tuple[str, ...] = ()


def collect(paths: Sequence[Path | str]) -> Runs:
    """Read every run at or below ``paths``, from directories and archives alike.

    A directory that cannot be read becomes a notice: the other runs still deserve their report.
    Names are relative to the path that was asked for, so that a report moves between machines.
    """
    lines: dict[Path, dict[str, Any]] = {}
    notices = []
    for root in map(Path, paths):
        for directory in find_runs([root]):
            if directory in lines:
                continue
            top = root.parent if root.name == ARCHIVE else root
            parts = (top.name, *directory.relative_to(root).parts)
            name = "/".join(part for part in parts if part and part != ARCHIVE)
            try:
                lines[directory] = _line(RunRecord.load(directory), name)
            except (StorageError, TypeError, KeyError) as error:
                reason = str(error).replace(str(directory), name)
                notices.append(f"{name} is left out: {reason}")
    columns = [*RUN_COLUMNS, "record", "setting", "besides", "paper", "began", "ended"]
    frame = pd.DataFrame([*lines.values()], columns=columns, dtype=object).astype(_DTYPES)
    frame["by_validation"] = _by_validation(frame)
    frame = frame.sort_values(["seed", "run"], ignore_index=True)
    return Runs(frame.assign(alone=ran_alone(frame)), tuple(notices))


def _by_validation(frame: pd.DataFrame) -> pd.Series:
    """Whether the value of each run is a validation's, as in records from before there was a test.

    A run without a result counts with the other runs of its recipe, if they are all of one kind.
    """
    told = (frame["metric"] == "val_perplexity").where(frame["metric"].notna())
    shared = told.groupby([frame["benchmark"], frame["recipe"]]).transform("min")
    return told.fillna(shared).fillna(False).astype(bool)


def _line(run: RunRecord, name: str) -> dict[str, Any]:
    """The line of a run in the frame."""
    identity, ablation, result = run.identity, run.identity.ablation, run.result
    began, ended = span_of(run)
    told = {key: getattr(result, key) for key in RUN_COLUMNS if hasattr(result, key)}
    own = ("benchmark", "recipe", "method", "seed", "command")
    return {
        **told,
        "paper": published(identity),
        **{key: getattr(identity, key) for key in own},
        "run": name,
        "ablation_axis": ablation and ablation.axis,
        "ablation_value": ablation and ablation.value,
        "status": run.status,
        "run_seconds": run.seconds,
        "device": device_of(run),
        "record": run,
        "setting": setting_of(run),
        "besides": _set_besides(run),
        "began": began,
        "ended": ended,
    }


def setting_of(run: RunRecord) -> str:
    """What determines a run apart from its seed, as a string to compare.

    On which device and how often it logged is not part of it; times are kept apart by device.
    """
    config = {key: value for key, value in run.identity.config.items() if key != "seed"}
    runtime = config.get("runtime")
    if isinstance(runtime, Mapping):
        config["runtime"] = {key: runtime.get(key) for key in ("precision", "compile")}
    return json.dumps(config, sort_keys=True, default=str)


def sections_of(runs: Runs) -> tuple[tuple[Section, ...], tuple[str, ...]]:
    """Group the runs into sections, and say which runs had to be left out on the way."""
    frame, notices = _one_per_seed(runs.frame)
    sections = []
    kinds = frame.groupby(["benchmark", "recipe"])["by_validation"].nunique()
    for key, members in frame.groupby(["benchmark", "recipe", "by_validation"]):
        benchmark, recipe, by_validation = key
        varied = members["ablation_axis"].notna()
        rows = _rows(members[~varied])
        ablations = tuple(_with_bases(rows, _ablations(members[varied])))
        note = "validation only" if by_validation and kinds[benchmark, recipe] > 1 else ""
        sections.append(Section(recipe, benchmark, rows, ablations, bool(by_validation), note))
    # The paper's benchmarks and the language model first; what has nothing finished last.
    sections.sort(
        key=lambda section: (
            all(row.finished.empty for row in section.all_rows),
            in_table_2(section.recipe, section.benchmark) is None,
            section.benchmark != "nanogpt",
            section.recipe,
            section.by_validation,
        )
    )
    return tuple(sections), notices


def _one_per_seed(frame: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """One run for each config and seed, finished runs first: a second would shrink the spread."""
    same = ["benchmark", "recipe", "method", *_ABLATION, "besides", "setting", "seed"]
    same.append("by_validation")
    frame = frame.assign(lost=frame["status"] != "finished")
    frame = frame.sort_values(["seed", "lost"], kind="stable")
    frame["kept"] = frame.groupby(same, dropna=False)["run"].transform("first")
    twice = frame.duplicated(same)
    notices = tuple(
        f"{run.method}: seed {run.seed} was run twice with the same config; {run.run} is left out for "
        f"{run.kept}"
        for run in frame[twice].itertuples()
    )
    return frame[~twice], notices


def _rows(members: pd.DataFrame) -> tuple[Row, ...]:
    """The rows of a comparison: those of Table 2 in its order, then ours and others."""
    settings = members.groupby("method")["setting"].nunique()
    rows = []
    for (method, _), group in members.groupby(["method", "setting"]):
        overrides = _overrides(group["record"].iloc[0].identity.overrides)
        row = Row(method, group)
        known = [m.named(row.polar.get("sketch")) for m in all_methods() if m.name == method]
        name = known[0] if known else method
        # The same method twice: the label says by which overrides it differs.
        rows.append(replace(row, label=f"{name}, {overrides}" if settings[method] > 1 else name))
    rank = [method.name for method in all_methods()]
    return tuple(sorted(rows, key=lambda row: (_place(row.method, rank), row.label)))


def _ablations(members: pd.DataFrame) -> list[AblationSet]:
    """The ablations in the order of ``polarstep list``, each still without a base."""
    settings = members.groupby(["ablation_axis", "method"])["besides"].nunique()
    ablations = []
    for (axis, method, besides), group in members.groupby(["ablation_axis", "method", "besides"]):
        known = [str(value) for a in AXES if a.name == axis for value in (*a.cifar10, *a.nanogpt)]
        rows = []
        for value in sorted(group["ablation_value"].unique(), key=lambda v: _place(v, known)):
            configs = group[group["ablation_value"] == value].groupby("setting")
            labels = [f"{axis} = {value}"] + [
                f"{axis} = {value} ({i})" for i in range(2, len(configs) + 1)
            ]
            rows += [Row(label, same) for label, (_, same) in zip(labels, configs, strict=True)]
        setting = besides if settings[axis, method] > 1 else ""
        ablations.append(AblationSet(axis, method, tuple(rows), setting=setting))
    axes = [axis.name for axis in AXES]
    return sorted(ablations, key=lambda ablation: (_place(ablation.axis, axes), ablation.of))


def _with_bases(rows: Sequence[Row], ablations: Sequence[AblationSet]) -> list[AblationSet]:
    """Find the base of each ablation: the config in which the axes and the comparison meet.

    With the recipe's own value, every axis runs the same config, so that no list of defaults is needed.
    An axis that was varied with another setting meets the others elsewhere.
    """
    based = []
    for ablation in ablations:
        plain = [row for row in rows if row.method == ablation.method]
        others = [o for o in ablations if o is not ablation and o.method == ablation.method]
        others = [o for o in others if ablation.setting or not o.setting]
        candidates = [*plain, *(row for other in others for row in other.rows)]
        elsewhere = Counter(row.setting for row in candidates)
        own = [row for row in ablation.rows if row.setting in elsewhere]
        base = own[0] if len(own) == 1 else None
        if not own and plain:
            most = max(plain, key=lambda row: elsewhere[row.setting])
            base = most if len(plain) == 1 or elsewhere[most.setting] > 1 else None
        based.append(replace(ablation, base=base))
    return based


def _place(item: Any, known: Sequence[str]) -> tuple[bool, float, str]:
    """A key to sort by: numbers by size, then names as they are ``known``, then others."""
    if isinstance(item, int | float):
        return False, item, ""
    return True, known.index(item) if item in known else len(known), item


def _set_besides(run: RunRecord) -> str:
    """What was set for an ablation beside the value that it varies, but for how it was run."""
    if run.identity.ablation is None:
        return ""
    axis = run.identity.ablation.axis
    shown = {
        key: value
        for key, value in run.identity.overrides.items()
        if not key.startswith("runtime.") and key.split(".")[-1] != axis
    }
    return _overrides(shown).replace("optimizer.polar.", "") if shown else ""


def _overrides(overrides: Mapping[str, Any]) -> str:
    shown = [f"{key}={value}" for key, value in sorted(overrides.items()) if key != "seed"]
    return ", ".join(shown) or "recipe's own settings"
