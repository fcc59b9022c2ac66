"""Imports inside ``polarstep.optim`` go one way, as the docstring of the package says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polarstep.optim

ROOT = Path(polarstep.optim.__file__).parent
# From the top down; a file may import from its own level and from the levels below.
LEVELS = (
    {"routing.muon_for"},
    {"muon"},
    {"alike", "checkpoints", "over_ranks"},
    {"guards"},
    {"routing", "added", "given"},
    {"stepping"},
    {"options"},
    {"groups", "elementwise"},
    {"elementwise_rule", "misnamed", "scaling", "transforms"},
)
PREFIX = "polarstep.optim."


def level_of(module: str) -> int | None:
    """The level of ``module``, or of the folder it is in."""
    name = module.removeprefix(PREFIX)
    for place in (name, name.partition(".")[0]):
        for level, names in enumerate(LEVELS):
            if place in names:
                return level
    return None


def imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PREFIX):
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return found


def modules() -> dict[str, Path]:
    files = [file for file in ROOT.rglob("*.py") if file.name != "__init__.py"]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_file_imports_from_its_level_or_below(name):
    here = level_of(name)
    assert here is not None, (
        f"{name} has no place in LEVELS, nor in the docstring of polarstep.optim"
    )
    for other in imported(modules()[name]):
        there = level_of(other)
        if there is not None:  # a name that is imported is no module
            assert here <= there, f"{name} imports {other}"


def test_the_levels_name_files_and_folders_that_exist():
    known = modules()
    for place in set().union(*LEVELS):
        assert place in known or (ROOT / place / "__init__.py").exists(), place


def test_an_import_upwards_would_be_found():
    assert level_of("groups") > level_of("polarstep.optim.muon.Muon")
    assert level_of("routing.roles") > level_of("routing.muon_for")
    assert "polarstep.optim.groups" in imported(ROOT / "muon.py")
