"""The comparison of a section's rows: its first sentence, its table and its two figures.

Trajectories are of validation perplexity for nanoGPT and of validation loss for CIFAR-10, as in the
paper's figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from polarstep_lab.estimates import Difference
from polarstep_lab.paper import DIFFERENCES, Published
from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.figures import Drawing, Look, Panel, Series, looks, points_only
from polarstep_lab.report.page import Block, Table, Text
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.runs import Metric, at_a_time
from polarstep_lab.wording import MISSING, in_digits, joined, listed

__all__ = [
    "comparison_blocks",
    "curve_of",
    "difference_cells",
    "headline",
    "metric_table",
    "times_text",
]

QUALITY = (
    "mean ± standard deviation over the seeds that finished; 95%: half the t-interval of the mean."
)
_AGAINST = (
    "on the seeds that both rows have (Pairs), ± half its 95% t-interval; where no seed is common, of "
    "the means."
)
_PAPER = (
    "Paper: Table 2. To the paper: here less the paper, ± half its 95% t-interval; ‡ marks a figure "
    "that ours differs from, as the interval leaves out zero."
)
_COSTS = (
    "GFLOPs: the optimizer's part of a step, from the ledger. Run s: the whole run, validation "
    "included. Times are medians over the seeds."
)


def headline(section: Section) -> list[Block]:
    """The best row against what the study compares with, which is AdamW unless it says otherwise.

    Rows that differ in their task are not weighed against each other.
    """
    best, metric = section.best(section.rows), section.metric
    base = best and section.base_of(best)
    if section.apart:
        text = f"The rows differ in {listed(section.apart)}, so that no best of them is named."
    elif best is None:
        text = "No run of this comparison has finished." if section.rows else ""
    elif base is None or best is base:
        count = sum(row.metric is not None for row in section.rows)
        which = "highest" if metric.higher_is_better else "lowest"
        what = f"{which} {metric.name.lower()} of {count} rows"
        text = f"{best.label} has the {what}, {_value(best, metric)}."
        text *= count > 1
    else:
        difference = best.minus(base)
        assert difference is not None
        text = (
            f"{best.label} has {metric.name.lower()} {_value(best, metric)}, {base.label} "
            f"{_value(base, metric)}: {difference.sentence(metric.decimals)}"
        )
        time = best.times["step_ms"] / base.times["step_ms"]
        if time == time and best.devices == base.devices:
            text += f"; a whole step takes {time:.2f} times as long"
        text += "."
    return [Text(text, "headline")] if text else []


def _value(row: Row, metric: Metric) -> str:
    return row.metric.text(metric.decimals) if row.metric else MISSING


def comparison_blocks(section: Section) -> list[Block]:
    """All rows, in a table and two figures; then what is known to differ from the paper's runs."""
    if not section.rows:
        return []
    named = {row: row.label for row in section.rows}
    drawn = dict(zip(section.rows, looks(len(section.rows)), strict=True))
    bases = {row: section.base_of(row) for row in section.rows}
    against = {base for row, base in bases.items() if base is not None and base is not row}
    what = f"Against {against.copy().pop().label}" if len(against) == 1 else "Difference"
    published = any(row.paper for row in section.rows)
    beside: dict[Row, dict[str, str]] = {}
    for row, base in bases.items():
        cells = beside.setdefault(row, {})
        if against:
            off = row.minus(base) if base is not None and base is not row else None
            cells |= difference_cells(off, section.metric, what)
        if published:
            off = row.metric.minus(row.paper.estimate) if row.metric and row.paper else None
            to_the_paper = difference_cells(off, section.metric)["Difference"]
            cells |= {"Paper": paper_cell(row, row.paper), "To the paper": to_the_paper}
    compared = () if section.apart else section.rows
    name = f"Comparison of {section.recipe}"
    caption = joined(
        f"{section.metric.name}: {QUALITY}",
        f"{what}: {_AGAINST}" if against else "",
        _PAPER if published else "",
        _COSTS,
        times_text(section.rows),
    )
    notes = [Text(note, "note") for note in DIFFERENCES[section.benchmark] if published]
    figures = [_trajectories(section, drawn), _costs(section, drawn)]
    return [
        metric_table(section, name, "Method", named, compared, beside, [*drawn.values()]),
        Text(caption),
        *([Text("What is known to differ from the paper's runs:", "known")] if notes else []),
        *notes,
        *(figure for figure in figures if figure is not None),
    ]


def metric_table(
    section: Section,
    name: str,
    column: str,
    named: Mapping[Row, str],
    compared: Sequence[Row],
    beside: Mapping[Row, Mapping[str, str]],
    drawn: Sequence[Look] = (),
) -> Table:
    """A line for each row of ``named``: its name, metric, cells ``beside`` it, cost and times.

    The best of the rows ``compared`` stands in bold.
    """
    metric, lines = section.metric, []
    for row, label in named.items():
        interval = row.metric and row.metric.from_zero.interval
        cells = {
            column: label,
            metric.name: _value(row, metric),
            "95%": MISSING if interval is None else f"± {interval:.{metric.decimals}f}",
            "Seeds": row.seeds_text,
            **beside.get(row, {}),
            "GFLOPs/step": in_digits(row.gflops),
            "Optimizer ms": in_digits(row.times["optimizer_ms_per_step"]),
            "Step ms": in_digits(row.times["step_ms"]),
            "Run s": in_digits(row.times["run_seconds"], 3),
        }
        lines.append(cells)
    scored = [row for row in compared if row.metric]
    best = section.best(scored) if len(scored) > 1 else None
    place = None if best is None else [*named].index(best)
    return Table(name, pd.DataFrame(lines), place, drawn)


def difference_cells(
    found: Difference | None, metric: Metric, name: str = "Difference"
) -> dict[str, str]:
    """The cells of a difference with its interval, and of the number of seeds common to both rows."""
    if found is None:
        return {name: MISSING, "Pairs": ""}
    return {name: found.text(metric.decimals), "Pairs": str(found.pairs or "means")}


def paper_cell(row: Row, published: Published | None) -> str:
    """A published figure beside a row, with ‡ where the row differs from it."""
    if published is None:
        return MISSING
    differs = row.metric is not None and row.metric.minus(published.estimate).clear
    return f"{published.mean:.4f} ± {published.std:.4f}{'‡' if differs else ''}"


def times_text(shown: Sequence[Row]) -> str:
    """Where times were measured, and how many runs were under way at a time."""
    rows = [row for row in shown if row.times["step_ms"] == row.times["step_ms"]]
    if not rows:
        return ""
    text = f"Times measured on {', '.join(sorted({d for row in rows for d in row.devices}))}"
    together = at_a_time(pd.concat([row.runs for row in rows]))
    if together == 1:
        return f"{text}, one run at a time."
    return f"{text} with up to {together} runs at a time: these are not the times of a run alone."


# --- figures --------------------------------------------------------------------------------------


def curve_of(row: Row, benchmark: str) -> pd.DataFrame:
    """``mean``, ``std`` and ``seconds`` of the finished seeds, at the steps that all of them share.

    Seconds are the median over the runs, and NaN for runs of several devices.
    """
    found = [_validations(run, benchmark) for run in row.finished["record"]]
    if not found:
        return pd.DataFrame(columns=["mean", "std", "seconds"], dtype=float)
    values = pd.concat([log["value"] for log in found], axis="columns").dropna()
    points = values.agg(["mean", "std"], axis="columns").fillna({"std": 0.0})
    seconds = pd.concat([log["seconds"] for log in found], axis="columns")
    points["seconds"] = seconds.median(axis="columns") if len(row.devices) == 1 else math.nan
    return points


def _validations(run: RunRecord, benchmark: str) -> pd.DataFrame:
    """Value and training seconds of each validation of a run, by step, where the value is finite."""
    columns = ["step", "loss", "perplexity", "seconds"]
    frame = pd.DataFrame([vars(row) for row in run.rows("val")], columns=columns)
    frame = frame.set_index("step").astype(float)
    perplexity = frame["perplexity"].fillna(np.exp(frame["loss"].clip(upper=700)))
    frame["value"] = frame["loss"] if benchmark == "cifar10" else perplexity
    return frame[np.isfinite(frame["value"])]


def _trajectories(section: Section, drawn: Mapping[Row, Look]) -> Drawing | None:
    """All rows against steps and against time."""
    curves = {row: curve_of(row, section.benchmark) for row in section.rows}
    quantity = f"Validation {'loss' if section.benchmark == 'cifar10' else 'perplexity'}"
    panels = []
    for axis, label in {"steps": "Training step", "seconds": "Seconds since the run began"}.items():
        series = []
        for row, curve in curves.items():
            points = curve.reset_index(names="steps")
            mean, std = points["mean"], points["std"]
            if points[axis].notna().any():
                band = (mean - std, mean + std)
                series.append(Series(row.label, drawn[row], points[axis], mean, *band, band=True))
        if series:
            panels.append(Panel(series, label, quantity, yscale=_scale(section)))
    if not panels:
        return None
    caption = f"{quantity}, mean over the seeds that finished; the band is one standard deviation."
    name = f"{section.slug}-trajectories"
    return Drawing(name, "Trajectories", caption, (10.5, 4.9), panels, columns=2)


def _costs(section: Section, drawn: Mapping[Row, Look]) -> Drawing | None:
    """The final metric against what the optimizer costs, in FLOPs and in measured time."""
    panels: list[Panel] = []
    costs = {
        "Optimizer GFLOPs per step (ledger)": [row.gflops for row in section.rows],
        "Optimizer milliseconds per step (measured)": [
            row.times["optimizer_ms_per_step"] for row in section.rows
        ],
    }
    for label, by_row in costs.items():
        series = []
        for row, cost in zip(section.rows, by_row, strict=True):
            if row.metric and cost and not math.isnan(cost):
                mean, spread = np.array([row.metric.mean]), row.metric.std or 0.0
                look = points_only(drawn[row])
                series += [Series(row.label, look, [cost], mean, mean - spread, mean + spread)]
        if len(series) > 1:
            quality, scale = section.metric.name, _scale(section)
            panels.append(Panel(series, label, quality, xscale="log", yscale=scale))
    if not panels:
        return None
    better = "up" if section.metric.higher_is_better else "down"
    caption = f"Better is {better} and to the left; bars are one standard deviation over seeds."
    name = f"{section.slug}-cost"
    return Drawing(name, "Quality against cost", caption, (10.5, 4.4), panels, columns=2)


def _scale(section: Section) -> str:
    """``"log"`` for perplexity, which is the exponential of the loss; ``"linear"`` for accuracy."""
    return "linear" if section.metric.higher_is_better else "log"
