"""The picture of the rooms: the folders and files of the package, and who imports whom.

Rows are from those who call to those who are called. A line is an import that no other path of lines
says already. Files that are used everywhere, as those about random numbers, are left out.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from pages import ROOT

PACKAGE = ROOT / "src/polarstep"


class Room(NamedTuple):
    """A box: its name, what it does in a few words, and the modules in it."""

    name: str
    does: str
    modules: tuple[str, ...]


ROWS: tuple[tuple[Room, ...], ...] = (
    (Room("optimizer.py", "the class you make", ("optimizer",)),),
    (Room("muon.py", "the algorithm", ("muon",)),),
    (
        Room("engines", "torch, fused, replay", ("engines",)),
        Room("ranks", "plans and exchange", ("ranks",)),
    ),
    (
        Room("bucket.py", "same-shaped matrices", ("bucket",)),
        Room("state.py", "momentum and more", ("state",)),
        Room("others.py", "AdamW, SGD, own", ("others",)),
    ),
    (
        Room("maps", "from M to T", ("maps",)),
        Room("transforms.py", "after the map", ("transforms",)),
    ),
    (Room("ops", "products, by device", ("ops",)),),
    (Room("kernels", "Triton", ("kernels",)),),
)
"""A step goes through these rooms, from top to bottom."""

BESIDE: tuple[tuple[Room, ...], ...] = (
    (
        Room("routing", "who gets which rule", ("routing",)),
        Room("checkpoints", "save and load", ("checkpoints",)),
        Room("convert", "from other Muons", ("convert",)),
    ),
    (
        Room("certificate", "γ and ν of a step", ("certificate",)),
        Room("theory", "the paper's bounds", ("theory",)),
    ),
)
"""No step goes through these; they import rooms above."""


def imported() -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second, from upper rows to lower ones."""
    row_of = {room.name: k for k, row in enumerate(ROWS) for room in row}
    room_of = {module: room.name for row in ROWS for room in row for module in room.modules}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        here = room_of.get(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        for name in _names(path):
            there = room_of.get(name.split(".")[1]) if "." in name else None
            if here and there and row_of[here] < row_of[there]:
                found.add((here, there))
    return found


def _names(path: Path) -> set[str]:
    """The modules of the package that a file imports, as ``polarstep.maps.base``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {name for name in found if name.startswith("polarstep.")}


def arrows() -> set[tuple[str, str]]:
    """The imports that no path of other imports says already."""
    pairs = imported()
    below: dict[str, set[str]] = {}
    for one, other in pairs:
        below.setdefault(one, set()).add(other)

    def reaches(one: str, other: str) -> bool:
        return any(each == other or reaches(each, other) for each in below.get(one, ()))

    return {
        (one, other)
        for one, other in pairs
        if not any(reaches(each, other) for each in below[one] - {other})
    }
