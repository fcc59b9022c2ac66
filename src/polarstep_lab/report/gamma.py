"""How inexact each polar step was: γ and ν of monitored runs, in a table and in a figure.

γ and ν are those of the paper's inexactness assumption: ⟨M, T⟩ ≥ (1 − γ)‖M‖_* and ‖T‖_op ≤ 1 + ν.
They come from ``gamma.jsonl``. The table shows the largest value of each row, since an assumption has
to hold throughout. The figure shows rows side by side on one scale, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd
from matplotlib.axes import Axes

from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.figures import Drawing, Panel, Series, looks
from polarstep_lab.report.page import Block, Table, part
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.wording import in_digits

__all__ = ["gamma_blocks", "gamma_figure", "gamma_of", "gamma_table"]

_CAPTION = (
    "γ is the alignment that a polar step gave up and ν by how much its operator norm exceeded one, "
    "from singular values, over all sampled steps and matrices. The theorems ask for a γ below 1 "
    "throughout."
)
_FIGURE = (
    "What each polar step gave up (γ) and by how much its operator norm exceeded one (ν), from exact "
    "singular values, against the training step: the median over matrices, and the band of all of them."
)
_LEAST = {"gamma": 1e-3, "nu": 0.01}  # the shortest axes: rounding errors must not fill a panel
_AT_MOST = 8  # more panels side by side could not be read


def gamma_blocks(section: Section) -> list[Block]:
    """A table of all monitored rows, and figures of the methods and of each ablation."""
    groups = [{row: row.label for row in section.rows}]
    groups += [{row: row.label for row in ablation.rows} for ablation in section.ablations]
    figures = [gamma_figure(rows, f"{section.slug}-gamma-{i}") for i, rows in enumerate(groups)]
    names = dict(groups[0])
    for ablation in section.ablations:
        names |= {row: f"{row.label}, {ablation.subject}" for row in ablation.rows}
    return part(gamma_table(names), _CAPTION, figures)


def gamma_of(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """``step``, ``matrix``, ``gamma`` and ``nu`` of monitored runs, a line for each sampled matrix.

    Zero matrices are left out: they have no polar factor to compare with.
    """
    entries = [
        entry
        for run in runs
        for entry in run.logs.get("gamma", ())
        if entry.get("stable_rank") != 0
    ]
    log = pd.DataFrame(entries).reindex(columns=["step", "gamma", "nu"])
    log["matrix"] = [
        str(entry["parameter"]).removesuffix(".weight")
        + (f" [{entry['block']}]" if entry.get("block") else "")  # one of several matrices
        for entry in entries
    ]
    return log.astype({"gamma": float, "nu": float})


def gamma_table(rows: Mapping[Row, str]) -> Table:
    """A line for each monitored row: how inexact its steps were, and where they were most so."""
    lines = []
    for row, name in rows.items():
        log = gamma_of(row.runs["record"])
        if log[["gamma", "nu"]].notna().any().all():
            worst, steps = log.loc[log["gamma"].idxmax()], log["step"].unique()
            sampled = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)}, last {max(steps)}"
            cells = {
                "Method": name,
                "Runs": row.seeds_text,
                "Sampled steps": sampled,
                "γ, median": _decimal(log["gamma"].median()),
                "γ, largest": _decimal(worst["gamma"]),
                "ν, largest": _decimal(log["nu"].max()),
                "Largest γ in": f"{worst['matrix']}, step {worst['step']}",
            }
            lines.append(cells)
    return Table("How inexact each step was", pd.DataFrame(lines))


def gamma_figure(rows: Mapping[Row, str], name: str) -> Drawing | None:
    """γ and ν of each monitored row against the step: the median matrix, and the band of all.

    A run that diverged is left out, as on its scale the others would be flat.
    """
    watched = {
        label: gamma_of([run])
        for row, label in rows.items()
        if (run := row.first_with("gamma")) and run.status != "diverged"
    }
    shown = dict([*watched.items()][:_AT_MOST])
    if not shown:
        return None
    panels = []
    for key, symbol in {"gamma": "γ", "nu": "ν"}.items():
        limit = 1.08 * max(_LEAST[key], *(log[key].fillna(0.0).max() for log in shown.values()))

        def finish(axes: Axes, limit: float = limit) -> None:
            axes.set_ylim(0, limit)
            axes.title.set_fontsize(8.5)

        for (label, log), look in zip(shown.items(), looks(len(shown)), strict=True):
            by_step = log[key].clip(lower=0.0).groupby(log["step"])
            found = by_step.agg(["min", "median", "max"]).dropna()
            band = (found["median"], found["min"], found["max"])
            title = label.replace(" (", "\n(", 1) if key == "gamma" else ""
            series = Series("", look, found.index, *band, band=True)
            panels.append(Panel([series], "", symbol, title, finish=finish))
    caption = _FIGURE
    if len(watched) > len(shown):
        caption += f" The first {_AT_MOST} of {len(watched)} monitored rows."
    title, size = "γ and ν along the run", (10.5, 4.6)
    return Drawing(name, title, caption, size, panels, len(shown), sharey="row")


def _decimal(value: float) -> str:
    """``value`` with four decimals; further decimals are rounding errors of the measurement.

    >>> _decimal(0.02761), _decimal(-4e-5), _decimal(1998.4756)
    ('0.0276', '0.0000', '1998')
    """
    if value >= 10:
        return in_digits(value)
    return f"{value:.4f}".replace("-0.0000", "0.0000").replace("-", "−")
