"""Trajectories over seeds: the mean, its band, and the runs that did not make it to the end.

nanoGPT is drawn as validation perplexity, CIFAR-10 as validation loss: as in the paper's figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polarstep_lab.records.record import MetricRow, RunRecord
from polarstep_lab.report.rows import Row

__all__ = ["Broken", "Curve", "curve_of", "quantity_name", "zoom"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Broken:
    """The trajectory of a run that diverged, failed, was stopped or has not ended."""

    status: str
    steps: Array
    values: Array
    seconds: Array


@dataclass(frozen=True)
class Curve:
    """Mean ± one standard deviation over finished seeds, at the steps that all of them share.

    Seconds are the median over the runs whose times the tables show.
    """

    label: str
    method: str
    steps: Array
    mean: Array
    std: Array
    seconds: Array
    broken: tuple[Broken, ...]

    @property
    def final(self) -> float:
        """The mean at the last step; NaN where no seed finished."""
        return float(self.mean[-1]) if len(self.mean) else math.nan


def quantity_name(benchmark: str) -> str:
    """What the trajectories of a benchmark show."""
    return "Validation loss" if benchmark == "cifar10" else "Validation perplexity"


def curve_of(row: Row, benchmark: str) -> Curve:
    """The trajectory of a row."""
    found = {run.directory: _series(run, benchmark) for run in row.finished}
    found = {directory: series for directory, series in found.items() if len(series[0])}
    finished = [*found.values()]
    timed = [found[run.directory] for run in row.timed if run.directory in found] or finished
    steps: Array = np.array([])
    if finished:
        shared = set.intersection(*(set(series[0].tolist()) for series in finished))
        steps = np.array(sorted(shared))
    values = np.array([series[1][np.isin(series[0], steps)] for series in finished])
    seconds = np.array([series[2][np.isin(series[0], steps)] for series in timed])
    many = len(finished) > 1
    empty: Array = np.array([])
    return Curve(
        label=row.label,
        method=row.method,
        steps=steps,
        mean=values.mean(axis=0) if finished else empty,
        std=values.std(axis=0, ddof=1) if many else np.zeros_like(steps),
        seconds=np.median(seconds, axis=0) if finished else empty,
        broken=tuple(
            Broken(run.status, *_series(run, benchmark))
            for run in row.runs
            if run.status != "finished" and len(_series(run, benchmark)[0])
        ),
    )


def zoom(curves: Sequence[Curve]) -> tuple[float, float, float, float] | None:
    """The window of the inset: the last fifth of training, around the curves that end well.

    Where runs differ in length (an ablation of the batch size), the fifth is that of the shortest,
    so that the end of every curve is in the window. One curve far above the rest would press all
    others into a line, so the window is as high as the curves whose end lies no further above the
    best than twice the median does. Returns (first step, last step, lowest, highest), or ``None``
    where there is nothing to see.
    """
    curves = [curve for curve in curves if len(curve.steps) > 2]
    if not curves:
        return None
    last = max(float(curve.steps[-1]) for curve in curves)
    first = 0.8 * min(float(curve.steps[-1]) for curve in curves)
    finals = sorted(curve.final for curve in curves)
    limit = finals[0] + 2 * (finals[len(finals) // 2] - finals[0]) + 1e-9 * abs(finals[0])
    lows, highs = [], []
    for curve in curves:
        inside = curve.steps >= first
        if curve.final <= limit and inside.sum() > 1:
            lows.append(float((curve.mean - curve.std)[inside].min()))
            highs.append(float((curve.mean + curve.std)[inside].max()))
    if not lows or max(highs) <= min(lows):
        return None
    margin = 0.08 * (max(highs) - min(lows))
    return first, last, min(lows) - margin, max(highs) + margin


def _series(run: RunRecord, benchmark: str) -> tuple[Array, Array, Array]:
    """Steps, values and training seconds of the validations of a run, the finite ones."""
    rows = [row for row in run.rows("val") if math.isfinite(_value(row, benchmark))]
    return (
        np.array([row.step for row in rows], dtype=np.float64),
        np.array([_value(row, benchmark) for row in rows], dtype=np.float64),
        np.array([row.seconds for row in rows], dtype=np.float64),
    )


def _value(row: MetricRow, benchmark: str) -> float:
    if benchmark == "cifar10" or row.perplexity is None:
        return row.loss if benchmark == "cifar10" else math.exp(min(row.loss, 700.0))
    return row.perplexity
