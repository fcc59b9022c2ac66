"""Names near the ends of the lines of a figure, at places where they meet nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from pages.figures.svg import Box, Frame, meet, text

Spot = tuple[float, float]
"""A place in the units of the figure."""


def names_near(frame: Frame, lines: Sequence[tuple[str, Sequence[Spot]]]) -> list[str]:
    """The name of each line near its last spot, with a thin line between where the two are apart.

    A name meets no line, no other name, none of the thin lines, and is not close to the end of another
    line; no thin line passes such an end. Of the places that are left a name has the one with the
    shortest thin line, where each line that the thin one crosses counts as 25 units more.
    """
    drawn = [pair for _, spots in lines for pair in pairwise(spots)]
    ends = [spots[-1] for _, spots in lines]
    taken: list[Box] = []
    thin: list[tuple[Spot, Spot]] = []
    shapes = []
    # From the bottom up: the lowest ends are the closest to each other, and have the most room below.
    for words, spots in sorted(lines, key=lambda line: -line[1][-1][1]):
        x, y = end = spots[-1]
        others = [(a - 3, b - 3, a + 3, b + 3) for a, b in ends if math.dist((a, b), end) > 5]
        around = [(left - 7, up - 7, right + 7, down + 7) for left, up, right, down in others]
        best: tuple[float, Box, Spot] | None = None
        for box, tip in _boxes_around(end, 6.4 * len(words)):
            length = math.dist(end, tip)
            if best and length >= best[0]:
                break
            if not (frame.left + 4 < box[0] and box[2] < frame.right + 12):
                continue
            if not (frame.top < box[1] and box[3] < frame.bottom - 2):
                continue
            if any(meet(box, other) for other in (*taken, *around)):
                continue
            if any(_enters((end, tip), other) for other in (*taken, *others)):
                continue
            if any(_enters(line, box) for line in (*drawn, *thin)):
                continue
            price = length + 25 * sum(_cross((end, tip), line) for line in (*drawn, *thin))
            if not best or price < best[0]:
                best = price, box, tip
        assert best, f"no room for the name {words}"
        _, box, tip = best
        taken.append(box)
        if math.dist(end, tip) > 12:
            thin.append((end, tip))
            shapes.append(f'<path d="M{x:.1f} {y:.1f}L{tip[0]:.1f} {tip[1]:.1f}" class="grid"/>')
        side = "start" if tip[0] <= box[0] else "end"
        at = box[0] if side == "start" else box[2]
        shapes.append(text(at, box[3] - 3, words, kind="small", anchor=side))
    return shapes


def _boxes_around(end: Spot, long: float) -> list[tuple[Box, Spot]]:
    """Boxes for a name of this length around the end of a line, the nearest first.

    With each is the spot at its side where a line from ``end`` would stop.
    """
    x, y = end
    found = []
    for down in range(-240, 241, 4):
        for aside in range(6, 247, 6):
            middle = y + down
            for side in (1, -1):
                tip = (x + side * aside, middle)
                left = tip[0] + 3 if side > 0 else tip[0] - 3 - long
                found.append(((left, middle - 7, left + long, middle + 7), tip))
    return sorted(found, key=lambda place: math.dist(end, place[1]))


def _enters(line: tuple[Spot, Spot], box: Box) -> bool:
    """Whether a part of a straight line lies inside a box."""
    (x0, y0), (x1, y1) = line
    begin, end = 0.0, 1.0
    for start, change, low, high in ((x0, x1 - x0, box[0], box[2]), (y0, y1 - y0, box[1], box[3])):
        if change:
            first, last = sorted(((low - start) / change, (high - start) / change))
            begin, end = max(begin, first), min(end, last)
        elif not low < start < high:
            return False
    return begin < end


def _cross(a: tuple[Spot, Spot], b: tuple[Spot, Spot]) -> bool:
    """Whether two straight lines have a point in common that is inside of both."""

    def side(line: tuple[Spot, Spot], spot: Spot) -> float:
        (x0, y0), (x1, y1) = line
        return (x1 - x0) * (spot[1] - y0) - (y1 - y0) * (spot[0] - x0)

    return side(a, b[0]) * side(a, b[1]) < 0 and side(b, a[0]) * side(b, a[1]) < 0
