"""The figure of a section's ablations: what each value of an axis changes, and whether that can be told.

Points and bars are the numbers of the tables: the difference from the recipe's own value with its 95%
t-interval, or the mean with its interval where no row has the recipe's own value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from polarstep_lab.estimates import Difference
from polarstep_lab.report.palette import Look, ordinal_looks
from polarstep_lab.report.panels import ALARM, INK_SOFT, PAGE, Drawing, Panel, Series
from polarstep_lab.report.rows import AblationSet, Row, Section, value_place
from polarstep_lab.wording import joined

__all__ = ["ablation_figure", "estimates_of"]

_DIFFERENCES = (
    "Points are differences from the recipe's own value, the large point at zero, on the seeds that "
    "both have; where no seed is common, of the means. A bar that crosses zero leaves open which is "
    "better."
)
_MEANS = "Where no run is known to have the recipe's own value, points are means."
_BARS = (
    "Bars are 95% t-intervals over n seeds; hollow points are of a single seed. Each axis has a scale "
    "of its own."
)
_LOST = "× marks a value of which a run diverged; its point is of the runs that finished."


def ablation_figure(section: Section, name: str) -> Drawing | None:
    """A panel for each axis: differences from the recipe's own value, or means where it is not known.

    An axis that was varied for several methods or settings has a line for each.
    """
    shown = [ablation for ablation in section.ablations if estimates_of(ablation)]
    subjects = dict.fromkeys(ablation.subject for ablation in shown)
    colours = ordinal_looks(len(subjects), ordered=False)[::-1]
    marks = itertools.cycle("osD^v")  # an × is for runs that diverged
    looks = {
        subject: replace(look, marker=mark)
        for subject, look, mark in zip(subjects, colours, marks, strict=False)
    }
    groups: dict[tuple[str, bool], list[AblationSet]] = {}
    for ablation in shown:
        groups.setdefault((ablation.axis, not ablation.differences), []).append(ablation)
    panels = [_axis_panel(section, same, looks) for same in groups.values()]
    lines = math.ceil(len(panels) / 3)
    caption = joined(
        "One setting varied, all else as in the recipe. "
        f"Better is {'up' if section.metric.higher_is_better else 'down'}.",
        _DIFFERENCES if any(ablation.differences for ablation in shown) else "",
        "" if all(ablation.differences for ablation in shown) else _MEANS,
        _BARS,
        _LOST if any(map(_diverged, shown)) else "",
    )
    columns, size = math.ceil(len(panels) / max(1, lines)), (10.5, 1.2 + 2.9 * lines)
    return Drawing.of_panels(name, "Ablations", caption, size, panels, columns, sharey=False)


def estimates_of(ablation: AblationSet) -> dict[Row, Difference]:
    """What is drawn of each row: differences and the base at zero, or else the means.

    A row without a number is left out.
    """
    found, base = ablation.differences, ablation.base
    if found and base and (zero := base.minus(base)):
        return {base: zero, **found}
    return {row: row.metric.from_zero for row in ablation.rows if row.metric}


def _diverged(ablation: AblationSet) -> list[Row]:
    """The rows of which a run diverged."""
    return [row for row in ablation.row_names if row.counts["diverged"]]


def _axis_panel(section: Section, same: Sequence[AblationSet], looks: Mapping[str, Look]) -> Panel:
    """The values of an axis in their order, evenly spaced; joined where they are numbers.

    Lines of several subjects are a little apart, so that their bars do not hide one another.
    """
    axis, metric, compared = same[0].axis, section.metric, bool(same[0].differences)
    shown = {ablation: estimates_of(ablation) for ablation in same}
    lost = {ablation: _diverged(ablation) for ablation in same}
    every = {a.value_of(row) for a in same for row in (*shown[a], *lost[a])}
    values = sorted(every, key=lambda value: value_place(value, axis))
    own = {a.value_of(a.base) for a in same if a.base and a.base in (*shown[a], *lost[a])}
    numeric = not any(isinstance(value, str) for value in values)
    step = min(0.16, 0.6 / len(same))

    def at(ablation: AblationSet, row: Row) -> float:
        aside = step * (same.index(ablation) - (len(same) - 1) / 2)
        return values.index(ablation.value_of(row)) + aside

    def finish(axes: Axes) -> None:
        if compared:
            axes.axhline(0.0, color=INK_SOFT, lw=0.8)
            axes.yaxis.set_major_formatter(_signed)
        for ablation, found in shown.items():
            look = looks[ablation.subject]
            for row in (row for row in found if row is ablation.base):
                fill = PAGE if found[row].interval is None else look.light
                big: dict[str, Any] = {"color": look.light, "mfc": fill, "ms": 9, "zorder": 5}
                axes.plot(at(ablation, row), found[row].value, look.marker, **big)
            for row in lost[ablation]:  # on the edge where worse values are, beyond every bar
                edge = 0.0 if metric.higher_is_better else 1.0
                cross: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
                axes.plot(at(ablation, row), edge, "x", color=ALARM, zorder=5, **cross)
        axes.set_title(_basis(shown), loc="right", fontsize=9, fontweight="normal")
        _name_values(axes, values, own)

    series = []
    for ablation, found in shown.items():
        look = looks[ablation.subject] if numeric else replace(looks[ablation.subject], dash="none")
        rows = sorted(found, key=lambda row: at(ablation, row))
        y = np.array([found[row].value for row in rows])
        half = np.array([found[row].interval for row in rows], dtype=float)  # None becomes NaN
        x = [at(ablation, row) for row in rows]
        series.append(Series(ablation.subject, look, x, y, y - half, y + half))
    name = f"Difference in {metric.name.lower()}" if compared else metric.name
    return Panel(series, "", name, axis, finish=finish)


def _basis(shown: Mapping[AblationSet, Mapping[Row, Difference]]) -> str:
    """How many seeds the points of a panel rest on, those of the base apart: ``n = 3 to 50``."""
    counts = {
        found.pairs
        for ablation, each in shown.items()
        for row, found in each.items()
        if row is not ablation.base or len(each) == 1
    }
    paired = sorted(count for count in counts if count)
    least, most = (paired[0], paired[-1]) if paired else (0, 0)
    told = f"n = {least}" if least == most else f"n = {least} to {most}"
    return " or ".join(
        [*([told] if paired else []), *(["no common seed"] if None in counts else [])]
    )


def _name_values(axes: Axes, values: Sequence[Any], own: Collection[Any]) -> None:
    """A tick for each value, turned where the names are long or many; the recipe's own says so."""
    names = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    turned = len("".join(names)) > 24
    for i, value in enumerate(values):
        if value in own and value != "recipe":
            names[i] += " (recipe)" if turned else "\nrecipe"
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(-0.5, len(names) - 0.5)
    if turned:
        axes.tick_params(axis="x", rotation=28 if len(names) < 8 else 60)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")


def _signed(value: float, _: object) -> str:
    """``+5``, ``−5`` and ``0``, as the tables write differences."""
    return f"{value:+g}".replace("-", "−") if value else "0"
