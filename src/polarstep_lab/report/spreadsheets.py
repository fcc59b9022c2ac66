"""The tables as CSV to compute with: every digit, every run.

Functions of the records alone, so the same records give the same bytes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.grouping import Runs
from polarstep_lab.report.rows import STATUSES, Section
from polarstep_lab.report.timing import device_of

__all__ = ["runs_csv", "summary_csv"]

_SUMMARY_COLUMNS = (
    "benchmark",
    "recipe",
    "method",
    "label",
    "ablation_axis",
    "ablation_value",
    "metric",
    "mean",
    "std",
    "seeds",
    *STATUSES,
    "optimizer_gflops_per_step",
    "optimizer_ms_per_step",
    "step_ms",
    "run_seconds",
    "device",
    "difference_to_base",
    "difference_error",
    "difference_pairs",
    "paper_mean",
    "paper_std",
    "paper_gflops",
    "command",
)
_RUN_COLUMNS = (
    "run",
    "benchmark",
    "recipe",
    "method",
    "ablation_axis",
    "ablation_value",
    "seed",
    "status",
    "metric",
    "value",
    "steps",
    "optimizer_gflops_per_step",
    "optimizer_ms_per_step",
    "step_ms",
    "run_seconds",
    "device",
    "message",
    "command",
)


def summary_csv(sections: Sequence[Section]) -> str:
    """One line for each row, with full precision."""
    return _csv(_SUMMARY_COLUMNS, (line for s in sections for line in _summary_lines(s)))


def runs_csv(runs: Runs) -> str:
    """One line for each run, those left out of the means included."""
    return _csv(_RUN_COLUMNS, (_run_line(run, runs.names[run.directory]) for run in runs.records))


def _summary_lines(section: Section) -> Iterable[dict[str, Any]]:
    ablated = {
        id(row): (ablation, value)
        for ablation in section.ablations
        for row, value in zip(ablation.rows, ablation.values, strict=True)
    }
    for row in section.all_rows:
        ablation, value = ablated.get(id(row), (None, None))
        difference = ablation.difference(row) if ablation else None
        metric, counts = row.metric, row.counts
        yield {
            "benchmark": section.benchmark,
            "recipe": section.recipe,
            "method": row.method,
            "label": row.label,
            "ablation_axis": ablation.axis if ablation else None,
            "ablation_value": value,
            "metric": "test_accuracy" if section.higher_is_better else "val_perplexity",
            "mean": metric.mean if metric else None,
            "std": metric.std if metric else None,
            "seeds": metric.n if metric else 0,
            **{status: counts.get(status, 0) for status in STATUSES},
            "optimizer_gflops_per_step": row.gflops,
            "optimizer_ms_per_step": row.optimizer_ms,
            "step_ms": row.step_ms,
            "run_seconds": row.seconds,
            "difference_to_base": difference.value if difference else None,
            "difference_error": difference.error if difference else None,
            "difference_pairs": difference.pairs if difference else None,
            "device": "; ".join(row.devices),
            "paper_mean": row.paper.mean if row.paper else None,
            "paper_std": row.paper.std if row.paper else None,
            "paper_gflops": row.paper.gflops if row.paper else None,
            "command": "\n".join(row.commands),
        }


def _run_line(run: RunRecord, name: str) -> dict[str, Any]:
    identity, result = run.identity, run.result
    line = {
        "run": name,
        "benchmark": identity.benchmark,
        "recipe": identity.recipe,
        "method": identity.method,
        "ablation_axis": identity.ablation.axis if identity.ablation else None,
        "ablation_value": identity.ablation.value if identity.ablation else None,
        "seed": identity.seed,
        "status": run.status,
        "run_seconds": run.seconds,
        "device": device_of(run),
        "command": identity.command,
    }
    if result:
        for name in _RUN_COLUMNS:
            if hasattr(result, name):
                line[name] = getattr(result, name)
    return line


def _csv(columns: Sequence[str], lines: Iterable[dict[str, Any]]) -> str:
    """RFC 4180 without the carriage returns; a missing value and NaN are empty fields."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n", restval="")
    writer.writeheader()
    for line in lines:
        writer.writerow({key: "" if value != value else value for key, value in line.items()})
    return buffer.getvalue()
