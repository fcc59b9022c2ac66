"""The parts that a report is made of; the page and the Markdown file show the same ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from polarstep_lab.report.drawing import Drawing
from polarstep_lab.report.palette import Look

__all__ = ["Block", "Commands", "Heading", "Table", "Text", "part", "tabulate"]

_NUMBER = re.compile(r"[-+−±—\d∞].*|recipe|means|")

Item = TypeVar("Item")


class Heading(NamedTuple):
    """The title of what follows; that of a section has level 2."""

    text: str
    level: int = 3


class Text(NamedTuple):
    """A paragraph; ``style`` is its class on the page."""

    text: str
    style: str = "verdict"


class Commands(NamedTuple):
    """The commands that repeat each row, after the label of the row."""

    rows: Sequence[tuple[str, str]]


class Table(NamedTuple):
    """A table of texts. ``best`` is the row whose second cell is bold.

    On the page each row may have the look of its curve in the figures.
    """

    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int | None = None
    looks: Sequence[Look] = ()

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, to be aligned on the right; the first never does."""
        columns = zip(*(row[1:] for row in self.rows), strict=True)
        return [False, *(all(map(_NUMBER.fullmatch, column)) for column in columns)]


def tabulate(
    name: str,
    items: Iterable[Item],
    columns: Mapping[str, Callable[[Item], str]],
    best: int | None = None,
    looks: Sequence[Look] = (),
) -> Table:
    """A table with a row for each item; ``columns`` has the cell of an item by the column's title."""
    cells = [[cell(item) for cell in columns.values()] for item in items]
    return Table(name, [*columns], cells, best, looks)


def part(
    title: str,
    table: Table | None,
    caption: str,
    figures: Sequence[Drawing | None] = (),
    lead: str = "",
) -> list[Block]:
    """A title, a sentence, a table with its caption, figures; nothing where nothing was measured."""
    parts: list[Block] = [Text(lead), table, Text(caption, "caption")] if table else []
    parts += [figure for figure in figures if figure]
    return [Heading(title), *parts] if parts else []


Block = Heading | Text | Commands | Table | Drawing
