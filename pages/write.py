"""The marked places of the pages are filled here, and the figures written.

After a marker ``<!-- KIND: RECORD -->``, with a kind of :data:`TABLES`, a page has the table made from
the record, up to the next blank line. Between ``<!-- claim: NAME -->`` and ``<!-- end -->`` is a claim
of :mod:`pages.claims`. Between ``<!-- results: FOLDER -->`` and ``<!-- end -->`` are the results of the
archived runs below the folder, with the commands that repeat them; it is empty without runs. The figures
in ``docs/assets`` are those of :mod:`pages.figures`.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import IO

from pages import ROOT
from pages.claims import made
from pages.figures import FIGURES
from pages.results import results_tables
from pages.tables import TABLES
from polarstep_lab.storage import write_atomically

PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
RESULTS = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
CLAIM = re.compile(r"(<!-- claim: (\S+) -->)(\n?).*?(<!-- end -->)", re.DOTALL)
MARKER = re.compile(r"(<!-- ([a-z-]+): (\S+) -->\n)\n(?:\|.*\n)*\n?")
WIDTH = 120  # of the lines of a page


def filled(text: str, page: str) -> str:
    """``text`` of the page with this path in the repository, with every marked table made anew."""
    up = "../" * page.count("/")

    def table(match: re.Match[str]) -> str:
        marker, kind, record = match.groups()
        if kind not in TABLES:
            return match[0]
        return f"{marker}\n{TABLES[kind](ROOT / record)}\n\n"

    def results(match: re.Match[str]) -> str:
        opening, folder, end = match.groups()
        return f"{opening}{results_tables(ROOT / folder, up)}{end}"

    def claim(match: re.Match[str]) -> str:
        opening, name, newline, end = match.groups()
        if not newline:
            return f"{opening}{made(name)}{end}"
        return f"{opening}\n\n{textwrap.fill(made(name), WIDTH, break_on_hyphens=False)}\n\n{end}"

    return RESULTS.sub(results, CLAIM.sub(claim, MARKER.sub(table, text)))


def main() -> int:
    """Write the pages and the figures, or with --check compare them."""
    texts = {page: filled((ROOT / page).read_text(encoding="utf-8"), page) for page in PAGES}
    texts |= {name: draw() for name, draw in FIGURES.items()}
    stale = [
        name
        for name, text in texts.items()
        if not (ROOT / name).exists() or (ROOT / name).read_text(encoding="utf-8") != text
    ]
    if "--check" not in sys.argv:
        for name in stale:
            _write(ROOT / name, texts[name])
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in sys.argv else 0


def _write(path: Path, text: str) -> None:
    def fill(file: IO[bytes]) -> None:
        file.write(text.encode())

    write_atomically(path, fill)
