"""Two figures of perplexity over cost: every map on two sets of matrices, and the README's maps."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping

from frontier import WIDTH, reported
from pages.figures.svg import Box, Frame, percent, svg, text
from pages.records.costs import HELD, on_hosts, steps
from pages.records.maps import Weighed, headline_maps, peers, short_name, timed_with_less, weighed
from pages.records.quality import BASE, million_tokens, perplexities, quality

LOWEST, HIGHEST = -6.0, 15.0
"""The perplexities that the figure of maps shows, in percent of full space's."""
TICKS = (0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500)
PANELS = {"nanoGPT": "on nanoGPT's 64 matrices", "8B layer": "on a layer of an 8B model"}
"""The sets of matrices on which steps are timed, in words."""


def draw() -> str:
    """Perplexity against full space over the time of a step, on two sets of matrices."""
    return _over_cost(weighed(), PANELS, short_name, panel=520, longest=30)


def headline() -> str:
    """The same for the maps of the README's table, on nanoGPT's matrices, where ``auto`` is a sixth."""
    shown = [each for _, each in headline_maps()]

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
    several = False
    title = (
        f"Test perplexity after {million_tokens():.1f}M tokens, against full space at {BASE[1]:g}"
    )
    shapes = [text(0, 20, title, kind="title")]
    for place, (load, words) in enumerate(panels.items()):
        top = 44 + place * (panel + 62)
        apart = {each.title for each in timed_with_less(load)}
        out = [each for each in known if each.title in apart]
        if out:
            notes.append(_left_out(out, load, words))
        timed = {
            each: _ms(each, load)[1]
            for each in known
            if each.timed and (each.timed, load) in steps() and each not in out
        }
        adamw = steps()["AdamW, fused", load]["ms"]
        points = [each for each in timed if _ms(each, load)[2] <= longest * adamw]
        times = [_ms(each, load)[2] for each in points]
        right = [each for each in timed if each not in points]
        if right:
            told = ", ".join(f"{name(each.title)} ({_told_ms(each, load)})" for each in right)
            notes.append(f"Right of the panel {words}: {told}.")
        x = (0.85 * min(adamw, *times), 1.6 * max(times))  # room for the last name
        frame = Frame(52, top, width - 16, top + panel, x, (LOWEST, HIGHEST))
        percents = {float(value): percent(value) for value in range(-4, 15, 2)}
        ticks = {tick: f"{tick:g}" for tick in TICKS if x[0] <= tick <= x[1]}
        shapes += frame.axes(percents, ticks, f"optimizer ms per step, {words}")
        at, _ = frame.at(adamw, HIGHEST)
        shapes.append(f'<path d="M{at:.1f} {frame.bottom}V{top + 14:.1f}" class="axis"/>')
        shapes.append(text(at - 3, top + 8, "AdamW", kind="small"))
        for each in points:
            shapes += _mark(frame, each, load)
        spreads = [box for each in points if (box := _spread(frame, each, load))]
        several |= bool(spreads)
        bars = [bar for each in points if (bar := _bar(frame, each, load))]
        marks = [(*_place(frame, each, load), name(each.title)) for each in points]
        shapes += frame.names(marks, beside=[*bars, *spreads])
    seeds = len(reported(perplexities()[BASE]))
    notes.insert(
        0,
        f"Bars: 95% t-intervals over paired seeds, of {seeds} in full space. Hollow: one seed. "
        "The GPT is 768 wide.",
    )
    if several:
        notes.append(
            "Level bar: from the fastest to the slowest host that the optimizer was timed on."
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
    return frame.at(_ms(each, load)[1], quality(each.trained).value)


def _ms(each: Weighed, load: str) -> tuple[float, float, float]:
    """The shortest, middle and longest time of a step; rows of other libraries have several hosts."""
    assert each.timed is not None
    found = sorted(row["ms"] for row in on_hosts(each.timed, load))
    if each.title not in {peer.title for peer in peers()} or len(found) < 2:
        found = [steps()[each.timed, load]["ms"]]
    return found[0], statistics.median(found), found[-1]


def _told_ms(each: Weighed, load: str) -> str:
    low, _, high = _ms(each, load)
    return " to ".join(dict.fromkeys((f"{low:.0f}", f"{high:.0f}"))) + " ms"


def _left_out(maps: list[Weighed], load: str, words: str) -> str:
    """Why a panel does not have these maps."""
    timed = {f"{(each.columns_on(load) or 0) / HELD[load]:.0%}" for each in maps}
    trained = {f"{(each.trained_columns or 0) / WIDTH:.0%}" for each in maps}
    return (
        f"Left out {words}: {len(maps)} sketches with {'/'.join(timed)} of the width, as they were "
        f"trained with {'/'.join(trained)}."
    )


def _bar(frame: Frame, each: Weighed, load: str) -> Box | None:
    """The interval of a map in the frame, as far as it lies inside; ``None`` for one seed."""
    assert each.trained is not None
    found = quality(each.trained)
    if not found.interval:
        return None
    x, _ = _place(frame, each, load)
    low, high = (frame.at(frame.x[0], min(max(end, LOWEST), HIGHEST))[1] for end in found.ends)
    return x - 1, high, x + 1, low


def _spread(frame: Frame, each: Weighed, load: str) -> Box | None:
    """The times on several hosts in the frame; ``None`` where the mark itself hides them."""
    low, _, high = _ms(each, load)
    left, right = (frame.at(ms, frame.y[0])[0] for ms in (low, high))
    _, y = _place(frame, each, load)
    return (left, y - 1, right, y + 1) if right - left > 12 else None


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
    if spread := _spread(frame, each, load):
        shapes.append(f'<path d="M{spread[0]:.1f} {y:.1f}H{spread[2]:.1f}" class="bar{other}"/>')
    shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" class="{kind}"/>')
    return shapes
