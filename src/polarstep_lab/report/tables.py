"""The tables of methods and ablations with their captions, and the same figures to compute with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd

from polarstep_lab.paper import ABLATIONS_SOURCE
from polarstep_lab.report.blocks import Block, Heading, Table, Text, tabulate
from polarstep_lab.report.estimates import MISSING, Difference, joined, listed, number
from polarstep_lab.report.figures import ablation_figure, cost_figure, trajectory_figure
from polarstep_lab.report.palette import look_of, ordinal_looks
from polarstep_lab.report.rows import AblationSet, Row, Section
from polarstep_lab.report.runs import RUN_COLUMNS, STATUSES, Runs, at_a_time

__all__ = [
    "ablation_blocks",
    "comparison_blocks",
    "comparison_caption",
    "comparison_table",
    "runs_csv",
    "summary_csv",
]

_OFF = (
    "Difference: here less the paper, ± half its 95% t-interval. ‡ marks a figure that ours differs "
    "from: the interval leaves out zero."
)
_QUALITY = (
    "mean ± standard deviation over the seeds that finished; 95%: half the t-interval of the mean."
)
_DIFFERENCE = (
    "Difference: from the recipe's own value, the config in which the axes meet, on the seeds that "
    "both have (Pairs), ± half its 95% t-interval, unknown for a single pair; where no seed is common, "
    "the difference of the means. A seed fixes initial weights and order of data, so this need not be "
    "the difference of the two means where one has more seeds."
)
_AUTHORS = (
    f"Authors: {ABLATIONS_SOURCE}; the paper prints curves only, and in that file the default "
    "setting differs from axis to axis, which is the only reason we know where figures differ. ‡ marks "
    "those that ours differ from: the 95% t-interval of the difference leaves out zero."
)

_UNLIKE = "Times of rows that differ in the last columns, how they were run, do not compare."

Columns = dict[str, Callable[[Row], str]]

_COST: Columns = {
    "GFLOPs/step": lambda row: number(row.gflops),
    "Optimizer ms": lambda row: number(row.times["optimizer_ms"]),
    "Step ms": lambda row: number(row.times["step_ms"]),
    "Run s": lambda row: number(row.times["run_seconds"], 3),
}


def comparison_table(section: Section) -> Table:
    """All methods, with the paper's figures where they compare."""
    columns: Columns = {"Method": lambda row: row.label} | _quality_columns(section)
    if any(row.paper for row in section.rows):
        off = _difference_columns(section, lambda row: row.off_the_paper)
        columns |= {"Paper": _paper_text, "Difference": off["Difference"]}
    looks = [look_of(row.method) for row in section.rows]
    name, best = f"Comparison of {section.recipe}", _best(section, section.rows)
    columns |= _COST | _condition_columns(section.rows)
    return tabulate(name, section.rows, columns, best, looks)


def comparison_caption(section: Section) -> str:
    """What the columns of the comparison mean, and where they were measured."""
    return joined(
        f"{section.metric.name}: {_QUALITY}",
        _OFF if any(row.paper for row in section.rows) else "",
        "GFLOPs: the optimizer's part of a step, from the ledger.",
        _times_text(section.rows),
        "Run s: the whole run, validation included. Times are medians over the seeds.",
        _UNLIKE if _condition_columns(section.rows) else "",
    )


def comparison_blocks(section: Section) -> list[Block | None]:
    """All methods, in a table and two figures."""
    if not section.rows:
        return []
    return [
        comparison_table(section),
        Text(comparison_caption(section), "caption"),
        trajectory_figure(section, f"{section.slug}-trajectories"),
        cost_figure(section, f"{section.slug}-cost"),
    ]


def ablation_blocks(section: Section) -> list[Block | None]:
    """All ablations, in a figure and a table for each."""
    if not section.ablations:
        return []
    tables: list[Block] = []
    for ablation in section.ablations:
        tables += [Heading(f"{ablation.axis}, {ablation.of}", level=4)]
        tables += [_ablation_table(section, ablation)]
    caption = joined(
        f"{section.metric.name}: {_QUALITY}",
        _DIFFERENCE if any(a.base for a in section.ablations) else "",
        *(_strays_text(section, ablation) for ablation in section.ablations),
        _times_text([row for ablation in section.ablations for row in ablation.named]),
        _UNLIKE if any(_condition_columns([*a.named]) for a in section.ablations) else "",
        _AUTHORS if any(row.paper for a in section.ablations for row in a.rows) else "",
    )
    figure = ablation_figure(section, f"{section.slug}-ablations")
    return [Heading("Ablations"), figure, *tables, Text(caption, "caption")]


def _ablation_table(section: Section, ablation: AblationSet) -> Table:
    """One axis, each value next to the recipe's own."""
    rows = [*ablation.named]
    columns: Columns = {ablation.axis: ablation.named.__getitem__} | _quality_columns(section)
    if ablation.base:
        differences = _difference_columns(section, ablation.difference)
        columns |= differences
        columns["Difference"] = lambda row: (
            "recipe" if row is ablation.base else differences["Difference"](row)
        )
    if any(row.paper for row in ablation.rows):
        columns["Authors"] = _paper_text
    columns |= {name: cell for name, cell in _COST.items() if name != "Run s"}
    columns |= _condition_columns(rows)
    looks = [look_of("")] * (len(rows) - len(ablation.rows))
    looks += ordinal_looks(len(ablation.rows), ablation.numeric)
    return tabulate(f"Ablation of {ablation.axis}", rows, columns, _best(section, rows), looks)


def _quality_columns(section: Section) -> Columns:
    """The metric ± its standard deviation, half the t-interval of its mean, and the seeds behind it."""
    metric = section.metric

    def interval(row: Row) -> str:
        found = row.metric and row.metric.from_zero.interval
        return MISSING if found is None else f"± {found:.{metric.decimals}f}"

    return {
        metric.name: lambda row: row.metric.text(metric.decimals) if row.metric else MISSING,
        "95%": interval,
        "Seeds": lambda row: row.seeds_text,
    }


def _difference_columns(section: Section, of: Callable[[Row], Difference | None]) -> Columns:
    """A difference with its interval, and on how many common seeds it rests."""

    def text(row: Row) -> str:
        return found.text(section.metric.decimals) if (found := of(row)) else MISSING

    def pairs(row: Row) -> str:
        return str(found.pairs or "means") if (found := of(row)) else ""

    return {"Difference": text, "Pairs": pairs}


def _paper_text(row: Row) -> str:
    """The published figure for a row, with a mark where ours is clearly another."""
    if not row.paper:
        return MISSING
    return f"{row.paper.mean:.4f} ± {row.paper.std:.4f}{'‡' * row.differs}"


def _best(section: Section, rows: Sequence[Row]) -> int | None:
    """The place of the best of ``rows``; ``None`` where there are not two to compare."""
    best = section.best(rows) if sum(row.metric is not None for row in rows) > 1 else None
    return None if best is None else rows.index(best)


def _strays_text(section: Section, ablation: AblationSet) -> str:
    """Which rows have no difference because they differ from their base in more than the axis."""
    rows: dict[str, list[str]] = {}
    for row, paths in (ablation.strays or {}).items():
        rows.setdefault(listed(paths), []).append(row.label + section.whose(ablation))
    said = "No difference is shown for {}: the recipe's own row differs in {} too."
    return joined(*(said.format(listed(names), paths) for paths, names in rows.items()))


def _times_text(shown: Sequence[Row]) -> str:
    """Where times were measured, and whether the runs had the device to themselves."""
    rows = [row for row in shown if not row.timed.empty]
    if not rows:
        return ""
    text = f"Times measured on {', '.join(sorted({d for row in rows for d in row.devices}))}"
    together = at_a_time(pd.concat([row.runs for row in rows]))
    if together == 1:
        return f"{text}, one run at a time."
    least, *_, most = sorted([len(row.alone) for row in rows] * 2)
    if not most:
        return (
            f"{text} with up to {together} runs at a time: these are not the times of a run alone."
        )
    seeds = str(most) if least == most else f"{least} to {most}"
    return f"{text}, over the {seeds} seeds of a row that had it to themselves."


def _condition_columns(rows: Sequence[Row]) -> Columns:
    """Commit and settings of speed that the times of rows belong to, where these are not all alike."""
    frames = {row: pd.DataFrame([*row.timed["conditions"]]) for row in rows}
    names = dict.fromkeys(name for frame in frames.values() for name in frame if name != "device")

    def text(row: Row, name: str) -> str:
        return "/".join(sorted(frames[row].get(name, pd.Series(dtype=object)).dropna().unique()))

    return {
        name.removeprefix("runtime."): partial(text, name=name)
        for name in map(str, names)
        if len({text(row, name) for row in rows if not row.timed.empty}) > 1
    }


def runs_csv(runs: Runs) -> str:
    """One line for each run, those left out of the means included."""
    return runs.frame.to_csv(columns=RUN_COLUMNS, index=False, lineterminator="\n")


def summary_csv(sections: Sequence[Section]) -> str:
    """One line for each row, with full precision."""
    lines = [
        _csv_line(section, row, ablation)
        for section in sections
        for ablation in (None, *section.ablations)
        for row in (ablation.rows if ablation else section.rows)
    ]
    return pd.DataFrame(lines, dtype=object).to_csv(index=False, lineterminator="\n")


def _csv_line(section: Section, row: Row, ablation: AblationSet | None) -> dict[str, object]:
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
        **{status: row.counts.get(status, 0) for status in STATUSES},
        "optimizer_gflops_per_step": row.gflops,
        **dict(zip(RUN_COLUMNS[12:15], row.times, strict=True)),
        "device": "; ".join(row.devices),
        "difference_to_base": difference and difference.value,
        "difference_error": difference and difference.error,
        "difference_pairs": difference and difference.pairs,
        **{f"paper_{key}": getattr(row.paper, key, None) for key in ("mean", "std", "gflops")},
        "command": row.commands,
    }
