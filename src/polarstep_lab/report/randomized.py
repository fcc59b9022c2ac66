"""Randomized steps next to those in full space: what a sketch saves, and what it costs.

Fewer FLOPs need not be less time, least of all for small matrices, and the metric may pay for them.
Each randomized row stands next to full-space Muon with the same momentum; the values of a sketch
ablation are such rows too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polarstep_lab.methods import METHODS
from polarstep_lab.report.estimates import Difference
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.texts import (
    MISSING,
    decimals_of,
    difference_text,
    listed,
    number,
    share_text,
)
from polarstep_lab.report.timing import commit_of, runtime_of

__all__ = ["RANDOMIZED_CAPTION", "Pair", "pairs_of", "randomized_cells", "verdict"]

RANDOMIZED_CAPTION = (
    "Difference: of the metric from that in full space, on the seeds that both have, ± its standard "
    "error. GFLOPs and times: in parts of those in full space. Times are compared where both rows "
    "have some of runs alone on the same device, at the same commit and under the same settings; "
    "those of whole runs where three seeds or more have them, since the first run of a process also "
    "compiles."
)

_RUNS_TO_COMPARE = 3


@dataclass(frozen=True)
class Pair:
    """A randomized row and the full-space one with the same momentum."""

    label: str
    row: Row
    full: Row

    @property
    def difference(self) -> Difference | None:
        """How far the metric is from that in full space."""
        return self.row.minus(self.full)

    @property
    def gflops(self) -> float | None:
        """The optimizer's FLOPs as a share of those in full space."""
        return _ratio(self.row.gflops, self.full.gflops)

    @property
    def optimizer(self) -> float | None:
        """How many times as long an optimizer step takes."""
        return self._times_as_long(lambda row: row.optimizer_ms)

    @property
    def step(self) -> float | None:
        """How many times as long a whole training step takes."""
        return self._times_as_long(lambda row: row.step_ms)

    @property
    def run(self) -> float | None:
        """How many times as long a whole run takes."""
        few = min(len(self.row.alone), len(self.full.alone)) < _RUNS_TO_COMPARE
        return None if few else self._times_as_long(lambda row: row.seconds)

    def _times_as_long(self, time: Callable[[Row], float | None]) -> float | None:
        ours, theirs = _circumstances(self.row), _circumstances(self.full)
        return _ratio(time(self.row), time(self.full)) if ours and ours == theirs else None


def pairs_of(section: Section) -> tuple[Pair, ...]:
    """The randomized rows of a section that have one in full space to stand next to.

    None where runs were made to be watched: watching takes most of their time.
    """
    if section.watched:
        return ()
    found = []
    rows = _row_of_each_muon(section)
    for method in METHODS:
        if not method.randomized or method.name not in rows:
            continue
        row = rows[method.name]
        labelled = [(row.label, row)]
        for ablation in section.ablations:
            if (ablation.axis, ablation.method) == ("sketch", method.name):
                others = [other for other in ablation.rows if other is not ablation.base]
                labelled += [(f"{row.label}, {other.label}", other) for other in others]
        for other in METHODS:
            same = other.algorithm == "muon" and other.nesterov is method.nesterov
            if same and not other.randomized and other.name in rows:
                found += [Pair(label, r, rows[other.name]) for label, r in labelled if r.metric]
    return tuple(found)


def _row_of_each_muon(section: Section) -> dict[str, Row]:
    """The row of each Muon of Table 2 in which something finished; of several, that of most seeds."""
    muons = {method.name for method in METHODS if method.algorithm == "muon"}
    rows: dict[str, Row] = {}
    for row in sorted(section.rows, key=lambda row: -len(row.finished)):
        if row.method in muons and row.metric:
            rows.setdefault(row.method, row)
    return rows


def _circumstances(row: Row) -> set[tuple[object, ...]]:
    """What has to be the same for times to compare: device, code and settings of the lone runs."""
    return {(*row.devices, commit_of(r), *sorted(runtime_of(r).items())) for r in row.alone}


def randomized_cells(section: Section) -> tuple[list[str], list[list[str]]] | None:
    """Header and cells of the table; ``None`` where there is nothing to compare."""
    header = ["Randomized", "Full space", "Difference", "GFLOPs", "Optimizer", "Step", "Run"]
    rows = [
        [
            pair.label,
            pair.full.label,
            difference_text(pair.difference, decimals_of(section)),
            share_text(pair.gflops),
            *(_times_text(ratio) for ratio in (pair.optimizer, pair.step, pair.run)),
        ]
        for pair in pairs_of(section)
    ]
    return (header, rows) if rows else None


def verdict(section: Section) -> str:
    """Whether randomized steps take less time here, and what the fastest gives for it, in words."""
    timed = [(step, pair) for pair in pairs_of(section) if (step := pair.step) is not None]
    if not timed:
        return ""
    ratios = [f"{step:.2f}" for step, _ in sorted(timed, key=lambda item: item[0])]
    span = ratios[0] if ratios[0] == ratios[-1] else f"{ratios[0]} to {ratios[-1]}"
    faster = [pair.label for step, pair in timed if round(step, 2) < 1]
    as_fast = [pair.label for step, pair in timed if round(step, 2) == 1]
    if len(faster) == len(timed):
        which = "every randomized row is faster" if faster[1:] else f"{faster[0]} is faster"
    elif faster:
        are = "are" if faster[1:] else "is"
        which = f"of {len(timed)} randomized rows {listed(faster)} {are} faster"
    elif as_fast:
        which = f"{listed(as_fast)} {'are' if as_fast[1:] else 'is'} as fast"
    else:
        label = timed[0][1].label
        which = "no randomized row is faster" if timed[1:] else f"{label} is not faster"
    _, best = min(timed, key=lambda item: item[0])
    fastest = f"The fastest, {best.label}, takes" if timed[1:] else "It takes"
    return (
        f"A whole step takes {span} times as long as in full space: {which}. {fastest} "
        f"{number(best.row.step_ms)} ms where {best.full.label} takes {number(best.full.step_ms)}, "
        f"with {share_text(best.gflops)} of the optimizer's FLOPs{_metric_text(section, best)}."
    )


def _metric_text(section: Section, pair: Pair) -> str:
    """By how much the metric is higher or lower, and on how many seeds."""
    difference = pair.difference
    if difference is None:
        return ""
    size = difference_text(
        Difference(abs(difference.value), difference.error), decimals_of(section)
    )
    text = (
        f"; its {section.metric_name.lower()} is {size.removeprefix('+')} "
        f"{'lower' if difference.value < 0 else 'higher'}"
    )
    if difference.pairs:
        text += f" on {difference.pairs} common seed{'s' * (difference.pairs > 1)}"
    if difference.error is not None:
        text += f", {'more' if difference.clear else 'less'} than two standard errors"
    return text


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def _times_text(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}×"
