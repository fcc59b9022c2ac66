"""The parts that a report is made of. The page and the Markdown file show the same parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from polarstep_lab.report.palette import Look
from polarstep_lab.report.panels import Drawing

__all__ = ["Block", "Commands", "Heading", "Table", "Text", "part"]

_NUMBER = re.compile(r"[-+−±—\d∞].*|recipe|means|")


class Heading(NamedTuple):
    """The title of the blocks below it, up to the next heading; a section's title has level 2."""

    text: str
    level: int = 3


class Text(NamedTuple):
    """A paragraph; ``style`` is its class on the page."""

    text: str
    style: str = "verdict"


class Commands(NamedTuple):
    """The label of each row, and the commands that repeat its runs."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class Table:
    """A table of texts. The second cell of the row ``best`` is bold.

    On the page, ``looks`` shows beside each row how its curve is drawn in the figures.
    """

    name: str
    cells: pd.DataFrame
    best: int | None = None
    looks: Sequence[Look] = ()

    @property
    def header(self) -> list[str]:
        """The titles of the columns."""
        return [*self.cells]

    @property
    def rows(self) -> list[list[str]]:
        """The texts, row by row."""
        return self.cells.to_numpy().tolist()

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, to be aligned on the right; the first never does."""
        numbers = self.cells.iloc[:, 1:].map(lambda cell: bool(_NUMBER.fullmatch(cell))).all()
        return [False, *numbers]


Block = Heading | Text | Commands | Table | Drawing


def part(
    table: Table, caption: str, figures: Sequence[Drawing | None] = (), lead: Text | None = None
) -> list[Block | None]:
    """A table below its name, between a leading text and its caption, then figures.

    Returns no blocks where neither the table nor a figure has something to show.
    """
    tables = [lead, table, Text(caption, "caption")] if table.rows else []
    return [Heading(table.name), *tables, *figures] if tables or any(figures) else []
