"""The figure of the gap to full space over tokens and over width."""

from __future__ import annotations

import scaling as study
from pages.figures.svg import Frame, multiples, percent, svg, text
from pages.records.quality import million_tokens
from pages.records.scaling import OVER, gaps


def draw() -> str:
    """The gap to full space over tokens and over width, with the fitted lines."""
    found = gaps()
    known = [gap for name in found for of in OVER.values() for _, gap in of(found, name)]
    width, height = 760, 394
    shapes = [text(0, 20, "Test perplexity against full space", kind="title")]
    y = (min(-1.0, min(known) - 1), max(known) + 1.5)
    panels: tuple[tuple[study.Unit, list[float], str], ...] = (
        ("tokens", [study.million(steps) for steps in study.LENGTHS], "million tokens, width 768"),
        ("width", [float(w) for w in study.WIDTHS], f"width, {million_tokens():.1f}M tokens"),
    )
    for place, (unit, ticks, words) in enumerate(panels):
        left = 52 + place * 372
        frame = Frame(left, 50, left + 320, height - 76, (0.8 * ticks[0], 1.25 * ticks[-1]), y)
        percents = {value: percent(value) for value in multiples(2, y)}
        shapes += frame.axes(percents, {tick: f"{tick:.0f}" for tick in ticks}, words)
        for name, kind, title in (
            (study.SIXTH, "low", "the map of auto"),
            (study.LOW_RANK, "other", "LowRank"),
        ):
            points = OVER[unit](found, name)
            for x, gap in points:
                at, up = frame.at(x, gap)
                shapes.append(f'<circle cx="{at:.1f}" cy="{up:.1f}" r="4" class="{kind}"/>')
            if not points:
                continue
            end = max(x for x, _ in points)
            spots = [frame.at(*point) for point in points]
            # The name lies above the points in the right half of the frame.
            top = min(up for at, up in spots if at > (frame.left + frame.right) / 2)
            if line := study.fits(found, name).get(unit):
                title += f": {line.told}"
                begin = min(x for x, _ in points)
                (x0, y0), (x1, y1) = (frame.at(x, line.at(x)) for x in (begin, end))
                path = f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"
                other = "" if kind == "low" else " other"
                shapes.append(f'<path d="{path}" class="bar{other}"/>')
                # … and above the line, from where the name begins.
                begins = max(0.0, (frame.right - 130 - x0) / (x1 - x0))
                top = min(top, y1, y0 + (y1 - y0) * begins)
            shapes.append(text(frame.right, top - 10, title, kind="small", anchor="end"))
    notes = (
        "A point is a pair of runs with one seed. Lines are fitted to the logarithm:",
        "points of percent for each doubling, with 95% t-intervals.",
    )
    shapes += [text(0, height - 22 + 14 * k, note, kind="small") for k, note in enumerate(notes)]
    return svg(width, height, "Test perplexity against full space over tokens and width", shapes)
