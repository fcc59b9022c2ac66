"""The figure of a record of ``step_cost.py``: whole steps, phases and, if they were run, sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib import color_sequences
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from polarstep_lab.storage import write_atomically
from step_sweeps import exponent

TAB20 = color_sequences["tab20"]
COLOURS = TAB20[::2] + TAB20[1::2]


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the record to a PNG file."""
    swept = bool(record.get("sweeps"))
    figure, axes = plt.subplots(
        2 if swept else 1, 2, figsize=(13, 9 if swept else 5), squeeze=False
    )
    # A workload without phases has no matrix that LowRank sketches.
    loads = [load for load, parts in record["phases"].items() if parts]
    _steps(axes[0, 0], record["steps"], loads)
    _phases(axes[0, 1], record["phases"], record["floor"], loads)
    if swept:
        _sweep(axes[1, 0], record["sweeps"]["width"], "width (ℓ: a quarter of it)")
        _sweep(axes[1, 1], record["sweeps"]["rank"], "ℓ")
        axes[1, 1].yaxis.set_minor_formatter("{x:g}")  # these times may span less than a decade
    figure.suptitle(record["machine"])
    figure.tight_layout()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=130))
    plt.close(figure)
    print(f"wrote {path}")


def _steps(axis: Axes, rows: list[dict[str, Any]], loads: list[str]) -> None:
    """Bars of the times of whole steps as multiples of AdamW's, in groups by workload."""
    ratios = {(row["workload"], row["optimizer"]): row["ratio"] for row in rows}
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    for i, name in enumerate(names):
        at = [j + (i - len(names) / 2) * 0.8 / len(names) for j in range(len(loads))]
        heights = [ratios.get((load, name), 0) for load in loads]
        axis.bar(at, heights, 0.8 / len(names), label=name, color=COLOURS[i % len(COLOURS)])
    axis.set_yscale("log")
    axis.axhline(1, color="black", lw=0.8)
    axis.set_xticks(range(len(loads)), loads)
    axis.set_ylabel("time of a step ÷ AdamW's")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * (top / bottom) ** 0.35)  # room for the names
    axis.legend(fontsize=7, ncols=2, loc="upper center")


def _phases(
    axis: Axes, phases: dict[str, dict[str, float]], floor: dict[str, float], loads: list[str]
) -> None:
    """One bar for each workload, its phases end to end, with the floor as a dashed line."""
    for j, load in enumerate(loads):
        left = 0.0
        for i, (phase, ms) in enumerate(phases[load].items()):
            axis.barh(j, ms, left=left, color=COLOURS[i], label=phase if j == 0 else None)
            left += ms
        axis.plot([floor[load]] * 2, [j - 0.45, j + 0.45], "k--", lw=1)
    axis.set_yticks(range(len(loads)), loads)
    axis.set_xlabel("ms, phases of LowRank (warm) one by one; dashed: the floor")
    axis.legend(fontsize=7)


def _sweep(axis: Axes, rows: list[dict[str, float]], x: str) -> None:
    """The times of a sweep on logarithmic axes, with their slopes in the legend."""
    at = [row["x"] for row in rows]
    for i, label in enumerate(k for k in rows[0] if k != "x"):
        slope = exponent(rows, label)
        times = [row[label] for row in rows]
        axis.loglog(at, times, "o-", color=COLOURS[i], label=f"{label}: grows as x^{slope:.2f}")
    axis.set_xticks(at, [f"{x:.0f}" for x in at])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(x)
    axis.set_ylabel("ms a step, four matrices")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
