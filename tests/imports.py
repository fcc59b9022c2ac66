"""Which parts of a package a file imports, for the tests that no part imports one above it."""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["imported"]


def imported(file: Path, package: str) -> set[str]:
    """The parts of ``package`` that a file imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == package and len(parts) > 1}
    return found
