"""The tables of methods and ablations with their captions, and the same numbers as CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from polarstep_lab.estimates import Difference
from polarstep_lab.paper import ABLATIONS_SOURCE, Published
from polarstep_lab.report.ablation_figure import ablation_figure
from polarstep_lab.report.blocks import Block, Heading, Table, Text
from polarstep_lab.report.figures import cost_figure, trajectory_figure
from polarstep_lab.report.palette import Look, look_of, ordinal_looks
from polarstep_lab.report.rows import AblationSet, Row, Section
from polarstep_lab.report.runs import RUN_COLUMNS, Metric, Runs, at_a_time
from polarstep_lab.wording import MISSING, in_digits, joined

__all__ = ["ablation_blocks", "comparison_blocks", "difference_cells", "runs_csv", "summary_csv"]

_QUALITY = (
    "mean ± standard deviation over the seeds that finished; 95%: half the t-interval of the mean."
)


def comparison_blocks(section: Section) -> list[Block | None]:
    """All methods, in a table and two figures."""
    if not section.rows:
        return []
    return [
        _comparison_table(section),
        Text(_comparison_caption(section), "caption"),
        trajectory_figure(section, f"{section.slug}-trajectories"),
        cost_figure(section, f"{section.slug}-cost"),
    ]


def _comparison_table(section: Section) -> Table:
    """All methods, with the paper's figures where they compare."""
    rows = {row: row.label for row in section.rows}
    beside: dict[Row, dict[str, str]] = {}
    for row in rows if any(row.paper for row in rows) else ():
        off = difference_cells(row.off_the_paper, section.metric)["Difference"]
        beside[row] = {"Paper": _paper_text(row, row.paper), "Difference": off}
    looks = [section.looks[row] for row in rows]
    compared = () if section.apart else section.rows
    name = f"Comparison of {section.recipe}"
    return _table(section, name, "Method", rows, compared, beside, looks)


def _comparison_caption(section: Section) -> str:
    """What the columns of the comparison mean, and where the times were measured."""
    off = (
        "Difference: here less the paper, ± half its 95% t-interval. ‡ marks a figure that ours differs "
        "from: the interval leaves out zero."
    )
    return joined(
        f"{section.metric.name}: {_QUALITY}",
        off if any(row.paper for row in section.rows) else "",
        "GFLOPs: the optimizer's part of a step, from the ledger.",
        _times_text(section.rows),
        "Run s: the whole run, validation included. Times are medians over the seeds.",
    )


def ablation_blocks(section: Section) -> list[Block | None]:
    """One figure of all ablations, and a table for each."""
    if not section.ablations:
        return []
    tables: list[Block | None] = []
    for ablation in section.ablations:
        heading = Heading(f"{ablation.axis}, {ablation.subject}", level=4)
        tables += [heading, _ablation_table(section, ablation)]
    figure = ablation_figure(section, f"{section.slug}-ablations")
    caption = Text(_ablation_caption(section), "caption")
    return [Heading("Ablations"), figure, *tables, caption]


def _ablation_table(section: Section, ablation: AblationSet) -> Table:
    """A row for each value of one axis, next to the recipe's own value."""
    beside: dict[Row, dict[str, str]] = {}
    for row in ablation.row_names:
        cells = difference_cells(ablation.difference(row), section.metric) if ablation.base else {}
        cells |= {"Difference": "recipe"} if row is ablation.base else {}
        authors = any(other.paper for other in ablation.rows)
        published = _paper_text(row, ablation.published(row))
        beside[row] = cells | ({"Authors": published} if authors else {})
    looks = [look_of("")] * (len(beside) - len(ablation.rows))
    looks += ordinal_looks(len(ablation.rows), ablation.numeric)
    compared = [*ablation.row_names]
    name, named = f"Ablation of {ablation.axis}", ablation.row_names
    return _table(section, name, ablation.axis, named, compared, beside, looks, whole_run=False)


def _ablation_caption(section: Section) -> str:
    """What the columns of all ablations mean, and for which rows no difference is shown."""
    difference = (
        "Difference: from the recipe's own value, the config in which the axes meet, on the seeds that "
        "both have (Pairs), ± half its 95% t-interval, unknown for a single pair; where no seed is "
        "common, the difference of the means. A seed fixes initial weights and order of data, so this "
        "need not be the difference of the two means where one has more seeds."
    )
    authors = (
        f"Authors: {ABLATIONS_SOURCE}; the paper prints curves only, and in that file the default "
        "setting differs from axis to axis, which is the only reason we know where figures differ. ‡ "
        "marks those that ours differ from: the 95% t-interval of the difference leaves out zero."
    )
    ablations = section.ablations
    return joined(
        f"{section.metric.name}: {_QUALITY}",
        difference if any(ablation.base for ablation in ablations) else "",
        _times_text([row for ablation in ablations for row in ablation.row_names]),
        authors if any(row.paper for ablation in ablations for row in ablation.rows) else "",
    )


def _table(
    section: Section,
    name: str,
    column: str,
    named: Mapping[Row, str],
    compared: Sequence[Row],
    beside: Mapping[Row, Mapping[str, str]],
    looks: Sequence[Look],
    whole_run: bool = True,
) -> Table:
    """A line for each row of ``named``: its name, metric, cells ``beside`` it, cost and times.

    The best of the rows ``compared`` stands in bold.
    """
    metric, lines = section.metric, []
    for row, label in named.items():
        interval = row.metric and row.metric.from_zero.interval
        cells = {
            column: label,
            metric.name: row.metric.text(metric.decimals) if row.metric else MISSING,
            "95%": MISSING if interval is None else f"± {interval:.{metric.decimals}f}",
            "Seeds": row.seeds_text,
            **beside.get(row, {}),
            "GFLOPs/step": in_digits(row.gflops),
            "Optimizer ms": in_digits(row.times["optimizer_ms_per_step"]),
            "Step ms": in_digits(row.times["step_ms"]),
            **({"Run s": in_digits(row.times["run_seconds"], 3)} if whole_run else {}),
        }
        lines.append(cells)
    scored = [row for row in compared if row.metric]
    best = section.best(scored) if len(scored) > 1 else None
    place = None if best is None else [*named].index(best)
    return Table(name, pd.DataFrame(lines), place, looks)


def difference_cells(found: Difference | None, metric: Metric) -> dict[str, str]:
    """The cells of a difference with its interval, and of the number of seeds common to both rows."""
    if found is None:
        return {"Difference": MISSING, "Pairs": ""}
    return {"Difference": found.text(metric.decimals), "Pairs": str(found.pairs or "means")}


def _paper_text(row: Row, published: Published | None) -> str:
    """A published figure beside a row, with ‡ where the row differs from it."""
    if published is None:
        return MISSING
    differs = row.metric is not None and row.metric.minus(published.estimate).clear
    return f"{published.mean:.4f} ± {published.std:.4f}{'‡' if differs else ''}"


def _times_text(shown: Sequence[Row]) -> str:
    """Where times were measured, and how many runs were under way at a time."""
    rows = [row for row in shown if row.times["step_ms"] == row.times["step_ms"]]
    if not rows:
        return ""
    text = f"Times measured on {', '.join(sorted({d for row in rows for d in row.devices}))}"
    together = at_a_time(pd.concat([row.runs for row in rows]))
    if together == 1:
        return f"{text}, one run at a time."
    return f"{text} with up to {together} runs at a time: these are not the times of a run alone."


def runs_csv(runs: Runs) -> str:
    """The file ``runs.csv``: a line for each run, those left out of the means included."""
    return runs.frame.to_csv(columns=RUN_COLUMNS, index=False, lineterminator="\n")


def summary_csv(sections: Sequence[Section]) -> str:
    """The file ``summary.csv``: a line for each row, with full precision."""
    lines = [
        _csv_line(section, row, ablation)
        for section in sections
        for ablation in (None, *section.ablations)
        for row in (ablation.rows if ablation else section.rows)
    ]
    return pd.DataFrame(lines, dtype=object).to_csv(index=False, lineterminator="\n")


def _csv_line(section: Section, row: Row, ablation: AblationSet | None) -> dict[str, object]:
    """The line of a row in ``summary.csv``."""
    difference = ablation and ablation.difference(row)
    return {
        "benchmark": section.benchmark,
        "recipe": section.recipe,
        "method": row.method,
        "label": row.label,
        "ablation_axis": ablation and ablation.axis,
        "ablation_value": row.value,
        "metric": section.metric.key,
        "mean": row.metric and row.metric.mean,
        "std": row.metric and row.metric.std,
        "seeds": row.metric.n if row.metric else 0,
        **row.counts,
        "optimizer_gflops_per_step": row.gflops,
        **row.times,
        "device": "; ".join(row.devices),
        "difference_to_base": difference and difference.value,
        "difference_error": difference and difference.error,
        "difference_pairs": difference and difference.pairs,
        **{f"paper_{key}": getattr(row.paper, key, None) for key in ("mean", "std", "gflops")},
        "command": row.commands,
    }
