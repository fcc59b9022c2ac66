"""How a measured number gets into README.md and docs/: no page has one that was typed in.

    python -m pages            # write the tables, the claims and the figures of the pages
    python -m pages --check    # fail if a page is not what its record says

README.md in this folder says what lies where.

The modules here import those of ``benchmarks/`` by their plain names, as in ``from frontier import
FULL``: the rules of a study (its rows, its seeds, how a rate is chosen) are written in the script that
makes the runs. The scripts import each other in this way too, which Python allows a script for its own
folder. For everyone else, importing this package allows it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""

sys.path.insert(0, str(ROOT / "benchmarks"))
