"""Two figures of validation perplexity over the time of training: the long run and shorter runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from long_run import SHOWN
from pages.figures.line_names import names_near
from pages.figures.svg import Frame, even_ticks, round_ticks, svg, text
from pages.records import long_run as study
from pages.records.curves import FULL, LIBRARY, OTHER, SKETCHED, Line, Point, curves, under
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


def long_run() -> str:
    """The figure of the long run: a line for each row of the study, of its first seed.

    Runs that shared the GPU have no time of their own, and no line.
    """
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
