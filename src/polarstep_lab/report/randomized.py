"""Randomized steps next to those in full space: what a sketch saves, and what it costs.

Fewer FLOPs need not be less time, least of all for small matrices, and the metric may pay for them.
Each randomized row stands next to full-space Muon with the same momentum; the values of a sketch
ablation are such rows too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polarstep_lab.paper import METHODS
from polarstep_lab.report.estimates import Difference
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.texts import difference_text, listed, number, plural, share_text
from polarstep_lab.report.timing import commit_of, runtime_of

__all__ = ["Pair", "change_text", "pairs_of", "verdict"]

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


def _circumstances(row: Row) -> set[tuple[object, ...]]:
    """What has to be the same for times to compare: device, code and settings of the lone runs."""
    return {
        (*row.devices, commit_of(run), *sorted(runtime_of(run).items()))
        for run in row.alone["record"]
    }


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def pairs_of(section: Section) -> tuple[Pair, ...]:
    """The randomized rows of a section that have a full-space row to stand next to.

    None where runs were made to be watched: watching takes most of their time.
    """
    if section.watched:
        return ()
    rows: dict[str, Row] = {}  # of several rows of a method, the one with the most seeds
    for row in sorted(section.rows, key=lambda row: -len(row.finished)):
        if row.metric:
            rows.setdefault(row.method, row)
    muons = [m for m in METHODS if m.algorithm == "muon" and m.name in rows]
    pairs = []
    for method in (m for m in muons if m.randomized):
        row = rows[method.name]
        labelled = [(row.label, row)]
        for ablation in section.ablations:
            if (ablation.axis, ablation.method) == ("sketch", method.name):
                others = [other for other in ablation.rows if other is not ablation.base]
                labelled += [(f"{row.label}, {other.label}", other) for other in others]
        for full in muons:
            if full.nesterov is method.nesterov and not full.randomized:
                pairs += [Pair(label, r, rows[full.name]) for label, r in labelled if r.metric]
    return tuple(pairs)


def verdict(section: Section) -> str:
    """Whether randomized steps take less time here, and what the fastest gives up for it."""
    timed = [(step, pair) for pair in pairs_of(section) if (step := pair.step) is not None]
    if not timed:
        return ""
    ratios = [f"{step:.2f}" for step in sorted(step for step, _ in timed)]
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
    change = change_text(section, best.difference)
    return (
        f"A whole step takes {span} times as long as in full space: {which}. {fastest} "
        f"{number(best.row.step_ms)} ms where {best.full.label} takes {number(best.full.step_ms)}, "
        f"with {share_text(best.gflops)} of the optimizer's FLOPs{change and f'; its {change}'}."
    )


def change_text(section: Section, difference: Difference | None) -> str:
    """By how much the metric is higher or lower, on how many seeds, and whether that is clear."""
    if difference is None:
        return ""
    size = difference_text(Difference(abs(difference.value), difference.error), section.decimals)
    text = (
        f"{section.metric_name.lower()} is {size.removeprefix('+')} "
        f"{'lower' if difference.value < 0 else 'higher'}"
    )
    if difference.pairs:
        text += f" on {plural(difference.pairs, 'common seed')}"
    if difference.error is not None:
        text += f", {'more' if difference.clear else 'less'} than two standard errors"
    return text
