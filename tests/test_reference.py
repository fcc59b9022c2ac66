"""The API reference has every public name, and every public name has a docstring."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import polarstep
import polarstep.theory

ROOT = Path(__file__).resolve().parent.parent


def loaded(name: str) -> ModuleType:
    """A module of docs/_site, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_an_entry_and_a_docstring() -> None:
    reference = loaded("reference")
    entries = re.findall(r"^::: (\S+)$", reference.sections(), re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert {f"polarstep.{name}" for name in polarstep.__all__} <= set(entries)
    described = set()
    for entry in entries:
        module, _, name = entry.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        described.add(id(value))
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{entry} has no docstring"
    for module in reference.public_modules():
        assert module.__doc__, module.__name__
        for name in module.__all__:
            assert id(getattr(module, name)) in described, f"{module.__name__}.{name}"


def test_docstrings_describe_arguments_that_there_are() -> None:
    """mkdocs refuses to build the site otherwise, and says less."""
    reference, checked = loaded("reference"), 0
    for entry in re.findall(r"^::: (\S+)$", reference.sections(), re.MULTILINE):
        module, _, name = entry.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        section = re.search(r"\n *Args:\n(.*?)(?:\n\n|$)", inspect.getdoc(value) or "", re.DOTALL)
        if section is None or not callable(value):
            continue
        described = re.findall(r"^    (\S[^:\n]*): ", section[1], re.MULTILINE)
        assert described, entry
        assert set(described) <= set(inspect.signature(value).parameters), entry
        checked += len(described)
    assert checked > 100


def test_the_page_has_the_place_for_the_entries() -> None:
    reference = loaded("reference")
    page = (ROOT / "docs" / "api.md").read_text()
    assert reference.MARKER in page
    assert "::: polarstep.Muon\n" in reference.on_page_markdown(page, None)


def test_docstrings_become_markdown() -> None:
    as_markdown = loaded("docstrings").as_markdown
    text = "See :class:`~polarstep.Muon`::\n\n    C ← βC\n\n>>> 1 + 1\n2\n\nMore text.\n"
    assert as_markdown(text) == (
        "See `polarstep.Muon`:\n\n    C ← βC\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore text.\n"
    )
