"""From runs to sections: which runs belong together, and which may be compared.

A section has the rows of one recipe, and its ablations apart from them. A run that repeats another is
left out, with a notice that says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from polarstep_lab.axes import AXES, find_axis
from polarstep_lab.config import ConfigError
from polarstep_lab.methods import all_methods
from polarstep_lab.paper import TABLE_2, PublishedTable
from polarstep_lab.recipes import resolve
from polarstep_lab.report.rows import AblationSet, Row, Section, place, value_place
from polarstep_lab.report.runs import METRICS, Runs

__all__ = ["in_table_2", "sections_of"]

_SCALED = ("nanogpt-small", "nanogpt-wiki")
"""Recipes that compare the paper's methods on another model: the order compares, digits do not."""


def in_table_2(recipe: str, benchmark: str) -> PublishedTable | None:
    """The part of Table 2 that a recipe compares with, at the paper's size or at another."""
    return TABLE_2[benchmark] if recipe == benchmark or recipe in _SCALED else None


def sections_of(runs: Runs) -> tuple[tuple[Section, ...], tuple[str, ...]]:
    """The sections of the runs, and a notice for each run that was left out."""
    frame, notices = _one_per_seed(runs.frame.assign(judged=_judged(runs.frame)))
    sections = []
    kinds = frame.groupby(["benchmark", "recipe"])["judged"].nunique()
    for (benchmark, recipe, judged), members in frame.groupby(["benchmark", "recipe", "judged"]):
        varied = members["ablation_axis"].notna()
        rows = _rows(members[~varied])
        found = _ablations(members[varied])
        ablations = tuple(replace(each, base=_base_of(each, rows)) for each in found)
        earlier = judged == "val_perplexity" and kinds[benchmark, recipe] > 1
        metric = next(metric for metric in METRICS if metric.key == judged)
        note = "validation only" if earlier else ""
        sections.append(Section(recipe, benchmark, metric, rows, ablations, note))
    # The paper's benchmarks and the language model come first, sections without a finished run last. Of
    # a recipe's two sections the first is the one that compares methods.
    sections.sort(
        key=lambda section: (
            all(row.finished.empty for row in section.all_rows),
            in_table_2(section.recipe, section.benchmark) is None,
            section.benchmark != "nanogpt",
            section.recipe,
            not section.rows,
            section.note,
        )
    )
    return tuple(sections), notices


def _judged(frame: pd.DataFrame) -> pd.Series:
    """The key of the metric that each run is judged by.

    A run without a result is judged like the other runs of its recipe: by the test, where some of them
    are judged by the test and some by the validation.
    """
    of_recipe = frame.groupby(["benchmark", "recipe"])["metric"].transform("min")
    of_benchmark = frame["benchmark"].map(
        {"cifar10": "test_accuracy", "nanogpt": "test_perplexity"}
    )
    return frame["metric"].fillna(of_recipe).fillna(of_benchmark)


def _one_per_seed(frame: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """One run for each config and seed, and a notice for each run that is left out for it.

    Of the runs that finished, the first to begin is kept: a run that was repeated for its times does not
    get another metric. Counting a seed twice would shrink the spread.
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
    rows = [Row(method, group) for (method, _), group in members.groupby(["method", "setting"])]
    labelled = [replace(row, label=_label(row, rows)) for row in rows]
    rank = [method.name for method in all_methods()]
    return tuple(sorted(labelled, key=lambda row: (place(row.method, rank), row.label)))


def _label(row: Row, rows: Sequence[Row]) -> str:
    """The variant of a row, or its method; where that has several rows, also the overrides that differ.

    A row without overrides of its own has all that it shares with the others, if it is not the only
    one of its kind: such rows differ in what was the recipe's default when they were made.
    """
    name = row.variant or row.method_that_ran
    alike = [other for other in rows if (other.variant or other.method_that_ran) == name]
    if len(alike) == 1:
        return name
    same = [_overrides(other) for other in alike]
    overrides = _overrides(row)
    shown = _own(overrides, same)
    if not shown and overrides and sum(not _own(other, same) for other in same) == 1:
        return name
    told = shown or overrides
    words = [f"{key}={value}" for key, value in sorted(told.items())]
    return ", ".join([name, *(words or ["recipe's own settings"])])


def _own(overrides: Mapping[str, Any], same: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The overrides that not all of ``same`` have."""
    return {
        key: value
        for key, value in overrides.items()
        if any(key not in other or other[key] != value for other in same)
    }


def _overrides(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.first.spec.overrides.items() if key != "seed"}


def _ablations(members: pd.DataFrame) -> list[AblationSet]:
    """The ablations in the order of ``polarstep list``, each still without a base."""
    settings = members.groupby(["ablation_axis", "method"])["besides"].nunique()
    ablations = []
    for (axis, method, besides), group in members.groupby(["ablation_axis", "method", "besides"]):
        rows = []
        for value in sorted(group["ablation_value"].unique(), key=lambda v: value_place(v, axis)):
            configs = group[group["ablation_value"] == value].groupby("setting")
            for i, (_, same) in enumerate(configs, start=1):
                rows.append(Row(f"{axis} = {value}{f' ({i})' if i > 1 else ''}", same))
        setting = besides if settings[axis, method] > 1 else ""
        ablations.append(AblationSet(axis, method, tuple(rows), setting=setting))
    axes = [axis.name for axis in AXES]
    return sorted(ablations, key=lambda ablation: (place(ablation.axis, axes), ablation.subject))


def _base_of(ablation: AblationSet, rows: Sequence[Row]) -> Row | None:
    """The row with the recipe's own value of the axis, or else the method's row of the comparison.

    ``None`` where neither is there, as where something else was set beside the axis.
    """
    with contextlib.suppress(ConfigError):
        own = find_axis(ablation.axis).own(
            resolve(ablation.rows[0].first.spec.recipe, ablation.method)
        )
        for row in ablation.rows:
            if row.value == own:
                return row
    plain = [row for row in rows if row.method == ablation.method]
    return plain[0] if len(plain) == 1 and not ablation.setting else None
