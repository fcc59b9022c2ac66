"""Imports inside ``polarstep.optim`` and ``polarstep.distributed`` go one way.

The docstring of ``polarstep.optim`` has the order, and that of ``polarstep.distributed`` its two halves:
optim imports both, and the step of one process is between them.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polarstep.optim

ROOT = Path(polarstep.optim.__file__).parents[1]
PACKAGES = ("polarstep.optim", "polarstep.distributed")
# From the top down; a file may import from its own level and from the levels below. Names without a
# package are those of polarstep.optim.
LEVELS = (
    {"routing.muon_for"},
    {"muon"},
    {"alike", "checkpoints", "over_ranks"},
    {"guards"},
    {"routing", "added", "given", "names"},
    {
        "distributed.carries",
        "distributed.local",
        "distributed.owned_graph",
        "distributed.owner",
        "distributed.plans",
        "distributed.resting",
        "distributed.spread",
        "distributed.step",
        "distributed.unstarted",
    },
    {"stepping"},
    {"options", "rates"},
    {"groups", "elementwise"},
    {"elementwise_rule", "flattened", "misnamed", "scaling", "transforms"},
    {
        "distributed.copies",
        "distributed.gather",
        "distributed.layout",
        "distributed.ledger",
        "distributed.status",
        "distributed.wire",
    },
)


def level_of(module: str) -> int | None:
    """The level of ``module``, or of the file or folder it is in."""
    parts = module.removeprefix("polarstep.").removeprefix("optim.").split(".")
    for place in (".".join(parts), ".".join(parts[:2]), parts[0]):
        for level, names in enumerate(LEVELS):
            if place in names:
                return level
    return None


def imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module, *(f"{module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {name for name in found if name.startswith(tuple(f"{each}." for each in PACKAGES))}


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for file in (ROOT / package.partition(".")[2]).rglob("*.py"):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            if file.name != "__init__.py":
                found[name.removeprefix("optim.")] = file
    return found


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_file_imports_from_its_level_or_below(name):
    here = level_of(name)
    assert here is not None, f"{name} has no place in LEVELS, nor in the docstring of its package"
    for other in imported(modules()[name]):
        there = level_of(other)
        if there is not None:  # a name that is imported is no module
            assert here <= there, f"{name} imports {other}"


# polarstep.muon is equation (1), and nothing that it is made of imports it.
BELOW_THE_ALGORITHM = {
    "state": ("bucket", "muon", "engines", "exchange", "optim.stepping", "optim.muon"),
    "bucket": ("muon", "engines", "exchange", "optim.muon", "optim.over_ranks"),
    "exchange": ("muon", "engines", "optim.muon", "optim.over_ranks"),
    "engines": ("muon", "exchange", "optim.muon", "optim.over_ranks"),
    "distributed": ("muon", "optim.muon", "optim.over_ranks"),
}


@pytest.mark.parametrize("place", BELOW_THE_ALGORITHM)
def test_no_part_of_a_step_imports_what_is_made_of_it(place):
    folder = ROOT / place
    for file in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                for above in BELOW_THE_ALGORITHM[place]:
                    told = f"{file.name} imports {node.module}"
                    assert not f"{node.module}.".startswith(f"polarstep.{above}."), told
                names = {each.name for each in node.names} if node.module == "polarstep" else set()
                assert not names & {*BELOW_THE_ALGORITHM[place]}, f"{file.name} imports {names}"


def test_one_function_takes_the_step_of_a_map():
    """Where ranks compute matrices for one another, a graph of its own replays the map."""
    calls = {
        str(file.relative_to(ROOT))
        for file in ROOT.rglob("*.py")
        if file.relative_to(ROOT).parts[0] not in ("polar", "maps")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("step_on_many", "steps_on_many", "checked_step")
    }
    assert calls <= {"muon.py", "distributed/owner.py", "optim/transforms.py"}


def test_the_levels_name_files_and_folders_that_exist():
    known = modules()
    for place in set().union(*LEVELS):
        assert place in known or (ROOT / "optim" / place / "__init__.py").exists(), place


def test_an_import_upwards_would_be_found():
    assert level_of("groups") > level_of("polarstep.optim.muon.Muon")
    assert level_of("routing.roles") > level_of("routing.muon_for")
    assert level_of("stepping.collect") > level_of("polarstep.distributed.step.Distribution")
    assert level_of("distributed.layout") > level_of("polarstep.optim.stepping.collect.Work")
    assert "polarstep.optim.groups" in imported(ROOT / "optim" / "muon.py")
    assert "polarstep.distributed.step" in imported(ROOT / "optim" / "muon.py")
    assert "polarstep.distributed.wire" in imported(ROOT / "distributed" / "layout.py")
