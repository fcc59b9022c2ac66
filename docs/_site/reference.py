"""The API reference: a section for each public module and an entry for each of its names.

A name is described in the first section that has it. mkdocstrings turns the ``:::`` lines into entries.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MARKER = "<!-- reference -->"
FIRST = ("muon_for", "Muon")  # what most readers look for


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the marker in docs/api.md by all sections."""
    return markdown.replace(MARKER, sections())


def sections() -> str:
    """Markdown of all sections, with a line for mkdocstrings in place of each entry."""
    lines: list[str] = []
    described: set[int] = set()
    for module in public_modules():
        summary = (inspect.getdoc(module) or "").split("\n\n")[0]
        lines += [f"## {module.__name__}", "", summary, ""]
        elsewhere = []
        for name in sorted(module.__all__, key=_rank):
            value = id(getattr(module, name))
            if value in described:
                elsewhere.append(f"`{name}`")
            else:
                described.add(value)
                lines += [f"::: {module.__name__}.{name}", ""]
        if elsewhere:
            lines += [f"Described above: {', '.join(elsewhere)}.", ""]
    return "\n".join(lines)


def _rank(name: str) -> int:
    """The place of a name in its section; names outside :data:`FIRST` keep their order."""
    return FIRST.index(name) if name in FIRST else len(FIRST)


def public_modules() -> Iterator[ModuleType]:
    """The modules whose ``__all__`` is the public surface."""
    for name in ("polarstep", "polarstep.maps", "polarstep.maps.sketches", "polarstep.certificate"):
        yield importlib.import_module(name)
    theory = importlib.import_module("polarstep.theory")
    for name in theory.__all__:
        yield importlib.import_module(f"polarstep.theory.{name}")
