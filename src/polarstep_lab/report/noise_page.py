"""What the two assumptions of the theory look like along a run: gradient noise, and γ and ν.

The noise is that of ``noise.jsonl`` (:mod:`polarstep_lab.training.noise_study`), γ and ν those of
``gamma.jsonl``. Tail indices are drawn as 1/α, in which their errors are normal and an infinite index
is a point on the axis: up is heavier, and above the line at α = 2 there is no variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.drawing import (
    ALARM,
    INK,
    INK_SOFT,
    RULE,
    Drawing,
    draw,
    style_axes,
)
from polarstep_lab.report.inexactness_heatmap import gamma_grid, one_method, orderly, panel_title
from polarstep_lab.report.inexactness_page import noise_points, noise_unit
from polarstep_lab.report.palette import ablation_look, look_of
from polarstep_lab.report.rows import Row

__all__ = ["gamma_lines", "noise_figure"]

LogRow = Mapping[str, Any]

_AT_MOST = 8  # panels that can still be read side by side
_TAIL_TICKS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
_GROWTH_TICKS = (1.0, 1.2, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2)


def noise_figure(row: Row, name: str) -> Drawing | None:
    """Tail, growth, survival and size of the noise of a row's first run that measured it."""
    run = next((run for run in row.runs if run.logs.get("noise")), None)
    if run is None:
        return None
    log = run.logs["noise"]
    unit = "example" if any(entry["unit"] == "example" for entry in log) else "batch"

    def paint(figure: Figure) -> None:
        (tail, grown), (survival, size) = figure.subplots(2, 2)
        _tails(tail, log, unit)
        _growth(grown, log, unit)
        _survival(survival, log, unit)
        _sizes(size, log)

    drawn = " and ".join(
        f"{entry['draws']} of one {noise_unit(run, entry)}"
        for u in ("example", "batch")
        for entry in _of(log, u, "all")[:1]
    )
    ended = "" if run.status == "finished" else f", {run.status}, with {noise_points(run)} points"
    caption = (
        f"{row.label}, seed {run.identity.seed}{ended}: gradients at weights held still, {drawn} at "
        "each point. Top left: Hill's index of ‖ξ‖ over all hidden matrices together, with 95% "
        "intervals; the blue band spans those of single matrices, and grey is what the same estimator "
        "says of Gaussian noise of the same size. Top right: the α with which the noise of sums grows, "
        "from sums of a quarter as many terms. Bottom left: how often the norm exceeds multiples of its "
        f"median. All norms are Frobenius norms.{_moments_differ(log, unit)}"
    )
    return draw(name, "Noise of the gradient", caption, (10.5, 8.2), paint)


def gamma_lines(rows: Sequence[Row], name: str) -> Drawing | None:
    """γ and ν of each monitored row against the step: the median matrix, and all of them."""
    watched = [row for row in rows if any(run.gamma for run in row.runs)]
    shown = [(row, next(run for run in row.runs if run.gamma)) for row in watched[:_AT_MOST]]
    if not shown:
        return None
    ablated = len({row.method for row, _ in shown}) < len(shown)

    def paint(figure: Figure) -> None:
        panels = figure.subplots(2, len(shown), sharex=True, sharey="row", squeeze=False)
        for key, symbol, line in zip(("gamma", "nu"), "γν", panels, strict=True):
            for index, (axes, (row, run)) in enumerate(zip(line, shown, strict=True)):
                look = ablation_look(index, len(shown), False) if ablated else look_of(row.method)
                _, steps, grid = gamma_grid(run.gamma, key)
                kept = ~np.all(np.isnan(grid), axis=0)
                x, values = np.array(steps)[kept], grid[:, kept]
                if not len(x):
                    continue
                low, middle, high = (
                    f(values, axis=0) for f in (np.nanmin, np.nanmedian, np.nanmax)
                )
                if len(x) == 1:  # a run that was lost early
                    bar = [middle - low, high - middle]
                    axes.errorbar(x, middle, yerr=bar, color=look.light, marker="o", capsize=3)
                axes.fill_between(x, low, high, color=look.light, alpha=0.2, linewidth=0)
                axes.plot(x, middle, color=look.light)
                style_axes(axes, "", symbol if index == 0 else "")
                if key == "gamma":
                    axes.set_title(panel_title(row, run), fontsize=8.5)
            # Rounding errors must not look like something, nor a run that blew up like everything.
            tops = [_largest(run, key) for _, run in shown]
            limit = max(_largest(run, key) for run in orderly([run for _, run in shown]))
            limit = 1.08 * max(limit, {"gamma": 1e-3, "nu": 0.01}[key])
            line[0].set_ylim(0, limit)
            for axes, top in zip(line, tops, strict=True):
                if top > limit:
                    place = {"xycoords": "axes fraction", "ha": "left", "va": "top", "fontsize": 8}
                    axes.annotate(f"↑ {top:.4g}", (0.08, 0.98), **place)
            line[0].yaxis.label.set_rotation(0)
        figure.supxlabel("Training step", fontsize=10)

    seeds = sorted({run.identity.seed for _, run in shown})
    caption = (
        f"{one_method(watched)}What each polar step gave up (γ) and by how much its operator norm "
        "exceeded one (ν), from exact singular values: the median over matrices, and the band of all "
        f"of them. Seed {', '.join(map(str, seeds))}."
    )
    if len(watched) > _AT_MOST:
        caption += f" The first {_AT_MOST} of {len(watched)} monitored rows."
    if any(_largest(run, "nu") > 1 for _, run in shown if run.status == "diverged"):
        caption += " An arrow marks what lies above the axis."
    return draw(name, "γ and ν along the run", caption, (10.5, 4.6), paint)


def _tails(axes: Axes, log: Sequence[LogRow], unit: str) -> None:
    """1/α̂ of the norms against the step."""
    of_matrices = [r for r in _of(log, unit) if r["parameter"] not in ("all", "hidden")]
    points = sorted({r["step"] for r in of_matrices if "tail" in r})
    spread = [
        [_inverse(r["tail"]["alpha"]) for r in of_matrices if r["step"] == step and "tail" in r]
        for step in points
    ]
    if spread:
        axes.fill_between(
            points,
            [min(values) for values in spread],
            [max(values) for values in spread],
            color=ablation_look(2, 7, True).light,
            alpha=0.25,
            linewidth=0,
            label="single matrices",
        )
    rows = [r for r in _of(log, unit, "hidden") if "tail" in r]
    with_reference = [r for r in rows if "gaussian" in r["tail"]]
    if with_reference:
        axes.fill_between(
            [r["step"] for r in with_reference],
            [_inverse(r["tail"]["gaussian"][2]) for r in with_reference],
            [_inverse(r["tail"]["gaussian"][0]) for r in with_reference],
            color=INK_SOFT,
            alpha=0.35,
            linewidth=0,
            label="Gaussian noise",
        )
    _with_intervals(axes, rows, [r["tail"] for r in rows], INK, f"hidden, one {unit}")
    if unit == "example":
        batches = [r for r in _of(log, "batch", "hidden") if "tail" in r]
        entries = [r["tail"] for r in batches]
        _with_intervals(
            axes, batches, entries, ablation_look(4, 7, True).light, "hidden, one batch", "--"
        )
    _finish(axes, log, "α of ‖ξ‖ (Hill)", "Tail of the noise", _TAIL_TICKS, -0.02, 0.66)


def _growth(axes: Axes, log: Sequence[LogRow], unit: str) -> None:
    """1/α from how sums of examples grow, a line for each length of the sums."""
    rows = [r for r in _of(log, unit, "hidden") if r.get("growth")]
    levels = sorted({entry["examples"] for r in rows for entry in r["growth"]})
    for index, level in enumerate(levels):
        pairs = [(r, e) for r in rows for e in r["growth"] if e["examples"] == level]
        look = ablation_look(index, len(levels), True)
        label = f"sums of {level} examples"
        _with_intervals(axes, [r for r, _ in pairs], [e for _, e in pairs], look.light, label)
    _finish(axes, log, "α", "Growth of sums", _GROWTH_TICKS, 0.45, 0.6)


def _survival(axes: Axes, log: Sequence[LogRow], unit: str) -> None:
    """P(‖ξ‖ > t) at three points of the run, t in units of the median."""
    rows = [r for r in _of(log, unit, "hidden") if r.get("survival")]
    chosen = [rows[i] for i in sorted({0, len(rows) // 2, len(rows) - 1})] if rows else []
    for index, entry in enumerate(chosen):
        look = ablation_look(index, len(chosen), True)
        median = dict(map(tuple, entry["survival"]))[0.5]
        points = [*entry["survival"], [1 / entry["draws"], entry["largest"]]]
        axes.plot(
            [value / median for _, value in points],
            [p for p, _ in points],
            color=look.light,
            marker=look.marker,
            markersize=4,
            label=f"step {entry['step']}",
        )
        dimension = entry.get("dimension")
        if dimension is not None and index == len(chosen) - 1:
            reference = [(_chi_quantile(1 - p, dimension), p) for p, _ in points]
            middle = _chi_quantile(0.5, dimension)
            axes.plot(
                [x / middle for x, _ in reference],
                [p for _, p in reference],
                color=INK_SOFT,
                linestyle=":",
                label=f"Gaussian, step {entry['step']}",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    heavy = np.array([1.0, max(high, 2.0)])
    axes.plot(heavy, 0.5 * heavy**-2.0, color=ALARM, lw=1.0, ls="--", label="t⁻², no variance")
    axes.set_xlim(low, high)
    near, far = (0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5), (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
    ticks = near if high < 10 * low else far
    axes.xaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    style_axes(axes, "t, in medians of ‖ξ‖", "P(‖ξ‖ > t)", "Survival")
    axes.legend(fontsize=8, loc="lower left")


def _sizes(axes: Axes, log: Sequence[LogRow]) -> None:
    """σ of the assumption, for α = 2, and the gradient itself."""
    examples, batches = (_of(log, unit, "hidden") for unit in ("example", "batch"))
    look = ablation_look(4, 7, True)
    for label, rows, colour, dash in (
        ("‖∇f‖", batches, INK, "-"),
        ("(E‖ξ‖²)^½, one example", examples, look.light, "-"),
        ("(E‖ξ‖²)^½, one batch", batches, look.light, "--"),
    ):
        sizes = [r["gradient"] if colour == INK else r["moments"]["2"] for r in rows]
        if rows:
            x, y = [r["step"] for r in rows], [size or math.nan for size in sizes]
            axes.plot(x, y, color=colour, linestyle=dash, marker="o", markersize=4, label=label)
    axes.set_yscale("log")
    style_axes(axes, "Training step", "Frobenius norm", "Noise and gradient")
    _step_axis(axes, log)
    axes.legend(fontsize=8, handlelength=3)


def _moments_differ(log: Sequence[LogRow], unit: str) -> str:
    """By how much σ depends on α: where norms concentrate, hardly at all."""
    ratios = [
        r["moments"]["2"] / r["moments"]["1.25"]
        for r in _of(log, unit, "hidden")
        if r["moments"]["1.25"]
    ]
    if not ratios:
        return ""
    return (
        f" From α = 1.25 to α = 2 the moment (E‖ξ‖^α)^(1/α) grows by {max(ratios) - 1:.1%} at most."
    )


def _with_intervals(
    axes: Axes,
    rows: Sequence[LogRow],
    entries: Sequence[Mapping[str, Any]],
    colour: str,
    label: str,
    dash: str = "-",
) -> None:
    if not rows:
        return
    middle = np.array([_inverse(e["alpha"]) for e in entries])
    ends = np.array([[_inverse(e["high"]) for e in entries], [_inverse(e["low"]) for e in entries]])
    axes.errorbar(
        [r["step"] for r in rows],
        middle,
        yerr=np.abs(ends - middle),
        color=colour,
        linestyle=dash,
        marker="o",
        markersize=4,
        capsize=2.5,
        elinewidth=1.0,
        label=label,
        zorder=3,
    )


def _finish(
    axes: Axes,
    log: Sequence[LogRow],
    ylabel: str,
    title: str,
    alphas: Sequence[float],
    low: float,
    high: float,
) -> None:
    """An axis of 1/α labelled by α, with the line above which there is no variance."""
    style_axes(axes, "Training step", ylabel, title)
    _step_axis(axes, log)
    top = axes.dataLim.y1
    axes.set_ylim(low, min(1.05, max(high, top + 0.03) if math.isfinite(top) else high))
    axes.axhline(0.5, color=ALARM, linewidth=1.0, linestyle="--", zorder=1)
    bottom, top = axes.get_ylim()
    ticks = [alpha for alpha in alphas if bottom <= 1 / alpha <= top]
    axes.yaxis.set_major_locator(FixedLocator([1 / alpha for alpha in ticks]))
    axes.yaxis.set_major_formatter(lambda y, _: "∞" if y == 0 else f"{1 / y:g}")
    axes.legend(fontsize=8, loc="upper right", ncols=2, handlelength=3)


def _step_axis(axes: Axes, log: Sequence[LogRow]) -> None:
    """Steps as they were measured: dense at the start, so evenly spaced in their cube root."""
    steps = sorted({r["step"] for r in log})
    axes.set_xscale("function", functions=(np.cbrt, lambda x: x**3))
    axes.set_xlim(-1e-4 * steps[-1], 1.08 * steps[-1])
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(False, axis="x")
    axes.spines["bottom"].set_color(RULE)


def _of(log: Sequence[LogRow], unit: str, parameter: str | None = None) -> list[LogRow]:
    return [
        r for r in log if r["unit"] == unit and (parameter is None or r["parameter"] == parameter)
    ]


def _inverse(alpha: float | None) -> float:
    """1/α; ``None`` is how a record writes infinity."""
    return 0.0 if alpha is None else 1 / alpha


def _chi_quantile(p: float, dimension: float) -> float:
    """A quantile of the norm of a Gaussian in ``dimension`` dimensions (Wilson and Hilferty)."""
    spread = 2 / (9 * dimension)
    z = NormalDist().inv_cdf(p)
    return float(max(0.0, 1 - spread + z * math.sqrt(spread)) ** 1.5)


def _largest(run: RunRecord, key: str) -> float:
    """The largest γ or ν along a run."""
    _, _, values = gamma_grid(run.gamma, key)
    return float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
