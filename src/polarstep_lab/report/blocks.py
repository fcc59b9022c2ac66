"""The parts that a report is made of. The page and the Markdown file show the same parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from polarstep_lab.drawing.palette import Look
from polarstep_lab.drawing.panels import Drawing

__all__ = ["Block", "Commands", "Heading", "Table", "Text", "part"]

_NUMBER = re.compile(r"[-+−±—\d∞].*|recipe|means|")


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


@dataclass(frozen=True, eq=False)
class Table:
    """A table of texts. ``best`` is the row whose second cell is bold.

    On the page each row may have the look of its curve in the figures.
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
    title: str,
    table: Table,
    caption: str,
    figures: Sequence[Drawing | None] = (),
    lead: str = "",
) -> list[Block]:
    """A title, a sentence, a table with its caption, figures; nothing where nothing was measured."""
    parts: list[Block] = [Text(lead), table, Text(caption, "caption")] if table.rows else []
    parts += [figure for figure in figures if figure]
    return [Heading(title), *parts] if parts else []
