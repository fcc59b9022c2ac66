"""The picture of the rooms: the folders and files of the package, and who imports whom.

Rows are from those who call to those who are called. Files that are used everywhere, as those about
random numbers, are left out.
"""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """A box: a file or folder of the package, and what it does in a few words."""

    name: str
    does: str


ROWS: tuple[tuple[Room, ...], ...] = (
    (Room("optimizer.py", "the class you make"),),
    (Room("muon.py", "the algorithm"),),
    (
        Room("engines", "torch, fused, replay"),
        Room("ranks", "plans and exchange"),
    ),
    (
        Room("state.py", "kept between steps"),
        Room("bucket.py", "same-shaped matrices"),
        Room("others.py", "AdamW, SGD, own"),
    ),
    (
        Room("momentum.py", "from G to M"),
        Room("maps", "from M to T"),
        Room("transforms.py", "after the map"),
    ),
    (Room("ops", "products, by device"),),
    (Room("kernels", "Triton"),),
)
"""A step goes through these rooms, from top to bottom."""

BESIDE: tuple[tuple[Room, ...], ...] = (
    (
        Room("routing", "who gets which rule"),
        Room("checkpoints", "save and load"),
        Room("convert", "from other Muons"),
    ),
    (
        Room("certificate", "γ and ν of a step"),
        Room("theory", "the paper's bounds"),
    ),
)
"""No step goes through these; they import rooms above."""

ARROWS = (
    ("optimizer.py", "muon.py"),
    ("muon.py", "engines"),
    ("muon.py", "ranks"),
    ("engines", "bucket.py"),
    ("engines", "state.py"),
    ("ranks", "bucket.py"),
    ("ranks", "others.py"),
    ("ranks", "state.py"),
    ("bucket.py", "maps"),
    ("bucket.py", "transforms.py"),
    ("state.py", "maps"),
    ("state.py", "momentum.py"),
    ("maps", "ops"),
    ("transforms.py", "ops"),
    ("ops", "kernels"),
)
"""Who imports whom. Every other import is along a path of these, as the tests of figures check."""
