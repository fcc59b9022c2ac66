"""The figure of the short GPT's ablations: what each value changes, with its interval."""

from __future__ import annotations

from pages.claims.ablations import AXES, basis
from pages.figures.svg import Frame, even_ticks, svg, text
from pages.records.runs import FULL

ROW, HEADING = 19, 30
"""The height of a value's row, and of the name of an axis above its rows."""


def draw() -> str:
    """A mark for each value of each axis, left of the line at zero where it is better."""
    changes = [(axis, axis.changes()) for axis in AXES]
    every = [found for _, each in changes for found in each.values()]
    width, left, right, top = 760, 250, 655, 34
    bottom = top + sum(HEADING + ROW * len(each) for _, each in changes) + 8
    ends = [end for found in every for end in found.ends]
    frame = Frame(left, top, right, bottom, (min(ends) - 1, max(ends) + 2), (0, 1), linear=True)
    shapes = [text(0, 20, "Test perplexity, against the recipe's own value", kind="title")]
    for value, label in even_ticks(frame.x).items():
        at, _ = frame.at(value, 0)
        kind = "grid" if value else "axis"
        label = f"+{label}" if value > 0 else label.replace("-", "−")
        shapes.append(f'<path d="M{at:.1f} {top}V{bottom}" class="{kind}"/>')
        shapes.append(text(at, bottom + 16, label, kind="small", anchor="middle"))
    y = top
    for axis, found in changes:
        y += HEADING
        shapes.append(text(0, y - 9, f"{axis.title} (recipe: {axis.recipe})", kind="small title"))
        other = " other" if axis.method == FULL else ""
        for value, change in found.items():
            (low, _), (high, _), (at, _) = (frame.at(x, 0) for x in (*change.ends, change.value))
            middle = y + ROW / 2 - 5
            mark = "other" if other else "low"
            shapes += [
                text(left - 10, middle + 4, axis.words[value], kind="small", anchor="end"),
                f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}" class="bar{other}"/>',
                f'<circle cx="{at:.1f}" cy="{middle:.1f}" r="4.5" class="{mark}"/>',
                text(width, middle + 4, change.text(1), kind="small", anchor="end"),
            ]
            y += ROW
    note = f"Bars: 95% t-intervals over paired seeds ({basis(every)}). Grey: full space."
    shapes.append(text(0, bottom + 38, note, kind="small"))
    return svg(width, bottom + 44, "Ablations of the short GPT", shapes)
