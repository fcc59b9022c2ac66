"""The figure of what a step of each optimizer costs."""

from __future__ import annotations

import math

from pages.figures.svg import svg, text
from pages.records.costs import TIMES, steps
from pages.records.maps import weighed


def draw() -> str:
    """A bar for the time of each optimizer's step over AdamW's, on two sets of matrices."""
    # Maps that differ in their learning rates alone have one time.
    names = [*dict.fromkeys(each.timed for each in weighed() if each.timed)]
    width, left, right, row, top = 760, 310, 60, 24, 34
    loads = (("nanoGPT", "the 64 matrices of nanoGPT"), ("8B layer", "a layer of an 8B model"))
    ratios = {at: measured["ratio"] for at, measured in steps(TIMES).items()}
    longest = math.log(max(ratios[name, load] for name, load in ratios if name in names))
    shapes, y = [], 0
    for load, words in loads:
        shapes.append(text(0, y + 20, f"{words}: time of a step ÷ AdamW's", kind="title"))
        timed = [name for name in names if (name, load) in ratios]
        for i, name in enumerate(timed):
            ratio, line = ratios[name, load], y + top + row * i
            # On a logarithmic scale, from half of AdamW's time on.
            length = (width - left - right) * math.log(2 * ratio) / (longest + math.log(2))
            kind = "low" if name.startswith(("LowRank", "Deflated")) else "other"
            bar = f'width="{length:.1f}" height="{row - 7}" class="{kind}"'
            shapes += [
                text(left - 8, line + 15, _row_name(name), anchor="end"),
                f'<rect x="{left}" y="{line + 2}" {bar}/>',
                text(left + length + 6, line + 15, f"{ratio:.2f}×"),
            ]
        y += top + row * len(timed) + 14
    return svg(width, y, "Time of an optimizer step over AdamW's", shapes)


def _row_name(name: str) -> str:
    """The name of an optimizer of ``step_cost.py``, short enough for the room beside the bars."""
    return name.replace(", rows normalized", " + rows").replace("Gaussian ", "")
