"""Randomized steps next to those in full space: what a sketch saves, and what it costs.

Fewer FLOPs need not be less time, least of all for small matrices, and the metric may pay for them.
Each randomized row stands next to full-space Muon with the same momentum; the values of a sketch
ablation are such rows too.
"""

from __future__ import annotations

from dataclasses import dataclass

from polarstep_lab.paper import METHODS, Method
from polarstep_lab.report.blocks import Table
from polarstep_lab.report.estimates import Difference
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.texts import (
    MISSING,
    difference_text,
    listed,
    number,
    plural,
    share_text,
    size_text,
)
from polarstep_lab.report.timing import commit_of, runtime_of

__all__ = ["RANDOMIZED_CAPTION", "Pair", "pairs_of", "randomized_table", "verdict"]

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
    """A row and another that its metric, FLOPs and times are compared with."""

    label: str
    row: Row
    full: Row

    @property
    def difference(self) -> Difference | None:
        """How far the metric is from the other row's."""
        return self.row.minus(self.full)

    @property
    def gflops(self) -> float | None:
        """The optimizer's FLOPs as a share of the other row's."""
        return _ratio(self.row.gflops, self.full.gflops)

    @property
    def times(self) -> tuple[float | None, float | None, float | None]:
        """How many times as long an optimizer step, a whole step and a run take.

        ``None`` where device, code and settings were not the same, or too few runs ran alone.
        """
        ours, theirs = _circumstances(self.row), _circumstances(self.full)
        if not ours or ours != theirs:
            return None, None, None
        optimizer, step, run = map(_ratio, self.row.times, self.full.times)
        few = min(len(self.row.alone), len(self.full.alone)) < _RUNS_TO_COMPARE
        return optimizer, step, None if few else run


def _circumstances(row: Row) -> set[tuple[object, ...]]:
    """What has to be the same for times to compare: device, code and settings of the lone runs."""
    return {
        (*row.devices, commit_of(run), *sorted(runtime_of(run).items()))
        for run in row.alone["record"]
    }


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def pairs_of(section: Section) -> list[Pair]:
    """The randomized rows of a section that have a full-space row to stand next to.

    None where runs were made to be watched: watching takes most of their time.
    """
    rows: dict[str, Row] = {}  # of several rows of a method, the one with the most seeds
    for row in sorted(section.rows, key=lambda row: -len(row.finished)):
        if row.metric and not section.watched:
            rows.setdefault(row.method, row)
    muons = [m for m in METHODS if m.algorithm == "muon" and m.name in rows]
    pairs = []
    for method in (m for m in muons if m.randomized):
        row = rows[method.name]
        labelled = [(row.label, row)]
        for ablation in section.ablations:
            if (ablation.axis, ablation.method) == ("sketch", method.name):
                others = [other for other in ablation.rows if other is not ablation.base]
                labelled += [(_label(method, row, other), other) for other in others]
        for full in muons:
            if full.nesterov is method.nesterov and not full.randomized:
                pairs += [Pair(label, r, rows[full.name]) for label, r in labelled if r.metric]
    return pairs


def _label(method: Method, row: Row, other: Row) -> str:
    """A value of the axis "sketch" by the name of its method with the sketch that ran."""
    ran = method.named(other.polar.get("sketch"))
    return f"{row.label.replace(method.name, ran, 1)}, {other.label}"


def randomized_table(section: Section) -> Table | None:
    """The randomized rows next to full space; ``None`` where there are not both."""
    header = ["Randomized", "Full space", "Difference", "GFLOPs", "Optimizer", "Step", "Run"]
    cells = [
        [
            pair.label,
            pair.full.label,
            difference_text(pair.difference, section.decimals),
            share_text(pair.gflops),
            *(MISSING if ratio is None else f"{ratio:.2f}×" for ratio in pair.times),
        ]
        for pair in pairs_of(section)
    ]
    return Table("Randomized next to full space", header, cells) if cells else None


def verdict(section: Section) -> str:
    """Whether randomized steps take less time here, and what the fastest gives up for it."""
    timed = [(step, pair) for pair in pairs_of(section) if (step := pair.times[1]) is not None]
    if not timed:
        return ""
    ratios = [f"{step:.2f}" for step in sorted(step for step, _ in timed)]
    span = ratios[0] if ratios[0] == ratios[-1] else f"{ratios[0]} to {ratios[-1]}"
    faster = [pair.label for step, pair in timed if round(step, 2) < 1]
    as_fast = [pair.label for step, pair in timed if round(step, 2) == 1]
    if faster and len(faster) == len(timed):
        which = "every randomized row is faster" if timed[1:] else f"{faster[0]} is faster"
    elif faster:
        which = f"of {len(timed)} randomized rows {listed(faster)} {_are(faster)} faster"
    elif as_fast:
        which = f"{listed(as_fast)} {_are(as_fast)} as fast"
    else:
        one = f"{timed[0][1].label} is not faster"
        which = "no randomized row is faster" if timed[1:] else one
    _, best = min(timed, key=lambda item: item[0])
    fastest = f"The fastest, {best.label}, takes" if timed[1:] else "It takes"
    difference = best.difference
    assert difference is not None  # both rows of a pair have a metric
    text = (
        f"A whole step takes {span} times as long as in full space: {which}. {fastest} "
        f"{number(best.row.step_ms)} ms where {best.full.label} takes {number(best.full.step_ms)}, "
        f"with {share_text(best.gflops)} of the optimizer's FLOPs; its {section.metric_name.lower()} "
        f"is {size_text(difference, section.decimals)}"
    )
    text += f" on {plural(difference.pairs, 'common seed')}" if difference.pairs else ""
    if difference.error is None:
        return f"{text}."
    return f"{text}, {'more' if difference.clear else 'less'} than two standard errors."


def _are(names: list[str]) -> str:
    return "are" if names[1:] else "is"
