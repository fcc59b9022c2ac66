"""The ablations of a section: a table for each, and one figure of what each value of an axis changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from polarstep_lab.estimates import Difference
from polarstep_lab.paper import ABLATIONS_SOURCE
from polarstep_lab.report.comparison import (
    QUALITY,
    difference_cells,
    metric_table,
    paper_cell,
    times_text,
)
from polarstep_lab.report.figures import INK_SOFT, Drawing, Look, Panel, Series, looks, points_only
from polarstep_lab.report.page import Block, Heading, Table, Text
from polarstep_lab.report.rows import AblationSet, Row, Section
from polarstep_lab.wording import joined

__all__ = ["ablation_blocks", "ablation_figure", "estimates_of"]

_DIFFERENCE = (
    "Difference: from the recipe's own value, the config in which the axes meet, on the seeds that both "
    "have (Pairs), ± half its 95% t-interval, unknown for a single pair; where no seed is common, the "
    "difference of the means."
)
_AUTHORS = (
    f"Authors: {ABLATIONS_SOURCE}; the paper prints curves only, and in that file the default setting "
    "differs from axis to axis. ‡ marks a figure that ours differs from."
)


def ablation_blocks(section: Section) -> list[Block]:
    """One figure of all ablations, and a table for each."""
    if not section.ablations:
        return []
    blocks: list[Block] = [Heading("Ablations")]
    if (figure := ablation_figure(section)) is not None:
        blocks.append(figure)
    for ablation in section.ablations:
        blocks += [
            Heading(f"{ablation.axis}, {ablation.subject}", level=4),
            _table(section, ablation),
        ]
    rows = [row for ablation in section.ablations for row in ablation.values]
    caption = joined(
        f"{section.metric.name}: {QUALITY}",
        _DIFFERENCE if any(ablation.base for ablation in section.ablations) else "",
        times_text(rows),
        _AUTHORS if any(row.paper for row in rows if row not in section.rows) else "",
    )
    return [*blocks, Text(caption)]


def _table(section: Section, ablation: AblationSet) -> Table:
    """A row for each value of one axis, next to the recipe's own value."""
    beside: dict[Row, dict[str, str]] = {}
    authors = any(row.paper for row in ablation.rows)
    for row in ablation.values:
        cells = difference_cells(ablation.difference(row), section.metric) if ablation.base else {}
        cells |= {"Difference": "recipe"} if row is ablation.base else {}
        published = paper_cell(row, ablation.published(row))
        beside[row] = cells | ({"Authors": published} if authors else {})
    named = {row: str(value) for row, value in ablation.values.items()}
    if ablation.base in named and ablation.own is not None:
        named[ablation.base] = f"{ablation.own} (recipe)"
    name = f"Ablation of {ablation.axis}"
    return metric_table(section, name, ablation.axis, named, [*named], beside)


def ablation_figure(section: Section) -> Drawing | None:
    """A panel for each axis: differences from the recipe's own value, or means where it is not known.

    An axis that was varied for several methods or settings has a line for each.
    """
    shown = {each: found for each in section.ablations if (found := estimates_of(each))}
    subjects = dict.fromkeys(ablation.subject for ablation in shown)
    drawn = dict(zip(subjects, looks(len(subjects)), strict=True))
    by_axis: dict[tuple[str, bool], list[AblationSet]] = {}
    for ablation, found in shown.items():
        by_axis.setdefault((ablation.axis, _compared(ablation, found)), []).append(ablation)
    panels = [
        _panel(section, axis, compared, {each: shown[each] for each in same}, drawn)
        for (axis, compared), same in by_axis.items()
    ]
    if not panels:
        return None
    lines = math.ceil(len(panels) / 3)
    better = "up" if section.metric.higher_is_better else "down"
    caption = (
        f"One setting varied, all else as in the recipe. Better is {better}. Points are differences "
        "from the recipe's own value, or means where no run has it. Bars are 95% t-intervals, and a bar "
        "that crosses zero leaves open which is better; a single seed has no bar."
    )
    name, size = f"{section.slug}-ablations", (10.5, 1.2 + 2.9 * lines)
    columns = math.ceil(len(panels) / lines)
    return Drawing(name, "Ablations", caption, size, panels, columns, sharey=False)


def estimates_of(ablation: AblationSet) -> dict[Row, Difference]:
    """What is drawn of each row: differences and the base at zero, or else the means.

    A row without a number is left out.
    """
    found = {row: d for row in ablation.rows if (d := ablation.difference(row))}
    if found and ablation.base and (zero := ablation.base.minus(ablation.base)):
        return {ablation.base: zero, **found}
    return {row: row.metric.from_zero for row in ablation.rows if row.metric}


def _compared(ablation: AblationSet, found: Mapping[Row, Difference]) -> bool:
    """Whether differences are drawn of an ablation, and not means."""
    return ablation.base in found and any(ablation.difference(row) for row in found)


def _panel(
    section: Section,
    axis: str,
    compared: bool,
    shown: Mapping[AblationSet, Mapping[Row, Difference]],
    drawn: Mapping[str, Look],
) -> Panel:
    """The values of an axis in their order, evenly spaced; joined where they are numbers.

    Lines of several subjects are a little apart, so that their bars do not hide one another.
    """
    every = {_value(each, row): None for each in shown for row in each.values if row in shown[each]}
    values = [*every]
    numeric = not any(isinstance(value, str) for value in values)
    if numeric:
        values.sort()
    series = []
    for number, (ablation, found) in enumerate(shown.items()):
        aside = min(0.16, 0.6 / len(shown)) * (number - (len(shown) - 1) / 2)
        rows = sorted(found, key=lambda row: values.index(_value(ablation, row)))
        x = [values.index(_value(ablation, row)) + aside for row in rows]
        y = np.array([found[row].value for row in rows])
        half = np.array([found[row].interval for row in rows], dtype=float)  # None becomes NaN
        look = drawn[ablation.subject] if numeric else points_only(drawn[ablation.subject])
        series.append(Series(ablation.subject, look, x, y, y - half, y + half))

    def finish(axes: Axes) -> None:
        if compared:
            axes.axhline(0.0, color=INK_SOFT, lw=0.8)
        names = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_xlim(-0.5, len(names) - 0.5)
        if len("".join(names)) > 24:  # turned, where the names are long or many
            axes.tick_params(axis="x", rotation=60)

    name = f"Difference in {section.metric.name.lower()}" if compared else section.metric.name
    return Panel(series, "", name, axis, finish=finish)


def _value(ablation: AblationSet, row: Row) -> Any:
    """The value of a row; of a base outside the ablation the recipe's own, as far as it is known."""
    value = ablation.values[row]
    if row is ablation.base and value == "recipe" and ablation.own is not None:
        value = ablation.own
    return value
