"""Common ground of all figures: panels of series in SVG, which comes out the same every time.

matplotlib is driven without pyplot: no global figure, no backend, no display. SVG ids are salted
with the name of the figure, which makes them reproducible and distinct within one page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

__all__ = [
    "ALARM",
    "INK",
    "INK_SOFT",
    "Drawing",
    "Look",
    "Panel",
    "Series",
    "looks",
    "points_only",
    "shades",
]

INK, INK_SOFT, RULE, PAGE, ALARM = "#1b1d23", "#5a5e69", "#d9dce3", "#fefefe", "#b3261e"


@dataclass(frozen=True)
class Look:
    """How one series is drawn."""

    colour: str
    dash: str = "-"
    marker: str = "o"


# All stand out from the page and from one another, for the three kinds of colour blindness, too.
_COLOURS = (
    "#6b6875", "#c97a04", "#2a62f0", "#1f9a5f", "#1d1a5e", "#a11a00", "#b165c8", "#2d0309", "#5d12a1",
    "#0a583b",
)  # fmt: skip
_SHADES = ("#9fb4d8", "#7796cc", "#5079bd", "#2f5da6", "#1d4484", "#122c5c", "#081737")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def looks(count: int) -> list[Look]:
    """Looks for ``count`` rows: neighbours differ in colour and marker, further rows in the dash.

    >>> len(set(looks(40)))
    40
    """
    return [
        Look(
            _COLOURS[i % len(_COLOURS)],
            _DASHES[i // len(_COLOURS) % len(_DASHES)],
            _MARKERS[i % len(_MARKERS)],
        )
        for i in range(count)
    ]


def shades(count: int) -> list[Look]:
    """Looks for ``count`` values in order, from pale to deep."""
    last = len(_SHADES) - 1
    places = [round(i * last / (count - 1)) for i in range(count)] if count > 1 else [last // 2]
    return [Look(_SHADES[place]) for place in places[:count]]


@dataclass(frozen=True)
class Series:
    """A line, points or a band; from ``low`` to ``high`` there are error bars, or a ``band``.

    A point whose ``low`` is NaN has no bar.
    """

    label: str
    look: Look
    x: Any
    y: Any = None
    low: Any = None
    high: Any = None
    band: bool = False

    def paint(self, axes: Axes) -> None:
        """Draw the series."""
        x, look = np.asarray(self.x), self.look
        style: dict[str, Any] = {"color": look.colour, "linestyle": look.dash, "zorder": 3}
        if self.band:
            shade: dict[str, Any] = {"alpha": 0.2, "linewidth": 1.8 if len(x) == 1 else 0.0}
            name = self.label if self.y is None else None
            axes.fill_between(x, self.low, self.high, color=look.colour, label=name, **shade)
            if self.y is not None:  # a few markers, to tell lines of like colours apart
                style |= {"marker": look.marker, "markersize": 4}
                style["markevery"] = max(1, len(x) // 7)
                axes.plot(x, self.y, label=self.label, **style)
            return
        y = np.asarray(self.y)
        bars = None if self.low is None else [y - np.asarray(self.low), np.asarray(self.high) - y]
        if bars is not None and np.isnan(bars[0]).all():
            bars = None
        style |= {"marker": look.marker, "markersize": 5, "capsize": 2.5, "elinewidth": 1.0}
        axes.errorbar(x, y, yerr=bars, label=self.label, **style)


@dataclass(frozen=True)
class Panel:
    """The series that share two axes; ``finish`` does what is special to the panel."""

    series: Sequence[Series]
    xlabel: str = ""
    ylabel: str = ""
    title: str = ""
    xscale: str = "linear"
    yscale: str = "linear"
    finish: Callable[[Axes], object] = lambda axes: None


_TEXT = ("text.color", "axes.labelcolor", "axes.titlecolor", "legend.labelcolor")
_RC: dict[Any, Any] = {
    **dict.fromkeys([*_TEXT, "xtick.labelcolor", "ytick.labelcolor"], INK),
    **dict.fromkeys(["axes.edgecolor", "xtick.color", "ytick.color"], INK_SOFT),
    **dict.fromkeys(["axes.facecolor", "figure.facecolor", "savefig.facecolor"], PAGE),
    **dict.fromkeys(["axes.spines.right", "axes.spines.top", "legend.frameon"], False),
    "axes.linewidth": 0.8,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same metrics on every machine
    "font.size": 10,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text: selectable, searchable, in the reader's font
}


@dataclass(frozen=True)
class Drawing:
    """One figure of ``size`` inches: panels in a grid of ``columns`` columns."""

    name: str
    title: str
    caption: str
    size: tuple[float, float]
    panels: Sequence[Panel]
    columns: int
    sharey: bool | Literal["row"] = True

    @cached_property
    def svg(self) -> str:
        """The figure, drawn when it is first asked for."""
        with mpl.rc_context():
            mpl.rcdefaults()  # a matplotlibrc of the machine must not reach the figure
            mpl.rcParams.update({**_RC, "svg.hashsalt": self.name})
            figure = Figure(figsize=self.size, layout="constrained")
            self.paint(figure)
            file = io.BytesIO()
            # No date and no version of the software: the same records give the same file.
            told = {"Title": self.title, "Date": None, "Creator": None}
            figure.savefig(file, format="svg", metadata=told)
        return file.getvalue().decode()

    @property
    def inline(self) -> str:
        """The figure for use within a page: no XML header and no fixed size."""
        opening, rest = self.svg[self.svg.index("<svg") :].split(">", 1)
        opening = re.sub(r' (width|height)="[^"]*"', "", opening)
        opening += f' role="img" aria-labelledby="{self.name}-caption"'
        return f"{opening}>{re.sub(r'<metadata>.*?</metadata>', '', rest, flags=re.DOTALL)}"

    def paint(self, figure: Figure) -> None:
        """Paint the panels, and below them the name of each series once.

        Panels that share their y axis with a neighbour on the left have no label of their own for it.
        """
        columns = min(self.columns, len(self.panels))
        rows = math.ceil(len(self.panels) / columns)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=self.sharey)
        for axes in grid.flat[len(self.panels) :]:
            axes.remove()
        names: dict[str, Any] = {}
        for place, (axes, panel) in enumerate(zip(grid.flat, self.panels, strict=False)):
            for series in panel.series:
                series.paint(axes)
            axes.set(xscale=panel.xscale, yscale=panel.yscale, xlabel=panel.xlabel)
            axes.set(ylabel="" if self.sharey and place % columns else panel.ylabel)
            axes.set(title=panel.title, axisbelow=True)
            axes.grid(True, axis="y")
            panel.finish(axes)
            handles, labels = axes.get_legend_handles_labels()
            names |= dict(zip(labels, handles, strict=True))
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            if axis.get_scale() == "log":
                _plain_log_ticks(axis)
        if names:
            columns = max(1, min(4, 120 // max(map(len, names))))  # so many fit beside one another
            below: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
            figure.legend([*names.values()], [*names], fontsize=9, **below)
            # The figure has room for three lines of names; the panels must not pay for more of them.
            more = math.ceil(len(names) / columns) - 3
            width, height = figure.get_size_inches()
            figure.set_size_inches(width, height + 0.2 * max(more, 0))


def points_only(look: Look) -> Look:
    """The look without the line between its points."""
    return replace(look, dash="none")


def _plain_log_ticks(axis: Any) -> None:
    """10, 20, 50 rather than powers of ten alone; on a short axis, evenly spaced numbers."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if low > 0 else 1.0
    if decades < 0.6:
        locator: Locator = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10])
    else:
        wide, medium, narrow = (1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
        locator = LogLocator(subs=wide if decades > 3 else medium if decades > 1.3 else narrow)
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
