"""Validation perplexity over the time of training: two figures, and the lines that they draw.

The time of a point is its step times the median time of a whole step, so that compiling, evaluations
and a slow start do not count. :mod:`pages.records.long_run` has the lines of the long run. Those of the
shorter runs are in ``results/frontier/curves.jsonl``, which ``frontier.py run --every 100`` makes: one
run of each optimizer, of a row of the tables in ``docs/frontier.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frontier import CHOICE, identity
from pages import ROOT
from pages.figures.line_names import names_near
from pages.figures.svg import Frame, even_ticks, round_ticks, short_name, svg, text
from pages.records.quality import BASE, million_tokens, peers, records, weighed
from polarstep.storage import read_lines

CURVES = "results/frontier/curves.jsonl"

SKETCHED, FULL, LIBRARY, OTHER = "sketched", "full", "library", "other"
"""How a line is drawn: for maps that sketch, full space, optimizers of other libraries, and the rest."""
DRAWN = {
    SKETCHED: 'class="line"',
    FULL: 'class="line full"',
    LIBRARY: 'class="line other" stroke-dasharray="5 3"',
    OTHER: 'class="line other"',
}

Point = tuple[float, float]
"""Seconds, and the perplexity on validation text after them."""


@dataclass(frozen=True)
class Line:
    """A run in a figure over time. ``kind`` is one of :data:`DRAWN`."""

    name: str
    points: Sequence[Point]
    kind: str

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


HEIGHT = 1.5
"""The highest perplexity of a figure, in parts of the one that full space ends with."""
TITLE = "Validation perplexity over the time of training"


def drawn(
    lines: Sequence[Line], tokens: float, unit: str, seconds: float, *, apart: bool = False
) -> str:
    """A figure with a line for each run, and the name and the last perplexity of each.

    ``tokens`` are those of a run, in millions. A ``unit`` of time, as ``minutes``, has so many seconds.
    A line that ends above the figure is named below it. Names stand in a column on the right. Where the
    ends of the lines are far ``apart`` in time, the axis of time is logarithmic, and a name stands
    wherever there is room near the end of its line.
    """
    (full,) = (line.end for line in lines if line.kind == FULL)
    lowest, top = min(line.end for line in lines), HEIGHT * full
    bottom = lowest - (top - lowest) / 4 if apart else 0.97 * lowest  # with room for names
    last = max(line.seconds for line in lines) / seconds
    inside = [(line, part) for line in lines if (part := under(line.points, top))]
    first = min(part[0][0] for _, part in inside) / seconds
    width, height = 760, 520 if apart else 430
    right, x = (width - 16, 1.3 * last) if apart else (540, 1.02 * last)
    frame = Frame(52, 50, right, height - 72, (0.95 * first, x), (bottom, top), linear=not apart)
    shapes = [text(0, 20, TITLE, kind="title")]
    if apart:
        ticks, words = round_ticks(frame.x), f"{unit} of training steps, on a logarithmic scale"
    else:
        ticks, words = even_ticks(frame.x), f"{unit} of training steps"
    shapes += frame.axes(even_ticks(frame.y), ticks, words)
    named = []
    for line, part in inside:
        spots = [frame.at(x / seconds, value) for x, value in part]
        path = "L".join(f"{x:.1f} {up:.1f}" for x, up in spots)
        shapes.append(f'<path d="M{path}" {DRAWN[line.kind]}/>')
        named.append((f"{line.name}, {line.end:.1f}", spots))
    shapes += names_near(frame, named) if apart else _column(frame, named)
    note = (
        f"One seed of each method, {tokens:.1f}M tokens. Blue: maps that sketch. Thick: full space."
    )
    if any(line.kind == LIBRARY for line in lines):
        note += " Dashed: other libraries."
    shapes.append(text(0, height - 8, note, kind="small"))
    outside = [f"{line.name} ({line.end:.1f})" for line in lines if line.end > top]
    if outside:
        height += 14
        words = f"Above the figure: {', '.join(outside)}."
        shapes.append(text(0, height - 8, words, kind="small"))
    return svg(width, height, TITLE, shapes)


def _column(frame: Frame, named: Sequence[tuple[str, Sequence[Point]]]) -> list[str]:
    """The names of lines on the right of a frame, from top to bottom, each joined to its end."""
    shapes = []
    room = frame.bottom - 13 * len(named)  # so that the lowest name is still inside the frame
    below = -math.inf
    ends = sorted((spots[-1][1], words, spots[-1][0]) for words, spots in named)
    for k, (at, words, x) in enumerate(ends):
        below = max(min(at, room + 13 * (k + 1)), below + 13)
        shapes.append(
            f'<path d="M{x + 3:.1f} {at:.1f}L{frame.right + 14} {below:.1f}" class="grid"/>'
        )
        shapes.append(text(frame.right + 18, below + 4, words, kind="small"))
    return shapes


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


def long_run() -> str:
    """The figure of the long run: a line for each row of the study, of its first seed.

    Runs that shared the GPU have no time of their own, and no line.
    """
    from long_run import SHOWN
    from pages.records import long_run as study

    lines = []
    for row in SHOWN:
        alone = study.alone(row.slug)
        if found := study.tests(row.slug).keys() & alone.keys():
            points = study.seconds(alone[min(found)])
            kind = SKETCHED if row.method.randomized else LIBRARY if row.method.peer else OTHER
            lines.append(Line(_brief(row.title), points, FULL if row.slug == study.BASE else kind))
    return drawn(lines, study.million_tokens(), "minutes", 60)


def _brief(title: str) -> str:
    """The name of a method of the long run beside its line."""
    name = title.replace("PolarExpress 5", "full space").replace(", normalized rows", " + rows")
    name = name.replace("normalized rows", "+ rows").replace("Deflated Muon", "Deflated")
    return short_name(name)


def frontier() -> str:
    """The figure of the shorter runs, ours beside the optimizers of other libraries."""
    return drawn([*curves().values()], million_tokens(), "seconds", 1, apart=True)


def recorded() -> list[dict[str, Any]]:
    """The records of the runs of :data:`CURVES`."""
    return read_lines(ROOT / CURVES)


def curves() -> dict[str, Line]:
    """The runs of :data:`CURVES` by the name of their map, in the order of the tables.

    Each must repeat a run that the tables report: one at their rate, and not of the seed that chose it.
    """
    others = peers()
    rows = {each.trained: each for each in (*weighed(), *others) if each.trained}
    known = {identity(run) for run in records() if run["seed"] != CHOICE}
    found: dict[tuple[str, float], Line] = {}
    for run in recorded():
        trained = run["map"], run["lr"]
        words = f"{CURVES}: {run['map']}, rate {run['lr']:g}, seed {run['seed']}"
        if trained not in rows or identity(run) not in known:
            raise ValueError(f"{words}: expected a run that the tables of docs/frontier.md report")
        if trained in found:
            raise ValueError(f"{words}: expected one run of each map")
        each = rows[trained]
        kind = LIBRARY if each in others else SKETCHED if each.columns else OTHER
        points = [(run["step_ms"] / 1000 * step, value) for step, value in run["curve"]]
        name = short_name(each.title)
        found[trained] = Line(name, points, FULL if trained == BASE else kind)
    return {trained[0]: found[trained] for trained in rows if trained in found}
