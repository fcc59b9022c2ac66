"""The figures of the pages as SVG, readable on a light and on a dark page; drawn from the records."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

from pages import ROOT
from pages.figures import over_time
from pages.figures.ablations import ablations
from pages.figures.svg import Box, Frame, multiples, percent, short_name, svg, text
from pages.records.quality import (
    GAPS,
    TIMES,
    Weighed,
    million_tokens,
    peers,
    perplexities,
    quality,
    reported,
    steps,
    weighed,
)
from pages.tables import HEADLINE


def step_cost() -> str:
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


LOWEST, HIGHEST = -6.0, 15.0
"""The perplexities that the figure of maps shows, in percent of full space's."""
TICKS = (0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500)


PANELS = {"nanoGPT": "on nanoGPT's 64 matrices", "8B layer": "on a layer of an 8B model"}
"""The sets of matrices on which steps are timed, in words."""


def frontier() -> str:
    """Perplexity against full space over the time of a step, on two sets of matrices."""
    return _over_cost(weighed(), PANELS, short_name, panel=520, longest=30)


def headline() -> str:
    """The same for the maps of the README's table, on nanoGPT's matrices, where ``auto`` is a sixth."""
    titles = {title for _, title in HEADLINE}
    shown = [each for each in weighed() if each.title in titles]

    def name(title: str) -> str:
        return re.sub(r"^(Deflated )?1/6", "auto", short_name(title))

    return _over_cost(shown, {"nanoGPT": PANELS["nanoGPT"]}, name)


def _over_cost(
    maps: Iterable[Weighed],
    panels: Mapping[str, str],
    name: Callable[[str], str],
    panel: int = 400,
    longest: float = math.inf,
) -> str:
    """A point for each map and for each optimizer of another library, with its interval.

    ``panel`` is the height of a panel, ``longest`` the longest time that it shows, over AdamW's.
    """
    all_known = {
        each: quality(each.trained) for each in (*maps, *peers()) if each.timed and each.trained
    }
    known = [each for each, found in all_known.items() if LOWEST < found.value < HIGHEST]
    above = [
        f"{name(each.title)} {found.told(unit='%')}"
        for each, found in all_known.items()
        if found.value >= HIGHEST
    ]
    width = 760
    notes = []
    title = f"Test perplexity after {million_tokens():.1f}M tokens, against full space"
    shapes = [text(0, 20, title, kind="title")]
    for place, (load, words) in enumerate(panels.items()):
        top = 44 + place * (panel + 62)
        timed = {
            each: steps()[each.timed, load]["ms"] for each in known if (each.timed, load) in steps()
        }
        adamw = steps()["AdamW, fused", load]["ms"]
        points = [each for each, ms in timed.items() if ms <= longest * adamw]
        times = [timed[each] for each in points]
        right = [each for each in timed if each not in points]
        if right:
            told = ", ".join(f"{name(each.title)} ({timed[each]:.0f} ms)" for each in right)
            notes.append(f"Right of the panel {words}: {told}.")
        x = (0.85 * min(adamw, *times), 1.6 * max(times))  # room for the last name
        frame = Frame(52, top, width - 16, top + panel, x, (LOWEST, HIGHEST))
        percents = {value: percent(value) for value in range(-4, 15, 2)}
        ticks = {tick: f"{tick:g}" for tick in TICKS if x[0] <= tick <= x[1]}
        shapes += frame.axes(percents, ticks, f"optimizer ms per step, {words}")
        at, _ = frame.at(adamw, HIGHEST)
        shapes.append(f'<path d="M{at:.1f} {frame.bottom}V{top + 14:.1f}" class="axis"/>')
        shapes.append(text(at - 3, top + 8, "AdamW", kind="small"))
        for each in points:
            shapes += _mark(frame, each, load)
        bars = [bar for each in points if (bar := _bar(frame, each, load))]
        marks = [(*_place(frame, each, load), name(each.title)) for each in points]
        shapes += frame.names(marks, beside=bars)
    seeds = len(reported(perplexities()["full", 0.014]))
    notes.insert(
        0,
        f"Bars: 95% t-intervals over paired seeds, of {seeds} in full space. Hollow: one seed. "
        "The GPT is 768 wide.",
    )
    if above:
        notes.append(f"Above the figure: {', '.join(above)}.")
    height = 26 + len(panels) * (panel + 62)
    for note in notes:
        height += 18
        shapes.append(text(0, height - 4, note, kind="small"))
    return svg(width, height, "Perplexity over the time of an optimizer step", shapes)


def _place(frame: Frame, each: Weighed, load: str) -> tuple[float, float]:
    assert each.timed is not None
    assert each.trained is not None
    return frame.at(steps()[each.timed, load]["ms"], quality(each.trained).value)


def _bar(frame: Frame, each: Weighed, load: str) -> Box | None:
    """The interval of a map in the frame, as far as it lies inside; ``None`` for one seed."""
    assert each.trained is not None
    found = quality(each.trained)
    if not found.interval:
        return None
    x, _ = _place(frame, each, load)
    low, high = (frame.at(frame.x[0], min(max(end, LOWEST), HIGHEST))[1] for end in found.ends)
    return x - 1, high, x + 1, low


def _mark(frame: Frame, each: Weighed, load: str) -> list[str]:
    """A circle with its interval, blue for maps that sketch."""
    assert each.trained is not None
    x, y = _place(frame, each, load)
    other = "" if each.columns else " other"
    shapes = []
    if bar := _bar(frame, each, load):
        shapes.append(f'<path d="M{x:.1f} {bar[3]:.1f}V{bar[1]:.1f}" class="bar{other}"/>')
    one_seed = quality(each.trained).pairs == 1
    kind = f"hollow{other}" if one_seed else "other" if other else "low"
    shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" class="{kind}"/>')
    return shapes


def gaps() -> str:
    """The gap to full space over tokens and over width, with the fitted lines."""
    import scaling as study

    found = study.gaps(study.recorded(ROOT / GAPS, study.FRONTIER))
    over = {"tokens": study.over_tokens, "width": study.over_width}
    known = [gap for name in found for of in over.values() for _, gap in of(found, name)]
    width, height = 760, 394
    shapes = [text(0, 20, "Test perplexity against full space", kind="title")]
    y = (min(-1.0, min(known) - 1), max(known) + 1.5)
    panels = (
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
            points = over[unit](found, name)
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


FIGURES = {
    "docs/assets/step-cost.svg": step_cost,
    "docs/assets/headline.svg": headline,
    "docs/assets/frontier.svg": frontier,
    "docs/assets/gpt-ablations.svg": ablations,
    "docs/assets/gaps.svg": gaps,
    "docs/assets/over-time.svg": over_time.long_run,
    "docs/assets/frontier-over-time.svg": over_time.frontier,
}
