"""A heat map of a monitor's rows: layers down, steps across, colour for γ or another column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from polarstep_lab.storage import write_atomically

__all__ = ["heatmap"]

LABELS = {
    "gamma": "γ, the alignment that the polar step lost",
    "nu": "ν, by how much ‖T‖ exceeds one",
    "captured_energy": "share of the momentum's energy inside the sketch",
    "stable_rank": "stable rank of the momentum",
    "effective_rank": "effective rank of the momentum",
    "update_ratio": "‖update‖/‖weight‖",
    "tail_index": "tail index of the gradient noise",
}


def heatmap(rows: Iterable[Mapping[str, Any]], path: str | Path, column: str = "gamma") -> None:
    """Draw one column of the rows of a :class:`polarstep.certificate.Monitor`, as a PNG, SVG or PDF.

    The suffix of ``path`` chooses the format. Layers are in the order of their first rows, which is the
    model's order. Steps at which a layer was not sampled stay empty.
    """
    if column not in LABELS:
        raise ValueError(f"column={column!r}: expected one of {', '.join(LABELS)}")
    cells: dict[tuple[str, int], float] = {}
    layers: dict[str, None] = {}
    for row in rows:
        value = row.get(column)
        if value is None or not math.isfinite(value):
            continue
        name = row["parameter"] + (f" [{row['block']}]" if row["block"] else "")
        layers[name] = None
        cells[name, row["step"]] = value
    if not cells:
        raise ValueError(
            f"no row has a finite {column!r}: record some steps first, and with exact=True for "
            "ranks and captured energy"
        )
    steps = sorted({step for _, step in cells})
    grid = np.array([[cells.get((name, step), math.nan) for step in steps] for name in layers])
    height = 1.4 + 0.21 * len(layers)
    # Not by pyplot: in a notebook its backend is the user's, and other plots go there.
    figure = Figure(figsize=(9.5, height), layout="constrained")
    axes = figure.subplots()
    top = 1.0 if column in ("captured_energy",) else None
    bottom = 0.0 if column in ("gamma", "nu", "captured_energy") else None
    image = axes.imshow(
        grid, aspect="auto", interpolation="nearest", cmap="viridis", vmin=bottom, vmax=top
    )
    axes.set_facecolor("#eeeeee")
    axes.set_yticks(range(len(layers)), list(layers), fontsize=7)
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 12)).round().astype(int))
    axes.set_xticks(shown, [f"{steps[i]:,}" for i in shown], fontsize=8)
    axes.set_xlabel("step")
    axes.set_title(LABELS[column], fontsize=10, loc="left")
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    suffix = Path(path).suffix.lstrip(".") or "png"
    write_atomically(Path(path), lambda file: figure.savefig(file, format=suffix, dpi=150))
