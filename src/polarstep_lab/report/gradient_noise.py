"""The noise of the gradient along a run: its table and its figure.

The noise is that of ``noise.jsonl`` (:mod:`polarstep_lab.training.noise_study`). Tail indices are drawn
as 1/α, in which their errors are normal and an infinite index is a point on the axis: up is heavier,
and above the line at α = 2 there is no variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter

from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.blocks import Table
from polarstep_lab.report.drawing import (
    ALARM,
    INK,
    INK_SOFT,
    RULE,
    Drawing,
    draw,
    plain_log_ticks,
    style_axes,
)
from polarstep_lab.report.palette import ordinal_looks
from polarstep_lab.report.rows import Row
from polarstep_lab.report.texts import MISSING, number

__all__ = ["NOISE_CAPTION", "chi_quantile", "noise_figure", "noise_sentence", "noise_table"]

NOISE_CAPTION = (
    "ξ is the difference of a gradient from ∇f at weights held still, over all hidden matrices "
    "together. Heaviest tail: the smallest index that Hill's estimator finds along the run, with its "
    "95% interval; Gaussian: what it finds in Gaussian noise of the same size. Slowest averaging: the "
    "smallest α with which sums grow, for the longest sums that were drawn. An α clearly below 2 "
    "speaks against a variance; one above 2 does not prove that there is one."
)
_LIKE_INFINITY = 1000.0
_TAIL_TICKS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
_GROWTH_TICKS = (1.0, 1.2, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2)
_BLUES = ordinal_looks(7)

Entry = Mapping[str, Any]


def _entries(run: RunRecord, unit: str, parameter: str = "hidden") -> list[Entry]:
    """What was recorded for gradients of one ``unit``: over all hidden matrices, or one parameter."""
    log = run.logs.get("noise", ())
    return [entry for entry in log if (entry["unit"], entry["parameter"]) == (unit, parameter)]


def _indices(entries: Sequence[Entry], key: str) -> pd.DataFrame:
    """The estimates of α under ``key``, a line for each, with the step and the ends of the interval.

    A record writes infinity as ``null``.
    """
    lines = [
        {"step": entry["step"], **found}
        for entry in entries
        for found in (entry.get("growth") or () if key == "growth" else [entry.get(key) or {}])
        if found
    ]
    columns = ["step", "examples", "alpha", "low", "high", "gaussian"]
    frame = pd.DataFrame(lines, columns=columns, dtype=object)
    ends = ["alpha", "low", "high"]
    return frame.assign(**frame[ends].astype(float).fillna(math.inf))


def _unit(run: RunRecord) -> str:
    """Gradients of single examples where there are some, or else of batches."""
    return "example" if _entries(run, "example") else "batch"


def _unit_name(run: RunRecord, entry: Entry) -> str:
    """What a gradient was taken of: an image, a sequence, or a batch of them."""
    noun = "image" if run.identity.benchmark == "cifar10" else "sequence"
    return noun if entry["examples"] == 1 else f"batch of {entry['examples']}"


def _points(run: RunRecord) -> str:
    """At how many points of a run noise was measured, and of how many where it has not ended."""
    points = len({entry["step"] for entry in run.logs.get("noise", ())})
    runtime = run.identity.config.get("runtime") or {}
    planned = (runtime.get("noise") or {}).get("points")
    return str(points) if planned in (None, points) else f"{points} of {planned}"


# --- the table ------------------------------------------------------------------------------------


def noise_table(rows: Sequence[Row]) -> Table | None:
    """A line for each unit of noise of each row that measured it: one example, one batch."""
    header = ["Method", "Gradient of one", "Points", "Heaviest tail, α̂", "Gaussian"]
    lines = []
    for row, run in ((row, run) for row in rows if (run := row.first_with("noise"))):
        label = row.label if run.status == "finished" else f"{row.label}, {run.status}"
        for entries in filter(None, (_entries(run, unit) for unit in ("example", "batch"))):
            heaviest, slowest = _smallest(_indices(entries, "tail")), _slowest(entries)
            gaussian = MISSING if heaviest is None else _gaussian(heaviest["gaussian"])
            line = [label, _unit_name(run, entries[0]), _points(run), _at(heaviest), gaussian]
            lines.append([*line, _at(slowest)])
    header += ["Slowest averaging, α"]
    return Table("Noise of the gradient", header, lines) if lines else None


def noise_sentence(row: Row) -> str:
    """When the noise of a row averages out slowest; empty where that was not measured."""
    run = row.first_with("noise")
    entries = _entries(run, _unit(run)) if run else []
    slowest = _slowest(entries)
    if run is None or slowest is None:
        return ""
    return (
        f"Along the run of {row.label}, the noise of one {_unit_name(run, entries[0])} averages out "
        f"slowest at step {slowest['step']}: its sums grow with α = {_interval(slowest)}."
    )


def _slowest(entries: Sequence[Entry]) -> Any:
    """The smallest α of sums as long as any that were drawn; ``None`` where none were drawn."""
    growth = _indices(entries, "growth")
    return _smallest(growth[growth["examples"] == growth["examples"].max()])


def _smallest(found: pd.DataFrame) -> Any:
    return None if found.empty else found.loc[found["alpha"].idxmin()]


def _at(found: Any) -> str:
    """An estimate of α with its interval and its step."""
    return MISSING if found is None else f"{_interval(found)} at step {found['step']}"


def _interval(found: Any) -> str:
    return f"{_index(found['alpha'])} ({_index(found['low'])} to {_index(found['high'])})"


def _gaussian(quantiles: Any) -> str:
    """What the estimator says of Gaussian noise: from the lowest to the highest quantile."""
    if not isinstance(quantiles, Sequence):
        return MISSING
    ends = [_index(math.inf if q is None else q) for q in (quantiles[0], quantiles[-1])]
    return " to ".join(dict.fromkeys(ends))


def _index(alpha: float) -> str:
    """A tail index; a large one means infinity.

    >>> _index(1.194), _index(61.7), _index(math.inf), _index(1.3e6)
    ('1.19', '61.7', '∞', '∞')
    """
    return "∞" if alpha > _LIKE_INFINITY else number(alpha, 3)


# --- the figure -----------------------------------------------------------------------------------


def noise_figure(row: Row, name: str) -> Drawing | None:
    """Tail, growth, survival and size of the noise of a row's first run that measured it."""
    run = row.first_with("noise")
    if run is None:
        return None
    unit = _unit(run)

    def paint(figure: Figure) -> None:
        (tail, growth), (survival, size) = figure.subplots(2, 2)
        _paint_tails(tail, run, unit)
        _paint_growth(growth, run, unit)
        _paint_survival(survival, _entries(run, unit))
        _paint_sizes(size, run)

    drawn = " and ".join(
        f"{entry['draws']} of one {_unit_name(run, entry)}"
        for each in ("example", "batch")
        for entry in _entries(run, each, "all")[:1]
    )
    ended = "" if run.status == "finished" else f", {run.status}, with {_points(run)} points"
    caption = (
        f"{row.label}, seed {run.identity.seed}{ended}: gradients at weights held still, {drawn} at "
        "each point. Top left: Hill's index of ‖ξ‖ over all hidden matrices together, with 95% "
        "intervals; the blue band spans those of single matrices, and grey is what the same estimator "
        "says of Gaussian noise of the same size. Top right: the α with which the noise of sums grows, "
        "from sums of a quarter as many terms. Bottom left: how often the norm exceeds multiples of its "
        "median. All norms are Frobenius norms."
    )
    moments = [entry["moments"] for entry in _entries(run, unit) if entry["moments"]["1.25"]]
    if moments:  # where norms concentrate, σ hardly depends on α
        most = max(moment["2"] / moment["1.25"] for moment in moments) - 1
        caption += f" From α = 1.25 to α = 2 the moment (E‖ξ‖^α)^(1/α) grows by {most:.1%} at most."
    return draw(name, "Noise of the gradient", caption, (10.5, 8.2), paint)


def _paint_tails(axes: Axes, run: RunRecord, unit: str) -> None:
    """1/α̂ of the norms against the step."""
    log = run.logs["noise"]
    single = [e for e in log if e["unit"] == unit and e["parameter"] not in ("all", "hidden")]
    found = _indices(single, "tail")
    spread = (1 / found["alpha"]).groupby(found["step"]).agg(["min", "max"])
    band: dict[str, Any] = {"color": _BLUES[2].light, "alpha": 0.25, "label": "single matrices"}
    axes.fill_between([*spread.index], spread["min"], spread["max"], linewidth=0, **band)
    tails = _indices(_entries(run, unit), "tail")
    known = tails.dropna(subset=["gaussian"])
    low, high = ([0.0 if q[i] is None else 1 / q[i] for q in known["gaussian"]] for i in (-1, 0))
    band = {"color": INK_SOFT, "alpha": 0.35, "label": "Gaussian noise"}
    axes.fill_between([*known["step"]], low, high, linewidth=0, **band)
    _paint_intervals(axes, tails, f"hidden, one {unit}", INK)
    if unit == "example":
        batches = _indices(_entries(run, "batch"), "tail")
        _paint_intervals(axes, batches, "hidden, one batch", _BLUES[4].light, "--")
    _finish(axes, run, "α of ‖ξ‖ (Hill)", "Tail of the noise", _TAIL_TICKS, (-0.02, 0.66))


def _paint_growth(axes: Axes, run: RunRecord, unit: str) -> None:
    """1/α from how sums of examples grow, a line for each length of the sums."""
    groups = _indices(_entries(run, unit), "growth").groupby("examples")
    for look, (length, growth) in zip(ordinal_looks(len(groups)), groups, strict=True):
        _paint_intervals(axes, growth, f"sums of {length} examples", look.light)
    _finish(axes, run, "α", "Growth of sums", _GROWTH_TICKS, (0.45, 0.6))


def _paint_survival(axes: Axes, entries: Sequence[Entry]) -> None:
    """P(‖ξ‖ > t) at three points of the run, t in units of the median."""
    measured = [entry for entry in entries if entry.get("survival")]
    chosen = measured and [measured[i] for i in sorted({0, len(measured) // 2, len(measured) - 1})]
    for entry, look in zip(chosen, ordinal_looks(len(chosen)), strict=True):
        points = np.array([*entry["survival"], [1 / entry["draws"], entry["largest"]]])
        median = points[points[:, 0] == 0.5, 1]
        style: dict[str, Any] = {"color": look.light, "marker": look.marker, "markersize": 4}
        axes.plot(points[:, 1] / median, points[:, 0], label=f"step {entry['step']}", **style)
    if chosen and entry.get("dimension") is not None:
        norms = [chi_quantile(1 - p, entry["dimension"]) for p in (0.5, *points[:, 0])]
        style = {"color": INK_SOFT, "linestyle": ":", "label": f"Gaussian, step {entry['step']}"}
        axes.plot(np.array(norms[1:]) / norms[0], points[:, 0], **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    heavy = np.array([1.0, max(high, 2.0)])
    axes.plot(heavy, 0.5 * heavy**-2.0, color=ALARM, lw=1.0, ls="--", label="t⁻², no variance")
    axes.set_xlim(low, high)
    plain_log_ticks(axes.xaxis)
    style_axes(axes, "t, in medians of ‖ξ‖", "P(‖ξ‖ > t)", "Survival")
    axes.legend(fontsize=8, loc="upper right")


def _paint_sizes(axes: Axes, run: RunRecord) -> None:
    """σ of the assumption, for α = 2, and the gradient itself."""
    for label, unit, colour, dash in (
        ("‖∇f‖", "batch", INK, "-"),
        ("(E‖ξ‖²)^½, one example", "example", _BLUES[4].light, "-"),
        ("(E‖ξ‖²)^½, one batch", "batch", _BLUES[4].light, "--"),
    ):
        entries = _entries(run, unit)
        sizes = [e["gradient"] if colour == INK else e["moments"]["2"] for e in entries]
        if entries:
            x, y = [entry["step"] for entry in entries], [size or math.nan for size in sizes]
            axes.plot(x, y, color=colour, linestyle=dash, marker="o", markersize=4, label=label)
    axes.set_yscale("log")
    style_axes(axes, "Training step", "Frobenius norm", "Noise and gradient")
    _step_axis(axes, run)
    axes.legend(fontsize=8, handlelength=3)


def _paint_intervals(
    axes: Axes, found: pd.DataFrame, label: str, colour: str, dash: str = "-"
) -> None:
    """1/α with its interval, against the step."""
    middle, ends = 1 / found["alpha"], (1 / found["high"], 1 / found["low"])
    style: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": "o", "markersize": 4}
    error = [abs(end - middle) for end in ends]
    style |= {"yerr": error, "capsize": 2.5, "elinewidth": 1.0, "zorder": 3}
    if not found.empty:
        axes.errorbar([*found["step"]], middle, label=label, **style)


def _finish(
    axes: Axes,
    run: RunRecord,
    ylabel: str,
    title: str,
    alphas: Sequence[float],
    limits: tuple[float, float],
) -> None:
    """An axis of 1/α labelled by α, with the line above which there is no variance."""
    style_axes(axes, "Training step", ylabel, title)
    _step_axis(axes, run)
    low, high = limits
    top = axes.dataLim.y1
    high = min(1.05, max(high, top + 0.03) if math.isfinite(top) else high)
    axes.set_ylim(low, high)
    axes.axhline(0.5, color=ALARM, linewidth=1.0, linestyle="--", zorder=1)
    ticks = [1 / alpha for alpha in alphas if low <= 1 / alpha <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(lambda y, _: "∞" if y == 0 else f"{1 / y:g}")
    axes.legend(fontsize=8, loc="upper right", ncols=2, handlelength=3)


def _step_axis(axes: Axes, run: RunRecord) -> None:
    """Steps as they were measured: dense at the start, so evenly spaced in their cube root."""
    steps = sorted({entry["step"] for entry in run.logs["noise"]})
    axes.set_xscale("function", functions=(np.cbrt, lambda x: x**3))
    axes.set_xlim(-1e-4 * steps[-1], 1.08 * steps[-1])
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(False, axis="x")
    axes.spines["bottom"].set_color(RULE)


def chi_quantile(p: float, dimension: float) -> float:
    """A quantile of the norm of a Gaussian in ``dimension`` dimensions (Wilson and Hilferty)."""
    spread = 2 / (9 * dimension)
    z = NormalDist().inv_cdf(p)
    return float(max(0.0, 1 - spread + z * math.sqrt(spread)) ** 1.5)
