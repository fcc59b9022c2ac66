"""What runs say together: the rows of a table.

A *row* is a set of runs that differ in their seed alone: same recipe, same method, same complete
config. Runs that diverged, failed, were stopped or have not ended never enter a mean, and never
disappear either: every row counts them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.estimates import Difference, Estimate, paired
from polarstep_lab.report.published import Published, Setting
from polarstep_lab.report.timing import device_of

__all__ = ["STATUSES", "AblationSet", "Row", "Section", "are_numbers"]

_SEEDS_TO_LIST = 4  # more commands than this are easier to read as a loop
STATUSES = ("finished", "diverged", "failed", "stopped", "unfinished")


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed alone.

    Times are those of the runs that had their device to themselves (``alone``), where there are any.
    """

    label: str
    method: str
    runs: tuple[RunRecord, ...]
    paper: Published | None = None
    alone: tuple[RunRecord, ...] = ()

    @property
    def finished(self) -> tuple[RunRecord, ...]:
        """The runs whose metric counts."""
        return tuple(run for run in self.runs if run.status == "finished")

    @property
    def counts(self) -> dict[str, int]:
        """How many runs ended in which way, the ways that occur only."""
        counter: Counter[str] = Counter(run.status for run in self.runs)
        return {status: counter[status] for status in STATUSES if counter[status]}

    @property
    def by_seed(self) -> dict[int, float]:
        """The final metric of each seed that finished."""
        values = {run.identity.seed: run.result.value for run in self.finished if run.result}
        return {seed: value for seed, value in values.items() if math.isfinite(value)}

    @property
    def metric(self) -> Estimate | None:
        """The final metric over the seeds that finished."""
        return Estimate.of(self.by_seed.values())

    def minus(self, other: Row) -> Difference | None:
        """How far the metric is from another row's: on the same seeds, or else by the means."""
        if self.metric is None or other.metric is None:
            return None
        return paired(self.by_seed, other.by_seed) or self.metric.minus(other.metric)

    @property
    def off_the_paper(self) -> Difference | None:
        """How far the metric is from the published one."""
        if self.metric is None or self.paper is None:
            return None
        return self.metric.minus(Estimate(self.paper.mean, self.paper.std, self.paper.seeds))

    @property
    def differs(self) -> bool:
        """Whether that is more than two standard errors."""
        return self.off_the_paper is not None and self.off_the_paper.clear

    @property
    def gflops(self) -> float | None:
        """Optimizer GFLOPs of one step, from the ledger; a function of the config alone."""
        results = [run.result for run in self.finished or self.runs if run.result]
        estimate = Estimate.of(result.optimizer_gflops_per_step for result in results)
        return estimate.mean if estimate else None

    @property
    def timed(self) -> tuple[RunRecord, ...]:
        """The runs whose times are shown: none where they ran on different devices.

        A run that did not finish has no time worth showing: its first steps are its slowest.
        """
        return (self.alone or self.finished) if len(self.devices) == 1 else ()

    @property
    def optimizer_ms(self) -> float | None:
        """Measured milliseconds of one optimizer step; ``None`` across different devices."""
        return _median(run.result.optimizer_ms_per_step for run in self.timed if run.result)

    @property
    def step_ms(self) -> float | None:
        """Measured milliseconds of one whole training step; ``None`` across different devices."""
        return _median(run.result.step_ms for run in self.timed if run.result)

    @property
    def seconds(self) -> float | None:
        """Measured wall-clock seconds of a whole run; ``None`` across different devices."""
        return _median(run.seconds for run in self.timed)

    @property
    def config(self) -> Mapping[str, Any]:
        """The config that all runs of the row share, but for the seed."""
        return self.runs[0].identity.config

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices these runs were measured on."""
        return tuple(sorted({device_of(run) for run in self.runs}))

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that repeat these runs, in order of seed, each once.

        Many seeds of one command become a loop over them.
        """
        commands = [run.identity.command for run in self.runs if run.identity.command]
        seeds = [str(run.identity.seed) for run in self.runs if run.identity.command]
        looped = {
            re.sub(rf"--seed {seed}(?= |$)", "--seed $seed", command)
            for seed, command in zip(seeds, commands, strict=True)
        }
        if len(commands) > _SEEDS_TO_LIST and len(looped) == 1:
            first, last = self.runs[0].identity.seed, self.runs[-1].identity.seed
            gapless = [str(seed) for seed in range(first, last + 1)] == seeds
            listed = f"$(seq {first} {last})" if gapless else " ".join(seeds)
            return (f"for seed in {listed}; do {looped.pop()}; done",)
        return tuple(dict.fromkeys(commands))


@dataclass(frozen=True)
class AblationSet:
    """One setting varied and all else held: a row for each of its values.

    ``base`` is the row with nothing varied, what the others are compared with: one of ``rows``, or
    the method's row of the comparison where no value of this axis is the recipe's own. ``setting`` is
    what else was set, where the axis was varied with several settings of the method.
    """

    axis: str
    method: str
    rows: tuple[Row, ...]
    values: tuple[int | float | str, ...]
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
        shared = {seed for row in self.rows if row is not self.base for seed in row.by_seed}
        return Estimate.of([values[seed] for seed in values if seed in shared] or values.values())

    @property
    def named(self) -> list[tuple[str, Row]]:
        """The rows by value, after the base where that is none of them."""
        rows = [(str(v), row) for v, row in zip(self.values, self.rows, strict=True)]
        if self.base is not None and self.base not in self.rows:
            rows.insert(0, ("recipe", self.base))
        return rows

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers, to be drawn on an axis."""
        return are_numbers(self.values)


@dataclass(frozen=True)
class Section:
    """All runs of one recipe."""

    recipe: str
    benchmark: str
    rows: tuple[Row, ...]
    ablations: tuple[AblationSet, ...]
    paper: Setting | None

    @property
    def slug(self) -> str:
        """A name for files and anchors."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.benchmark}-{self.recipe}".lower()).strip("-")

    @property
    def metric_name(self) -> str:
        """What the final metric is called."""
        return "Test accuracy" if self.benchmark == "cifar10" else "Validation perplexity"

    @property
    def higher_is_better(self) -> bool:
        """Which way the final metric improves."""
        return self.benchmark == "cifar10"

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows of the comparison, then those of the ablations."""
        return (*self.rows, *(row for ablation in self.ablations for row in ablation.rows))

    def whose(self, ablation: AblationSet) -> str:
        """To be put after the name of a row, where one axis was varied with several methods."""
        same = [other for other in self.ablations if other.axis == ablation.axis]
        return f" with {ablation.of}" if len(same) > 1 else ""

    @property
    def ablation_rows(self) -> tuple[Row, ...]:
        """All that the tables of the ablations show, the recipe's own rows included."""
        return tuple(row for ablation in self.ablations for _, row in ablation.named)

    @property
    def watched(self) -> bool:
        """Whether its runs were made to look at noise, γ and ν: every row has some of them."""
        return all(
            any(run.gamma or run.logs.get("noise") for run in row.runs) for row in self.all_rows
        )

    def best(self, rows: Sequence[Row]) -> Row | None:
        """The row with the best mean metric."""
        scored = [(row.metric.mean, row) for row in rows if row.metric]
        choose = max if self.higher_is_better else min
        return choose(scored, key=lambda pair: pair[0])[1] if scored else None

    def marked(self, rows: Sequence[Row]) -> Row | None:
        """The row that a table of ``rows`` sets in bold: the best, where there are two to compare.

        ``rows`` are all that the table shows, the recipe's own above an ablation included.
        """
        return self.best(rows) if sum(row.metric is not None for row in rows) > 1 else None


def are_numbers(values: Iterable[object]) -> bool:
    """Whether all of ``values`` can be put on an axis."""
    return all(isinstance(value, int | float) for value in values)


def _median(values: Iterable[float]) -> float | None:
    """Of times: one run that compiled or waited says nothing about the others."""
    times = list(values)
    return statistics.median(times) if times else None
