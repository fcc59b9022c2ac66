"""Validation perplexity over the time of training, of runs as long as those of the tables.

The time of a point is its step times the median time of a whole step, so that compiling, evaluations
and a slow start do not count. The runs are in ``results/frontier/curves.jsonl``, which ``frontier.py run
--every 100`` makes: one run of each optimizer, of a row of the tables in ``docs/frontier.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frontier import CHOICE, identity, reported
from pages import ROOT
from pages.records.maps import peers, short_name, weighed
from pages.records.quality import BASE, VALIDATION, perplexities, records
from polarstep_lab.storage import read_lines
from which_text import check_one_text

CURVES = "results/frontier/curves.jsonl"

SKETCHED, FULL, LIBRARY, OTHER = "sketched", "full", "library", "other"
"""The kinds of lines: maps that sketch, full space, optimizers of other libraries, and the rest."""

Point = tuple[float, float]
"""Seconds, and the perplexity on validation text after them."""


@dataclass(frozen=True)
class Line:
    """A run in a figure over time. ``kind`` is one of the four above.

    ``ends`` are the last perplexities of all seeds that the tables report, where they are known.
    """

    name: str
    points: Sequence[Point]
    kind: str
    ends: Sequence[float] = ()

    @property
    def end(self) -> float:
        """The last perplexity."""
        return self.points[-1][1]

    @property
    def seconds(self) -> float:
        """The time of all steps."""
        return self.points[-1][0]

    def reaches(self, level: float) -> float | None:
        """The time from which the perplexity stays at ``level`` or below; ``None`` if it ends above."""
        part = under(self.points, level)
        return part[0][0] if part else None


def under(points: Sequence[Point], top: float) -> list[Point]:
    """The last part of a falling line that is not above ``top``, from where it crosses ``top`` on."""
    above = [k for k, (_, value) in enumerate(points) if value > top]
    if not above:
        return [*points]
    k = above[-1]
    if k + 1 == len(points):
        return []
    (x0, y0), (x1, y1) = points[k], points[k + 1]
    return [(x0 + (x1 - x0) * (y0 - top) / (y0 - y1), top), *points[k + 1 :]]


def recorded() -> list[dict[str, Any]]:
    """The records of the runs of :data:`CURVES`."""
    return read_lines(ROOT / CURVES)


def curves() -> dict[str, Line]:
    """The runs of :data:`CURVES` by the name of their map, in the order of the tables.

    Each must repeat a run of a map in the tables, and not of the seed that chose its rate. At another
    rate than in the tables its name has the rate. Raises ``ValueError`` for a run on another text.
    """
    others = peers()
    rows = {each.trained[0]: each for each in (*weighed(), *others) if each.trained}
    known = {identity(run) for run in records() if run["seed"] != CHOICE}
    check_one_text([*records(), *recorded()])
    found: dict[str, Line] = {}
    for run in recorded():
        trained = run["map"], run["lr"]
        words = f"{CURVES}: {run['map']}, rate {run['lr']:g}, seed {run['seed']}"
        if trained[0] not in rows or identity(run) not in known:
            raise ValueError(f"{words}: expected a run that the tables of docs/frontier.md report")
        if trained[0] in found:
            raise ValueError(f"{words}: expected one run of each map")
        each = rows[trained[0]]
        kind = LIBRARY if each in others else SKETCHED if each.columns else OTHER
        points = [(run["step_ms"] / 1000 * step, value) for step, value in run["curve"]]
        name = short_name(each.title)
        if trained != each.trained:
            name += f", rate {trained[1]:g}"
        ends = [*reported(perplexities(VALIDATION)[trained]).values()]
        found[trained[0]] = Line(name, points, FULL if trained == BASE else kind, ends)
    return {name: found[name] for name in rows if name in found}
