"""The figures of a section: trajectories, quality against cost, ablations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polarstep_lab.report.curves import Curve, curve_of, quantity_name, zoom
from polarstep_lab.report.drawing import (
    ALARM,
    INK_SOFT,
    RULE,
    Drawing,
    draw,
    plain_log_ticks,
    style_axes,
)
from polarstep_lab.report.palette import Look, look_of, ordinal_looks
from polarstep_lab.report.rows import AblationSet, Row, Section
from polarstep_lab.report.texts import listed

__all__ = ["ablation_figures", "cost_figure", "trajectory_figure"]

_LATE = 0.4
"""The share of training after which the curves of an ablation are shown."""

FAR_OFF = 4.0
"""A method this many times worse than the median one is named below a figure, not drawn in it."""


def trajectory_figure(section: Section, name: str) -> Drawing | None:
    """All methods against steps, with an inset on the last stretch, and against time."""
    curves = [curve_of(row, section.benchmark) for row in section.rows]
    if all(curve.points.empty and not curve.broken for curve in curves):
        return None
    quantity = quantity_name(section.benchmark)
    window = zoom(curves)

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1), sharey=True)
        _trajectories(left, curves, "steps")
        style_axes(left, "Training step", quantity)
        _scale_of_trajectories(left, curves, section)
        if window:
            _inset(left, curves, window)
        _trajectories(right, curves, "seconds")
        style_axes(right, "Seconds since the run began", "")
        _legend(figure, left)

    caption = f"{quantity}, mean over the seeds that finished; the band is one standard deviation."
    if window:
        caption += " The inset shows the last fifth of training around the curves that end best."
    if any(0 < len(row.alone) < len(row.finished) for row in section.rows):
        caption += " Seconds are those of runs that had the device to themselves."
    if any(curve.broken for curve in curves):
        caption += " Thin dotted lines are runs that did not finish; × marks where one diverged."
    return draw(name, "Trajectories", caption, (10.5, 4.9), paint)


def cost_figure(section: Section, name: str) -> Drawing | None:
    """The final metric against what the optimizer costs, in FLOPs and in measured time."""
    scored = [(row, row.metric) for row in section.rows if row.metric]
    costs: dict[str, Callable[[Row], float | None]] = {
        "Optimizer GFLOPs per step (ledger)": lambda row: row.gflops,
        "Optimizer milliseconds per step (measured)": lambda row: row.optimizer_ms,
    }
    panels = {
        label: [(row, metric, x) for row, metric in scored if (x := cost(row))]
        for label, cost in costs.items()
    }
    panels = {label: points for label, points in panels.items() if len(points) > 1}
    if not panels:
        return None
    means = sorted(metric.mean for _, metric in scored)
    limit = math.inf if section.higher_is_better else FAR_OFF * means[len(means) // 2]
    far_off = [f"{row.label} ({metric.mean:.4g})" for row, metric in scored if metric.mean > limit]

    def paint(figure: Figure) -> None:
        axes_row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (label, points) in zip(axes_row, panels.items(), strict=True):
            for row, metric, x in points:
                if metric.mean <= limit:
                    style = _marked(look_of(row.method)) | {"markersize": 8, "linestyle": "none"}
                    axes.errorbar(x, metric.mean, yerr=metric.std, label=row.label, **style)
            style_axes(axes, label, section.metric_name if axes is axes_row[0] else "")
            axes.set_xscale("log")
            plain_log_ticks(axes.xaxis)
            _scale_of_metric(axes, section)
        _legend(figure, axes_row[0])

    better = "up" if section.higher_is_better else "down"
    caption = f"Better is {better} and to the left; bars are one standard deviation over seeds."
    caption += f" Far above the axis: {listed(far_off)}." if far_off else ""
    return draw(name, "Quality against cost", caption, (10.5, 4.4), paint)


def ablation_figures(section: Section, name: str) -> list[Drawing]:
    """All axes of a method side by side, on one scale: what matters and what does not.

    An axis that was varied with several settings has a figure of its own, with a line for each.
    """
    finished = [a for a in section.ablations if any(row.metric for row in a.rows)]
    shared = sorted({a.axis for a in finished if a.setting and a.numeric})
    methods = dict.fromkeys(ablation.of for ablation in finished)
    apart = [[a for a in finished if a.of == of and a.axis not in shared] for of in methods]
    figures: list[tuple[Callable[..., Drawing], list[AblationSet]]]
    figures = [(_small_multiples, group) for group in apart if group]
    figures += [(_lines, [a for a in finished if a.axis == axis]) for axis in shared]
    return [
        paint(section, group, f"{name}-{index}" if index else name)
        for index, (paint, group) in enumerate(figures)
    ]


def _lines(section: Section, ablations: Sequence[AblationSet], name: str) -> Drawing:
    """The final metric over one axis, a line for each method and setting."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        looks = ordinal_looks(len(ablations), ordered=False)
        for ablation, look in zip(ablations, looks, strict=True):
            shown = [(float(row.value), row.metric) for row in ablation.rows if row.metric]
            axes.errorbar(
                [value for value, _ in shown],
                [metric.mean for _, metric in shown],
                yerr=[metric.std or 0.0 for _, metric in shown],
                linestyle=look.dash,
                label=ablation.of,
                **_marked(look),
            )
        style_axes(axes, ablations[0].axis, section.metric_name)
        axes.set_xscale("log")
        values = sorted({float(row.value) for ablation in ablations for row in ablation.rows})
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)
        _scale_of_metric(axes, section)
        _legend(figure, axes, most=1)

    caption = f"{ablations[0].axis}, varied with each setting; mean ± one standard deviation."
    return draw(name, "Ablations", caption, (10.5, 5.2), paint)


def _small_multiples(section: Section, ablations: Sequence[AblationSet], name: str) -> Drawing:
    """For each axis of a method the final metric above, and the end of the trajectories below."""
    quantity = quantity_name(section.benchmark)

    def paint(figure: Figure) -> None:
        panels = figure.subplots(
            2, len(ablations), squeeze=False, height_ratios=(1.15, 1), sharey="row"
        )
        for (top, bottom), ablation in zip(panels.T, ablations, strict=True):
            first = ablation is ablations[0]
            looks = ordinal_looks(len(ablation.rows), ablation.numeric)
            _finals(top, ablation, looks)
            _scale_of_metric(top, section)
            title = ablation.axis.replace("-", "\n")  # panels are narrow
            style_axes(top, "", section.metric_name if first else "", title)
            _endings(bottom, ablation, looks, section)
            style_axes(bottom, "Share of training", quantity if first else "")
        if not section.higher_is_better:
            panels[1, 0].set_yscale("log")
            plain_log_ticks(panels[1, 0].yaxis)

    caption = (
        f"{ablations[0].of}: one setting varied, all else as in the recipe. Above, the final "
        f"{section.metric_name.lower()}; all axes on one scale, mean ± one standard deviation."
    )
    references = [a.reference for a in ablations if a.reference]
    if references:
        band = ", the band ± one" * any(reference.std is not None for reference in references)
        caption += (
            " The dotted line is the recipe's own value over the seeds that it shares with the "
            f"others{band}."
        )
    caption += f" Below, {quantity.lower()} over the later part of training."
    return draw(name, "Ablations", caption, (10.5, 5.6), paint)


def _finals(axes: Axes, ablation: AblationSet, looks: Sequence[Look]) -> None:
    """Points with error bars, evenly spaced; joined where the values have an order."""
    base = ablation.reference
    if base is not None:
        spread = base.std or 0.0
        axes.axhspan(base.mean - spread, base.mean + spread, color=RULE, alpha=0.6, linewidth=0)
        axes.axhline(base.mean, color=INK_SOFT, linewidth=0.8, linestyle=":")
    shown = [(x, row.metric) for x, row in enumerate(ablation.rows) if row.metric]
    if ablation.numeric:
        axes.plot([x for x, _ in shown], [m.mean for _, m in shown], color=INK_SOFT, lw=1.0)
    for x, metric in shown:
        axes.errorbar(x, metric.mean, yerr=metric.std, zorder=3, **_marked(looks[x]))
    names = [str(row.value) for row in ablation.rows]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    if max(map(len, names)) > 5:  # names would run into one another
        for label in axes.get_xticklabels():
            label.set(rotation=28, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.5, len(names) - 0.5)


def _endings(axes: Axes, ablation: AblationSet, looks: Sequence[Look], section: Section) -> None:
    """Curves against the share of training, from where they are close enough to be told apart."""
    for row, look in zip(ablation.rows, looks, strict=True):
        points = curve_of(row, section.benchmark).points
        share = points.index / (points.index[-1] if len(points) else 1.0)
        late = share >= _LATE
        (line,) = axes.plot(share[late], points["mean"][late], linewidth=1.4, label=str(row.value))
        line.set(color=look.light, linestyle=look.dash)
    axes.set_xlim(_LATE, 1.0)
    axes.set_xticks([0.5, 0.75, 1.0], ["0.5", "0.75", "1"])
    spacing = {"handlelength": 1.6, "labelspacing": 0.25, "borderaxespad": 0.2}
    axes.legend(fontsize=7.5, loc="upper right", **spacing)


def _marked(look: Look) -> dict[str, Any]:
    """The style of a point with an error bar."""
    return {"color": look.light, "marker": look.marker, "markersize": 6, "capsize": 2.5}


def _trajectories(axes: Axes, curves: Sequence[Curve], against: str) -> None:
    """The mean and the band of each curve, and dotted the runs that did not finish."""
    for curve in curves:
        colour, points = look_of(curve.method).light, curve.points
        x, mean, std = (points.reset_index(names="steps")[key] for key in (against, "mean", "std"))
        dash = look_of(curve.method).dash
        axes.plot(x, mean, color=colour, linestyle=dash, label=curve.label, zorder=3)
        if (std > 0).any():
            axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)
        for _, lost in curve.broken:
            x = lost.reset_index(names="steps")[against]
            axes.plot(x, lost["value"], color=colour, linestyle=":", lw=1.0)


def _inset(axes: Axes, curves: Sequence[Curve], window: tuple[float, float, float, float]) -> None:
    """The end of training, at the upper right, where a falling curve leaves room."""
    first, last, low, high = window
    inset = axes.inset_axes((0.46, 0.44, 0.52, 0.53))
    finished = [Curve(curve.label, curve.method, curve.points, ()) for curve in curves]
    _trajectories(inset, finished, "steps")
    inset.set_xlim(first, last)
    inset.set_ylim(low, high)
    inset.tick_params(labelsize=8)
    inset.grid(True, axis="y")
    for spine in inset.spines.values():
        spine.set(visible=True, color=INK_SOFT, linewidth=0.8)
    axes.indicate_inset_zoom(inset, edgecolor=RULE, alpha=1.0)


def _scale_of_trajectories(axes: Axes, curves: Sequence[Curve], section: Section) -> None:
    """Perplexity on a logarithmic axis; a run on its way to infinity does not stretch it."""
    if not section.higher_is_better:
        axes.set_yscale("log")
    means = [curve.points["mean"].max() for curve in curves if not curve.points.empty]
    top = min([axes.get_ylim()[1], *([1.5 * max(means)] if means else [])])
    axes.set_ylim(top=top)
    if not section.higher_is_better:
        plain_log_ticks(axes.yaxis)
    for status, lost in (broken for curve in curves for broken in curve.broken):
        if status == "diverged":
            x, y = lost.index[-1], min(lost["value"].iloc[-1], top)
            axes.plot(x, y, "x", color=ALARM, zorder=5, clip_on=False)


def _scale_of_metric(axes: Axes, section: Section) -> None:
    """Perplexity on a logarithmic axis: it is the exponential of what is minimized."""
    if not section.higher_is_better:
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis)


def _legend(figure: Figure, axes: Axes, most: int = 4) -> None:
    """Below the figure, with at most ``most`` names in a row."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(most, max(1, len(labels)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)
