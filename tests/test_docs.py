"""What the pages say is what the code does and what the records hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polarstep as ps

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def run_blocks(page: str, namespace: dict[str, object]) -> None:
    """Execute the Python blocks of a page one after the other."""
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), namespace)


def test_the_readme_runs_in_a_script_that_has_a_model() -> None:
    layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)]
    namespace: dict[str, object] = {"model": torch.nn.Sequential(*layers)}
    run_blocks("README.md", namespace)
    assert isinstance(namespace["optimizer"], ps.Muon)


def test_getting_started_runs_and_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks("docs/start.md", {})
    printed = capsys.readouterr().out
    shown = re.search(r"```\n(parameter .*?)```", (ROOT / "docs/start.md").read_text(), re.DOTALL)
    assert shown is not None
    for line in shown[1].strip().splitlines():
        assert " ".join(line.split()) in " ".join(printed.split()), line


def test_the_maps_that_which_map_names_can_be_built() -> None:
    page = (ROOT / "docs/which.md").read_text()
    choices = re.findall(r"`(polar|transform)=(ps\.[^`]+)`", page)
    assert len(choices) >= 5
    for option, text in choices:
        made = eval(text, {"ps": ps})
        ps.Muon([torch.nn.Parameter(torch.eye(3))], **{option: made})


def test_the_readme_names_the_two_commands_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_measured_tables_are_those_of_their_records() -> None:
    check = [sys.executable, str(ROOT / "benchmarks/update_docs.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if not target.startswith(("http", "mailto")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_version_is_the_same_everywhere() -> None:
    assert f'version = "{ps.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {ps.__version__}" in (ROOT / "CITATION.cff").read_text()
