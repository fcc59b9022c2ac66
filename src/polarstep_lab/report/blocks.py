"""The parts that a report is made of; the page and the Markdown file show the same ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polarstep_lab.report.drawing import Drawing
from polarstep_lab.report.palette import Look

__all__ = ["Block", "Commands", "Heading", "Notes", "Table", "Text"]

_NUMBER = re.compile(r"[-+−—\d∞].*|recipe|")


@dataclass(frozen=True)
class Heading:
    """The title of what follows; that of a section has level 2."""

    kind: ClassVar = "heading"
    text: str
    level: int = 3


@dataclass(frozen=True)
class Text:
    """A paragraph; ``style`` is its class on the page."""

    kind: ClassVar = "text"
    text: str
    style: str = "verdict"


@dataclass(frozen=True)
class Notes:
    """Sentences by their letter, each with its topic."""

    kind: ClassVar = "notes"
    title: str
    sentences: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Commands:
    """The commands that repeat each row, after the label of the row."""

    kind: ClassVar = "commands"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table of texts. ``best`` is the row whose second cell is bold.

    On the page each row may have the look of its curve in the figures.
    """

    kind: ClassVar = "table"
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


Block = Heading | Text | Notes | Commands | Table | Drawing
