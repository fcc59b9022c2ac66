"""The parts that a report is made of; the page and the Markdown file show the same ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polarstep_lab.report.drawing import Drawing
from polarstep_lab.report.palette import Look
from polarstep_lab.report.rows import Row

__all__ = ["Block", "Commands", "Heading", "Notes", "Strip", "Table", "Text", "strips_of"]

_NUMERIC = re.compile(r"[-+−—\d∞].*|recipe|")


@dataclass(frozen=True)
class Heading:
    """The title of what follows, below that of a section."""

    kind: ClassVar = "heading"
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; ``style`` is its class on the page."""

    kind: ClassVar = "text"
    text: str
    style: str = "verdict"


@dataclass(frozen=True)
class Notes:
    """Lettered notes: a letter, a topic and a sentence each."""

    kind: ClassVar = "notes"
    title: str
    items: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Commands:
    """The commands that repeat each row, by its label."""

    kind: ClassVar = "commands"
    items: Sequence[tuple[str, Look, str]]


@dataclass(frozen=True)
class Strip:
    """The seeds of a row on a line, from 0 to 100: each value, their mean, and the paper's mean."""

    dots: Sequence[float]
    mean: float | None
    paper: float | None
    label: str


@dataclass(frozen=True)
class Table:
    """A table of texts. ``bold`` is the row and the column of the best value.

    On the page each row may have the ``looks`` of its curve in the figures, and a column of ``strips``.
    """

    kind: ClassVar = "table"
    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: tuple[int, int] | None = None
    looks: Sequence[Look] = ()
    strips: Sequence[Strip] = ()

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, to be aligned on the right."""
        return [all(_NUMERIC.fullmatch(row[i]) for row in self.rows) for i in range(len(self.header))]


Block = Heading | Text | Notes | Commands | Table | Drawing


def strips_of(rows: Sequence[Row], decimals: int, log: bool) -> list[Strip]:
    """A strip for each row of a table, all on one scale, logarithmic if ``log``."""
    values = [value for row in rows for value in row.by_seed]
    values += [row.paper.mean for row in rows if row.paper]
    scale: Callable[[float], float] = math.log if log and min(values, default=0) > 0 else float
    low, high = (scale(min(values)), scale(max(values))) if values else (0.0, 1.0)

    def place(value: float) -> float:
        share = (scale(value) - low) / (high - low) if high > low else 0.5
        return round(4 + 92 * share, 2)

    return [
        Strip(
            [place(value) for value in row.by_seed],
            place(row.metric.mean) if row.metric else None,
            place(row.paper.mean) if row.paper else None,
            ", ".join(f"{value:.{decimals}f}" for value in row.by_seed),
        )
        for row in rows
    ]
