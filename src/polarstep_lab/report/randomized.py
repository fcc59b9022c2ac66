"""Randomized steps next to those in full space: what a sketch saves, and what it costs.

Fewer FLOPs need not take less time, least of all for small matrices, and may make the metric worse.
Each randomized row stands next to full-space Muon with the same momentum; so does each value of a
sketch ablation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from polarstep_lab.axes import longest_short_side
from polarstep_lab.config import ConfigError, RunConfig
from polarstep_lab.estimates import Difference, Estimate
from polarstep_lab.paper import METHODS
from polarstep_lab.report.blocks import Block, Table, Text, part
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.tables import difference_cells
from polarstep_lab.wording import MISSING, in_digits, joined, listed

__all__ = ["Pair", "pairs_of", "randomized_blocks", "randomized_table", "verdict"]

_CAPTION = (
    "Difference: of the metric from that in full space, on the seeds that both have (Pairs), ± half its "
    "95% t-interval. GFLOPs and times: in parts of those in full space. Times are compared where both "
    "rows have some of runs alone on the same device, at the same commit and under the same settings."
)


@dataclass(frozen=True)
class Pair:
    """A row, and the row ``full`` that its metric, FLOPs and times are compared with."""

    label: str
    row: Row
    full: Row

    @property
    def difference(self) -> Difference:
        """How far the metric of ``row`` is from that of ``full``; both rows have finished runs."""
        found = self.row.minus(self.full)
        assert found is not None
        return found

    @property
    def gflops(self) -> str:
        """The optimizer's FLOPs of ``row`` in per cent of those of ``full``."""
        ours, theirs = self.row.gflops, self.full.gflops
        return f"{ours / theirs:.2%}" if ours is not None and theirs else MISSING

    @property
    def times(self) -> pd.Series:
        """The times of a step and of the run in ``row`` as multiples of those in ``full``.

        NaN unless both rows have runs that ran alone, with the same device, commit and settings.
        """
        ours, theirs = ({str(c) for c in row.alone["conditions"]} for row in (self.row, self.full))
        found = self.row.times / self.full.times
        return found if ours and ours == theirs else found * math.nan

    @property
    def step_difference(self) -> Difference:
        """How much longer a whole step of ``row`` takes than of ``full``, over runs that ran alone."""
        ours, theirs = (Estimate.of(row.alone["step_ms"]) for row in (self.row, self.full))
        assert ours is not None
        assert theirs is not None
        return ours.minus(theirs)


def pairs_of(section: Section) -> list[Pair]:
    """The randomized rows of a section, each with its full-space row; rows without it are left out.

    Both rows of a pair have the same model and the same data.
    Empty where every row recorded noise, γ or ν: recording takes most of the time of such runs.
    """
    if section.watched:
        return []
    rows = {method: row for method, row in section.by_method.items() if row.metric}
    muons = [m for m in METHODS if m.algorithm == "muon" and m.name in rows]
    pairs = []
    for method in (m for m in muons if m.randomized):
        row = rows[method.name]
        labelled = {row: row.label}
        for ablation in section.ablations:
            if (ablation.axis, ablation.method) == ("sketch", method.name):
                for other in (other for other in ablation.rows if other is not ablation.base):
                    label = row.label.replace(method.name, other.method_that_ran, 1)
                    labelled[other] = f"{label}, {other.label}"
        for full in (m for m in muons if m.nesterov is method.nesterov and not m.randomized):
            for other, label in labelled.items():
                found = _of_the_same_task([rows[full.name], *section.rows], full.name, other)
                if other.metric and found:
                    pairs.append(Pair(label, other, found))
    return pairs


def _of_the_same_task(rows: Sequence[Row], method: str, row: Row) -> Row | None:
    """The first of ``rows`` that has this method, and the model and the data of ``row``.

    A run of more steps, or of a larger network, reaches another metric whatever its polar map.
    """
    return next((r for r in rows if r.method == method and r.metric and r.task == row.task), None)


def randomized_blocks(section: Section) -> list[Block | None]:
    """The table of randomized rows next to full space, with its verdict in words before it."""
    return part(randomized_table(section), _CAPTION, lead=Text(verdict(section)))


def randomized_table(section: Section) -> Table:
    """A line for each pair of a randomized row and its full-space row."""
    lines = [
        {
            "Randomized": pair.label,
            "Full space": pair.full.label,
            **difference_cells(pair.difference, section.metric),
            "GFLOPs": pair.gflops,
            "Optimizer": _times(pair.times["optimizer_ms_per_step"]),
            "Step": _times(pair.times["step_ms"]),
        }
        for pair in pairs_of(section)
    ]
    return Table("Randomized next to full space", pd.DataFrame(lines))


def _times(ratio: float) -> str:
    """A ratio of times, as ``0.82×``; a dash for NaN."""
    return MISSING if ratio != ratio else f"{ratio:.2f}×"


def verdict(section: Section) -> str:
    """Which randomized steps take less time, and what the fastest randomized optimizer gives up.

    Outside the optimizer all rows compute the same, so what the time of that part varies by between
    runs is noise. A whole step is called faster or slower only if the interval of the difference lies
    beyond that noise. One run of a row has no interval.
    """
    pairs = pairs_of(section)
    same = [pair.label for pair in pairs if _sketches_nothing(pair.row)]
    unsketched = (
        f"No matrix has more rows than ℓ: {listed(same)} ran in full space." if same else ""
    )
    timed = {pair: pair.times for pair in pairs if pair.times.notna()["step_ms"]}
    if not timed:
        return unsketched
    ratios = sorted({f"{times['step_ms']:.2f}" for times in timed.values()})
    runs = pd.concat([row.alone for pair in timed for row in (pair.row, pair.full)])
    rest = runs["step_ms"] - runs["optimizer_ms_per_step"]
    noise = round(float(rest.max() - rest.min()), 6)
    groups: dict[str, list[str]] = {"Faster": [], "Slower": [], "Neither": []}
    for pair in timed:
        groups[_how(pair.step_difference, noise)].append(pair.label)
    least = min(timed, key=lambda pair: timed[pair]["optimizer_ms_per_step"])
    ours, theirs = (in_digits(r.times["optimizer_ms_per_step"]) for r in (least.row, least.full))
    return joined(
        f"A whole step takes {' to '.join(dict.fromkeys((ratios[0], ratios[-1])))} times as long as in "
        "full space. What a step does outside the optimizer is the same in all rows and its time varied "
        f"by {in_digits(noise, 2)} ms between runs. A row is called faster or slower where the 95% "
        "t-interval of the difference to full space lies beyond that.",
        *(f"{how}: {listed(names)}." for how, names in groups.items() if names),
        f"The least optimizer time is that of {least.label}, {ours} ms where {least.full.label} takes "
        f"{theirs}, with {least.gflops} of the FLOPs; its {section.metric.name.lower()} is "
        f"{least.difference.sentence(section.metric.decimals)}.",
        unsketched,
    )


def _how(longer: Difference, noise: float) -> str:
    """What is said of a step whose time differs so from that in full space."""
    if longer.interval is None or abs(longer.value) - longer.interval <= noise:
        return "Neither"
    return "Faster" if longer.value < 0 else "Slower"


def _sketches_nothing(row: Row) -> bool:
    """Whether the sketch of a row has at least as many columns as every matrix has rows."""
    try:
        config = RunConfig.from_dict(row.config)
    except ConfigError:  # a record of another version: its model cannot be built
        return False
    polar = config.optimizer.polar
    return polar.rank is not None and polar.rank + polar.oversample >= longest_short_side(
        config.model
    )
