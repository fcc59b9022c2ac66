"""The γ/ν picture of monitored runs: how inexact each polar step was, layer by layer.

γ and ν are those of the paper's inexactness assumption: ⟨M, T⟩ ≥ (1 − γ)‖M‖_* and ‖T‖_op ≤ 1 + ν.
The methods stand side by side on one scale, since the question is which of them gives up more. ν is
drawn where there is any; with the paper's polynomials it is zero but for rounding (Proposition 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.drawing import RULE, Drawing, draw
from polarstep_lab.report.rows import Row

__all__ = ["gamma_figure", "gamma_grid", "one_method", "orderly", "panel_title"]

NU_WORTH_DRAWING = 0.005
_AT_MOST = 8  # columns that can still be read side by side

Grid = NDArray[np.float64]


def gamma_figure(rows: Sequence[Row], name: str) -> Drawing | None:
    """γ of every monitored parameter over training, a column for each row; ``None`` without any."""
    watched = [row for row in rows if any(run.gamma for run in row.runs)]
    monitored = [(row, next(run for run in row.runs if run.gamma)) for row in watched[:_AT_MOST]]
    if not monitored:
        return None
    parameters = list(dict.fromkeys(_name(r) for _, run in monitored for r in run.gamma))
    runs = [run for _, run in monitored]
    worst_nu = max(_largest(gamma_grid(run.gamma, "nu")[2]) for run in orderly(runs))
    measures = ["gamma", "nu"] if worst_nu > NU_WORTH_DRAWING else ["gamma"]

    def paint(figure: Figure) -> None:
        panels = figure.subplots(len(measures), len(monitored), sharey=True, squeeze=False)
        for measure, line in zip(measures, panels, strict=True):
            grids = [_aligned(run, measure, parameters) for _, run in monitored]
            shown = [_aligned(run, measure, parameters)[1] for run in orderly(runs)]
            top = max(1e-3, *map(_largest, shown))
            for axes, (row, run), (steps, values) in zip(line, monitored, grids, strict=True):
                mesh = _panel(axes, steps, values, top)
                axes.set_title(panel_title(row, run), fontsize=8.5)
            line[0].set_yticks(np.arange(len(parameters)) + 0.5, parameters, fontsize=7)
            line[0].set_ylim(len(parameters), 0)
            bar = figure.colorbar(mesh, ax=list(line), pad=0.01, aspect=30)
            bar.set_label({"gamma": "γ", "nu": "ν"}[measure], rotation=0, labelpad=8)
        figure.supxlabel("Training step", fontsize=10)

    seeds = sorted({run.identity.seed for run in runs})
    caption = (
        f"{one_method(watched)}Alignment given up by each polar step (γ), for each monitored "
        f"parameter, on one scale; zero is exact. Seed {', '.join(map(str, seeds))}."
    )
    if len(measures) == 1:
        caption += f" The operator norm exceeds one by ν ≤ {max(worst_nu, 0.0):.1g} at most."
    else:
        caption += " Below: by how much the operator norm exceeds one (ν)."
    if any(entry.get("stable_rank") == 0 for run in runs for entry in run.gamma):
        caption += " Grey: the momentum was zero, which has no polar factor."
    if len(watched) > _AT_MOST:
        caption += f" The first {_AT_MOST} of {len(watched)} monitored rows."
    height = 1.5 + len(measures) * 0.17 * max(8, len(parameters))
    return draw(name, "γ and ν", caption, (10.5, height), paint)


def gamma_grid(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[str], list[float], Grid]:
    """Parameters as they first appear × steps ascending; NaN where nothing was sampled."""
    parameters = list(dict.fromkeys(_name(row) for row in rows))
    steps = sorted({float(row["step"]) for row in rows})
    values = np.full((len(parameters), len(steps)), math.nan)
    for row in rows:
        value = row.get(key)
        if value is not None and row.get("stable_rank") != 0:  # 0 has no polar factor to miss
            index = parameters.index(_name(row)), steps.index(float(row["step"]))
            values[index] = max(0.0, float(value))
    return parameters, steps, values


def _aligned(run: RunRecord, key: str, parameters: Sequence[str]) -> tuple[list[float], Grid]:
    """The grid of a run with the lines of ``parameters``, in their order."""
    own, steps, values = gamma_grid(run.gamma, key)
    lines = [
        values[own.index(p)] if p in own else np.full(len(steps), math.nan) for p in parameters
    ]
    return steps, np.array(lines)


def _panel(axes: Axes, steps: Sequence[float], values: Grid, top: float) -> Any:
    mesh = axes.pcolormesh(
        np.arange(values.shape[1] + 1),
        np.arange(values.shape[0] + 1),
        np.ma.masked_invalid(values),
        cmap="cividis",
        vmin=0.0,
        vmax=top,
        rasterized=True,
    )
    shown = np.unique(np.linspace(0, len(steps) - 1, min(3, len(steps))).round().astype(int))
    axes.set_xticks(shown + 0.5, [f"{steps[index]:g}" for index in shown], fontsize=8)
    axes.set_facecolor(RULE)
    return mesh


def _largest(values: Grid) -> float:
    return float(np.nanmax(values)) if np.isfinite(values).any() else 0.0


def orderly(runs: Sequence[RunRecord]) -> Sequence[RunRecord]:
    """The runs that decide on a scale: one that diverged would leave nothing to see of the others."""
    return [run for run in runs if run.status != "diverged"] or runs


def panel_title(row: Row, run: RunRecord) -> str:
    """A label on two lines, to fit above a narrow panel, and how its run ended if it did not finish."""
    label = row.label.replace(" (", "\n(", 1)
    return label if run.status == "finished" else f"{label}\n({run.status})"


def one_method(rows: Sequence[Row]) -> str:
    """The method that all panels are about, to begin a caption with; nothing where there are more."""
    methods = {row.method for row in rows}
    return f"{methods.pop()}. " if len(methods) == 1 else ""


def _name(row: Mapping[str, Any]) -> str:
    """The parameter, and which block of it where it holds several matrices."""
    name = str(row["parameter"]).removesuffix(".weight")
    return f"{name} [{row['block']}]" if row.get("block") else name
