"""What the pages say is what the code does and what the records hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    # The table the README shows is an excerpt of the one its first example prints.
    shown = re.search(r"```\n(parameter .*?)```", README, re.DOTALL)
    assert shown is not None
    for line in shown[1].strip().splitlines():
        if line != "…":
            assert " ".join(line.split()) in " ".join(printed.split()), line


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
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if not target.startswith(("http", "mailto")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_version_is_the_same_everywhere() -> None:
    import polarstep

    assert f'version = "{polarstep.__version__}"' in (ROOT / "pyproject.toml").read_text()
