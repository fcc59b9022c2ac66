"""Trajectories over seeds: the mean, its band, and the runs that did not make it to the end.

nanoGPT is drawn as validation perplexity, CIFAR-10 as validation loss: as in the paper's figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from polarstep_lab.records.record import MetricRow, RunRecord
from polarstep_lab.report.rows import Row

__all__ = ["Curve", "curve_of", "quantity_name", "zoom"]


@dataclass(frozen=True)
class Curve:
    """Mean ± one standard deviation over finished seeds, at the steps that all of them share.

    ``points`` has columns ``mean``, ``std`` and ``seconds`` and the steps as its index; seconds are the
    median over the runs whose times the tables show. ``broken`` are the runs that did not finish, each
    by its status, with columns ``value`` and ``seconds``.
    """

    label: str
    method: str
    points: pd.DataFrame
    broken: tuple[tuple[str, pd.DataFrame], ...]

    @property
    def final(self) -> float:
        """The mean at the last step; NaN where no seed finished."""
        return math.nan if self.points.empty else float(self.points["mean"].iloc[-1])


def quantity_name(benchmark: str) -> str:
    """What the trajectories of a benchmark show."""
    return "Validation loss" if benchmark == "cifar10" else "Validation perplexity"


def curve_of(row: Row, benchmark: str) -> Curve:
    """The trajectory of a row."""
    found = {index: _series(run, benchmark) for index, run in row.runs["record"].items()}
    found = {index: series for index, series in found.items() if not series.empty}
    finished = [index for index in row.finished.index if index in found]
    timed = [index for index in row.timed.index if index in found] or finished
    points = pd.DataFrame(columns=["mean", "std", "seconds"], dtype=float)
    if finished:
        values = pd.DataFrame({index: found[index]["value"] for index in finished}).dropna()
        seconds = pd.DataFrame({index: found[index]["seconds"] for index in timed})
        spread = values.std(axis="columns") if finished[1:] else 0.0
        points = pd.DataFrame({"mean": values.mean(axis="columns"), "std": spread})
        points["seconds"] = seconds.median(axis="columns")
    broken = [(status, index) for index, status in row.runs["status"].items() if index in found]
    return Curve(
        row.label,
        row.method,
        points,
        tuple((status, found[index]) for status, index in broken if status != "finished"),
    )


def zoom(curves: Sequence[Curve]) -> tuple[float, float, float, float] | None:
    """The window of the inset: the last fifth of training, around the curves that end well.

    Where runs differ in length (an ablation of the batch size), the fifth is that of the shortest,
    so that the end of every curve is in the window. One curve far above the rest would press all
    others into a line, so the window is as high as the curves whose end lies no further above the
    best than twice the median does. Returns (first step, last step, lowest, highest), or ``None``
    where there is nothing to see.
    """
    curves = [curve for curve in curves if len(curve.points) > 2]
    if not curves:
        return None
    ends = [float(curve.points.index[-1]) for curve in curves]
    first, last = 0.8 * min(ends), max(ends)
    finals = sorted(curve.final for curve in curves)
    limit = finals[0] + 2 * (finals[len(finals) // 2] - finals[0]) + 1e-9 * abs(finals[0])
    seen = [curve.points[curve.points.index >= first] for curve in curves if curve.final <= limit]
    seen = [points for points in seen if len(points) > 1]
    low = min((float((points["mean"] - points["std"]).min()) for points in seen), default=0.0)
    high = max((float((points["mean"] + points["std"]).max()) for points in seen), default=0.0)
    margin = 0.08 * (high - low)
    return (first, last, low - margin, high + margin) if high > low else None


def _series(run: RunRecord, benchmark: str) -> pd.DataFrame:
    """Values and training seconds of the validations of a run by step, the finite ones."""
    rows = run.rows("val")
    columns = {
        "value": [_value(row, benchmark) for row in rows],
        "seconds": [r.seconds for r in rows],
    }
    frame = pd.DataFrame(columns, index=[row.step for row in rows], dtype=float)
    return frame[np.isfinite(frame["value"])]


def _value(row: MetricRow, benchmark: str) -> float:
    if benchmark == "cifar10":
        return row.loss
    return math.exp(min(row.loss, 700.0)) if row.perplexity is None else row.perplexity
