"""What runs say together: the rows of a table.

A *row* is a set of runs that differ in their seed alone: same recipe, same method, same complete
config. Runs that diverged, failed, were stopped or have not ended enter no mean, and every row counts
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from polarstep_lab.paper import Published
from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.estimates import Difference, Estimate, paired

__all__ = ["STATUSES", "AblationSet", "Row", "Section"]

_SEEDS_TO_LIST = 4  # more commands than this are easier to read as a loop
STATUSES = ("finished", "diverged", "failed", "stopped", "unfinished")


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
    def setting(self) -> str:
        """The config that all runs share, but for the seed, as a string to compare."""
        return str(self.runs["setting"].iloc[0])

    @property
    def value(self) -> int | float | str:
        """The value that an ablation gave to its axis in these runs."""
        value: int | float | str = self.runs["ablation_value"].iloc[0]
        return value

    @cached_property
    def paper(self) -> Published | None:
        """The published figure; ``None`` unless every run is in the published setting."""
        found = set(self.runs["paper"])
        return found.pop() if len(found) == 1 else None

    @cached_property
    def finished(self) -> pd.DataFrame:
        """The runs whose metric counts."""
        return self.runs[self.runs["status"] == "finished"]

    @cached_property
    def alone(self) -> pd.DataFrame:
        """The finished runs that had their device to themselves."""
        return self.finished[self.finished["alone"]]

    @cached_property
    def timed(self) -> pd.DataFrame:
        """The runs whose times are shown: those that ran alone, or else all that finished.

        None where the runs ran on different devices. A run that did not finish has no time worth
        showing: its first steps are its slowest.
        """
        if len(self.devices) > 1:
            return self.runs[:0]
        return self.finished if self.alone.empty else self.alone

    @property
    def records(self) -> tuple[RunRecord, ...]:
        """The records of all runs, in order of seed."""
        return tuple(self.runs["record"])

    @property
    def counts(self) -> dict[str, int]:
        """How many runs ended in which way."""
        found = self.runs["status"].value_counts()
        return {status: int(found[status]) for status in STATUSES if status in found}

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
        """How far the metric is from another row's: on the same seeds, or else by the means."""
        if self.metric is None or other.metric is None:
            return None
        return paired(self.by_seed, other.by_seed) or self.metric.minus(other.metric)

    @property
    def off_the_paper(self) -> Difference | None:
        """How far the metric is from the published figure."""
        if self.metric is None or self.paper is None:
            return None
        return self.metric.minus(Estimate(self.paper.mean, self.paper.std, self.paper.seeds))

    @property
    def differs(self) -> bool:
        """Whether the metric is more than two standard errors from the published figure."""
        return self.off_the_paper is not None and self.off_the_paper.clear

    @cached_property
    def gflops(self) -> float | None:
        """Optimizer GFLOPs of one step, from the ledger; a function of the config alone."""
        runs = self.runs if self.finished.empty else self.finished
        estimate = Estimate.of(runs["optimizer_gflops_per_step"])
        return estimate.mean if estimate else None

    @property
    def times(self) -> tuple[float | None, float | None, float | None]:
        """Milliseconds of an optimizer step and of a whole step, and seconds of a run.

        Medians over the timed runs: a run that compiled or waited says nothing about the others.
        """
        columns = ("optimizer_ms_per_step", "step_ms", "run_seconds")
        medians = self.timed[[*columns]].median(skipna=False)
        optimizer, step, run = (None if self.timed.empty else float(medians[c]) for c in columns)
        return optimizer, step, run

    @property
    def optimizer_ms(self) -> float | None:
        """Measured milliseconds of one optimizer step; ``None`` without a timed run."""
        return self.times[0]

    @property
    def step_ms(self) -> float | None:
        """Measured milliseconds of one whole training step; ``None`` without a timed run."""
        return self.times[1]

    @property
    def config(self) -> Mapping[str, Any]:
        """The config that all runs of the row share, but for the seed."""
        return self.records[0].identity.config

    @property
    def polar(self) -> Mapping[str, Any]:
        """What the config says of the polar map; empty where it says nothing."""
        optimizer = self.config.get("optimizer")
        polar = optimizer.get("polar") if isinstance(optimizer, Mapping) else None
        return polar if isinstance(polar, Mapping) else {}

    @property
    def devices(self) -> list[str]:
        """The devices these runs were measured on."""
        return sorted(self.runs["device"].unique())

    def first_with(self, log: str) -> RunRecord | None:
        """The first run that recorded ``"gamma"`` or ``"noise"``; ``None`` where no run did."""
        return next((run for run in self.records if run.logs.get(log)), None)

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that repeat these runs, in order of seed; for many seeds, a loop over them."""
        known = self.runs[self.runs["command"] != ""]
        seeds = list(map(str, known["seed"]))
        looped = {
            re.sub(rf"--seed {seed}(?= |$)", "--seed $seed", command)
            for seed, command in zip(seeds, known["command"], strict=True)
        }
        if len(seeds) <= _SEEDS_TO_LIST or len(looped) > 1:
            return tuple(known["command"].unique())
        gapless = seeds == list(map(str, range(int(seeds[0]), int(seeds[-1]) + 1)))
        listed = f"$(seq {seeds[0]} {seeds[-1]})" if gapless else " ".join(seeds)
        return (f"for seed in {listed}; do {looped.pop()}; done",)


@dataclass(frozen=True, eq=False)
class AblationSet:
    """One setting varied and all else held: a row for each of its values.

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
    def of(self) -> str:
        """What was varied: the method, with its setting."""
        return f"{self.method}, {self.setting}" if self.setting else self.method

    def difference(self, row: Row) -> Difference | None:
        """How far the metric of a row is from that of the base."""
        return None if self.base is None or row is self.base else row.minus(self.base)

    @property
    def reference(self) -> Estimate | None:
        """The base's metric over the seeds that the differences are taken on."""
        if self.base is None:
            return None
        values = self.base.by_seed
        shared = {seed for row in self.rows if row is not self.base for seed in row.by_seed.index}
        return Estimate.of(values[values.index.isin(shared)]) or Estimate.of(values)

    @property
    def named(self) -> list[tuple[str, Row]]:
        """The rows by value; before them the base as ``recipe``, where it is none of them."""
        rows = [(str(row.value), row) for row in self.rows]
        if self.base is not None and self.base not in self.rows:
            rows.insert(0, ("recipe", self.base))
        return rows

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers, to be drawn on an axis."""
        return all(isinstance(row.value, int | float) for row in self.rows)


@dataclass(frozen=True, eq=False)
class Section:
    """All runs of one recipe that are judged on the same data: the test's, or the validation's.

    Runs of earlier versions have a validation perplexity only (``by_validation``). Where a recipe has
    runs of both kinds it has two sections, and ``note`` says which one holds the earlier runs.
    """

    recipe: str
    benchmark: str
    rows: tuple[Row, ...]
    ablations: tuple[AblationSet, ...]
    by_validation: bool = False
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

    @property
    def metric_name(self) -> str:
        """What the final metric is called."""
        if self.higher_is_better:
            return "Test accuracy"
        return "Validation perplexity" if self.by_validation else "Test perplexity"

    @property
    def metric(self) -> str:
        """The name of the final metric in records and tables to compute with."""
        return self.metric_name.lower().replace("validation", "val").replace(" ", "_")

    @property
    def higher_is_better(self) -> bool:
        """Which way the final metric improves."""
        return self.benchmark == "cifar10"

    @property
    def decimals(self) -> int:
        """Decimals of the final metric: four for an accuracy, as in Table 2, three for a perplexity."""
        return 4 if self.higher_is_better else 3

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows of the comparison, then those of the ablations."""
        return (*self.rows, *(row for ablation in self.ablations for row in ablation.rows))

    def whose(self, ablation: AblationSet) -> str:
        """What follows the name of a row where several methods had the same axis varied."""
        same = [other for other in self.ablations if other.axis == ablation.axis]
        return f" with {ablation.of}" if len(same) > 1 else ""

    @property
    def ablation_rows(self) -> tuple[Row, ...]:
        """All rows in the tables of the ablations, the recipe's own rows included."""
        return tuple(row for ablation in self.ablations for _, row in ablation.named)

    @cached_property
    def watched(self) -> bool:
        """Whether its runs were made to look at noise, γ and ν: every row recorded some of them."""
        return all(row.first_with("gamma") or row.first_with("noise") for row in self.all_rows)

    def best(self, rows: Sequence[Row]) -> Row | None:
        """The row with the best mean metric."""
        scored = {row: row.metric.mean for row in rows if row.metric}
        choose = max if self.higher_is_better else min
        return choose(scored, key=lambda row: scored[row]) if scored else None
