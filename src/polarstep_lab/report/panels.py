"""Common ground of all figures: panels of series, and files that come out the same every time.

matplotlib is driven without pyplot: no global figure, no backend, no display. SVG ids are salted
with the name of the figure, which makes them reproducible and distinct within one page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from polarstep_lab.report.palette import CHROME, Look, themed

__all__ = ["Drawing", "Panel", "Series", "paint_series", "style_axes"]

INK, INK_SOFT, RULE, PAGE, _, ALARM = (look.light for look in CHROME)

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
    """One figure of ``size`` inches, filled by ``paint`` when its files are first asked for."""

    name: str
    title: str
    caption: str
    size: tuple[float, float]
    paint: Callable[[Figure], object]

    @cached_property
    def files(self) -> tuple[str, bytes]:
        """The figure as SVG, in the light colours, and as PNG."""
        with mpl.rc_context():
            mpl.rcdefaults()  # a matplotlibrc of the machine must not reach the figure
            mpl.rcParams.update({**_RC, "svg.hashsalt": self.name})
            figure = Figure(figsize=self.size, layout="constrained")
            self.paint(figure)
            svg, png = io.BytesIO(), io.BytesIO()
            # No date and no version of the software: the same records give the same file.
            told = {"Title": self.title}
            figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, **told})
            figure.savefig(png, format="png", dpi=160, metadata={"Software": None, **told})
        return svg.getvalue().decode(), png.getvalue()

    @property
    def inline(self) -> str:
        """The figure for use within a page: no XML header, no fixed size, the page's colours."""
        svg, _ = self.files
        opening, rest = svg[svg.index("<svg") :].split(">", 1)
        opening = re.sub(r' (width|height)="[^"]*"', "", opening)
        opening += f' role="img" aria-labelledby="{self.name}-caption"'
        rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
        return themed(f"{opening}>{rest}")

    @classmethod
    def of_panels(
        cls,
        name: str,
        title: str,
        caption: str,
        size: tuple[float, float],
        panels: Sequence[Panel],
        columns: int,
        sharey: bool | Literal["row"] = True,
    ) -> Drawing | None:
        """The figure of ``panels`` in a grid of ``columns`` columns; ``None`` without panels."""
        paint = partial(_paint_panels, panels=panels, columns=columns, sharey=sharey)
        return cls(name, title, caption, size, paint) if panels else None


@dataclass(frozen=True)
class Series:
    """A line, points or a band; from ``low`` to ``high`` there are error bars, or a ``band``.

    A point whose ``low`` is NaN has no bar and is hollow: how far it can be trusted is not known.
    """

    label: str
    look: Look
    x: Any
    y: Any = None
    low: Any = None
    high: Any = None
    band: bool = False


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


def _paint_panels(figure: Figure, panels: Sequence[Panel], columns: int, sharey: Any) -> None:
    """Paint the panels in a grid of ``columns`` columns, and below it the name of each series once.

    Panels that share their y axis with a neighbour on the left have no label of their own for it.
    """
    columns = min(columns, len(panels))
    grid = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False, sharey=sharey)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    names: dict[str, Any] = {}
    for place, (axes, panel) in enumerate(zip(grid.flat, panels, strict=False)):
        for series in panel.series:
            paint_series(axes, series)
        axes.set(xscale=panel.xscale, yscale=panel.yscale)
        ylabel = "" if sharey and place % columns else panel.ylabel
        style_axes(axes, panel.xlabel, ylabel, panel.title)
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


def paint_series(axes: Axes, series: Series) -> None:
    """One series in its look."""
    x, look = np.asarray(series.x), series.look
    style: dict[str, Any] = {"color": look.light, "linestyle": look.dash, "zorder": 3}
    if series.band:
        shade: dict[str, Any] = {"alpha": 0.2, "linewidth": 1.8 if len(x) == 1 else 0.0}
        name = series.label if series.y is None else None
        axes.fill_between(x, series.low, series.high, color=look.light, label=name, **shade)
        style["marker"] = "o" * (len(x) == 1)
        if series.label and len(x) > 1:  # a few markers, to tell lines of like colours apart
            style |= {"marker": look.marker, "markersize": 4, "markevery": max(1, len(x) // 7)}
        if series.y is not None:
            axes.plot(x, series.y, label=series.label, **style)
        return
    y = np.asarray(series.y)
    bars = None if series.low is None else [y - np.asarray(series.low), np.asarray(series.high) - y]
    bare = np.full(y.shape, False) if bars is None else np.isnan(bars[0])
    style |= {"marker": look.marker, "markersize": 5, "capsize": 2.5, "elinewidth": 1.0}
    axes.errorbar(x, y, yerr=None if bare.all() else bars, label=series.label, **style)
    if bare.any():
        hollow: dict[str, Any] = {"markerfacecolor": PAGE, "markeredgecolor": look.light}
        axes.plot(x[bare], y[bare], look.marker, markersize=5, zorder=4, **hollow)


def style_axes(axes: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    """Labels and a quiet grid."""
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, axisbelow=True)
    axes.grid(True, axis="y")


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
