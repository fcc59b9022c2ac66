"""What runs say together: the rows of a table.

A *row* is a set of runs that differ in their seed alone: same recipe, same method, same complete
config. Runs that diverged, failed, were stopped or have not ended never enter a mean, and never
disappear either: every row counts them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarstep.experiments.records.record import RunRecord
from polarstep.experiments.report.estimates import Difference, Estimate
from polarstep.experiments.report.published import Published, Setting
from polarstep.experiments.report.timing import device_of

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
    def metric(self) -> Estimate | None:
        """The final metric over the seeds that finished."""
        return Estimate.of(run.result.value for run in self.finished if run.result)

    @property
    def gflops(self) -> float | None:
        """Optimizer GFLOPs of one step, from the ledger; a function of the config alone."""
        estimate = self._over_results("optimizer_gflops_per_step")
        return estimate.mean if estimate else None

    @property
    def optimizer_ms(self) -> Estimate | None:
        """Measured milliseconds of one optimizer step; ``None`` across different devices."""
        return self._timing("optimizer_ms_per_step")

    @property
    def step_ms(self) -> Estimate | None:
        """Measured milliseconds of one whole training step; ``None`` across different devices."""
        return self._timing("step_ms")

    @property
    def seconds(self) -> Estimate | None:
        """Measured wall-clock seconds of a whole run; ``None`` across different devices."""
        if len(self.devices) != 1:
            return None
        return Estimate.of(run.seconds for run in self.alone or self.finished)

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

    def _timing(self, name: str) -> Estimate | None:
        return self._over_results(name, self.alone) if len(self.devices) == 1 else None

    def _over_results(self, name: str, chosen: Sequence[RunRecord] = ()) -> Estimate | None:
        """Over the chosen or the finished runs, or those that at least ended where none finished."""
        runs = chosen or self.finished or self.runs
        return Estimate.of(getattr(run.result, name) for run in runs if run.result)


@dataclass(frozen=True)
class AblationSet:
    """One setting varied and all else held: a row for each of its values.

    ``base`` is the row with nothing varied, what the others are compared with: one of ``rows``, or
    the method's row of the comparison where no value of this axis is the recipe's own.
    """

    axis: str
    method: str
    rows: tuple[Row, ...]
    values: tuple[int | float | str, ...]
    base: Row | None = None

    def difference(self, row: Row) -> Difference | None:
        """How far the metric of a row is from that of the base."""
        if self.base is None or row is self.base or not row.metric or not self.base.metric:
            return None
        return row.metric.minus(self.base.metric)

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

    def best(self, rows: Sequence[Row]) -> Row | None:
        """The row with the best mean metric."""
        scored = [(row.metric.mean, row) for row in rows if row.metric]
        choose = max if self.higher_is_better else min
        return choose(scored, key=lambda pair: pair[0])[1] if scored else None


def are_numbers(values: Iterable[object]) -> bool:
    """Whether all of ``values`` can be put on an axis."""
    return all(isinstance(value, int | float) for value in values)
