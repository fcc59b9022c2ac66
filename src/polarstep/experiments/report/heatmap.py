"""The γ/ν picture of a monitored run: how inexact each polar step was, layer by layer.

γ and ν are those of the paper's inexactness assumption: ⟨M, T⟩ ≥ (1 − γ)‖M‖_* and ‖T‖_op ≤ 1 + ν.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from polarstep.experiments.report.drawing import INK, RULE, Drawing, draw
from polarstep.experiments.report.rows import Row

__all__ = ["gamma_figure", "gamma_grid"]


def gamma_figure(row: Row, name: str) -> Drawing | None:
    """γ and ν of every monitored parameter over training; ``None`` where nothing was monitored."""
    monitored = [run for run in row.runs if run.gamma]
    if not monitored:
        return None
    run = monitored[0]
    parameters, steps, gamma = gamma_grid(run.gamma, "gamma")
    _, _, nu = gamma_grid(run.gamma, "nu")
    height = 1.6 + 0.19 * max(6, len(parameters))

    def paint(figure: Figure) -> None:
        for axes, values, symbol, first in zip(
            figure.subplots(1, 2, sharey=True), (gamma, nu), ("γ", "ν"), (True, False), strict=True
        ):
            mesh = axes.pcolormesh(
                np.arange(len(steps) + 1),
                np.arange(len(parameters) + 1),
                np.ma.masked_invalid(values),
                cmap="cividis",
                vmin=0.0,
                vmax=max(1e-3, float(np.nanmax(values)) if np.isfinite(values).any() else 1.0),
                rasterized=True,
            )
            shown = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).astype(int))
            axes.set_xticks(shown + 0.5, [f"{steps[index]:g}" for index in shown])
            axes.set_yticks(np.arange(len(parameters)) + 0.5)
            if first:
                axes.set_yticklabels(parameters, fontsize=7)
                axes.invert_yaxis()
            axes.set_facecolor(RULE)
            axes.set_xlabel("Training step")
            axes.set_title(f"{symbol}, {row.label}" if first else symbol, color=INK)
            figure.colorbar(mesh, ax=axes, pad=0.02)

    caption = (
        f"Inexactness of the polar step of {row.label}, seed {run.identity.seed}: alignment given "
        "up (γ) and excess of the operator norm (ν), for each monitored parameter. Zero is exact."
    )
    return draw(name, f"γ and ν: {row.label}", caption, (10.5, height), paint)


def gamma_grid(
    rows: Sequence[Mapping[str, Any]], key: str
) -> tuple[list[str], list[float], NDArray[np.float64]]:
    """Parameters as they first appear × steps ascending; NaN where nothing was sampled."""
    parameters = list(dict.fromkeys(_name(row) for row in rows))
    steps = sorted({float(row["step"]) for row in rows})
    values = np.full((len(parameters), len(steps)), math.nan)
    for row in rows:
        value = row.get(key)
        if value is not None:
            index = parameters.index(_name(row)), steps.index(float(row["step"]))
            values[index] = max(0.0, float(value))
    return parameters, steps, values


def _name(row: Mapping[str, Any]) -> str:
    """The parameter, and which block of it where it holds several matrices."""
    return f"{row['parameter']} [{row['block']}]" if row.get("block") else str(row["parameter"])
