"""The report as Markdown to paste, and the short tables of a front page.

Every text may come from a record, so every text is escaped: no name can break a table, open a link or
become HTML.
"""

from __future__ import annotations

import html
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

_SPECIAL = re.compile(r"[\\`*|\[\]~]|(?<!\w)_|_(?!\w)|^[-+=#](?=\s)")


def markdown(sections: Sequence[Section], notices: Sequence[str]) -> str:
    """All tables and the commands behind them, as one Markdown document."""
    lines = ["# Results", ""]
    for notice in notices:
        lines += [f"> {escaped(notice)}", ""]
    for section in sections:
        lines += [f"## {escaped(section.title)}", ""]
        for block in blocks_of(section, Drawings()):
            lines += [*_lines(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def escaped(text: str) -> str:
    """``text`` as Markdown that shows exactly that text, on one line.

    >>> print(escaped("a|b\\n<i>*_train_*</i>"), escaped("micro_batch"), escaped("# no heading"))
    a\\|b &lt;i&gt;\\*\\_train\\_\\*&lt;/i&gt; micro_batch \\# no heading
    """
    plain = html.escape(" ".join(text.split()), quote=False)
    return _SPECIAL.sub(lambda match: "\\" + match[0], plain)


def _lines(block: Block) -> list[str]:
    match block:
        case Heading(text, level):
            return [f"{'#' * level} {escaped(text)}"]
        case Text(text):
            return [escaped(text)]
        case Notes(title, sentences):
            told = [f"- ({m}) {topic}: {escaped(text)}" for m, (topic, text) in sentences.items()]
            return [escaped(title), "", *told]
        case Commands(rows):
            return "\n\n".join(_fenced(label, command) for label, command in rows).split("\n")
        case Table():
            return _table(block)
        case _:
            raise TypeError(f"{block!r} has no form in Markdown")


def _fenced(label: str, command: str) -> str:
    """A label and its commands in a fence that is longer than any in the commands."""
    fence = "`" * max([3, *(1 + len(ticks) for ticks in re.findall("`+", command))])
    return f"{escaped(label)}:\n\n{fence}sh\n{command or '# not recorded'}\n{fence}"


def _table(table: Table) -> list[str]:
    cells = [[escaped(cell) for cell in row] for row in table.rows]
    if table.best is not None:
        cells[table.best][1] = f"**{cells[table.best][1]}**"
    rule = "|".join("--:" if numeric else ":--" for numeric in table.numeric)
    header, *rows = (f"| {' | '.join(line)} |" for line in [[*map(escaped, table.header)], *cells])
    return [header, f"|{rule}|", *rows]


def brief_lines(section: Section) -> list[str]:
    """The comparison with the columns that fit a front page; times only if all rows ran alone.

    Below it stands what a reader of the times has to know, and how randomized steps compare.
    """
    beside = beside_the_paper(section)
    comparable = beside is not None and beside.comparable
    timed = all(not row.alone.empty for row in section.rows)
    header = ["Method", section.metric_name, *["paper", "difference"] * comparable, "GFLOPs/step"]
    header += ["optimizer ms", "step ms", "run s"] * timed
    cells = []
    for row in section.rows:
        line = [row.label, metric_text(row.metric, section.decimals)]
        line += [paper_text(row), difference_text(row.off_the_paper, section.decimals)] * comparable
        line += [number(value, 3) for value in (row.gflops, *(row.times if timed else ()))]
        cells.append(line)
    known = unlike_text([(row.label, row) for row in section.rows]) if timed else ""
    below = [escaped(text) for text in (known, verdict(section)) if text]
    table = _table(Table(section.recipe, header, cells))
    return [*table, *(line for text in below for line in ("", text))]
