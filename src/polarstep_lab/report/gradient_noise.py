"""The noise of the gradient along a run: its table and its figure.

The noise is that of ``noise.jsonl`` (:mod:`polarstep_lab.training.noise_study`). Tail indices are drawn
as 1/α, in which their errors are normal and an infinite index is a point on the axis: up is heavier,
and above the line at α = 2 there is no variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter

from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.blocks import Block, Table, part, tabulate
from polarstep_lab.report.drawing import ALARM, Drawing, Panel, Series, paint_panels
from polarstep_lab.report.estimates import MISSING, number
from polarstep_lab.report.palette import CHROME, Look, ordinal_looks
from polarstep_lab.report.rows import Row, Section

__all__ = ["noise_blocks", "noise_figure", "noise_table"]

_CAPTION = (
    "ξ is the difference of a gradient from ∇f at weights held still, over all hidden matrices "
    "together. Heaviest tail: the smallest index that Hill's estimator finds along the run, with its "
    "95% interval; Gaussian: what it finds in Gaussian noise of the same size. Slowest averaging: the "
    "smallest α with which sums grow, for the longest sums that were drawn. An α clearly below 2 "
    "speaks against a variance; one above 2 does not prove that there is one."
)
_LIKE_INFINITY = 1000.0
_INK, _GREY, *_ = CHROME
_PALE, _DEEP = ordinal_looks(7)[2:5:2]


def noise_blocks(section: Section) -> list[Block]:
    """The noise of all rows that measured it, in a table and in a figure for each."""
    figures = [
        noise_figure(row, f"{section.slug}-noise-{index}")
        for index, row in enumerate(section.all_rows)
    ]
    return part("Noise of the gradient", noise_table(section.all_rows), _CAPTION, figures)


def noise_table(rows: Sequence[Row]) -> Table | None:
    """A line for each unit of noise of each row that measured it: one example, one batch."""
    lines = []
    for row, run in ((row, run) for row in rows if (run := row.first_with("noise"))):
        ended = "" if run.status == "finished" else f", {run.status}"
        for entries in filter(None, (_entries(run, unit) for unit in ("example", "batch"))):
            growth = _indices(entries, "growth")
            longest = growth[growth["examples"] == growth["examples"].max()]
            found = {"tail": _smallest(_indices(entries, "tail")), "growth": _smallest(longest)}
            lines.append({"label": row.label + ended, "run": run, "entry": entries[0], **found})
    columns: dict[str, Callable[[Any], str]] = {
        "Method": lambda line: line["label"],
        "Gradient of one": lambda line: _unit_name(line["run"], line["entry"]),
        "Points": lambda line: _points(line["run"]),
        "Heaviest tail, α̂": lambda line: _at(line["tail"]),
        "Gaussian": lambda line: _gaussian(line["tail"]),
        "Slowest averaging, α": lambda line: _at(line["growth"]),
    }
    return tabulate("Noise of the gradient", lines, columns) if lines else None


def noise_figure(row: Row, name: str) -> Drawing | None:
    """Tail, growth and size of the noise of a row's first run that measured it."""
    run = row.first_with("noise")
    if run is None:
        return None
    log = run.logs["noise"]
    unit = "example" if _entries(run, "example") else "batch"
    steps = sorted({entry["step"] for entry in log})

    def step_axis(axes: Axes) -> None:
        """Steps as they were measured: dense at the start, so evenly spaced in their cube root."""
        axes.set_xscale("function", functions=(np.cbrt, lambda x: x**3))
        axes.set_xlim(-1e-4 * steps[-1], 1.08 * steps[-1])
        axes.xaxis.set_major_locator(FixedLocator(steps))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", labelsize=8)

    def alpha_axis(alphas: Sequence[float], low: float, high: float) -> Callable[[Axes], None]:
        """An axis of 1/α labelled by α, with the line above which there is no variance."""

        def finish(axes: Axes) -> None:
            step_axis(axes)
            top = axes.dataLim.y1
            limit = min(1.05, max(high, top + 0.03) if math.isfinite(top) else high)
            axes.set_ylim(low, limit)
            axes.axhline(0.5, color=ALARM, lw=1.0, ls="--", zorder=1, label="no variance above")
            ticks = [1 / alpha for alpha in alphas if low <= 1 / alpha <= limit]
            axes.yaxis.set_major_locator(FixedLocator(ticks))
            axes.yaxis.set_major_formatter(lambda y, _: "∞" if y == 0 else f"{1 / y:g}")

        return finish

    single = [e for e in log if e["unit"] == unit and e["parameter"] not in ("all", "hidden")]
    found = _indices(single, "tail")
    spread = (1 / found["alpha"]).groupby(found["step"]).agg(["min", "max"])
    hidden = _indices(_entries(run, unit), "tail")
    known = hidden.dropna(subset=["gaussian"])
    low, high = ([0.0 if q[i] is None else 1 / q[i] for q in known["gaussian"]] for i in (-1, 0))
    x = spread.index
    tails = [Series("single matrices", _PALE, x, None, spread["min"], spread["max"], band=True)]
    tails += [
        Series("Gaussian noise", _GREY, known["step"].astype(int), None, low, high, band=True)
    ]
    tails += [_inverse(hidden, f"hidden, one {unit}", _INK)]
    if unit == "example":
        batches = _indices(_entries(run, "batch"), "tail")
        tails += [_inverse(batches, "hidden, one batch", _DEEP)]
    sums = _indices(_entries(run, unit), "growth").groupby("examples")
    growth = [
        _inverse(found, f"sums of {length} examples", look)
        for look, (length, found) in zip(ordinal_looks(len(sums)), sums, strict=True)
    ]
    sizes = []
    for look, each in ((_INK, "batch"), (_PALE, "example"), (_DEEP, "batch")):
        entries = _entries(run, each)
        norms = [entry["gradient" if look is _INK else "moments"] for entry in entries]
        y = [(norm if look is _INK else norm["2"]) or math.nan for norm in norms]
        label = "‖∇f‖" if look is _INK else f"(E‖ξ‖²)^½, one {each}"
        sizes += [Series(label, look, [entry["step"] for entry in entries], y)] if entries else []
    tail_axis = alpha_axis((1, 1.25, 1.5, 2, 3, 5, 10, math.inf), -0.02, 0.66)
    growth_axis = alpha_axis((1, 1.2, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2, 2.1, 2.2), 0.45, 0.6)
    at = "Training step"
    panels = [
        Panel(tails, at, "α of ‖ξ‖ (Hill)", "Tail of the noise", finish=tail_axis),
        Panel(growth, at, "α", "Growth of sums", finish=growth_axis),
        Panel(sizes, at, "Frobenius norm", "Noise and gradient", yscale="log", finish=step_axis),
    ]
    paint = partial(paint_panels, panels=panels, columns=3, sharey=False)
    return Drawing(name, "Noise of the gradient", _figure_caption(row, run, unit), (13, 5), paint)


def _figure_caption(row: Row, run: RunRecord, unit: str) -> str:
    drawn = " and ".join(
        f"{entry['draws']} of one {_unit_name(run, entry)}"
        for each in ("example", "batch")
        for entry in _entries(run, each, "all")[:1]
    )
    ended = "" if run.status == "finished" else f", {run.status}, with {_points(run)} points"
    caption = (
        f"{row.label}, seed {run.identity.seed}{ended}: gradients at weights held still, {drawn} at "
        "each point. Left: Hill's index of ‖ξ‖ over all hidden matrices together, with 95% intervals; "
        "bands: those of single matrices, and what it says of Gaussian noise of the same size. Middle: "
        "the α with which the noise of sums grows, from sums of a quarter as many terms. All norms are "
        "Frobenius norms."
    )
    moments = [entry["moments"] for entry in _entries(run, unit) if entry["moments"]["1.25"]]
    if moments:  # where norms concentrate, σ hardly depends on α
        most = max(moment["2"] / moment["1.25"] for moment in moments) - 1
        caption += f" From α = 1.25 to α = 2 the moment (E‖ξ‖^α)^(1/α) grows by {most:.1%} at most."
    return caption


def _entries(run: RunRecord, unit: str, parameter: str = "hidden") -> list[Any]:
    """What was recorded for gradients of one ``unit``: over all hidden matrices, or one parameter."""
    log = run.logs["noise"]
    return [entry for entry in log if (entry["unit"], entry["parameter"]) == (unit, parameter)]


def _indices(entries: Sequence[Any], key: str) -> pd.DataFrame:
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


def _inverse(found: pd.DataFrame, label: str, look: Look) -> Series:
    """1/α with its interval, against the step."""
    x, (y, low, high) = found["step"].astype(int), (1 / found[k] for k in ("alpha", "high", "low"))
    return Series(label, look, x, y, low, high)


def _unit_name(run: RunRecord, entry: Any) -> str:
    """What a gradient was taken of: an image, a sequence, or a batch of them."""
    noun = "image" if run.identity.benchmark == "cifar10" else "sequence"
    return noun if entry["examples"] == 1 else f"batch of {entry['examples']}"


def _points(run: RunRecord) -> str:
    """At how many points of a run noise was measured, and of how many where it has not ended."""
    points = len({entry["step"] for entry in run.logs["noise"]})
    runtime = run.identity.config.get("runtime") or {}
    planned = (runtime.get("noise") or {}).get("points")
    return str(points) if planned in (None, points) else f"{points} of {planned}"


def _smallest(found: pd.DataFrame) -> Any:
    return None if found.empty else found.loc[found["alpha"].idxmin()]


def _at(found: Any) -> str:
    """An estimate of α with its interval and its step."""
    if found is None:
        return MISSING
    alpha, low, high = (_index(found[key]) for key in ("alpha", "low", "high"))
    return f"{alpha} ({low} to {high}) at step {found['step']}"


def _gaussian(found: Any) -> str:
    """What the estimator says of Gaussian noise: from the lowest to the highest quantile."""
    if found is None or not isinstance(quantiles := found["gaussian"], Sequence):
        return MISSING
    ends = [_index(math.inf if q is None else q) for q in (quantiles[0], quantiles[-1])]
    return " to ".join(dict.fromkeys(ends))


def _index(alpha: float) -> str:
    """A tail index; a large one means infinity.

    >>> _index(1.194), _index(61.7), _index(math.inf), _index(1.3e6)
    ('1.19', '61.7', '∞', '∞')
    """
    return "∞" if alpha > _LIKE_INFINITY else number(alpha, 3)
