"""From runs to sections: which runs belong together, and which may be compared.

A section is a recipe with its rows, the ablations apart. A run that was made twice becomes a notice:
nothing found is dropped in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from polarstep_lab.ablations import AXES, apply_axis
from polarstep_lab.config import ConfigError, RunConfig
from polarstep_lab.methods import all_methods
from polarstep_lab.paper import TABLE_2, Setting
from polarstep_lab.records.settings import settings_in
from polarstep_lab.report.rows import AblationSet, Row, Section
from polarstep_lab.report.runs import METRICS, Runs

__all__ = ["in_table_2", "sections_of"]

_SCALED = ("nanogpt-small", "nanogpt-wiki")
"""Recipes that ask the paper's question of another model: rankings can be compared, digits cannot."""

_NOT_TRAINING = ("runtime.compile", "data.root", "evaluation.every")
"""Settings in which a row may differ from its base: they do not change what is trained."""


def in_table_2(recipe: str, benchmark: str) -> Setting | None:
    """Table 2 for a recipe that asks the paper's question, at the paper's size or at another."""
    return TABLE_2[benchmark] if recipe == benchmark or recipe in _SCALED else None


def sections_of(runs: Runs) -> tuple[tuple[Section, ...], tuple[str, ...]]:
    """Group the runs into sections, and say which runs had to be left out on the way."""
    frame, notices = _one_per_seed(runs.frame.assign(judged=_judged(runs.frame)))
    sections = []
    kinds = frame.groupby(["benchmark", "recipe"])["judged"].nunique()
    for (benchmark, recipe, judged), members in frame.groupby(["benchmark", "recipe", "judged"]):
        members = members.assign(timed=_timed(members))
        varied = members["ablation_axis"].notna()
        rows = _rows(members[~varied])
        found = _ablations(members[varied])
        ablations = tuple(_based(each, _base_of(each, rows, found)) for each in found)
        earlier = judged == "val_perplexity" and kinds[benchmark, recipe] > 1
        metric = next(metric for metric in METRICS if metric.key == judged)
        note = "validation only" if earlier else ""
        sections.append(Section(recipe, benchmark, metric, rows, ablations, note))
    # The paper's benchmarks and the language model first; what has nothing finished last.
    sections.sort(
        key=lambda section: (
            all(row.finished.empty for row in section.all_rows),
            in_table_2(section.recipe, section.benchmark) is None,
            section.benchmark != "nanogpt",
            section.recipe,
            section.note,
        )
    )
    return tuple(sections), notices


def _judged(frame: pd.DataFrame) -> pd.Series:
    """The key of the metric that each run is judged by.

    A run without a result counts with the other runs of its recipe; with those judged by the test where
    there are both kinds.
    """
    of_recipe = frame.groupby(["benchmark", "recipe"])["metric"].transform("min")
    of_benchmark = frame["benchmark"].map(
        {"cifar10": "test_accuracy", "nanogpt": "test_perplexity"}
    )
    return frame["metric"].fillna(of_recipe).fillna(of_benchmark)


def _timed(members: pd.DataFrame) -> pd.Series:
    """Which runs of a section count for its times: those that ran alone, or else all that finished.

    Runs that share a device slow one another down. A run that did not finish may have its first steps
    alone, which are the slowest.
    """
    finished = members["status"] == "finished"
    alone = finished & members["alone"]
    return alone if alone.any() else finished


def _one_per_seed(frame: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """One run for each config and seed: of those that finished, the one that began first.

    A second run would shrink the spread, and a run made later, for its times, must not replace a metric.
    """
    same = ["benchmark", "recipe", "method", "ablation_axis", "ablation_value", "besides"]
    same += ["setting", "seed", "judged"]
    frame = frame.assign(lost=frame["status"] != "finished")
    frame = frame.sort_values(["seed", "lost", "began"], kind="stable")
    frame["kept"] = frame.groupby(same, dropna=False)["run"].transform("first")
    twice = frame.duplicated(same)
    notices = tuple(
        f"{run.method}: seed {run.seed} was run twice with the same config; {run.run} is left out for "
        f"{run.kept}"
        for run in frame[twice].itertuples()
    )
    return frame[~twice].sort_values("seed", kind="stable"), notices


def _rows(members: pd.DataFrame) -> tuple[Row, ...]:
    """The rows of a comparison: those of Table 2 in its order, then ours and others."""
    settings = members.groupby("method")["setting"].nunique()
    rows = []
    for (method, _), group in members.groupby(["method", "setting"]):
        row = Row(method, group)
        rows.append(replace(row, label=row.method_that_ran))
    differing = [
        replace(row, label=f"{row.label}, {_difference(row, rows)}")
        if settings[row.method] > 1
        else row
        for row in rows
    ]
    rank = [method.name for method in all_methods()]
    return tuple(sorted(differing, key=lambda row: (_place(row.method, rank), row.label)))


def _difference(row: Row, rows: Sequence[Row]) -> str:
    """By which overrides a row differs from the other rows of its method."""
    overrides = _overrides(row)
    others = [_overrides(other) for other in rows if other.method == row.method]
    own = {
        key: value
        for key, value in overrides.items()
        if any(key not in other or other[key] != value for other in others)
    }
    shown = [f"{key}={value}" for key, value in sorted((own or overrides).items())]
    return ", ".join(shown) or "recipe's own settings"


def _overrides(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.first.identity.overrides.items() if key != "seed"}


def _ablations(members: pd.DataFrame) -> list[AblationSet]:
    """The ablations in the order of ``polarstep list``, each still without a base."""
    settings = members.groupby(["ablation_axis", "method"])["besides"].nunique()
    ablations = []
    for (axis, method, besides), group in members.groupby(["ablation_axis", "method", "besides"]):
        known = [str(value) for a in AXES if a.name == axis for value in (*a.cifar10, *a.nanogpt)]
        rows = []
        for value in sorted(group["ablation_value"].unique(), key=lambda v: _place(v, known)):
            configs = group[group["ablation_value"] == value].groupby("setting")
            for i, (_, same) in enumerate(configs, start=1):
                rows.append(Row(f"{axis} = {value}{f' ({i})' if i > 1 else ''}", same))
        setting = besides if settings[axis, method] > 1 else ""
        ablations.append(AblationSet(axis, method, tuple(rows), setting=setting))
    axes = [axis.name for axis in AXES]
    return sorted(ablations, key=lambda ablation: (_place(ablation.axis, axes), ablation.subject))


def _base_of(
    ablation: AblationSet, rows: Sequence[Row], ablations: Sequence[AblationSet]
) -> Row | None:
    """The row with the config in which the axes and the comparison meet; ``None`` without such a row.

    With the recipe's own value, every axis runs the same config, so that no list of defaults is needed.
    An axis that was varied with another setting meets the others elsewhere.
    """
    plain = [row for row in rows if row.method == ablation.method]
    others = [
        row
        for other in ablations
        if other is not ablation and other.method == ablation.method
        if ablation.setting or not other.setting
        for row in other.rows
    ]
    elsewhere = Counter(row.setting for row in (*plain, *others))
    own = [row for row in ablation.rows if row.setting in elsewhere]
    if own:
        return own[0] if len(own) == 1 else None
    if not plain:
        return None
    most = max(plain, key=lambda row: elsewhere[row.setting])
    return most if len(plain) == 1 or elsewhere[most.setting] > 1 else None


def _based(ablation: AblationSet, base: Row | None) -> AblationSet:
    """The ablation with its base and strays; without the base where all other rows are strays."""
    if base is None:
        return ablation
    varied = [row for row in ablation.rows if row is not base]
    found = {row: _beside_the_axis(row, base, ablation.axis) for row in varied}
    strays = {row: paths for row, paths in found.items() if paths}
    keeps = not varied or len(strays) < len(varied)
    return replace(ablation, base=base if keeps else None, strays=strays)


def _beside_the_axis(row: Row, base: Row, axis: str) -> list[str]:
    """The settings in which ``row`` differs from its base, apart from those that the axis changes."""
    ours = settings_in(row.config)
    theirs = settings_in(_with_value(base.config, axis, row.value))
    return [
        path
        for path in sorted({*ours, *theirs})
        if ours.get(path) != theirs.get(path)
        and path.split(".")[-1] != axis
        and path not in _NOT_TRAINING
    ]


def _with_value(config: Mapping[str, Any], axis: str, value: Any) -> Mapping[str, Any]:
    """A config with one value of an axis; unchanged where this version cannot read it."""
    try:
        return apply_axis(RunConfig.from_dict(config), axis, value).to_dict()
    except ConfigError:
        return config


def _place(item: Any, known: Sequence[str]) -> tuple[bool, float, str]:
    """A key to sort by: numbers by size, then names as they are ``known``, then others."""
    if isinstance(item, int | float):
        return False, item, ""
    return True, known.index(item) if item in known else len(known), item
