"""How inexact each polar step was: γ and ν of monitored runs, in a table and in two figures.

γ and ν are those of the paper's inexactness assumption: ⟨M, T⟩ ≥ (1 − γ)‖M‖_* and ‖T‖_op ≤ 1 + ν.
They come from ``gamma.jsonl``. The table shows the worst of each run, since an assumption has to hold
throughout. The figures show methods side by side on one scale, since the question is which of them
gives up more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polarstep.theory.bounds.polar import COVERED
from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.blocks import Table
from polarstep_lab.report.drawing import RULE, Drawing, draw, style_axes
from polarstep_lab.report.palette import ablation_look, look_of
from polarstep_lab.report.rows import Row
from polarstep_lab.report.texts import MISSING, number

__all__ = [
    "GAMMA_CAPTION",
    "gamma_grid",
    "gamma_heatmap",
    "gamma_lines",
    "gamma_sentence",
    "gamma_table",
    "panel_title",
]

GAMMA_CAPTION = (
    "γ is the alignment that a polar step gave up and ν by how much its operator norm exceeded one, "
    "from singular values, over all sampled steps and matrices. The theorems ask for γ < 1 throughout. "
    "ν, proved: what Propositions 1 (full space) and 2 (Gaussian sketch) say of exact arithmetic, so "
    "that anything more is rounding. They give γ by the singular values of each matrix alone, which "
    "records do not keep."
)
_SYMBOLS = {"gamma": "γ", "nu": "ν"}
_LEAST = {"gamma": 1e-3, "nu": 0.01}  # the shortest axes: rounding must not look like something
_NU_WORTH_DRAWING = 0.005
_AT_MOST = 8  # panels that can still be read side by side

Shown = Sequence[tuple[Row, RunRecord]]


def gamma_grid(run: RunRecord, key: str) -> pd.DataFrame:
    """γ or ν of a run: matrices in the order they were recorded × steps; NaN where nothing is known.

    A zero matrix has no polar factor to miss, and rounding below zero counts as zero.
    """
    log = pd.DataFrame(run.gamma).reindex(columns=["step", "stable_rank", key])
    log["name"] = [_name(entry) for entry in run.gamma]
    log[key] = log[key].astype(float).clip(lower=0.0).mask(log["stable_rank"] == 0)
    grid = log.drop_duplicates(["name", "step"], keep="last").pivot(
        index="name", columns="step", values=key
    )
    return grid.reindex(log["name"].unique())


def _name(entry: Mapping[str, Any]) -> str:
    """The parameter, and which block of it where it holds several matrices."""
    name = str(entry["parameter"]).removesuffix(".weight")
    return f"{name} [{entry['block']}]" if entry.get("block") else name


# --- the table ------------------------------------------------------------------------------------


def gamma_table(rows: Sequence[Row]) -> Table | None:
    """A line for each monitored row: which polar map, and how inexact it was."""
    header = ["Method", "Polar map", "Runs", "Sampled steps"]
    header += ["γ, median", "γ, largest", "ν, largest", "ν, proved"]
    cells = []
    for row in rows:
        log = _log(row)
        if log.empty:
            continue
        steps = log["step"].unique()
        sampled = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)}, last {max(steps)}"
        figures = (log["gamma"].median(), log["gamma"].max(), log["nu"].max())
        cells.append(
            [row.method, _polar_map(row), _runs(row), sampled, *map(_decimal, figures), _proved(row)]
        )
    return Table("How inexact each step was", header, cells) if cells else None


def gamma_sentence(rows: Sequence[Row]) -> str:
    """The largest γ and ν among ``rows``, and the polar maps that they are of."""
    logs = {row: log for row in rows if not (log := _log(row)).empty}
    if not logs:
        return ""
    worst = []
    for key, symbol in _SYMBOLS.items():
        row = max(logs, key=lambda row: logs[row][key].max())  # noqa: B023 - called at once
        largest = _decimal(logs[row][key].max())
        worst.append(f"{symbol} {'is ' * (not worst)}at most {largest} ({row.method}: {_polar_map(row)})")
    return f"In the runs that finished, {worst[0]} and {worst[1]}."


def _log(row: Row) -> pd.DataFrame:
    """Steps, γ and ν of all monitored runs of a row, without zero matrices; empty without values."""
    entries = [e for run in row.records for e in run.gamma if e.get("stable_rank") != 0]
    log = pd.DataFrame(entries, columns=["step", "gamma", "nu"])
    return log if log[["gamma", "nu"]].notna().any().all() else log[:0]


def _runs(row: Row) -> str:
    """How many runs, and how they ended where they did not finish."""
    if row.counts.keys() == {"finished"}:
        return str(len(row.runs))
    return ", ".join(f"{count} {status}" for status, count in row.counts.items())


def _polar_map(row: Row) -> str:
    """Polynomial, steps, rank and sketch by the config; the label where the config has none."""
    polar = row.polar
    if not polar.get("solver"):
        return row.label
    words = [str(polar["solver"])]
    words += [f"{polar['steps']} steps"] if polar.get("steps") else []
    words += [f"rank {polar['rank']}"] if polar.get("rank") else []
    words += [str(polar["sketch"])] if polar.get("rank") and not _gaussian(row) else []
    return ", ".join(words)


def _proved(row: Row) -> str:
    """ν by Proposition 1, or by Proposition 2 for a Gaussian sketch."""
    covered = not row.polar.get("rank") or _gaussian(row)
    return "0" if covered and row.polar.get("solver") in COVERED else MISSING


def _gaussian(row: Row) -> bool:
    return row.polar.get("sketch") == "gaussian"


def _decimal(value: float) -> str:
    """Four decimals: less is rounding.

    >>> _decimal(0.02761), _decimal(-4e-5), _decimal(1998.4756)
    ('0.0276', '0.0000', '1998')
    """
    if value >= 10:
        return number(value)
    return f"{value:.4f}".replace("-0.0000", "0.0000").replace("-", "−")


# --- the figures ----------------------------------------------------------------------------------


def gamma_lines(rows: Sequence[Row], name: str) -> Drawing | None:
    """γ and ν of each monitored row against the step: the median matrix, and the band of all."""
    shown = _shown(rows)
    if not shown:
        return None
    ablated = len({row.method for row, _ in shown}) < len(shown)

    def paint(figure: Figure) -> None:
        panels = figure.subplots(2, len(shown), sharex=True, sharey="row", squeeze=False)
        for (key, symbol), line in zip(_SYMBOLS.items(), panels, strict=True):
            limit = 1.08 * max(_LEAST[key], _scale(shown, key))
            line[0].set_ylim(0, limit)
            line[0].yaxis.label.set_rotation(0)
            for index, (axes, (row, run)) in enumerate(zip(line, shown, strict=True)):
                look = ablation_look(index, len(shown), False) if ablated else look_of(row.method)
                style_axes(axes, "", symbol if index == 0 else "")
                if key == "gamma":
                    axes.set_title(panel_title(row, run), fontsize=8.5)
                _band(axes, gamma_grid(run, key).dropna(axis="columns", how="all"), look.light)
                if (top := _largest(run, key)) > limit:
                    place = {"xycoords": "axes fraction", "ha": "left", "va": "top", "fontsize": 8}
                    axes.annotate(f"↑ {top:.4g}", (0.08, 0.98), **place)
        figure.supxlabel("Training step", fontsize=10)

    caption = (
        f"{_one_method(rows)}What each polar step gave up (γ) and by how much its operator norm "
        "exceeded one (ν), from exact singular values: the median over matrices, and the band of all "
        f"of them.{_which(rows, shown)}"
    )
    if any(_largest(run, "nu") > 1 for _, run in shown if run.status == "diverged"):
        caption += " An arrow marks what lies above the axis."
    return draw(name, "γ and ν along the run", caption, (10.5, 4.6), paint)


def gamma_heatmap(rows: Sequence[Row], name: str) -> Drawing | None:
    """γ of every monitored matrix over training, a panel for each row, and ν where there is any."""
    shown = _shown(rows)
    if not shown:
        return None
    names = list(dict.fromkeys(n for _, run in shown for n in gamma_grid(run, "gamma").index))
    worst_nu = _scale(shown, "nu")
    measures = ["gamma", "nu"] if worst_nu > _NU_WORTH_DRAWING else ["gamma"]

    def paint(figure: Figure) -> None:
        panels = figure.subplots(len(measures), len(shown), sharey=True, squeeze=False)
        for key, line in zip(measures, panels, strict=True):
            top = max(1e-3, _scale(shown, key))
            for axes, (row, run) in zip(line, shown, strict=True):
                mesh = _heat(axes, gamma_grid(run, key).reindex(names), top)
                axes.set_title(panel_title(row, run), fontsize=8.5)
            line[0].set_yticks(np.arange(len(names)) + 0.5, names, fontsize=7)
            line[0].set_ylim(len(names), 0)
            bar = figure.colorbar(mesh, ax=list(line), pad=0.01, aspect=30)
            bar.set_label(_SYMBOLS[key], rotation=0, labelpad=8)
        figure.supxlabel("Training step", fontsize=10)

    caption = (
        f"{_one_method(rows)}Alignment given up by each polar step (γ), for each monitored "
        f"parameter, on one scale; zero is exact.{_which(rows, shown)}"
    )
    if len(measures) == 1:
        caption += f" The operator norm exceeds one by ν ≤ {worst_nu:.1g} at most."
    else:
        caption += " Below: by how much the operator norm exceeds one (ν)."
    if any(entry.get("stable_rank") == 0 for _, run in shown for entry in run.gamma):
        caption += " Grey: the momentum was zero, which has no polar factor."
    height = 1.5 + len(measures) * 0.17 * max(8, len(names))
    return draw(name, "γ and ν", caption, (10.5, height), paint)


def _band(axes: Axes, grid: pd.DataFrame, colour: str) -> None:
    """The median over matrices, and the band from the smallest to the largest."""
    if grid.empty:
        return
    x, low, middle, high = grid.columns, grid.min(), grid.median(), grid.max()
    if len(x) == 1:  # a run that was lost early
        bar = [middle - low, high - middle]
        axes.errorbar(x, middle, yerr=bar, color=colour, marker="o", capsize=3)
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(x, middle, color=colour)


def _heat(axes: Axes, grid: pd.DataFrame, top: float) -> Any:
    """One panel of the heatmap; grey where nothing is known."""
    values = np.ma.masked_invalid(grid.to_numpy())
    mesh = axes.pcolormesh(values, cmap="cividis", vmin=0.0, vmax=top, rasterized=True)
    count = grid.shape[1]
    ticks = np.unique(np.linspace(0, count - 1, min(3, count)).round().astype(int))
    axes.set_xticks(ticks + 0.5, [f"{step:g}" for step in grid.columns[ticks]], fontsize=8)
    axes.set_facecolor(RULE)
    return mesh


def _shown(rows: Sequence[Row]) -> Shown:
    """The monitored rows that a figure has room for, each with its first monitored run."""
    return [(row, run) for row in rows if (run := row.first_with("gamma"))][:_AT_MOST]


def _which(rows: Sequence[Row], shown: Shown) -> str:
    """Which seeds a figure shows, and how many rows it has no room for."""
    seeds = sorted({run.identity.seed for _, run in shown})
    watched = sum(row.first_with("gamma") is not None for row in rows)
    more = f" The first {_AT_MOST} of {watched} monitored rows." if watched > len(shown) else ""
    return f" Seed {', '.join(map(str, seeds))}.{more}"


def _scale(shown: Shown, key: str) -> float:
    """The largest γ or ν drawn. A run that diverged would leave nothing to see of the others."""
    runs = [run for _, run in shown]
    return max(_largest(run, key) for run in [r for r in runs if r.status != "diverged"] or runs)


def _largest(run: RunRecord, key: str) -> float:
    """The largest γ or ν along a run."""
    return float(np.nan_to_num(gamma_grid(run, key).max().max()))


def panel_title(row: Row, run: RunRecord) -> str:
    """A label on two lines, to fit above a narrow panel; how the run ended if it did not finish."""
    label = row.label.replace(" (", "\n(", 1)
    return label if run.status == "finished" else f"{label}\n({run.status})"


def _one_method(rows: Sequence[Row]) -> str:
    """The method that all panels are about, to begin a caption with; empty where there are more."""
    methods = {row.method for row in rows if row.first_with("gamma")}
    return f"{methods.pop()}. " if len(methods) == 1 else ""
