"""From run directories to sections: which runs belong together.

A section is a recipe with its rows, the ablations apart. Nothing found is dropped in silence: what
cannot be read, or was run twice, becomes a notice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polarstep.storage import StorageError
from polarstep_lab.ablations import AXES
from polarstep_lab.records.archive import ARCHIVE
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.report.published import (
    METHODS,
    Published,
    Setting,
    keeps_setting,
    published,
    published_ablation,
    scaled,
)
from polarstep_lab.report.rows import AblationSet, Row, Section, are_numbers
from polarstep_lab.report.timing import ran_alone

__all__ = ["Runs", "collect", "sections_of"]


@dataclass(frozen=True)
class Runs:
    """The records found, and what kept others from being used."""

    records: tuple[RunRecord, ...]
    names: Mapping[Path, str]
    notices: tuple[str, ...] = field(default=())


def collect(paths: Sequence[Path | str]) -> Runs:
    """Read every run at or below ``paths``, from directories and archives alike.

    A directory that cannot be read becomes a notice: the other runs still deserve their report.
    Names are relative to the path that was asked for, so that a report moves between machines.
    """
    records, names, notices = [], {}, []
    for root in map(Path, paths):
        for directory in find_runs([root]):
            if directory in names:
                continue
            top = root.parent if root.name == ARCHIVE else root
            parts = (top.name, *directory.relative_to(root).parts)
            name = "/".join(part for part in parts if part and part != ARCHIVE)
            try:
                record = RunRecord.load(directory)
            except (StorageError, TypeError, KeyError) as error:
                reason = str(error).replace(str(directory), name)
                notices.append(f"{name} is left out: {reason}")
                continue
            records.append(record)
            names[directory] = name
    order = sorted(records, key=lambda run: (run.identity.seed, names[run.directory]))
    return Runs(tuple(order), names, tuple(notices))


def sections_of(runs: Runs) -> tuple[tuple[Section, ...], tuple[str, ...]]:
    """Group the runs into sections, and say what had to be left out on the way."""
    notices: list[str] = []
    alone = ran_alone(runs.records)
    sections = []
    for (benchmark, recipe), members in _grouped(
        runs.records, lambda run: (run.identity.benchmark, run.identity.recipe)
    ):
        setting = published(recipe, benchmark)
        plain = [run for run in members if run.identity.ablation is None]
        rows = _rows(plain, runs, notices, setting, alone)
        varied = _grouped(
            [run for run in members if run.identity.ablation is not None],
            lambda run: (run.identity.ablation.axis, run.identity.method, _set_besides(run)),
        )
        times = Counter((axis, method) for (axis, method, _), _ in varied)
        ablations = [
            replace(
                _ablation(axis, method, group, runs, notices, alone),
                setting=setting if times[axis, method] > 1 else "",
            )
            for (axis, method, setting), group in varied
        ]
        ablations = sorted(_with_bases(rows, ablations), key=_place_of_axis)
        sections.append(Section(recipe, benchmark, rows, tuple(ablations), setting))
    # The paper's benchmarks and the language model first; what has nothing finished last.
    sections.sort(
        key=lambda section: (
            not any(row.finished for row in section.all_rows),
            scaled(section.recipe, section.benchmark) is None,
            section.benchmark != "nanogpt",
            section.recipe,
        )
    )
    return tuple(sections), tuple(notices)


def setting_of(run: RunRecord) -> str:
    """What determines a run apart from its seed, as a string to compare.

    On which device and how often it logged is not part of it; times are kept apart by device.
    """
    config = {key: value for key, value in run.identity.config.items() if key != "seed"}
    runtime = config.get("runtime")
    if isinstance(runtime, Mapping):
        config["runtime"] = {key: runtime.get(key) for key in ("precision", "compile")}
    return json.dumps(config, sort_keys=True, default=str)


def _rows(
    members: Sequence[RunRecord],
    runs: Runs,
    notices: list[str],
    setting: Setting | None,
    alone: Set[Path],
) -> tuple[Row, ...]:
    groups = _grouped(members, lambda run: (run.identity.method, setting_of(run)))
    times = Counter(method for (method, _), _ in groups)
    rows = []
    for (method, _), group in groups:
        label = method
        if times[method] > 1:  # the same method twice: say by which overrides it differs
            label = f"{method}, {_overrides(group[0].identity.overrides)}"
        same = all(keeps_setting(run.identity.overrides) for run in group)
        paper = setting.rows.get(method) if setting and same else None
        rows.append(_row(label, method, _one_per_seed(group, label, runs, notices), paper, alone))
    rank = {method: index for index, method in enumerate(METHODS)}
    rows.sort(key=lambda row: (rank.get(row.method, len(rank)), row.label))
    return tuple(rows)


def _row(
    label: str,
    method: str,
    seeds: tuple[RunRecord, ...],
    paper: Published | None,
    alone: Set[Path],
) -> Row:
    timed = tuple(run for run in seeds if run.status == "finished" and run.directory in alone)
    return Row(label, method, seeds, paper, timed)


def _ablation(
    axis: str,
    method: str,
    members: Sequence[RunRecord],
    runs: Runs,
    notices: list[str],
    alone: Set[Path],
) -> AblationSet:
    values = {run.identity.ablation.value for run in members if run.identity.ablation}
    known = [str(value) for a in AXES if a.name == axis for value in (*a.cifar10, *a.nanogpt)]
    ordered = (
        sorted(values)
        if are_numbers(values)
        else sorted(values, key=lambda value: (_place(str(value), known), str(value)))
    )
    rows, kept = [], []
    for value in ordered:
        group = [r for r in members if r.identity.ablation and r.identity.ablation.value == value]
        for number, (_, same) in enumerate(_grouped(group, setting_of)):
            label = f"{axis} = {value}" + (f" ({number + 1})" if number else "")
            paper = published_ablation(group[0].identity.recipe, method, axis, value)
            if not keeps_setting(group[0].identity.overrides):
                paper = None
            seeds = _one_per_seed(same, label, runs, notices)
            rows.append(_row(label, method, seeds, paper, alone))
            kept.append(value)
    return AblationSet(axis, method, tuple(rows), tuple(kept))


def _place_of_axis(ablation: AblationSet) -> tuple[int, str, str]:
    """The order in which ``polarstep list`` has the axes."""
    place = _place(ablation.axis, [axis.name for axis in AXES])
    return place, ablation.axis, ablation.of


def _place(item: str, items: Sequence[str]) -> int:
    return items.index(item) if item in items else len(items)


def _with_bases(rows: Sequence[Row], ablations: Sequence[AblationSet]) -> list[AblationSet]:
    """Find the base of each ablation: the config in which the axes and the comparison meet.

    With the recipe's own value on it, every axis runs the same config. No list of defaults is
    needed, and none can be wrong. An axis that was varied with another setting meets them elsewhere.
    """
    based = []
    for ablation in ablations:
        plain = [row for row in rows if row.method == ablation.method]
        others = [o for o in ablations if o is not ablation and o.method == ablation.method]
        others = [o for o in others if ablation.setting or not o.setting]
        elsewhere = Counter(
            setting_of(row.runs[0]) for group in (plain, *(o.rows for o in others)) for row in group
        )
        own = [row for row in ablation.rows if setting_of(row.runs[0]) in elsewhere]
        base = own[0] if len(own) == 1 else None
        if base is None and not own and plain:
            most = max(plain, key=lambda row: elsewhere[setting_of(row.runs[0])])
            only = len(plain) == 1 or elsewhere[setting_of(most.runs[0])] > 1
            base = most if only else None
        based.append(replace(ablation, base=base))
    return based


def _one_per_seed(
    group: Sequence[RunRecord], label: str, runs: Runs, notices: list[str]
) -> tuple[RunRecord, ...]:
    """One run for each seed, finished ones first: counting a seed twice would shrink the spread."""
    kept: dict[int, RunRecord] = {}
    for run in sorted(group, key=lambda run: (run.identity.seed, run.status != "finished")):
        other = kept.setdefault(run.identity.seed, run)
        if other is not run:
            notices.append(
                f"{label}: seed {run.identity.seed} was run twice with the same config; "
                f"{runs.names[run.directory]} is left out for {runs.names[other.directory]}"
            )
    return tuple(kept.values())


def _set_besides(run: RunRecord) -> str:
    """What was set for an ablation beside the value that it varies, but for how it was run."""
    assert run.identity.ablation is not None
    shown = {
        key: value
        for key, value in run.identity.overrides.items()
        if not key.startswith("runtime.") and key.split(".")[-1] != run.identity.ablation.axis
    }
    return _overrides(shown).replace("optimizer.polar.", "") if shown else ""


def _overrides(overrides: Mapping[str, Any]) -> str:
    shown = [f"{key}={value}" for key, value in sorted(overrides.items()) if key != "seed"]
    return ", ".join(shown) or "recipe's own settings"


def _grouped(items: Iterable[RunRecord], key: Any) -> list[tuple[Any, list[RunRecord]]]:
    """Items by key, keys in sorted order, items in the order given."""
    groups: dict[Any, list[RunRecord]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return sorted(groups.items())
