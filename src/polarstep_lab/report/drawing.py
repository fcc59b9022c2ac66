"""Common ground of all figures: fonts, sizes, and files that come out the same every time.

matplotlib is driven without pyplot: no global figure, no backend, no display. SVG ids are salted
with the name of the figure, which makes them reproducible and distinct within one page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from polarstep_lab.report.palette import CHROME, themed

__all__ = ["Drawing", "draw", "plain_log_ticks", "style_axes"]

INK, INK_SOFT, RULE, PAGE, _, ALARM = (look.light for look in CHROME)

_RC: dict[Any, Any] = {
    "axes.edgecolor": INK_SOFT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.facecolor": PAGE,
    "axes.facecolor": PAGE,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same metrics on every machine
    "font.size": 10,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "savefig.facecolor": PAGE,
    "svg.fonttype": "none",  # text stays text: selectable, searchable, in the reader's font
    "text.color": INK,
    "xtick.color": INK_SOFT,
    "ytick.color": INK_SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


@dataclass(frozen=True)
class Drawing:
    """One figure in the three forms a report needs: inside a page, as SVG, as PNG."""

    kind: ClassVar = "figure"
    name: str
    title: str
    caption: str
    svg: str
    png: bytes

    @property
    def inline(self) -> str:
        """The figure for use within a page: no XML header, no fixed size, the page's colours."""
        body = self.svg[self.svg.index("<svg") :]
        opening, rest = body.split(">", 1)
        opening = re.sub(r' (width|height)="[^"]*"', "", opening)
        opening += f' role="img" aria-labelledby="{self.name}-caption"'
        rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
        return themed(f"{opening}>{rest}")


def draw(
    name: str,
    title: str,
    caption: str,
    size: tuple[float, float],
    paint: Callable[[Figure], object],
) -> Drawing:
    """Let ``paint`` fill a figure of ``size`` inches and keep it as SVG and PNG."""
    with mpl.rc_context():
        mpl.rcdefaults()  # a matplotlibrc of the machine must not reach the figure
        mpl.rcParams.update({**_RC, "svg.hashsalt": name})
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        svg, png = io.BytesIO(), io.BytesIO()
        # No date and no version of the software: the same records give the same file.
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
        figure.savefig(png, format="png", dpi=160, metadata={"Software": None, "Title": title})
    return Drawing(name, title, caption, svg.getvalue().decode(), png.getvalue())


def style_axes(axes: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    """Labels and a quiet grid."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, axis="y")
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title)


def plain_log_ticks(axis: Any) -> None:
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
