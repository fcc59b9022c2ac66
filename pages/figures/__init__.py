"""The figures of the pages as SVG, readable on a light and on a dark page; drawn from the records.

A module for each figure, :mod:`~pages.figures.frontier` and :mod:`~pages.figures.over_time` for two.
:mod:`~pages.figures.svg` has axes and shapes.
"""

from __future__ import annotations

from pages.figures import ablations, frontier, gaps, over_time, step_cost

FIGURES = {
    "docs/assets/step-cost.svg": step_cost.draw,
    "docs/assets/headline.svg": frontier.headline,
    "docs/assets/frontier.svg": frontier.draw,
    "docs/assets/gpt-ablations.svg": ablations.draw,
    "docs/assets/gaps.svg": gaps.draw,
    "docs/assets/over-time.svg": over_time.long_run,
    "docs/assets/frontier-over-time.svg": over_time.frontier,
}
