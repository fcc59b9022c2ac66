"""The report as Markdown to paste, and the short tables of a front page.

Every text may come from a record, so every text is escaped: no name can break a table, open a link or
become HTML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from polarstep_lab.report.beside_paper import beside_the_paper
from polarstep_lab.report.blocks import Block, Commands, Heading, Notes, Table, Text
from polarstep_lab.report.captions import unlike_text
from polarstep_lab.report.content import Drawings, blocks_of
from polarstep_lab.report.randomized import verdict
from polarstep_lab.report.rows import Section
from polarstep_lab.report.texts import difference_text, metric_text, number, paper_text

__all__ = ["brief_lines", "escaped", "markdown"]

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"[\\`*|\[\]~]|(?<!\w)_|_(?!\w)|^(?=(?:[-+=#]|\d+[.)])(?:\s|$))")


def markdown(sections: Sequence[Section], notices: Sequence[str]) -> str:
    """All tables and the commands behind them, as one Markdown document."""
    lines = ["# Results", ""]
    for notice in notices:
        lines += [f"> {escaped(notice)}", ""]
    for section in sections:
        lines += [f"## {escaped(section.recipe)} ({escaped(section.benchmark)})", ""]
        for block in blocks_of(section, Drawings()):
            lines += [*_lines(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def escaped(text: str) -> str:
    """``text`` as Markdown that shows exactly that text, on one line.

    >>> escaped("a|b\\n<i>*_train_*</i>"), escaped("micro_batch = 2"), escaped("# no heading")
    ('a\\\\|b &lt;i&gt;\\\\*\\\\_train\\\\_\\\\*&lt;/i&gt;', 'micro_batch = 2', '\\\\# no heading')
    """
    text = re.sub("[&<>]", lambda match: _ENTITIES[match[0]], " ".join(text.split()))
    return _SPECIAL.sub(lambda match: "\\" + match[0], text)


def _lines(block: Block) -> list[str]:
    match block:
        case Heading(text):
            return [f"### {escaped(text)}"]
        case Text(text):
            return [escaped(text)]
        case Notes(title, items):
            told = [f"- ({mark}) {topic}: {escaped(text)}" for mark, topic, text in items]
            return [escaped(title), "", *told]
        case Commands(items):
            return "\n\n".join(_fenced(label, command) for label, _, command in items).split("\n")
        case Table():
            return _table(block)
        case _:
            raise TypeError(f"{block!r} has no form in Markdown")


def _fenced(label: str, command: str) -> str:
    """A label and its commands in a fence that is longer than any in the commands."""
    fence = "`" * max(3, *(1 + len(run) for run in re.findall("`+", command)), 3)
    return f"{escaped(label)}:\n\n{fence}sh\n{command or '# not recorded'}\n{fence}"


def _table(table: Table) -> list[str]:
    cells = [[escaped(cell) for cell in row] for row in table.rows]
    if table.bold:
        row, column = table.bold
        cells[row][column] = f"**{cells[row][column]}**"
    rule = ["--:" if numeric else ":--" for numeric in [False, *table.numeric[1:]]]
    lines = [[escaped(name) for name in table.header], *cells]
    drawn = ["| " + " | ".join(line) + " |" for line in lines]
    return [drawn[0], "|" + "|".join(rule) + "|", *drawn[1:]]


def brief_lines(section: Section) -> list[str]:
    """The comparison with the columns that fit a front page; times only if all rows ran alone.

    Below it stands what a reader of the times has to know, and how randomized steps compare.
    """
    beside = beside_the_paper(section)
    comparable = beside is not None and beside.comparable
    timed = all(not row.alone.empty for row in section.rows)
    header = ["Method", section.metric_name]
    header += ["paper", "difference"] if comparable else []
    header += ["GFLOPs/step", *(["optimizer ms", "step ms", "run s"] if timed else [])]
    off = {line.row: line.difference for line in beside.lines} if beside else {}
    rows = []
    for row in section.rows:
        cells = [row.label, metric_text(row.metric, section.decimals)]
        if comparable:
            cells += [paper_text(row), difference_text(off.get(row), section.decimals)]
        times = (row.optimizer_ms, row.step_ms, row.seconds) if timed else ()
        rows.append([*cells, *(number(value, 3) for value in (row.gflops, *times))])
    known = unlike_text([(row.label, row) for row in section.rows]) if timed else ""
    below = [escaped(text) for text in (known, verdict(section)) if text]
    table = _table(Table(section.recipe, header, rows))
    return [*table, *(line for text in below for line in ("", text))]
