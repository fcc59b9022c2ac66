"""The rows of a table, made of runs, and the ablations and sections that hold the rows.

Runs of one row have the same recipe, method, complete config and data, and differ in their seed alone.
Runs that diverged, failed, were stopped or have not ended enter no mean; each row says how many it has.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from polarstep_lab.axes import AXES, find_axis
from polarstep_lab.config import ConfigError, RunConfig
from polarstep_lab.estimates import Difference, Estimate, paired
from polarstep_lab.methods import all_methods
from polarstep_lab.paper import ABLATIONS, Published
from polarstep_lab.records.record import RunRecord
from polarstep_lab.records.settings import NOT_TRAINING, settings_in
from polarstep_lab.report.palette import Look, looks_of
from polarstep_lab.report.runs import STATUSES, TIMES, Metric, data_of

__all__ = ["AblationSet", "Row", "Section", "place", "value_place"]

_SEEDS_TO_LIST = 4  # more commands than this are easier to read as a loop


@dataclass(frozen=True, eq=False)
class Row:
    """Runs that differ in their seed alone: lines of the frame that ``collect`` makes."""

    label: str
    runs: pd.DataFrame

    @property
    def method(self) -> str:
        """The method of these runs."""
        return str(self.runs["method"].iloc[0])

    @property
    def method_that_ran(self) -> str:
        """The name of the method, with the sketch that ran where it is not the method's own."""
        for method in all_methods():
            if method.name == self.method:
                return method.named(self.polar.get("sketch"), self.polar.get("auto"))
        return self.method

    @property
    def variant(self) -> str:
        """The variant of a study that these runs are of; empty where they are of several or none."""
        names = {run.spec.study.get("variant", "") for run in self.runs["record"]}
        return str(names.pop()) if len(names) == 1 else ""

    @property
    def setting(self) -> str:
        """What determines the result of these runs, apart from the seed, as a string to compare."""
        return str(self.runs["setting"].iloc[0])

    @cached_property
    def task_settings(self) -> Mapping[str, Any]:
        """Model, data, stages of training and length of the test, by the path of each setting."""
        settings = {
            path: value
            for path, value in settings_in(self.config).items()
            if path.startswith(("model.", "data.", "evaluation.tokens"))
            and path not in NOT_TRAINING
        }
        return settings | {"the data read": data_of(self.first.environment)}

    @cached_property
    def task(self) -> str:
        """The settings of the task, as a string to compare.

        Runs of more steps, or of a larger network, reach another metric whatever their method is.
        """
        return json.dumps(self.task_settings, sort_keys=True, default=str)

    @property
    def value(self) -> Any:
        """The value that an ablation gave to its axis in these runs."""
        return self.runs["ablation_value"].iloc[0]

    @property
    def first(self) -> RunRecord:
        """The record of the first run. The other records differ only in what the seed changes."""
        record: RunRecord = self.runs["record"].iloc[0]
        return record

    @property
    def config(self) -> Mapping[str, Any]:
        """The complete config of the first run."""
        return self.first.spec.config

    @property
    def polar(self) -> Mapping[str, Any]:
        """What the config says of the polar map; empty where it says nothing."""
        return (self.config.get("optimizer") or {}).get("polar") or {}

    @property
    def devices(self) -> list[str]:
        """The devices these runs were measured on."""
        return sorted(self.runs["device"].unique())

    @cached_property
    def finished(self) -> pd.DataFrame:
        """The runs whose metric counts."""
        return self.runs[self.runs["status"] == "finished"]

    @property
    def counts(self) -> pd.Series:
        """How many runs ended in which way, by status."""
        return self.runs["status"].value_counts().reindex(STATUSES, fill_value=0)

    @property
    def seeds_text(self) -> str:
        """How many seeds the metric is the mean of, and how many runs of the row did not finish."""
        finished, lost = self.counts["finished"], self.counts.drop("finished")
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

    @property
    def off_the_paper(self) -> Difference | None:
        """How far the metric is from the published figure."""
        if self.metric is None or self.paper is None:
            return None
        return self.metric.minus(self.paper.estimate)

    @property
    def differs(self) -> bool:
        """Whether the 95% interval of the difference from the published figure leaves out zero."""
        return self.off_the_paper is not None and self.off_the_paper.clear

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
        """The commands that repeat these runs, in order of seed; for many seeds, a loop over them."""
        known = self.runs[self.runs["command"] != ""]
        seeds = list(map(str, known["seed"]))
        looped = {
            re.sub(rf"--seed {seed}(?= |$)", "--seed $seed", command)
            for seed, command in zip(seeds, known["command"], strict=True)
        }
        if len(seeds) <= _SEEDS_TO_LIST or len(looped) > 1:
            return "\n".join(known["command"].unique())
        gapless = seeds == list(map(str, range(int(seeds[0]), int(seeds[-1]) + 1)))
        listed = f"$(seq {seeds[0]} {seeds[-1]})" if gapless else " ".join(seeds)
        return f"for seed in {listed}; do {looped.pop()}; done"


@dataclass(frozen=True, eq=False)
class AblationSet:
    """A row for each value of one setting, with all other settings held.

    ``base`` is the row that the others are compared with: the row of ``rows`` that has the recipe's own
    value, or else the method's row of the comparison. ``setting`` is what else was set, where the axis
    was varied with several settings of the method.
    """

    axis: str
    method: str
    rows: tuple[Row, ...]
    base: Row | None = None
    setting: str = ""

    @property
    def subject(self) -> str:
        """The method whose setting was varied, with what else was set."""
        return f"{self.method}, {self.setting}" if self.setting else self.method

    def difference(self, row: Row) -> Difference | None:
        """How far the metric of a row is from the base's; ``None`` for the base itself."""
        if self.base is None or row is self.base:
            return None
        return row.minus(self.base)

    @cached_property
    def differences(self) -> dict[Row, Difference]:
        """The difference of each row that has one."""
        return {row: found for row in self.rows if (found := self.difference(row))}

    @cached_property
    def base_value(self) -> Any:
        """The recipe's own value of the axis; ``None`` where the base's config does not tell it."""
        if self.base is None or self.base in self.rows:
            return self.base and self.base.value
        with contextlib.suppress(ConfigError):
            return find_axis(self.axis).own(RunConfig.from_dict(self.base.config))
        # A config of another version, or an axis: most axes are settings of the polar map.
        return self.base.polar.get(self.axis)

    def published(self, row: Row) -> Published | None:
        """The authors' figure for a row or for the base, from the file of their ablations.

        Their default setting has a figure of its own on each axis, other than in Table 2.
        """
        if row is self.base and any(other.paper for other in self.rows):
            return ABLATIONS.get(self.axis, {}).get(self.base_value, row.paper)
        return row.paper

    def value_of(self, row: Row) -> Any:
        """The value of a row or of the base; ``"recipe"`` where the base's is not known."""
        if row is not self.base:
            return row.value
        return "recipe" if self.base_value is None else self.base_value

    @property
    def row_names(self) -> dict[Row, str]:
        """The value of each row as text. A base that is none of the rows comes first, as ``recipe``."""
        rows = {row: str(row.value) for row in self.rows}
        return rows if self.base is None or self.base in rows else {self.base: "recipe", **rows}

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers, to be drawn on an axis."""
        return all(isinstance(row.value, int | float) for row in self.rows)


@dataclass(frozen=True, eq=False)
class Section:
    """All runs of one recipe that are judged by the same metric.

    A recipe has two sections where some of its runs are judged by the test and others have a validation
    only; the ``note`` of the second section says so.
    """

    recipe: str
    benchmark: str
    metric: Metric
    rows: tuple[Row, ...]
    ablations: tuple[AblationSet, ...]
    note: str = ""

    @property
    def title(self) -> str:
        """The heading of the section."""
        return f"{self.recipe} ({self.benchmark})" + (f", {self.note}" if self.note else "")

    @property
    def slug(self) -> str:
        """A name for files and anchors."""
        name = f"{self.benchmark}-{self.recipe} {self.note}"
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

    @cached_property
    def looks(self) -> dict[Row, Look]:
        """How each row of the comparison is drawn."""
        return dict(zip(self.rows, looks_of(row.method for row in self.rows), strict=True))

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows of the comparison, then those of the ablations."""
        return (*self.rows, *(row for ablation in self.ablations for row in ablation.rows))

    @property
    def by_method(self) -> dict[str, Row]:
        """One row for each method: a row in the paper's setting, or else of the most common task.

        The task is that for which the most methods have a finished run, so that methods are compared
        on the same model and data. Of several rows the row with the most seeds is taken.
        """
        done = {(row.task, row.method) for row in self.rows if not row.finished.empty}
        methods = Counter(task for task, _ in done)
        best_first = sorted(
            self.rows,
            key=lambda row: (row.paper is None, -methods[row.task], -len(row.finished)),
        )
        return {row.method: row for row in reversed(best_first)}

    def label_in(self, ablation: AblationSet, row: Row) -> str:
        """The label of an ablation's row; with the subject where several ablations vary its axis."""
        same = [other for other in self.ablations if other.axis == ablation.axis]
        return f"{row.label} with {ablation.subject}" if len(same) > 1 else row.label

    @cached_property
    def watched(self) -> bool:
        """Whether every row recorded noise, or γ and ν: its runs were made to measure them."""
        return all(row.first_with("gamma") or row.first_with("noise") for row in self.all_rows)

    @cached_property
    def apart(self) -> list[str]:
        """The settings of the task in which finished rows of the comparison differ.

        Such rows have a table, and no row of it is called the best: by its length or its network alone
        a run can be better than another.
        """
        tasks = [row.task_settings for row in self.rows if row.metric]
        return [
            path
            for path in sorted({path for task in tasks for path in task})
            if any(task.get(path) != tasks[0].get(path) for task in tasks)
        ]

    @cached_property
    def against(self) -> Row | None:
        """The finished row that the study compares with, else AdamW's; ``None`` without either."""
        asked = {run.spec.study.get("against") for row in self.rows for run in row.runs["record"]}
        names = [*sorted(filter(None, asked)), "AdamW"]
        for name in names:
            for row in self.rows:
                if row.metric and name in (row.variant, row.method):
                    return row
        return None

    def best(self, rows: Sequence[Row]) -> Row | None:
        """The row with the best mean metric."""
        scored = {row: row.metric.mean for row in rows if row.metric}
        choose = max if self.metric.higher_is_better else min
        return choose(scored, key=lambda row: scored[row]) if scored else None


def place(item: Any, known: Sequence[str]) -> tuple[bool, float, str]:
    """A key to sort by: numbers by size, then names in the order of ``known``, then other names."""
    if isinstance(item, int | float):
        return False, item, ""
    return True, known.index(item) if item in known else len(known), item


def value_place(value: Any, axis: str) -> tuple[bool, float, str]:
    """A key to sort the values of an axis by: numbers by size, names in the order of the paper."""
    known = [str(name) for a in AXES if a.name == axis for name in (*a.cifar10, *a.nanogpt)]
    return place(value, known)
