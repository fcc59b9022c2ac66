"""The tables of a report as Markdown to paste and as CSV to compute with.

Both are functions of the records alone, so the same records give the same bytes. The Markdown
rounds the way the paper's Table 2 does; the CSV keeps every digit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from polarstep.experiments.report.rows import STATUSES, Estimate, Row, Runs, Section, device_of

__all__ = ["MISSING", "markdown", "metric_text", "number", "runs_csv", "seeds_text", "summary_csv"]

MISSING = "—"

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
    "device",
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
    "device",
    "message",
    "command",
)


def number(value: float | None, digits: int = 4) -> str:
    """``value`` with about ``digits`` significant digits and no exponent where it can be read.

    >>> number(2135.7551), number(0.0118), number(3.0), number(None)
    ('2136', '0.01180', '3.000', '—')
    """
    if value is None or value != value:
        return MISSING
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    decimals = 0
    while decimals < digits + 3 and abs(value) * 10**decimals < 10 ** (digits - 1):
        decimals += 1
    return f"{value:.{decimals if value else digits - 1}f}"


def metric_text(estimate: Estimate | None, decimals: int) -> str:
    """Mean ± standard deviation, or the mean alone for a single seed."""
    if estimate is None:
        return MISSING
    mean = f"{estimate.mean:.{decimals}f}"
    return mean if estimate.std is None else f"{mean} ± {estimate.std:.{decimals}f}"


def decimals_of(section: Section) -> int:
    """Decimals of the final metric: four for an accuracy, as in Table 2, three for a perplexity."""
    return 4 if section.benchmark == "cifar10" else 3


def seeds_text(row: Row) -> str:
    """How many seeds the metric rests on, with every run that is not in it.

    A reader must not take a mean over survivors for a mean over all.
    """
    counts = row.counts
    finished = counts.pop("finished", 0)
    if not counts:
        return str(finished)
    others = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{finished} of {len(row.runs)} ({others})"


def paper_text(row: Row) -> str:
    """The paper's figure for a row of the paper's recipe, with the digits it is printed with."""
    return f"{row.paper.mean:.4f} ± {row.paper.std:.4f}" if row.paper else MISSING


def markdown(sections: Sequence[Section], notices: Sequence[str]) -> str:
    """All tables and the commands behind them, as one Markdown document."""
    lines = ["# Results", ""]
    for notice in notices:
        lines += [f"> {notice}", ""]
    for section in sections:
        lines += [f"## {section.recipe} ({section.benchmark})", ""]
        if section.rows:
            lines += [*_markdown_table(section, section.rows, "Method"), ""]
            lines += [caption(section), ""]
        for ablation in section.ablations:
            lines += [f"### Ablation: {ablation.axis}, {ablation.method}", ""]
            lines += [*_markdown_table(section, ablation.rows, ablation.axis), ""]
        lines += ["### Commands", ""]
        for row in section.all_rows:
            lines += [f"{row.label}:", "", "```sh", *(row.commands or ("# not recorded",))]
            lines += ["```", ""]
    return "\n".join(lines).rstrip() + "\n"


def summary_csv(sections: Sequence[Section]) -> str:
    """One line for each row, with full precision."""
    return _csv(_SUMMARY_COLUMNS, (line for s in sections for line in _summary_lines(s)))


def runs_csv(runs: Runs) -> str:
    """One line for each run, those left out of the means included."""
    return _csv(_RUN_COLUMNS, (_run_line(run, runs.names[run.directory]) for run in runs.records))


def _markdown_table(section: Section, rows: Sequence[Row], first: str) -> list[str]:
    paper = any(row.paper for row in rows)
    header = [first, section.metric_name, "Seeds", "GFLOPs/step", "Optimizer ms", "Step ms"]
    if paper:
        header[2:2] = ["Paper"]
        header[5:5] = ["Paper GFLOPs"]
    best = section.best(rows)
    lines = ["| " + " | ".join(header) + " |", "|:--|" + "--:|" * (len(header) - 1)]
    for row in rows:
        text = metric_text(row.metric, decimals_of(section))
        cells = [
            row.label,
            f"**{text}**" if row is best and len(rows) > 1 else text,
            seeds_text(row),
            number(row.gflops),
            number(row.optimizer_ms.mean if row.optimizer_ms else None),
            number(row.step_ms.mean if row.step_ms else None),
        ]
        if paper:
            cells[2:2] = [paper_text(row)]
            cells[5:5] = [number(row.paper.gflops if row.paper else None)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def caption(section: Section) -> str:
    """What the columns of the comparison mean, and where they were measured."""
    devices = sorted({device for row in section.rows for device in row.devices})
    text = (
        f"{section.metric_name}: mean ± standard deviation over the seeds that finished. GFLOPs: "
        f"the optimizer's part of a step, from the ledger. Times measured on {', '.join(devices)}."
    )
    return text + (f" The paper's figures: {section.paper.source}." if section.paper else "")


def _summary_lines(section: Section) -> Iterable[dict[str, Any]]:
    ablated = {
        id(row): (ablation.axis, value)
        for ablation in section.ablations
        for row, value in zip(ablation.rows, ablation.values, strict=True)
    }
    for row in section.all_rows:
        axis, value = ablated.get(id(row), (None, None))
        metric, counts = row.metric, row.counts
        yield {
            "benchmark": section.benchmark,
            "recipe": section.recipe,
            "method": row.method,
            "label": row.label,
            "ablation_axis": axis,
            "ablation_value": value,
            "metric": "test_accuracy" if section.higher_is_better else "val_perplexity",
            "mean": metric.mean if metric else None,
            "std": metric.std if metric else None,
            "seeds": metric.n if metric else 0,
            **{status: counts.get(status, 0) for status in STATUSES},
            "optimizer_gflops_per_step": row.gflops,
            "optimizer_ms_per_step": row.optimizer_ms.mean if row.optimizer_ms else None,
            "step_ms": row.step_ms.mean if row.step_ms else None,
            "device": "; ".join(row.devices),
            "paper_mean": row.paper.mean if row.paper else None,
            "paper_std": row.paper.std if row.paper else None,
            "paper_gflops": row.paper.gflops if row.paper else None,
            "command": "\n".join(row.commands),
        }


def _run_line(run: Any, name: str) -> dict[str, Any]:
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
