"""Maps import operations, these import kernels, and none of them imports back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polarstep

ROOT = Path(polarstep.__file__).parent
# From the top down. A package may import from itself and from what comes after it.
ORDER = ("maps", "ops", "kernels", "numerics")
# What lies below all of them.
BELOW = {"checked_values", "context", "cuda_graphs", "flops", "rng"}


def imported(file: Path) -> set[str]:
    """The parts of the package that a file imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "polarstep":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polarstep."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == "polarstep" and len(parts) > 1}
    return found


@pytest.mark.parametrize("name", ORDER)
def test_nothing_is_imported_from_above(name):
    allowed = BELOW | set(ORDER[ORDER.index(name) :])
    files = [ROOT / f"{name}.py"] if name == "numerics" else sorted((ROOT / name).rglob("*.py"))
    assert files
    back = {file.name: found for file in files if (found := imported(file) - allowed)}
    assert back == {}
