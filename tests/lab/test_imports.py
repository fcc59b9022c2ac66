"""Rooms of the laboratory import from rooms before them, and no room imports back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.imports import imported

import polarstep_lab

ROOT = Path(polarstep_lab.__file__).parent
# From the bottom up. A room may import from itself and from what comes before it.
ORDER = (
    *("storage", "git", "wording", "settings_by_name", "estimates", "paper", "methods"),
    *("models", "config", "flops", "axes", "recipes", "study"),
    *("data", "optimizers", "records", "checks", "train", "jobs"),
    *("report", "tune", "studies", "cli", "__main__"),
)


def test_every_room_has_its_place():
    rooms = {
        path.stem for path in ROOT.iterdir() if any(path.rglob("*.py")) or path.suffix == ".py"
    }
    assert rooms - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_nothing_is_imported_from_above(name):
    allowed = set(ORDER[: ORDER.index(name) + 1])
    file = ROOT / f"{name}.py"
    files = [file] if file.exists() else sorted((ROOT / name).rglob("*.py"))
    assert files
    back = {
        file.name: found for file in files if (found := imported(file, "polarstep_lab") - allowed)
    }
    assert back == {}
