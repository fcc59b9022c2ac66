"""The figure of ``polarstep rates``: measured slopes against predicted ones, and two examples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from polarstep.theory.schedules import rate
from polarstep_lab.checks.convergence.studies import StudyRow
from polarstep_lab.storage import write_atomically

__all__ = ["draw"]

COLOURS = {
    "exact": "#1b1b1b",
    "newton-schulz": "#0072b2",
    "gaussian": "#d55e00",
    "kaczmarz": "#009e73",
}
MARKERS = {"nesterov": "o", "polyak": "s"}


def draw(
    path: Path,
    horizons: Sequence[int],
    rates: Sequence[StudyRow],
    tuning: tuple[Sequence[int], Sequence[StudyRow]] | None,
    batches: tuple[Sequence[int], Sequence[StudyRow]] | None,
) -> None:
    """Write the figure to ``path`` with the suffixes ``.svg`` and ``.png``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, grid = plt.subplots(2, 2, figsize=(11, 8.2), layout="constrained")
        _slopes(grid[0, 0], rates)
        _curves(grid[0, 1], horizons, rates)
        if tuning is not None:
            _tuning(grid[1, 0], *tuning)
        if batches is not None:
            _batches(grid[1, 1], *batches)
        for axes, missing in ((grid[1, 0], tuning is None), (grid[1, 1], batches is None)):
            axes.set_visible(not missing)
        try:
            for kind in ("svg", "png"):
                write_atomically(
                    path.with_suffix(f".{kind}"),
                    partial(figure.savefig, format=kind, dpi=150),
                )
        finally:
            plt.close(figure)


def _slopes(axes: Any, rates: Sequence[StudyRow]) -> None:
    import numpy as np

    alphas = sorted({row.alpha for row in rates})
    fine = np.linspace(max(1.01, alphas[0] - 0.05), 2.0, 100)
    axes.plot(fine, [-rate(a) for a in fine], "-", color="#888888", lw=2, label="−(α−1)/(3α−2)")
    unknown = [-rate(a, knows_alpha=False) for a in fine]
    axes.plot(fine, unknown, ":", color="#888888", lw=2, label="−(α−1)/(2α), α unknown")
    kinds: dict[tuple[str, str], list[StudyRow]] = {}
    for row in rates:
        kinds.setdefault((row.details["solver"], row.details["momentum"]), []).append(row)
    for place, (kind, rows) in enumerate(kinds.items()):
        shift = 0.012 * (place - (len(kinds) - 1) / 2)
        average = "average over the run" if place == 0 else None
        _points(axes, [row.alpha + shift for row in rows], kind, rows, average)
    axes.set_xlabel("α, the order of the noise's finite moment")
    axes.set_ylabel("slope of log min E‖∇f‖ against log K")
    axes.set_title("Measured rates (lower is faster; grey: promised)", loc="left", fontsize=10)
    axes.legend(fontsize=7, ncol=2, frameon=False, loc="lower left")
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.35 * (high - low), high)


def _points(
    axes: Any,
    x: Sequence[float],
    kind: tuple[str, str],
    rows: Sequence[StudyRow],
    label_of_average: str | None,
) -> None:
    """The slopes of one solver and momentum with their intervals, and those of averages as crosses."""
    solver, momentum = kind
    lines = [row.fit["minimum"] for row in rows]
    error = [
        [line["slope"] - line["low"] for line in lines],
        [line["high"] - line["slope"] for line in lines],
    ]
    axes.errorbar(
        x,
        [line["slope"] for line in lines],
        yerr=error,
        fmt=MARKERS[momentum],
        color=COLOURS[solver],
        mfc=COLOURS[solver] if momentum == "nesterov" else "white",
        ms=5,
        lw=1,
        label=f"{solver}, {momentum}",
    )
    axes.plot(
        x,
        [row.fit["average"]["slope"] for row in rows],
        "x",
        color=COLOURS[solver],
        ms=4,
        alpha=0.7,
        label=label_of_average,
    )


def _curves(axes: Any, horizons: Sequence[int], rates: Sequence[StudyRow]) -> None:
    import matplotlib.pyplot as plt

    shown = [r for r in rates if r.details["momentum"] == "nesterov"]
    solver = shown[0].details["solver"]
    shown = [row for row in shown if row.details["solver"] == solver]
    for row, colour in zip(shown, plt.cm.viridis(_spread(len(shown))), strict=True):
        line = row.fit["minimum"]
        axes.loglog(horizons, line["values"], "o-", color=colour, ms=4, label=f"α = {row.alpha:g}")
        axes.fill_between(
            horizons, line["value_low"], line["value_high"], color=colour, alpha=0.2, lw=0
        )
        anchor = line["values"][-1]
        promised = [anchor * (K / horizons[-1]) ** row.predicted for K in horizons]
        axes.loglog(horizons, promised, "--", color=colour, lw=1)
    axes.set_xlabel("horizon K")
    axes.set_ylabel("min over k of E‖∇f(X_k)‖_F")
    axes.set_title(f"{solver}, nesterov (dashed: promised slope)", loc="left", fontsize=10)
    _ticks(axes, horizons)
    axes.legend(fontsize=8, frameon=False)


def _tuning(axes: Any, horizons: Sequence[int], rows: Sequence[StudyRow]) -> None:
    for row, colour in zip(rows, ("#0072b2", "#d55e00"), strict=True):
        line = row.fit["average"]
        label = (
            f"tuned for α = {row.details['tuned_for']:g}: slope {line['slope']:+.3f}, "
            f"promised {row.predicted:.3f}"
        )
        axes.loglog(horizons, line["values"], "o-", color=colour, ms=4, label=label)
        axes.fill_between(
            horizons, line["value_low"], line["value_high"], color=colour, alpha=0.2, lw=0
        )
        first = line["values"][0]
        promised = [first * (K / horizons[0]) ** row.predicted for K in horizons]
        axes.loglog(horizons, promised, "--", color=colour, lw=1)
    axes.set_xlabel("horizon K")
    axes.set_ylabel("average over k of E‖∇f(X_k)‖_F")
    axes.set_title(
        f"Bounded-variance tuning under tails of index {rows[0].alpha:g}+", loc="left", fontsize=10
    )
    _ticks(axes, horizons)
    axes.legend(fontsize=8, frameon=False)


def _batches(axes: Any, horizons: Sequence[int], rows: Sequence[StudyRow]) -> None:
    import matplotlib.pyplot as plt

    threshold = rows[0].details["threshold"]
    for row, colour in zip(rows, plt.cm.plasma(_spread(len(rows))), strict=True):
        above = row.details["batch"] >= threshold
        values = row.fit["average"]["values"]
        axes.loglog(horizons, values, "o-", color=colour, ms=4, lw=2.5 if above else 1.2)
        label = row.name + (" (threshold)" if above else "")
        place = {
            "xytext": (6, -2),
            "textcoords": "offset points",
            "va": "center",
        }
        axes.annotate(label, (horizons[-1], values[-1]), color=colour, fontsize=8, **place)
    axes.set_xlim(right=horizons[-1] * 3.2)
    axes.set_xlabel("horizon K")
    axes.set_ylabel("average over k of E‖∇f(X_k)‖_F")
    axes.set_title(
        f"Multiplicative noise, σ₁ = {rows[0].details['sigma1']:.0f}: the batch decides",
        loc="left",
        fontsize=10,
    )
    _ticks(axes, horizons)


def _ticks(axes: Any, horizons: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_xticks(horizons, [f"{K:,}" for K in horizons])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _spread(count: int) -> list[float]:
    return [0.1 + 0.75 * i / max(1, count - 1) for i in range(count)]
