"""Two figures of validation perplexity over the time of training: the long run and shorter runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from long_run import SHOWN
from pages.figures.svg import Frame, even_ticks, round_ticks, svg, text
from pages.records import long_run as study
from pages.records.curves import (
    FULL,
    LIBRARY,
    OTHER,
    SKETCHED,
    Line,
    Point,
    curves,
    recorded,
    under,
)
from pages.records.maps import short_name
from pages.records.quality import million_tokens

DRAWN = {
    SKETCHED: 'class="line"',
    FULL: 'class="line full"',
    LIBRARY: 'class="line other" stroke-dasharray="5 3"',
    OTHER: 'class="line other"',
}
"""How a line of each kind is drawn."""

HEIGHT = 1.5
"""The highest perplexity of a figure, in parts of the one that full space ends with."""
TITLE = "Validation perplexity over the time of training"


def drawn(
    lines: Sequence[Line], unit: str, seconds: float, notes: Sequence[str], *, log: bool = False
) -> str:
    """A figure with a line for each run, and its name with its last perplexity, or those of all seeds.

    A ``unit`` of time, as ``minutes``, has so many seconds; with ``log`` its axis is logarithmic. Names
    stand in a column on the right, in the order of the ends of their lines, and ``notes`` below. A line
    that ends above the figure is named below it. The line of full space lies over the others.
    """
    (full,) = (line.end for line in lines if line.kind == FULL)
    top = HEIGHT * full
    last = max(line.seconds for line in lines) / seconds
    inside = [(line, part) for line in lines if (part := under(line.points, top))]
    first = min(part[0][0] for _, part in inside) / seconds
    names = {line.name: f"{line.name}, {_told(line)}" for line, _ in inside}
    width, height = 760, 430
    x, y = (0.95 * first, 1.02 * last), (0.97 * min(line.end for line in lines), top)
    right = width - 24 - 6.6 * max(map(len, names.values()))
    frame = Frame(52, 50, right, height - 72, x, y, linear=not log)
    shapes = [text(0, 20, TITLE, kind="title")]
    ticks = round_ticks(frame.x) if log else even_ticks(frame.x)
    words = f"{unit} of training steps{', on a logarithmic scale' if log else ''}"
    shapes += frame.axes(even_ticks(frame.y), ticks, words)
    named = []
    for line, part in sorted(inside, key=lambda each: each[0].kind == FULL):
        spots = [frame.at(x / seconds, value) for x, value in part]
        path = "L".join(f"{x:.1f} {up:.1f}" for x, up in spots)
        shapes.append(f'<path d="M{path}" {DRAWN[line.kind]}/>')
        named.append((names[line.name], spots))
    shapes += _column(frame, named)
    legend = "Blue: maps that sketch. Thick: full space."
    if any(line.kind == LIBRARY for line in lines):
        legend += " Dashed: other libraries, without a CUDA graph."
    outside = [f"{line.name} ({_told(line)})" for line in lines if line.end > top]
    above = [f"Above the figure: {', '.join(outside)}."] if outside else []
    for note in (legend, *notes, *above):
        shapes.append(text(0, height - 8, note, kind="small"))
        height += 14
    return svg(width, height - 14, TITLE, shapes)


def _told(line: Line) -> str:
    """The last perplexity of a line, or from the lowest to the highest of all its seeds."""
    ends = line.ends or (line.end,)
    return " to ".join(dict.fromkeys(f"{end:.1f}" for end in (min(ends), max(ends))))


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


def long_run() -> str:
    """The figure of the long run: a line for each row of the study, of the seed in the middle.

    Runs that shared the GPU have no time of their own, and no line.
    """
    lines = []
    for row in SHOWN:
        alone = study.alone(row.slug)
        if found := study.tests(row.slug).keys() & alone.keys():
            points = middle([study.seconds(alone[seed]) for seed in sorted(found)])
            kind = SKETCHED if row.method.randomized else LIBRARY if row.method.peer else OTHER
            lines.append(Line(_brief(row.title), points, FULL if row.slug == study.BASE else kind))
    rest = rest_of_a_step()
    notes = (
        f"{study.million_tokens():.1f}M tokens. Each line is of the run with the middle end of those "
        "with a time, of two the lower one.",
        f"Runs are of different days: what a step does outside the optimizer took {min(rest):.0f} to "
        f"{max(rest):.0f} ms.",
    )
    return drawn(lines, "minutes", 60, notes)


def middle(runs: Sequence[Sequence[Point]]) -> Sequence[Point]:
    """The run whose last perplexity is in the middle; of an even number the lower one of two."""
    return sorted(runs, key=lambda points: points[-1][1])[(len(runs) - 1) // 2]


def rest_of_a_step() -> list[float]:
    """The ms of a step outside the optimizer, in the median of each row of the long run."""
    times = (study.times(row.slug) for row in SHOWN)
    return [whole - optimizer for optimizer, whole in filter(None, times)]


def _brief(title: str) -> str:
    """The name of a method of the long run beside its line."""
    name = title.replace("PolarExpress 5", "full space").replace(", normalized rows", " + rows")
    name = name.replace("normalized rows", "+ rows").replace("Deflated Muon", "Deflated")
    return short_name(name)


def frontier() -> str:
    """The figure of the shorter runs, ours beside the optimizers of other libraries."""
    lines = [*curves().values()]
    (seed,) = {run["seed"] for run in recorded()}
    seeds = max(len(line.ends) for line in lines)
    notes = (
        f"{million_tokens():.1f}M tokens. Each line is of seed {seed}; the numbers are the ends of all "
        f"{seeds} seeds of the tables, lowest to highest.",
    )
    return drawn(lines, "seconds", 1, notes, log=True)
