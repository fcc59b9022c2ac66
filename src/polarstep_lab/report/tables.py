"""The tables of a section: methods, ablations, randomized rows, the paper; and those to compute with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from polarstep_lab.report.beside_paper import Beside, Line
from polarstep_lab.report.blocks import Table, strips_of
from polarstep_lab.report.captions import time_cells
from polarstep_lab.report.grouping import RUN_COLUMNS, Runs
from polarstep_lab.report.palette import ablation_look, look_of
from polarstep_lab.report.randomized import Pair
from polarstep_lab.report.rows import STATUSES, AblationSet, Row, Section
from polarstep_lab.report.texts import (
    MISSING,
    difference_text,
    metric_text,
    number,
    paper_text,
    seeds_text,
    share_text,
)

__all__ = [
    "RANDOMIZED_CAPTION",
    "ablation_table",
    "comparison_table",
    "paper_table",
    "randomized_table",
    "runs_csv",
    "summary_csv",
]

RANDOMIZED_CAPTION = (
    "Difference: of the metric from that in full space, on the seeds that both have, ± its standard "
    "error. GFLOPs and times: in parts of those in full space. Times are compared where both rows "
    "have some of runs alone on the same device, at the same commit and under the same settings; "
    "those of whole runs where three seeds or more have them, since the first run of a process also "
    "compiles."
)


def comparison_table(section: Section) -> Table:
    """All methods."""
    header = ["Method", section.metric_name, "Seeds", "GFLOPs/step"]
    rows = [
        [
            row.label,
            metric_text(row.metric, section.decimals),
            seeds_text(row),
            number(row.gflops),
            *time_cells(row, section.rows),
        ]
        for row in section.rows
    ]
    return Table(
        f"Comparison of {section.recipe}",
        [*header, "Optimizer ms", "Step ms", "Run s"],
        rows,
        _bold(section, section.rows),
        [look_of(row.method) for row in section.rows],
        strips_of(section.rows, section.decimals, log=not section.higher_is_better),
    )


def ablation_table(section: Section, ablation: AblationSet) -> Table:
    """One axis, each value next to the recipe's own."""
    shown = [row for _, row in ablation.named]
    columns: dict[str, Callable[[Row], str]] = {
        section.metric_name: lambda row: metric_text(row.metric, section.decimals),
        "Seeds": seeds_text,
        "Difference": lambda row: "recipe" if row is ablation.base
        else difference_text(ablation.difference(row), section.decimals),
        "Authors": paper_text,
        "GFLOPs/step": lambda row: number(row.gflops),
        "Optimizer ms": lambda row: time_cells(row, section.ablation_rows)[0],
        "Step ms": lambda row: time_cells(row, section.ablation_rows)[1],
    }  # fmt: skip
    if ablation.base is None:
        del columns["Difference"]
    if not any(row.paper for row in ablation.rows):
        del columns["Authors"]
    count = len(ablation.rows)
    looks = [ablation_look(index, count, ablation.numeric) for index in range(count)]
    return Table(
        f"Ablation of {ablation.axis}",
        [ablation.axis, *columns],
        [[value, *(cell(row) for cell in columns.values())] for value, row in ablation.named],
        _bold(section, shown),
        [look_of("")] * (len(shown) - count) + looks,
        strips_of(shown, section.decimals, log=not section.higher_is_better),
    )


def _bold(section: Section, rows: Sequence[Row]) -> tuple[int, int] | None:
    """The place of the best metric among ``rows``, in the column after the labels."""
    best = section.marked(rows)
    return None if best is None else (list(rows).index(best), 1)


def randomized_table(section: Section, pairs: Sequence[Pair]) -> Table:
    """Randomized rows next to full space."""

    def times(ratio: float | None) -> str:
        return MISSING if ratio is None else f"{ratio:.2f}×"

    return Table(
        "Randomized next to full space",
        ["Randomized", "Full space", "Difference", "GFLOPs", "Optimizer", "Step", "Run"],
        [
            [
                pair.label,
                pair.full.label,
                difference_text(pair.difference, section.decimals),
                share_text(pair.gflops),
                *map(times, (pair.optimizer, pair.step, pair.run)),
            ]
            for pair in pairs
        ],
    )


def paper_table(section: Section, beside: Beside) -> Table:
    """The section next to Table 2: digits where they compare, and else places and relative costs."""
    columns: dict[str, Callable[[Line], str]] = {
        "Method": lambda line: line.row.label,
        "Place": lambda line: str(line.place or MISSING),
        "Place in the paper": lambda line: str(line.paper_place),
        "Relative GFLOPs": lambda line: share_text(line.relative_gflops),
        "in the paper": lambda line: share_text(line.paper_relative_gflops),
        "Notes": _notes_text,
    }
    if beside.comparable:
        columns = {
            "Method": lambda line: line.row.label,
            "Here": lambda line: metric_text(line.row.metric, section.decimals),
            "Paper": lambda line: paper_text(line.row),
            "Difference": lambda line: difference_text(line.difference, section.decimals),
            "GFLOPs": lambda line: number(line.row.gflops),
            "Paper GFLOPs": lambda line: number(line.published_gflops),
            "Notes": _notes_text,
        }
    rows = [[cell(line) for cell in columns.values()] for line in beside.lines]
    return Table("Next to the paper", [*columns], rows)


def _notes_text(line: Line) -> str:
    """The letters of what is known to differ; says so where a difference has no known reason."""
    return ", ".join(line.marks) or ("no reason known" if line.row.differs else "")


def runs_csv(runs: Runs) -> str:
    """One line for each run, those left out of the means included."""
    return runs.frame.to_csv(columns=[*RUN_COLUMNS], index=False, lineterminator="\n")


def summary_csv(sections: Sequence[Section]) -> str:
    """One line for each row, with full precision."""
    lines = []
    for section in sections:
        varied = {row: (a, v) for a in section.ablations for row, v in zip(a.rows, a.values, strict=True)}
        for row in section.all_rows:
            ablation, value = varied.get(row, (None, None))
            difference = ablation.difference(row) if ablation else None
            lines.append(
                {
                    "benchmark": section.benchmark,
                    "recipe": section.recipe,
                    "method": row.method,
                    "label": row.label,
                    "ablation_axis": ablation and ablation.axis,
                    "ablation_value": value,
                    "metric": "test_accuracy" if section.higher_is_better else "val_perplexity",
                    "mean": row.metric and row.metric.mean,
                    "std": row.metric and row.metric.std,
                    "seeds": row.metric.n if row.metric else 0,
                    **{status: row.counts.get(status, 0) for status in STATUSES},
                    "optimizer_gflops_per_step": row.gflops,
                    "optimizer_ms_per_step": row.optimizer_ms,
                    "step_ms": row.step_ms,
                    "run_seconds": row.seconds,
                    "device": "; ".join(row.devices),
                    "difference_to_base": difference and difference.value,
                    "difference_error": difference and difference.error,
                    "difference_pairs": difference and difference.pairs,
                    "paper_mean": row.paper and row.paper.mean,
                    "paper_std": row.paper and row.paper.std,
                    "paper_gflops": row.paper and row.paper.gflops,
                    "command": "\n".join(row.commands),
                }
            )
    return pd.DataFrame(lines, dtype=object).to_csv(index=False, lineterminator="\n")
