"""The figures of a comparison: trajectories, and quality against cost.

Trajectories are of validation perplexity for nanoGPT and of validation loss for CIFAR-10, as in the
paper's figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from polarstep_lab.estimates import Estimate
from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.palette import Look
from polarstep_lab.report.panels import ALARM, Drawing, Panel, Series
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.wording import listed

__all__ = ["Curve", "cost_figure", "curve_of", "trajectory_figure"]

FAR_OFF = 4.0
"""A method this many times worse than the median method is named in the caption and not drawn."""


@dataclass(frozen=True)
class Curve:
    """Mean ± one standard deviation over finished seeds, at the steps that all of them share.

    ``points`` has columns ``mean``, ``std`` and ``seconds`` and the steps as its index; seconds are the
    median over the runs whose times the tables show, and NaN without such a run. ``broken`` has the
    status and the points of each run that did not finish, with columns ``value`` and ``seconds``.
    """

    row: Row
    points: pd.DataFrame
    broken: tuple[tuple[str, pd.DataFrame], ...]

    @property
    def final(self) -> float:
        """The mean at the last step; NaN where no seed finished."""
        return math.nan if self.points.empty else float(self.points["mean"].iloc[-1])

    def series(self, against: str, look: Look) -> list[Series]:
        """The mean with its band, then a dotted line for each run that did not finish.

        Over seconds there is no line for runs whose times do not count.
        """
        points = self.points.reset_index(names="steps")
        mean, std = points["mean"], points["std"]
        found = [
            Series(self.row.label, look, points[against], mean, mean - std, mean + std, band=True)
        ]
        for _, lost in self.broken:
            x = lost.reset_index(names="steps")[against]
            found += [Series("", replace(look, dash=":", marker=""), x, lost["value"])]
        return [series for series in found if series.x.notna().any()]


def curve_of(row: Row, benchmark: str) -> Curve:
    """The trajectory of a row, from the validations of its runs."""
    found = {index: _validations(run, benchmark) for index, run in row.runs["record"].items()}
    found = {index: log for index, log in found.items() if not log.empty}
    finished = [found[index] for index in row.finished.index if index in found]
    timed = finished if len(row.devices) == 1 else []
    points = pd.DataFrame(columns=["mean", "std", "seconds"], dtype=float)
    if finished:
        values = pd.concat([log["value"] for log in finished], axis="columns").dropna()
        points = values.agg(["mean", "std"], axis="columns").fillna({"std": 0.0})
        points["seconds"] = math.nan
        if timed:
            seconds = pd.concat([log["seconds"] for log in timed], axis="columns")
            points["seconds"] = seconds.median(axis="columns")
    lost = row.runs.loc[[*found]].query("status != 'finished'")
    broken = [(run["status"], found[i]) for i, run in lost.iterrows()]
    return Curve(row, points, tuple(broken))


def _validations(run: RunRecord, benchmark: str) -> pd.DataFrame:
    """Value and training seconds of each validation of a run, by step, where the value is finite."""
    columns = ["step", "loss", "perplexity", "seconds"]
    frame = pd.DataFrame([vars(row) for row in run.rows("val")], columns=columns)
    frame = frame.set_index("step").astype(float)
    perplexity = frame["perplexity"].fillna(np.exp(frame["loss"].clip(upper=700)))
    frame["value"] = frame["loss"] if benchmark == "cifar10" else perplexity
    return frame[np.isfinite(frame["value"])]


def trajectory_figure(section: Section, name: str) -> Drawing | None:
    """All methods against steps and against time."""
    curves = [curve_of(row, section.benchmark) for row in section.rows]
    if all(curve.points.empty and not curve.broken for curve in curves):
        return None
    quantity = f"Validation {'loss' if section.benchmark == 'cifar10' else 'perplexity'}"
    scale = _scale(section)

    def finish(axes: Axes) -> None:
        # A run on its way to infinity does not stretch the axis.
        means = [1.5 * curve.points["mean"].max() for curve in curves if not curve.points.empty]
        top = min([axes.get_ylim()[1], *([max(means)] if means else [])])
        axes.set_ylim(top=top)
        for status, lost in (broken for curve in curves for broken in curve.broken):
            if status == "diverged":
                x, y = lost.index[-1], min(lost["value"].iloc[-1], top)
                axes.plot(x, y, "x", color=ALARM, zorder=5, clip_on=False)

    steps, seconds = (
        [series for curve in curves for series in curve.series(key, section.looks[curve.row])]
        for key in ("steps", "seconds")
    )
    panels = [Panel(steps, "Training step", quantity, yscale=scale, finish=finish)]
    if seconds:
        panels.append(Panel(seconds, "Seconds since the run began", quantity, yscale=scale))
    caption = f"{quantity}, mean over the seeds that finished; the band is one standard deviation."
    ended = [curve for curve in curves if not curve.points.empty]
    untimed = [curve.row.label for curve in ended if curve.points["seconds"].isna().all()]
    if untimed:
        caption += f" Without times that count: {listed(untimed) if seconds else 'all runs'}."
    if any(curve.broken for curve in curves):
        caption += " Thin dotted lines are runs that did not finish; × marks where one diverged."
    return Drawing.of_panels(name, "Trajectories", caption, (10.5, 4.9), panels, columns=2)


def cost_figure(section: Section, name: str) -> Drawing | None:
    """The final metric against what the optimizer costs, in FLOPs and in measured time."""
    scored = {row: row.metric for row in section.rows if row.metric}
    costs = {
        "Optimizer GFLOPs per step (ledger)": {row: row.gflops for row in scored},
        "Optimizer milliseconds per step (measured)": {
            r: r.times["optimizer_ms_per_step"] for r in scored
        },
    }
    middle = float(np.median([metric.mean for metric in scored.values()] or [0.0]))
    limit = math.inf if section.metric.higher_is_better else FAR_OFF * middle
    far_off = [f"{row.label} ({m.mean:.4g})" for row, m in scored.items() if m.mean > limit]
    panels: list[Panel] = []
    for label, by_row in costs.items():
        series = [
            _point(row.label, replace(section.looks[row], dash="none"), cost, scored[row])
            for row, cost in by_row.items()
            if cost and not math.isnan(cost) and scored[row].mean <= limit
        ]
        if len(series) > 1:
            quality = section.metric.name
            panels.append(Panel(series, label, quality, xscale="log", yscale=_scale(section)))
    better = "up" if section.metric.higher_is_better else "down"
    caption = f"Better is {better} and to the left; bars are one standard deviation over seeds."
    caption += f" Far above the axis: {listed(far_off)}." if far_off else ""
    return Drawing.of_panels(name, "Quality against cost", caption, (10.5, 4.4), panels, columns=2)


def _point(label: str, look: Look, x: float, metric: Estimate) -> Series:
    """The mean of a metric with a bar of one standard deviation."""
    mean, spread = np.array([metric.mean]), metric.std or 0.0
    return Series(label, look, [x], mean, mean - spread, mean + spread)


def _scale(section: Section) -> str:
    """``"log"`` for perplexity, which is the exponential of the loss; ``"linear"`` for accuracy."""
    return "linear" if section.metric.higher_is_better else "log"
