"""Maps import operations, these import kernels, and none of them imports back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.imports import imported

import polarstep

ROOT = Path(polarstep.__file__).parent
# From the top down. A package may import from itself and from what comes after it.
ORDER = ("maps", "ops", "kernels", "numerics")
# What lies below all of them.
BELOW = {"checked_values", "context", "flops", "rng"}


@pytest.mark.parametrize("name", ORDER)
def test_nothing_is_imported_from_above(name):
    allowed = BELOW | set(ORDER[ORDER.index(name) :])
    files = [ROOT / f"{name}.py"] if name == "numerics" else sorted((ROOT / name).rglob("*.py"))
    assert files
    back = {file.name: found for file in files if (found := imported(file, "polarstep") - allowed)}
    assert back == {}
