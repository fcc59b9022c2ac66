"""Parts of the figures of the pages: an SVG for light and dark pages, axes, and names beside marks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

STYLE = (
    "text{font:14px sans-serif;fill:#666}.title{font-weight:bold}.small{font-size:12px}"
    ".low{fill:#3f6fb5}.other{fill:#a8a8a8}.axis{stroke:#888;stroke-width:1}"
    ".grid{stroke:#8884;stroke-width:1}.bar{stroke:#3f6fb5;stroke-width:2}"
    ".bar.other{stroke:#8a8a8a}.hollow{fill:none;stroke:#3f6fb5;stroke-width:2}.hollow.other{fill:none;stroke:#8a8a8a}"
    ".line{stroke:#3f6fb5;stroke-width:2;fill:none}.line.other{stroke:#8a8a8a;stroke-width:1.5;fill:none}"
    ".line.full{stroke:#333;stroke-width:2.5}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.low{fill:#7aa7e8}.bar{stroke:#7aa7e8}"
    ".hollow:not(.other){stroke:#7aa7e8}.line{stroke:#7aa7e8}.line.full{stroke:#ddd}}"
)


def svg(width: int, height: int, title: str, shapes: Sequence[str]) -> str:
    """A whole figure; ``title`` is what a screen reader says of it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *shapes, "</svg>\n"])


def text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    """Words at a place; ``kind`` is their class in :data:`STYLE`."""
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{words}</text>'


def percent(value: float) -> str:
    """As ``+2%``, ``0%`` or ``−2%``."""
    return f"{'−' if value < 0 else '+' if value > 0 else ''}{abs(value):g}%"


def multiples(unit: float, between: tuple[float, float]) -> list[float]:
    """The multiples of ``unit`` between two numbers."""
    first, last = math.ceil(between[0] / unit), math.floor(between[1] / unit)
    return [unit * k for k in range(first, last + 1)]


def even_ticks(between: tuple[float, float]) -> dict[float, str]:
    """Four to eleven evenly spaced values of a linear axis, each with its label.

    The values are multiples of 1, 2 or 5 times a power of ten, the smallest such unit of which the axis
    is at most ten long. The next smaller unit is at least 2/5 of it, so the axis is longer than four.
    """
    length = between[1] - between[0]
    power = math.floor(math.log10(length)) - 1
    decimals, unit = next(
        (max(0, -p), digit * 10.0**p)
        for p in (power, power + 1)
        for digit in (1, 2, 5)
        if length <= 10 * digit * 10.0**p
    )
    return {value: f"{value:.{decimals}f}" for value in multiples(unit, between)}


def round_ticks(between: tuple[float, float]) -> dict[float, str]:
    """Round values of a logarithmic axis, each with its label: 1, 2, 3, 4, 5, 7, 10, 20 and so on."""
    powers = range(math.floor(math.log10(between[0])), math.ceil(math.log10(between[1])) + 1)
    values = (digit * 10.0**power for power in powers for digit in (1, 2, 3, 4, 5, 7))
    return {value: f"{value:g}" for value in values if between[0] <= value <= between[1]}


@dataclass(frozen=True)
class Frame:
    """A plot's area, and where a value lies in it."""

    left: float
    top: float
    right: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]
    linear: bool = False
    """Whether x is shown as it is, not by its logarithm."""

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a value lies, in the units of the figure."""
        first, last, here = (v if self.linear else math.log(v) for v in (*self.x, x))
        along = (here - first) / (last - first)
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + along * (self.right - self.left), self.bottom - up * (
            self.bottom - self.top
        )

    def axes(self, y: Mapping[float, str], x: Mapping[float, str], words: str) -> list[str]:
        """A line with its label at each ``y``, a label below each ``x``, and what ``x`` is in words."""
        shapes = []
        for value, label in y.items():
            _, at = self.at(self.x[0], value)
            kind = "axis" if value == 0 else "grid"
            shapes.append(f'<path d="M{self.left} {at:.1f}H{self.right}" class="{kind}"/>')
            shapes.append(text(self.left - 6, at + 4, label, kind="small", anchor="end"))
        shapes.append(
            f'<path d="M{self.left} {self.top}V{self.bottom}H{self.right}" '
            'class="axis" fill="none"/>'
        )
        for value, label in x.items():
            at, _ = self.at(value, self.y[0])
            shapes.append(text(at, self.bottom + 17, label, kind="small", anchor="middle"))
        middle = (self.left + self.right) / 2
        return [*shapes, text(middle, self.bottom + 36, words, kind="small", anchor="middle")]

    def names(
        self, marks: Sequence[tuple[float, float, str]], beside: Sequence[Box] = ()
    ) -> list[str]:
        """A name for each mark, at the first place where it meets no mark, name or line at zero.

        Names do not meet the boxes ``beside`` either. A name that stands far from its mark has a line to
        it. Lines and names cross only where there is no other place.
        """
        taken = [*beside, *((x - 8, y - 8, x + 8, y + 8) for x, y, _ in marks)]
        _, zero = self.at(self.x[0], 0)
        taken.append((self.left, zero - 1, self.right, zero + 1))
        named: list[Box] = []
        lines: list[Box] = []
        shapes = []
        for x, y, name in marks:
            boxes = [_box(x, y, name, place) for place in _PLACES]
            free = [
                k
                for k, box in enumerate(boxes)
                if self._holds(box) and not _meets(box, (*taken, *named))
            ]
            clear = (
                k
                for k in free
                if not _meets(boxes[k], lines)
                and not any(_meets(dot, named) for dot in _line(x, y, k))
            )
            best = next(clear, free[0] if free else 0)
            named.append(boxes[best])
            lines += _line(x, y, best)
            right, down, anchor = _PLACES[best]
            for end_x, end_y, *_ in _line(x, y, best)[-1:]:
                path = f"M{x:.1f} {y:.1f}L{end_x:.1f} {end_y:.1f}"
                shapes.append(f'<path d="{path}" class="axis"/>')
            shapes.append(text(x + right, y + down, name, kind="small", anchor=anchor))
        return shapes

    def _holds(self, box: Box) -> bool:
        """Whether a name in this box stays within the frame, or nearly so on the right."""
        left, top, right, bottom = box
        inside = self.left < left and right < self.right + 12
        return inside and self.top + 10 < top and bottom < self.bottom


Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""

# Where a name may stand, by its distance to the right of its mark and down, and its anchor; best first.
_PLACES = (
    (10, 4, "start"),
    (-10, 4, "end"),
    (0, 22, "middle"),
    (0, -12, "middle"),
    *(
        (side * 10, down, "start" if side > 0 else "end")
        for down in (16, -9, 28, -21, 40, -33, 52, -45, 64, -57, 76, -69, 88, -81, 100, -93)
        for side in (1, -1)
    ),
)


def _box(x: float, y: float, name: str, place: tuple[int, int, str]) -> Box:
    """The box of a name at a place beside a mark."""
    right, down, anchor = place
    long = 6.8 * len(name)
    left = x + right - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * long
    bottom = y + down + 3
    return left, bottom - 13, left + long, bottom


def _line(x: float, y: float, place: int) -> list[Box]:
    """Points on the line from a mark to a name that is too far from it to be told without a line."""
    right, down, _ = _PLACES[place]
    if not right or abs(down) <= 16:
        return []
    end = down - (10 if down > 0 else -4)
    along = [(x + right * part / 8, y + end * part / 8) for part in range(1, 9)]
    return [(at, up, at, up) for at, up in along]


def _meets(box: Box, others: Iterable[Box]) -> bool:
    return any(meet(box, other) for other in others)


def meet(a: Box, b: Box) -> bool:
    """Whether two boxes have a point in common."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
