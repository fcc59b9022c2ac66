"""The tables of a section, methods and ablations, and the same figures to compute with."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from polarstep_lab.report.blocks import Table
from polarstep_lab.report.captions import time_cells
from polarstep_lab.report.grouping import RUN_COLUMNS, Runs
from polarstep_lab.report.palette import look_of, ordinal_looks
from polarstep_lab.report.rows import STATUSES, AblationSet, Row, Section
from polarstep_lab.report.texts import difference_text, metric_text, number, paper_text, seeds_text

__all__ = ["ablation_table", "comparison_table", "runs_csv", "summary_csv"]


def comparison_table(section: Section) -> Table:
    """All methods."""
    header = ["Method", section.metric_name, "Seeds", "GFLOPs/step"]
    header += ["Optimizer ms", "Step ms", "Run s"]
    cells = [
        [
            row.label,
            *_metric_cells(section, row),
            number(row.gflops),
            *time_cells(row, section.rows),
        ]
        for row in section.rows
    ]
    looks = [look_of(row.method) for row in section.rows]
    return Table(
        f"Comparison of {section.recipe}", header, cells, _best(section, section.rows), looks
    )


def ablation_table(section: Section, ablation: AblationSet) -> Table:
    """One axis, each value next to the recipe's own."""
    based, authors = ablation.base is not None, any(row.paper for row in ablation.rows)
    header = [ablation.axis, section.metric_name, "Seeds"]
    header += ["Difference"] * based + ["Authors"] * authors
    cells = []
    for value, row in ablation.named:
        difference = difference_text(ablation.difference(row), section.decimals)
        line = [value, *_metric_cells(section, row)]
        line += ["recipe" if row is ablation.base else difference] * based
        line += [paper_text(row)] * authors
        cells.append([*line, number(row.gflops), *time_cells(row, section.ablation_rows)[:2]])
    return Table(
        f"Ablation of {ablation.axis}",
        [*header, "GFLOPs/step", "Optimizer ms", "Step ms"],
        cells,
        _best(section, [row for _, row in ablation.named]),
        [look_of("")] * (len(cells) - len(ablation.rows))
        + ordinal_looks(len(ablation.rows), ablation.numeric),
    )


def _metric_cells(section: Section, row: Row) -> list[str]:
    return [metric_text(row.metric, section.decimals), seeds_text(row)]


def _best(section: Section, rows: Sequence[Row]) -> int | None:
    """The place of the best of ``rows``; ``None`` where there are not two to compare."""
    best = section.best(rows) if sum(row.metric is not None for row in rows) > 1 else None
    return None if best is None else rows.index(best)


def runs_csv(runs: Runs) -> str:
    """One line for each run, those left out of the means included."""
    return runs.frame.to_csv(columns=RUN_COLUMNS, index=False, lineterminator="\n")


def summary_csv(sections: Sequence[Section]) -> str:
    """One line for each row, with full precision."""
    lines = []
    for section in sections:
        ablations = {row: ablation for ablation in section.ablations for row in ablation.rows}
        for row in section.all_rows:
            ablation = ablations.get(row)
            difference = ablation.difference(row) if ablation else None
            times = dict(
                zip(("optimizer_ms_per_step", "step_ms", "run_seconds"), row.times, strict=True)
            )
            lines.append(
                {
                    "benchmark": section.benchmark,
                    "recipe": section.recipe,
                    "method": row.method,
                    "label": row.label,
                    "ablation_axis": ablation and ablation.axis,
                    "ablation_value": row.value,
                    "metric": section.metric,
                    "mean": row.metric and row.metric.mean,
                    "std": row.metric and row.metric.std,
                    "seeds": row.metric.n if row.metric else 0,
                    **{status: row.counts.get(status, 0) for status in STATUSES},
                    "optimizer_gflops_per_step": row.gflops,
                    **times,
                    "device": "; ".join(row.devices),
                    "difference_to_base": difference and difference.value,
                    "difference_error": difference and difference.error,
                    "difference_pairs": difference and difference.pairs,
                    **{
                        f"paper_{key}": getattr(row.paper, key, None)
                        for key in ("mean", "std", "gflops")
                    },
                    "command": "\n".join(row.commands),
                }
            )
    return pd.DataFrame(lines, dtype=object).to_csv(index=False, lineterminator="\n")
