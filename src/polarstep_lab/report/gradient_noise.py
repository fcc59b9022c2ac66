"""The noise of the gradient along a run: its table and its figure.

The noise is read from ``noise.jsonl`` (:mod:`polarstep_lab.train.noise_log`). Tail indices are drawn
as 1/α, in which their errors are normal and an infinite index is a point on the axis: up is heavier,
and above the line at α = 2 there is no variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter

from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.figures import ALARM, INK, INK_SOFT, Drawing, Look, Panel, Series, shades
from polarstep_lab.report.page import Block, Table, part
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.wording import MISSING, in_digits

__all__ = ["noise_blocks", "noise_figure", "noise_table"]

_CAPTION = (
    "ξ is the difference of a gradient from ∇f at weights held still, over all hidden matrices "
    "together. Heaviest tail: the smallest index that Hill's estimator finds along the run, with its "
    "95% interval; Gaussian: what it finds in Gaussian noise of the same size. Slowest averaging: the "
    "smallest α with which sums grow, for the longest sums that were drawn. An α clearly below 2 "
    "speaks against a variance; one above 2 does not prove that there is one."
)
_LIKE_INFINITY = 1000.0
_X_LABEL = "Training step"
_INK, _GREY = Look(INK), Look(INK_SOFT)
_PALE, _DEEP = shades(7)[2:5:2]


def noise_blocks(section: Section) -> list[Block]:
    """The noise of all rows that measured it, in a table and in a figure for each."""
    rows = section.all_rows
    figures = [noise_figure(row, f"{section.slug}-noise-{i}") for i, row in enumerate(rows)]
    return part(noise_table(rows), _CAPTION, figures)


def noise_table(rows: Sequence[Row]) -> Table:
    """A line for each unit of noise of each row that measured it: one example, one batch."""
    lines = []
    for row, run in ((row, run) for row in rows if (run := row.first_with("noise"))):
        ended = "" if run.status == "finished" else f", {run.status}"
        for entries in _by_unit(run).values():
            tails, growth = _indices(entries, "tail"), _indices(entries, "growth")
            longest = growth[growth["examples"] == growth["examples"].max()]
            (heaviest, gaussian), (slowest, _) = _smallest(tails), _smallest(longest)
            cells = {
                "Method": row.label + ended,
                "Gradient of one": _unit_name(run, entries),
                "Points": _points(run),
                "Heaviest tail, α̂": heaviest,
                "Gaussian": gaussian,
                "Slowest averaging, α": slowest,
            }
            lines.append(cells)
    return Table("Noise of the gradient", pd.DataFrame(lines))


def noise_figure(row: Row, name: str) -> Drawing | None:
    """Tail, growth and size of the noise of a row's first run that measured it."""
    run = row.first_with("noise")
    if run is None:
        return None
    panels = [_tail_panel(run), _growth_panel(run), _size_panel(run)]
    title, caption = "Noise of the gradient", _figure_caption(row, run)
    return Drawing(name, title, caption, (13, 5), panels, columns=3, sharey=False)


def _tail_panel(run: RunRecord) -> Panel:
    """Hill's index of the noise along the run, next to what it finds in Gaussian noise."""
    log, by_unit = pd.DataFrame(run.logs["noise"]), _by_unit(run)
    unit, hidden = next(iter(by_unit.items()))
    single = log[(log["unit"] == unit) & ~log["parameter"].isin(["all", "hidden"])]
    found = _indices(single, "tail")
    spread = (1 / found["alpha"]).groupby(found["step"]).agg(["min", "max"])
    known = _indices(hidden, "tail").dropna(subset=["gaussian"])
    low, high = ([0.0 if q[i] is None else 1 / q[i] for q in known["gaussian"]] for i in (-1, 0))
    ends = spread["min"], spread["max"]
    tails = [
        Series("single matrices", _PALE, spread.index, None, *ends, band=True),
        Series("Gaussian noise", _GREY, known["step"], None, low, high, band=True),
    ]
    for look, (each, entries) in zip((_INK, _DEEP), by_unit.items(), strict=False):
        tails += [_inverse(_indices(entries, "tail"), f"hidden, one {each}", look)]
    alphas = (1, 1.25, 1.5, 2, 3, 5, 10, math.inf)
    axis = partial(_alpha_axis, steps=_steps(run), alphas=alphas, low=-0.02, high=0.66)
    return Panel(tails, _X_LABEL, "α of ‖ξ‖ (Hill)", "Tail of the noise", finish=axis)


def _growth_panel(run: RunRecord) -> Panel:
    """The α with which sums of examples grow, a line for each length of the sums."""
    hidden = next(iter(_by_unit(run).values()))
    sums = _indices(hidden, "growth").groupby("examples")
    growth = [
        _inverse(found, f"sums of {length} examples", look)
        for look, (length, found) in zip(shades(len(sums)), sums, strict=True)
    ]
    alphas = (1, 1.2, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2, 2.1, 2.2)
    axis = partial(_alpha_axis, steps=_steps(run), alphas=alphas, low=0.45, high=0.6)
    return Panel(growth, _X_LABEL, "α", "Growth of sums", finish=axis)


def _size_panel(run: RunRecord) -> Panel:
    """The norms of the gradient and of the noise of each unit."""

    def line(label: str, look: Look, entries: pd.DataFrame, norm: pd.Series) -> Series:
        # A logarithmic axis has no place for zero.
        return Series(label, look, entries["step"], norm.astype(float).replace(0.0, math.nan))

    by_unit, looks = _by_unit(run), {"example": _PALE, "batch": _DEEP}
    batches = by_unit.get("batch")
    sizes = [] if batches is None else [line("‖∇f‖", _INK, batches, batches["gradient"])]
    for unit, entries in by_unit.items():
        norm = entries["moments"].str["2"]
        sizes.append(line(f"(E‖ξ‖²)^½, one {unit}", looks[unit], entries, norm))
    axis = partial(_step_axis, steps=_steps(run))
    return Panel(sizes, _X_LABEL, "Frobenius norm", "Noise and gradient", yscale="log", finish=axis)


def _figure_caption(row: Row, run: RunRecord) -> str:
    """What was drawn at each point, what each panel shows, and how little σ depends on α."""
    drawn = " and ".join(
        f"{entries['draws'].iloc[0]} of one {_unit_name(run, entries)}"
        for entries in _by_unit(run, "all").values()
    )
    ended = "" if run.status == "finished" else f", {run.status}, with {_points(run)} points"
    caption = (
        f"{row.label}, seed {run.spec.seed}{ended}: gradients at weights held still, {drawn} at "
        "each point. Left: Hill's index of ‖ξ‖ over all hidden matrices together, with 95% intervals; "
        "bands: those of single matrices, and what it says of Gaussian noise of the same size. Middle: "
        "the α with which the noise of sums grows, from sums of a quarter as many terms. All norms are "
        "Frobenius norms."
    )
    hidden = next(iter(_by_unit(run).values()))
    moments = [moment for moment in hidden["moments"] if moment["1.25"]]
    if moments:  # the last sentence: where norms concentrate, σ hardly depends on α
        most = max(moment["2"] / moment["1.25"] for moment in moments) - 1
        caption += f" From α = 1.25 to α = 2 the moment (E‖ξ‖^α)^(1/α) grows by {most:.1%} at most."
    return caption


def _step_axis(axes: Axes, steps: Sequence[int]) -> None:
    """Label the steps that were measured: dense at the start, so evenly spaced in their cube root."""
    axes.set_xscale("function", functions=(np.cbrt, lambda x: x**3))
    axes.set_xlim(-1e-4 * steps[-1], 1.08 * steps[-1])
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=8)


def _alpha_axis(
    axes: Axes, steps: Sequence[int], alphas: Sequence[float], low: float, high: float
) -> None:
    """Label an axis of 1/α by α, and draw the line above which there is no variance."""
    _step_axis(axes, steps)
    top = axes.dataLim.y1
    limit = min(1.05, max(high, top + 0.03) if math.isfinite(top) else high)
    axes.set_ylim(low, limit)
    axes.axhline(0.5, color=ALARM, lw=1.0, ls="--", zorder=1, label="no variance above")
    ticks = [1 / alpha for alpha in alphas if low <= 1 / alpha <= limit]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(lambda y, _: "∞" if y == 0 else f"{1 / y:g}")


# --- what a log holds -----------------------------------------------------------------------------


def _by_unit(run: RunRecord, parameter: str = "hidden") -> dict[str, pd.DataFrame]:
    """The entries of a parameter, by what each gradient was taken of: an example or a batch.

    ``"hidden"`` is all hidden matrices together. ``"example"`` comes before ``"batch"``; a unit of
    which no gradients were drawn is left out.
    """
    log = pd.DataFrame(run.logs["noise"])
    found = dict([*log[log["parameter"] == parameter].groupby("unit")])
    return {unit: found[unit] for unit in ("example", "batch") if unit in found}


def _steps(run: RunRecord) -> list[int]:
    """The steps at which noise was measured."""
    return sorted({entry["step"] for entry in run.logs["noise"]})


def _indices(entries: pd.DataFrame, key: str) -> pd.DataFrame:
    """The estimates of α under ``"tail"`` or ``"growth"``, a line for each, with their steps.

    An entry has one estimate of the tail and a list of estimates of growth. A record writes infinity as
    ``null``.
    """
    told = entries.reindex(columns=["step", key])
    told = (told.explode(key) if key == "growth" else told).dropna()
    columns = ["examples", "alpha", "low", "high", "gaussian"]
    frame = pd.DataFrame([*told[key]], columns=columns, dtype=object)
    ends = frame[["alpha", "low", "high"]].astype(float).fillna(math.inf)
    return frame.assign(step=told["step"].to_numpy(), **ends)


def _inverse(found: pd.DataFrame, label: str, look: Look) -> Series:
    """A line of 1/α with its interval, against the step."""
    y, low, high = (1 / found[key] for key in ("alpha", "high", "low"))
    return Series(label, look, found["step"], y, low, high)


def _unit_name(run: RunRecord, entries: pd.DataFrame) -> str:
    """What a gradient was taken of: an image, a sequence, or a batch of several."""
    noun = "image" if run.spec.benchmark == "cifar10" else "sequence"
    examples = entries["examples"].iloc[0]
    return noun if examples == 1 else f"batch of {examples}"


def _points(run: RunRecord) -> str:
    """At how many points of a run noise was measured; of how many, where some are still missing."""
    points = len(_steps(run))
    runtime = run.spec.config.get("runtime") or {}
    planned = (runtime.get("noise") or {}).get("points")
    return str(points) if planned in (None, points) else f"{points} of {planned}"


def _smallest(found: pd.DataFrame) -> tuple[str, str]:
    """The smallest α with its interval and step, and what its estimator finds in Gaussian noise.

    Of Gaussian noise the text has the lowest and the highest quantile.
    """
    if found.empty:
        return MISSING, MISSING
    least = found.loc[found["alpha"].idxmin()]
    alpha, low, high = (_index(least[key]) for key in ("alpha", "low", "high"))
    text, quantiles = f"{alpha} ({low} to {high}) at step {least['step']}", least["gaussian"]
    if not isinstance(quantiles, Sequence):
        return text, MISSING
    ends = [_index(math.inf if q is None else q) for q in (quantiles[0], quantiles[-1])]
    return text, " to ".join(dict.fromkeys(ends))


def _index(alpha: float) -> str:
    """A tail index; a large one means infinity.

    >>> _index(1.194), _index(61.7), _index(math.inf), _index(1.3e6)
    ('1.19', '61.7', '∞', '∞')
    """
    return "∞" if alpha > _LIKE_INFINITY else in_digits(alpha, 3)
