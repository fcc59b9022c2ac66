"""The tables of a report as Markdown to paste and as CSV to compute with.

Both are functions of the records alone, so the same records give the same bytes. The Markdown
rounds the way the paper's Table 2 does; the CSV keeps every digit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from polarstep.experiments.report.paper import Beside, Line, beside_the_paper
from polarstep.experiments.report.published import ABLATIONS_SOURCE
from polarstep.experiments.report.rows import (
    STATUSES,
    AblationSet,
    Difference,
    Estimate,
    Row,
    Runs,
    Section,
    at_a_time,
    device_of,
)

__all__ = [
    "MISSING",
    "ablation_caption",
    "brief_lines",
    "caption",
    "comparison_lines",
    "difference_text",
    "markdown",
    "metric_text",
    "number",
    "runs_csv",
    "seeds_text",
    "summary_csv",
]

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
    "run_seconds",
    "device",
    "difference_to_base",
    "difference_error",
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


def difference_text(difference: Difference | None, decimals: int) -> str:
    """A signed difference ± its standard error.

    >>> difference_text(Difference(-0.00123, 0.0004), 4)
    '−0.0012 ± 0.0004'
    """
    if difference is None:
        return MISSING
    sign = "−" if difference.value < 0 else "+"
    text = f"{sign}{abs(difference.value):.{decimals}f}"
    return text if difference.error is None else f"{text} ± {difference.error:.{decimals}f}"


def share_text(share: float | None) -> str:
    """A share in per cent.

    >>> share_text(0.1175), share_text(None)
    ('11.75%', '—')
    """
    return MISSING if share is None else f"{share:.2%}"


def mean_text(estimate: Estimate | None, digits: int = 4) -> str:
    """The mean alone, for times."""
    return number(estimate.mean if estimate else None, digits)


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
            lines += [*comparison_lines(section), "", caption(section), ""]
            beside = beside_the_paper(section)
            lines += _beside_lines(section, beside) if beside else []
        for ablation in section.ablations:
            lines += [f"### Ablation: {ablation.axis}, {ablation.method}", ""]
            lines += [*_ablation_lines(section, ablation), ""]
        lines += [ablation_caption(section), ""] if section.ablations else []
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


def comparison_lines(section: Section) -> list[str]:
    """The table of all methods."""
    paper = any(row.paper for row in section.rows)
    header = ["Method", section.metric_name, "Seeds", "GFLOPs/step"]
    header += ["Optimizer ms", "Step ms", "Run s"]
    if paper:
        header[2:2] = ["Paper"]
        header[5:5] = ["Paper GFLOPs"]
    best = section.best(section.rows)
    lines = []
    for row in section.rows:
        text = metric_text(row.metric, decimals_of(section))
        cells = [
            row.label,
            f"**{text}**" if row is best and len(section.rows) > 1 else text,
            seeds_text(row),
            number(row.gflops),
            mean_text(row.optimizer_ms),
            mean_text(row.step_ms),
            mean_text(row.seconds, 3),
        ]
        if paper:
            cells[2:2] = [paper_text(row)]
            cells[5:5] = [number(row.paper.gflops if row.paper else None)]
        lines.append(cells)
    return _table(header, lines)


def brief_lines(section: Section) -> list[str]:
    """The table of all methods with the columns that fit a front page; times of lone runs only."""
    beside = beside_the_paper(section)
    comparable = beside is not None and beside.comparable
    timed = all(row.alone for row in section.rows)
    header = ["Method", section.metric_name]
    header += ["paper", "difference"] if comparable else []
    header += ["GFLOPs/step", *(["optimizer ms", "step ms", "run s"] if timed else [])]
    off = {line.row.label: line.difference for line in beside.lines} if beside else {}
    lines = []
    for row in section.rows:
        cells = [row.label, metric_text(row.metric, decimals_of(section))]
        if comparable:
            cells += [paper_text(row), difference_text(off.get(row.label), decimals_of(section))]
        cells += [number(row.gflops, 3)]
        if timed:
            cells += [mean_text(e, 3) for e in (row.optimizer_ms, row.step_ms, row.seconds)]
        lines.append(cells)
    return _table(header, lines)


def _ablation_lines(section: Section, ablation: AblationSet) -> list[str]:
    """The table of one axis, each value next to the recipe's."""
    authors = any(row.paper for row in ablation.rows)
    based = ablation.base is not None
    header = [ablation.axis, "Seeds", section.metric_name]
    header += ["Difference"] * based + ["Authors"] * authors
    header += ["GFLOPs/step", "Optimizer ms", "Step ms"]
    decimals = decimals_of(section)
    best = section.best(ablation.rows)
    lines = []
    for value, row in ablation_rows(ablation):
        text = metric_text(row.metric, decimals)
        cells = [
            value,
            seeds_text(row),
            f"**{text}**" if row is best and len(ablation.rows) > 1 else text,
        ]
        if based:
            cells.append(base_text(ablation, row, decimals))
        if authors:
            cells.append(paper_text(row))
        cells += [number(row.gflops), mean_text(row.optimizer_ms), mean_text(row.step_ms)]
        lines.append(cells)
    return _table(header, lines)


def ablation_rows(ablation: AblationSet) -> list[tuple[str, Row]]:
    """The rows of an axis by value, after the recipe's own where that is none of them."""
    rows = [(str(v), row) for v, row in zip(ablation.values, ablation.rows, strict=True)]
    if ablation.base is not None and ablation.base not in ablation.rows:
        rows.insert(0, ("recipe", ablation.base))
    return rows


def base_text(ablation: AblationSet, row: Row, decimals: int) -> str:
    """The difference from the recipe's value; a word at that value itself."""
    return "recipe" if row is ablation.base else difference_text(ablation.difference(row), decimals)


def _beside_lines(section: Section, beside: Beside) -> list[str]:
    """The section next to the paper, with what is known to differ."""
    header, cells = beside_cells(section, beside)
    lines = ["### Next to the paper", "", beside.summary, "", *_table(header, cells), ""]
    if beside.order:
        lines += [beside.order, ""]
    if beside.notes:
        lines += ["What is known to differ:", ""]
        lines += [f"- ({note.mark}) {note.topic}: {note.text}" for note in beside.notes]
        lines += [""]
    return lines


def beside_cells(section: Section, beside: Beside) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table next to the paper."""
    if not beside.comparable:
        header = [
            "Method",
            "Place",
            "Place in the paper",
            "Relative GFLOPs",
            "in the paper",
            "Notes",
        ]
        return header, [
            [
                line.row.label,
                str(line.place or MISSING),
                str(line.paper_place),
                share_text(line.relative_gflops),
                share_text(line.paper_relative_gflops),
                notes_text(line),
            ]
            for line in beside.lines
        ]
    decimals = decimals_of(section)
    header = ["Method", "Here", "Paper", "Difference", "GFLOPs", "Paper GFLOPs", "Notes"]
    return header, [
        [
            line.row.label,
            metric_text(line.row.metric, decimals),
            paper_text(line.row),
            difference_text(line.difference, decimals),
            number(line.row.gflops),
            number(line.published.gflops),
            notes_text(line),
        ]
        for line in beside.lines
    ]


def notes_text(line: Line) -> str:
    """The letters of what is known to differ, or that nothing is, or that nothing needs to be."""
    if line.marks:
        return ", ".join(line.marks)
    return "no reason known" if line.differs else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|:--|" + "--:|" * (len(header) - 1)]
    for cells in rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def caption(section: Section) -> str:
    """What the columns of the comparison mean, and where they were measured."""
    text = (
        f"{section.metric_name}: mean ± standard deviation over the seeds that finished. GFLOPs: "
        f"the optimizer's part of a step, from the ledger. {times_text(section.rows)} Run s: the "
        "whole run, validation included."
    )
    return text + (f" The paper's figures: {section.paper.source}." if section.paper else "")


def times_text(rows: Sequence[Row]) -> str:
    """Where times were measured, and whether the runs had the device to themselves."""
    devices = sorted({device for row in rows for device in row.devices})
    together = at_a_time(run for row in rows for run in row.runs)
    text = f"Times measured on {', '.join(devices)}"
    if together == 1:
        return f"{text}, one run at a time."
    if all(row.alone for row in rows):
        counts = sorted({len(row.alone) for row in rows})
        seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{text}, over the {seeds} seeds of a row that had it to themselves."
    return (
        f"{text} with up to {together} runs at a time: they share it, so these are not the times of "
        "a run alone."
    )


def ablation_caption(section: Section) -> str:
    """What the columns of the ablations mean."""
    text = f"{section.metric_name}: mean ± standard deviation over the seeds that finished."
    if any(ablation.base for ablation in section.ablations):
        text += (
            " Difference: from the recipe's own value, ± its standard error; that is the config in "
            "which the axes meet."
        )
    text += " " + times_text([row for ablation in section.ablations for row in ablation.rows])
    if any(row.paper for ablation in section.ablations for row in ablation.rows):
        text += (
            f" Authors: {ABLATIONS_SOURCE}; the paper prints curves only, and in that file the "
            "default setting differs from axis to axis."
        )
    return text


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
            "optimizer_ms_per_step": row.optimizer_ms.mean if row.optimizer_ms else None,
            "step_ms": row.step_ms.mean if row.step_ms else None,
            "run_seconds": row.seconds.mean if row.seconds else None,
            "difference_to_base": difference.value if difference else None,
            "difference_error": difference.error if difference else None,
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
