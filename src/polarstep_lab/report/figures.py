"""The figures of a section: trajectories, quality against cost, ablations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from numpy.typing import ArrayLike, NDArray

from polarstep_lab.report.curves import Curve, curve_of, quantity_name, zoom
from polarstep_lab.report.drawing import ALARM, INK_SOFT, RULE, Drawing, draw, style_axes
from polarstep_lab.report.palette import Look, ablation_look, look_of
from polarstep_lab.report.rows import AblationSet, Row, Section

__all__ = ["ablation_figures", "cost_figure", "trajectory_figure"]

_LATE = 0.4
"""The share of training after which the curves of an ablation are shown."""

FAR_OFF = 4.0
"""A method this many times worse than the median one is marked at the edge of a figure."""


def trajectory_figure(section: Section, name: str) -> Drawing | None:
    """All methods against steps, with an inset on the last stretch, and against time."""
    curves = [curve_of(row, section.benchmark) for row in section.rows]
    if not any(len(curve.steps) or curve.broken for curve in curves):
        return None
    looks = [look_of(curve.method) for curve in curves]
    quantity = quantity_name(section.benchmark)
    window = zoom(curves)

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1), sharey=True)
        _trajectories(left, curves, looks, "steps")
        style_axes(left, "Training step", quantity)
        _scale(left, curves, section)
        if window:
            _inset(left, curves, looks, window)
        _trajectories(right, curves, looks, "seconds")
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
    rows = [row for row in section.rows if row.metric]
    panels: list[tuple[str, Callable[[Row], float | None]]] = [
        ("Optimizer GFLOPs per step (ledger)", lambda row: row.gflops),
        (
            "Optimizer milliseconds per step (measured)",
            lambda row: row.optimizer_ms,
        ),
    ]
    panels = [panel for panel in panels if len([row for row in rows if panel[1](row)]) > 1]
    if not panels:
        return None

    far_off = _far_off(rows, section.higher_is_better)

    def paint(figure: Figure) -> None:
        axes_row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (label, cost) in zip(axes_row, panels, strict=True):
            for row in rows:
                x, look = cost(row), look_of(row.method)
                if x and row.metric and row not in far_off:
                    mean, std = row.metric.mean, row.metric.std or 0.0
                    axes.errorbar(
                        x,
                        mean,
                        yerr=[[mean - float(_below(mean, std))], [std]],
                        color=look.light,
                        marker=look.marker,
                        markersize=8,
                        capsize=3,
                        linestyle="none",
                        label=row.label,
                    )
            style_axes(axes, label, section.metric_name if axes is axes_row[0] else "")
            axes.set_xscale("log")
            _plain_log_ticks(axes.xaxis)
            _scale_of_metric(axes, section)
            for row in far_off:
                x, look = cost(row), look_of(row.method)
                if x and row.metric:
                    high = axes.get_xaxis_transform()
                    axes.plot(
                        x, 0.97, look.marker, color=look.light, transform=high, label=row.label
                    )
                    axes.annotate(
                        f"↑ {row.metric.mean:.4g}",
                        (x, 0.97),
                        (8, 0),
                        xycoords=high,
                        textcoords="offset points",
                        va="center",
                        fontsize=8,
                    )
        _legend(figure, axes_row[0])

    better = "up" if section.higher_is_better else "down"
    caption = f"Better is {better} and to the left; bars are one standard deviation over seeds."
    if far_off:
        caption += " An arrow marks a method whose mean lies far above the axis."
    return draw(name, "Quality against cost", caption, (10.5, 4.4), paint)


def ablation_figures(section: Section, name: str) -> tuple[Drawing, ...]:
    """All axes of a method side by side, on one scale: what matters and what does not.

    An axis that was varied with several settings has a figure of its own, with a line for each.
    """
    drawings: list[Drawing] = []

    def next_name() -> str:
        return f"{name}-{len(drawings)}" if drawings else name

    finished = [a for a in section.ablations if any(row.metric for row in a.rows)]
    shared = {a.axis for a in finished if a.setting and a.numeric}
    for method in dict.fromkeys(ablation.of for ablation in finished):
        mine = [a for a in finished if a.of == method and a.axis not in shared]
        if mine:
            drawings.append(_small_multiples(section, method, mine, next_name()))
    for axis in sorted(shared):
        drawings.append(_lines(section, [a for a in finished if a.axis == axis], next_name()))
    return tuple(drawings)


def _lines(section: Section, ablations: Sequence[AblationSet], name: str) -> Drawing:
    """The final metric over one axis, a line for each method and setting."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for index, ablation in enumerate(ablations):
            look = ablation_look(index, len(ablations), ordered=False)
            pairs = zip(ablation.values, ablation.rows, strict=True)
            shown = [(value, row.metric) for value, row in pairs if row.metric]
            axes.errorbar(
                [float(value) for value, _ in shown],
                [metric.mean for _, metric in shown],
                yerr=[metric.std or 0.0 for _, metric in shown],
                color=look.light,
                linestyle=look.dash,
                marker=look.marker,
                markersize=6,
                capsize=2.5,
                label=ablation.of,
            )
        style_axes(axes, ablations[0].axis, section.metric_name)
        axes.set_xscale("log")
        values = sorted({float(value) for ablation in ablations for value in ablation.values})
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)
        _scale_of_metric(axes, section)
        _legend(figure, axes, most=1)

    caption = f"{ablations[0].axis}, varied with each setting; mean ± one standard deviation."
    return draw(name, "Ablations", caption, (10.5, 5.2), paint)


def _small_multiples(
    section: Section, method: str, ablations: Sequence[AblationSet], name: str
) -> Drawing:
    def paint(figure: Figure) -> None:
        panels = figure.subplots(
            2, len(ablations), squeeze=False, height_ratios=(1.15, 1), sharey="row"
        )
        for (top, bottom), ablation in zip(panels.T, ablations, strict=True):
            looks = [
                ablation_look(index, len(ablation.rows), ablation.numeric)
                for index in range(len(ablation.rows))
            ]
            first = ablation is ablations[0]
            _final(top, ablation, looks, section)
            title = ablation.axis.replace("-", "\n")  # panels are narrow
            style_axes(top, "", section.metric_name if first else "", title)
            curves = [curve_of(row, section.benchmark) for row in ablation.rows]
            _endings(bottom, curves, looks)
            quantity = quantity_name(section.benchmark)
            style_axes(bottom, "Share of training", quantity if first else "")
            bottom.legend(
                *_handles(bottom, [str(value) for value in ablation.values]),
                fontsize=7.5, handlelength=1.6, labelspacing=0.25, borderaxespad=0.2, loc="upper right",
            )  # fmt: skip
        if section.benchmark != "cifar10":
            panels[1, 0].set_yscale("log")
            _plain_log_ticks(panels[1, 0].yaxis)

    references = [a.reference for a in ablations if a.reference]
    caption = (
        f"{method}: one setting varied, all else as in the recipe. Above, the final "
        f"{section.metric_name.lower()}; all axes on one scale, mean ± one standard deviation"
    )
    if references:
        caption += ". The dotted line is the recipe's own value over the seeds that it shares with "
        caption += "the others"
        caption += ", the band ± one" * any(reference.std is not None for reference in references)
    caption += "."
    caption += (
        f" Below, {quantity_name(section.benchmark).lower()} over the later part of training."
    )
    return draw(name, "Ablations", caption, (10.5, 5.6), paint)


def _endings(axes: Axes, curves: Sequence[Curve], looks: Sequence[Look]) -> None:
    """Curves against the share of training, from where they are close enough to be told apart."""
    for curve, look in zip(curves, looks, strict=True):
        last = curve.steps[-1] if len(curve.steps) else 1.0
        late = curve.steps >= _LATE * last
        axes.plot(
            curve.steps[late] / last,
            curve.mean[late],
            color=look.light,
            linestyle=look.dash,
            linewidth=1.4,
        )
    axes.set_xlim(_LATE, 1.0)
    axes.set_xticks([_LATE, 0.75, 1.0], [f"{_LATE:g}", "0.75", "1"])


def _handles(axes: Axes, labels: Sequence[str]) -> tuple[Sequence[object], Sequence[str]]:
    return axes.get_lines(), labels


def _trajectories(axes: Axes, curves: Sequence[Curve], looks: Sequence[Look], against: str) -> None:
    for index, (curve, look) in enumerate(zip(curves, looks, strict=True)):
        x = curve.steps if against == "steps" else curve.seconds
        (line,) = axes.plot(
            x, curve.mean, color=look.light, linestyle=look.dash, label=curve.label, zorder=3
        )
        line.set_gid(f"series-{index}")
        if np.any(curve.std > 0):
            axes.fill_between(
                x,
                _below(curve.mean, curve.std),
                curve.mean + curve.std,
                color=look.light,
                alpha=0.16,
                linewidth=0,
            )
        for broken in curve.broken:
            x = broken.steps if against == "steps" else broken.seconds
            axes.plot(x, broken.values, color=look.light, linestyle=":", lw=1.0)


def _below(mean: ArrayLike, std: ArrayLike) -> NDArray[np.float64]:
    """The lower end of a band: mean − std; where that is not positive, as far as up on a log scale."""
    mean, std = np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64)
    return np.where(mean > std, mean - std, mean**2 / (mean + std))


def _far_off(rows: Sequence[Row], higher_is_better: bool) -> list[Row]:
    """Methods so much worse than most that an axis with them on it would show nothing else."""
    if higher_is_better:
        return []
    means = sorted(row.metric.mean for row in rows if row.metric)
    limit = FAR_OFF * means[len(means) // 2]
    return [row for row in rows if row.metric and row.metric.mean > limit]


def _inset(
    axes: Axes,
    curves: Sequence[Curve],
    looks: Sequence[Look],
    window: tuple[float, float, float, float],
) -> None:
    """Where a falling curve leaves room: at the upper right."""
    first, last, low, high = window
    inset = axes.inset_axes((0.46, 0.44, 0.52, 0.53))
    _trajectories(inset, [_without_broken(curve) for curve in curves], looks, "steps")
    inset.set_xlim(first, last)
    inset.set_ylim(low, high)
    inset.tick_params(labelsize=8)
    inset.grid(True, axis="y")
    for spine in inset.spines.values():
        spine.set(visible=True, color=INK_SOFT, linewidth=0.8)
    axes.indicate_inset_zoom(inset, edgecolor=RULE, alpha=1.0)


def _without_broken(curve: Curve) -> Curve:
    return Curve(
        curve.label, curve.method, curve.steps, curve.mean, curve.std, curve.seconds, broken=()
    )


def _final(axes: Axes, ablation: AblationSet, looks: Sequence[Look], section: Section) -> None:
    """Points with error bars, evenly spaced; joined where the values have an order."""
    pairs = list(zip(ablation.values, ablation.rows, strict=True))
    positions = range(len(pairs))
    base = ablation.reference
    if base is not None:
        spread = base.std or 0.0
        axes.axhspan(base.mean - spread, base.mean + spread, color=RULE, alpha=0.6, linewidth=0)
        axes.axhline(base.mean, color=INK_SOFT, linewidth=0.8, linestyle=":")
    shown = [(x, row.metric) for x, (_, row) in zip(positions, pairs, strict=True) if row.metric]
    if ablation.numeric:
        axes.plot([x for x, _ in shown], [m.mean for _, m in shown], color=INK_SOFT, lw=1.0)
    for x, (_, row), look in zip(positions, pairs, looks, strict=True):
        if row.metric:
            axes.errorbar(
                x,
                row.metric.mean,
                yerr=row.metric.std,
                color=look.light,
                marker=look.marker,
                markersize=6,
                capsize=2.5,
                zorder=3,
            )
    axes.set_xticks(positions, [str(value) for value, _ in pairs], fontsize=8)
    if max(len(str(value)) for value, _ in pairs) > 5:  # names would run into one another
        for label in axes.get_xticklabels():
            label.set(rotation=28, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.5, len(pairs) - 0.5)
    _scale_of_metric(axes, section)


def _scale(axes: Axes, curves: Sequence[Curve], section: Section) -> None:
    """Perplexity on a logarithmic axis: it is the exponential of what is minimized."""
    if section.benchmark != "cifar10":
        axes.set_yscale("log")
    top = axes.get_ylim()[1]
    means = [curve.mean.max() for curve in curves if len(curve.mean)]
    if means:  # a run on its way to infinity must not stretch the axis for all others
        top = min(top, 1.5 * max(means))
        axes.set_ylim(top=top)
    if section.benchmark != "cifar10":
        _plain_log_ticks(axes.yaxis)
    for curve in curves:
        for broken in curve.broken:
            if broken.status == "diverged":
                y = min(broken.values[-1], top)
                axes.plot(broken.steps[-1], y, "x", color=ALARM, zorder=5, clip_on=False)


def _scale_of_metric(axes: Axes, section: Section) -> None:
    """That of the final metric: perplexity on a logarithmic one."""
    if not section.higher_is_better:
        axes.set_yscale("log")
        _plain_log_ticks(axes.yaxis)


def _plain_log_ticks(axis: object) -> None:
    """10, 20, 50 rather than powers of ten alone; on a short axis, evenly spaced numbers."""
    low, high = axis.get_view_interval()  # type: ignore[attr-defined]
    decades = math.log10(high / low) if low > 0 else 1.0
    if decades < 0.6:
        locator: Locator = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10])
    else:
        wide, medium, narrow = (1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
        locator = LogLocator(subs=wide if decades > 3 else medium if decades > 1.3 else narrow)
    axis.set_major_locator(locator)  # type: ignore[attr-defined]
    axis.set_minor_locator(NullLocator())  # type: ignore[attr-defined]
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))  # type: ignore[attr-defined]


def _legend(figure: Figure, axes: Axes, most: int = 4) -> None:
    """Below the figure, with that many names in a row at ``most``."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(most, max(1, len(labels)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)
