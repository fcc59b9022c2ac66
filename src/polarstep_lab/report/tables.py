"""The tables of a report as Markdown to paste.

A function of the records alone, so the same records give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polarstep_lab.report.captions import (
    ablation_caption,
    caption,
    commits_text,
    settings_text,
    times_of,
)
from polarstep_lab.report.inexactness_page import (
    GAMMA_CAPTION,
    NOISE_CAPTION,
    assumptions_headline,
    gamma_cells,
    noise_cells,
)
from polarstep_lab.report.paper import Beside, beside_the_paper
from polarstep_lab.report.randomized import RANDOMIZED_CAPTION, randomized_cells, verdict
from polarstep_lab.report.rows import AblationSet, Section
from polarstep_lab.report.texts import (
    MISSING,
    base_text,
    decimals_of,
    difference_text,
    metric_text,
    notes_text,
    number,
    paper_text,
    seeds_text,
    share_text,
)

__all__ = ["beside_cells", "brief_lines", "comparison_lines", "markdown"]


def markdown(sections: Sequence[Section], notices: Sequence[str]) -> str:
    """All tables and the commands behind them, as one Markdown document."""
    lines = ["# Results", ""]
    for notice in notices:
        lines += [f"> {notice}", ""]
    for section in sections:
        lines += [f"## {section.recipe} ({section.benchmark})", ""]
        if section.watched:
            lines += [assumptions_headline(section), "", *_assumption_lines(section)]
        if section.rows:
            lines += ["### The runs", ""] if section.watched else []
            lines += [*comparison_lines(section), "", caption(section), ""]
            lines += _randomized_lines(section)
            beside = beside_the_paper(section)
            lines += _beside_lines(section, beside) if beside else []
        for ablation in section.ablations:
            lines += [f"### Ablation: {ablation.axis}, {ablation.of}", ""]
            lines += [*_ablation_lines(section, ablation), ""]
        lines += [ablation_caption(section), ""] if section.ablations else []
        lines += [] if section.watched else _assumption_lines(section)
        lines += ["### Commands", ""]
        named = [(row.label, row) for row in section.rows]
        named += [(r.label + section.whose(a), r) for a in section.ablations for r in a.rows]
        for label, row in named:
            lines += [f"{label}:", "", "```sh", *(row.commands or ("# not recorded",)), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def comparison_lines(section: Section) -> list[str]:
    """The table of all methods."""
    paper = any(row.paper for row in section.rows)
    header = ["Method", section.metric_name, "Seeds", "GFLOPs/step"]
    header += ["Optimizer ms", "Step ms", "Run s"]
    if paper:
        header[2:2] = ["Paper"]
        header[5:5] = ["Paper GFLOPs"]
    best = section.marked(section.rows)
    lines = []
    for row in section.rows:
        text = metric_text(row.metric, decimals_of(section))
        cells = [
            row.label,
            f"**{text}**" if row is best else text,
            seeds_text(row),
            number(row.gflops),
            *times_of(row, section.rows),
        ]
        if paper:
            cells[2:2] = [paper_text(row)]
            cells[5:5] = [number(row.paper.gflops if row.paper else None)]
        lines.append(cells)
    return _table(header, lines)


def brief_lines(section: Section) -> list[str]:
    """The table of all methods with the columns that fit a front page; times of lone runs only.

    Below it stands what a reader of the times has to know, and how randomized steps compare.
    """
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
            cells += [number(t, 3) for t in (row.optimizer_ms, row.step_ms, row.seconds)]
        lines.append(cells)
    named = [(row.label, row) for row in section.rows] if timed else []
    known = " ".join(filter(None, [settings_text(named), commits_text(named)]))
    below = [text for text in (known, verdict(section)) if text]
    return [*_table(header, lines), *(line for text in below for line in ("", text))]


def _ablation_lines(section: Section, ablation: AblationSet) -> list[str]:
    """The table of one axis, each value next to the recipe's."""
    authors = any(row.paper for row in ablation.rows)
    based = ablation.base is not None
    header = [ablation.axis, "Seeds", section.metric_name]
    header += ["Difference"] * based + ["Authors"] * authors
    header += ["GFLOPs/step", "Optimizer ms", "Step ms"]
    decimals = decimals_of(section)
    best = section.marked([row for _, row in ablation.named])
    lines = []
    for value, row in ablation.named:
        text = metric_text(row.metric, decimals)
        cells = [
            value,
            seeds_text(row),
            f"**{text}**" if row is best else text,
        ]
        if based:
            cells.append(base_text(ablation, row, decimals))
        if authors:
            cells.append(paper_text(row))
        cells += [number(row.gflops), *times_of(row, section.ablation_rows)[:2]]
        lines.append(cells)
    return _table(header, lines)


def _assumption_lines(section: Section) -> list[str]:
    """Noise, γ and ν, where they were measured."""
    lines = []
    for title, cells, below in (
        ("Noise of the gradient", noise_cells(section), NOISE_CAPTION),
        ("How inexact each step was", gamma_cells(section), GAMMA_CAPTION),
    ):
        if cells:
            lines += [f"### {title}", "", *_table(*cells), "", below, ""]
    return lines


def _randomized_lines(section: Section) -> list[str]:
    """Randomized rows next to full space, where there are both."""
    cells = randomized_cells(section)
    if not cells:
        return []
    told = verdict(section)
    lines = ["### Randomized next to full space", "", *([told, ""] if told else [])]
    return [*lines, *_table(*cells), "", RANDOMIZED_CAPTION, ""]


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


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|:--|" + "--:|" * (len(header) - 1)]
    for cells in rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
