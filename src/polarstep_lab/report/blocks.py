"""The parts that a report is made of. The page and the Markdown file show the same parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from polarstep_lab.drawing.palette import Look
from polarstep_lab.drawing.panels import Drawing

__all__ = ["Block", "Cells", "Commands", "Heading", "Table", "Text", "part"]

_NUMBER = re.compile(r"[-+−±—\d∞].*|recipe|means|")

Cells = Mapping[str, str]
"""The cells of a row of a table, by the titles of their columns."""


class Heading(NamedTuple):
    """The title of what follows; the title of a section has level 2."""

    text: str
    level: int = 3


class Text(NamedTuple):
    """A paragraph; ``style`` is its class on the page."""

    text: str
    style: str = "verdict"


class Commands(NamedTuple):
    """The label of each row, and the commands that repeat its runs."""

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

    @classmethod
    def of(
        cls,
        name: str,
        rows: Sequence[Cells],
        best: int | None = None,
        looks: Sequence[Look] = (),
    ) -> Table | None:
        """The table of these rows, which all have the same columns; ``None`` without rows."""
        return (
            cls(name, [*rows[0]], [[*row.values()] for row in rows], best, looks) if rows else None
        )

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, to be aligned on the right; the first never does."""
        columns = zip(*(row[1:] for row in self.rows), strict=True)
        return [False, *(all(map(_NUMBER.fullmatch, column)) for column in columns)]


Block = Heading | Text | Commands | Table | Drawing


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
