"""The rows of a table, and the sections and ablations that hold them: which runs may be compared.

Runs of one row have the same recipe, method, complete config and data, and differ in their seed alone.
Runs that diverged, failed, were stopped or have not ended enter no mean; each row says how many it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from polarstep_lab.axes import AXES, find_axis
from polarstep_lab.config import ConfigError
from polarstep_lab.estimates import Difference, Estimate, paired
from polarstep_lab.methods import all_methods
from polarstep_lab.paper import ABLATIONS, Published
from polarstep_lab.recipes import resolve
from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.runs import (
    METRICS,
    STATUSES,
    TIMES,
    Metric,
    Runs,
    data_of,
    settings_in,
)

__all__ = ["AblationSet", "Row", "Section", "sections_of"]

_COMMANDS_TO_LIST = 4


@dataclass(frozen=True, eq=False)
class Row:
    """Runs that differ in their seed alone: lines of the frame that ``collect_runs`` makes."""

    label: str
    runs: pd.DataFrame

    @cached_property
    def method(self) -> str:
        """The method of these runs."""
        return str(self.runs["method"].iloc[0])

    @cached_property
    def name(self) -> str:
        """The variant of the study that these runs are of, or the method with the sketch that ran."""
        names = {run.spec.study.get("variant", "") for run in self.runs["record"]}
        variant = str(names.pop()) if len(names) == 1 else ""
        for method in all_methods():
            if not variant and method.name == self.method:
                polar = (self.config.get("optimizer") or {}).get("polar") or {}
                return method.named(polar.get("sketch"), polar.get("auto"))
        return variant or self.method

    @cached_property
    def task(self) -> Mapping[str, Any]:
        """Model, data, stages of training and length of the test, by the path of each setting.

        Runs of more steps, or of a larger network, reach another metric whatever their method is.
        """
        settings = {
            path: value
            for path, value in settings_in(self.config).items()
            if path.startswith(("model.", "data.", "evaluation.tokens")) and path != "data.root"
        }
        return settings | {"the data read": data_of(self.first.environment)}

    @property
    def value(self) -> Any:
        """The value that an ablation gave to its axis in these runs."""
        return self.runs["ablation_value"].iloc[0]

    @cached_property
    def first(self) -> RunRecord:
        """The record of the first run. The other records differ only in what the seed changes."""
        record: RunRecord = self.runs["record"].iloc[0]
        return record

    @property
    def config(self) -> Mapping[str, Any]:
        """The complete config of the first run."""
        return self.first.spec.config

    @property
    def devices(self) -> list[str]:
        """The devices these runs were measured on."""
        return sorted(self.runs["device"].unique())

    @cached_property
    def finished(self) -> pd.DataFrame:
        """The runs whose metric counts."""
        return self.runs[self.runs["status"] == "finished"]

    @property
    def seeds_text(self) -> str:
        """How many seeds the metric is the mean of, and how many runs of the row did not finish."""
        counts = self.runs["status"].value_counts().reindex(STATUSES, fill_value=0)
        finished, lost = counts["finished"], counts.drop("finished")
        others = ", ".join(f"{count} {status}" for status, count in lost[lost > 0].items())
        return f"{finished} of {len(self.runs)} ({others})" if others else str(finished)

    @cached_property
    def by_seed(self) -> pd.Series:
        """The final metric of each seed that finished."""
        values = self.finished.set_index("seed")["value"]
        return values[np.isfinite(values)]

    @cached_property
    def metric(self) -> Estimate | None:
        """The final metric over the seeds that finished."""
        return Estimate.of(self.by_seed)

    def minus(self, other: Row) -> Difference | None:
        """This metric less another row's, on common seeds; of the means where no seed is common."""
        if self.metric is None or other.metric is None:
            return None
        return paired(self.by_seed, other.by_seed) or self.metric.minus(other.metric)

    @cached_property
    def paper(self) -> Published | None:
        """The published figure; ``None`` unless every run is in the published setting."""
        found = set(self.runs["paper"])
        return found.pop() if len(found) == 1 else None

    @cached_property
    def gflops(self) -> float | None:
        """Optimizer GFLOPs of one step, from the ledger; they depend on the config alone."""
        runs = self.runs if self.finished.empty else self.finished
        estimate = Estimate.of(runs["optimizer_gflops_per_step"])
        return estimate.mean if estimate else None

    @cached_property
    def times(self) -> pd.Series:
        """The median of each column of :data:`TIMES` over the runs that finished, on one device.

        A mean would follow a single run that compiled or waited.
        """
        runs = self.finished if len(self.devices) == 1 else self.runs[:0]
        return runs[TIMES].median(skipna=False)

    def first_with(self, log: str) -> RunRecord | None:
        """The first run that recorded ``"gamma"`` or ``"noise"``; ``None`` where no run did."""
        return next((run for run in self.runs["record"] if run.logs.get(log)), None)

    @property
    def commands(self) -> str:
        """The commands that repeat these runs, in order of seed; of many, the first."""
        known = self.runs[self.runs["command"] != ""]
        commands = [*known["command"].unique()]
        if len(commands) > _COMMANDS_TO_LIST:
            others = ", ".join(map(str, known["seed"].iloc[1:]))
            commands = [commands[0], f"# and with the seeds {others}"]
        return "\n".join(commands)


@dataclass(frozen=True, eq=False)
class AblationSet:
    """A row for each value of one setting, with all other settings held.

    ``base`` is the row that the others are compared with: the row of ``rows`` that has the recipe's
    ``own`` value, or else the method's row of the comparison. ``setting`` is what else was set, where
    the axis was varied with several settings of the method.
    """

    axis: str
    method: str
    rows: tuple[Row, ...]
    base: Row | None = None
    own: Any = None
    setting: str = ""

    @property
    def subject(self) -> str:
        """The method whose setting was varied, with what else was set."""
        return f"{self.method}, {self.setting}" if self.setting else self.method

    def difference(self, row: Row) -> Difference | None:
        """How far the metric of a row is from the base's; ``None`` for the base itself."""
        return None if self.base is None or row is self.base else row.minus(self.base)

    def published(self, row: Row) -> Published | None:
        """The authors' figure for a row or for the base, from the file of their ablations.

        Their default setting has a figure of its own on each axis, other than in Table 2.
        """
        if row is self.base and any(other.paper for other in self.rows):
            return ABLATIONS.get(self.axis, {}).get(self.own, row.paper)
        return row.paper

    @property
    def values(self) -> dict[Row, Any]:
        """The value of each row. A base that is none of the rows comes first, as ``"recipe"``."""
        values = {row: row.value for row in self.rows}
        outside = self.base is not None and self.base not in self.rows
        return {self.base: "recipe", **values} if outside else values  # type: ignore[dict-item]


@dataclass(frozen=True, eq=False)
class Section:
    """All runs of one recipe that are judged by the same metric."""

    recipe: str
    benchmark: str
    metric: Metric
    rows: tuple[Row, ...]
    ablations: tuple[AblationSet, ...]

    @property
    def title(self) -> str:
        """The heading of the section."""
        note = ", validation only" if self.metric.key == "val_perplexity" else ""
        return f"{self.recipe} ({self.benchmark}){note}"

    @property
    def slug(self) -> str:
        """A name for files and anchors."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows of the comparison, then those of the ablations."""
        return (*self.rows, *(row for ablation in self.ablations for row in ablation.rows))

    @cached_property
    def apart(self) -> list[str]:
        """The settings of the task in which finished rows of the comparison differ.

        Such rows have a table, and no row of it is called the best: by its length or its network alone
        a run can be better than another.
        """
        tasks = [row.task for row in self.rows if row.metric]
        return [
            path
            for path in sorted({path for task in tasks for path in task})
            if any(task.get(path) != tasks[0].get(path) for task in tasks)
        ]

    def base_of(self, row: Row) -> Row | None:
        """The finished row that a row is compared with: its study's, else AdamW's, with the same task.

        Of several rows of AdamW it is the best.
        """
        for name in filter(None, (row.first.spec.study.get("against"), "AdamW")):
            same = [each for each in self.rows if name in (each.name, each.method)]
            if found := self.best([each for each in same if each.task == row.task]):
                return found
        return None

    def best(self, rows: Sequence[Row]) -> Row | None:
        """The row with the best mean metric."""
        scored = {row: row.metric.mean for row in rows if row.metric}
        choose = max if self.metric.higher_is_better else min
        return choose(scored, key=lambda row: scored[row]) if scored else None


# --- from runs to sections ------------------------------------------------------------------------


def sections_of(runs: Runs) -> tuple[tuple[Section, ...], tuple[str, ...]]:
    """The sections of the runs, and a notice for each run that was left out."""
    frame, notices = _one_per_seed(runs.frame.assign(judged=_judged(runs.frame)))
    sections = []
    for (benchmark, recipe, judged), members in frame.groupby(["benchmark", "recipe", "judged"]):
        varied = members["ablation_axis"].notna()
        rows = _rows(members[~varied])
        ablations = _ablations(members[varied], rows)
        sections.append(Section(recipe, benchmark, METRICS[judged], rows, ablations))
    # Sections without a finished run come last; before them, those with ablations alone.
    sections.sort(
        key=lambda section: (
            all(row.finished.empty for row in section.all_rows),
            section.recipe,
            not section.rows,
            section.title,
        )
    )
    return tuple(sections), notices


def _judged(frame: pd.DataFrame) -> pd.Series:
    """The key of the metric that each run is judged by; without a result, that of its recipe."""
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
    rows = [Row("", group) for _, group in members.groupby(["method", "setting"])]
    labelled = [replace(row, label=_label(row, rows)) for row in rows]
    rank = [method.name for method in all_methods()]
    return tuple(sorted(labelled, key=lambda row: (_place(row.method, rank), row.label)))


def _label(row: Row, rows: Sequence[Row]) -> str:
    """The name of a row; where several rows have it, also the overrides in which they differ."""

    def overrides(row: Row) -> dict[str, Any]:
        return {key: value for key, value in row.first.spec.overrides.items() if key != "seed"}

    alike = [overrides(other) for other in rows if other.name == row.name]
    if len(alike) == 1:
        return row.name
    own = overrides(row)
    differ = {k: v for k, v in own.items() if any(k not in o or o[k] != v for o in alike)}
    words = [f"{key}={value}" for key, value in sorted((differ or own).items())]
    return ", ".join([row.name, *(words or ["recipe's own settings"])])


def _ablations(members: pd.DataFrame, comparison: Sequence[Row]) -> tuple[AblationSet, ...]:
    """The ablations in the order of ``polarstep list``."""
    settings = members.groupby(["ablation_axis", "method"])["besides"].nunique()
    ablations = []
    for (axis, method, besides), group in members.groupby(["ablation_axis", "method", "besides"]):
        known = [str(value) for a in AXES if a.name == axis for value in (*a.cifar10, *a.nanogpt)]
        rows = [
            Row(f"{axis} = {value}", same)
            for (value, _), same in sorted(
                group.groupby(["ablation_value", "setting"], sort=False),
                key=lambda found: _place(found[0][0], known),
            )
        ]
        setting = besides if settings[axis, method] > 1 else ""
        try:
            own = find_axis(axis).own(resolve(rows[0].first.spec.recipe, method))
        except ConfigError:  # a recipe or an axis of a study of one's own
            own = None
        plain = [row for row in comparison if row.method == method and not setting]
        base = next((row for row in rows if row.value == own), None)
        base = base or (plain[0] if len(plain) == 1 else None)
        ablations.append(AblationSet(axis, method, tuple(rows), base, own, setting))
    axes = [axis.name for axis in AXES]
    return tuple(sorted(ablations, key=lambda each: (_place(each.axis, axes), each.subject)))


def _place(item: Any, known: Sequence[str]) -> tuple[bool, float, str]:
    """A key to sort by: numbers by size, then names in the order of ``known``, then other names."""
    if isinstance(item, int | float):
        return False, item, ""
    return True, known.index(item) if item in known else len(known), item
