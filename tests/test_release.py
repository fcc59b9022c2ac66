"""What a release and the two commands of the README install and run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = {path.stem: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def jobs(name: str) -> dict[str, dict]:
    return yaml.safe_load(WORKFLOWS[name].read_text())["jobs"]


def commands(job: dict) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_every_action_is_named_by_its_commit(name: str) -> None:
    """A tag can be moved to other code."""
    used = re.findall(r"uses: (\S+)", WORKFLOWS[name].read_text())
    assert used
    for action in used:
        assert action.startswith("./") or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)


def test_a_release_runs_all_tests_before_it_builds_and_publishes() -> None:
    release = jobs("release")
    assert release["test"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in WORKFLOWS["ci"].read_text()
    assert "bash .ci/run" in commands(jobs("ci")["test"])
    assert release["build"]["needs"] == "test"
    assert release["publish"]["needs"] == "build"
    assert commands(release["publish"])[-1].startswith("twine upload")
    allowed = [job.get("permissions", {}).get("id-token") for job in release.values()]
    assert allowed == [None, None, "write"]  # the last one alone may publish


@pytest.mark.parametrize(("name", "job"), [("ci", "wheel"), ("release", "build")])
def test_the_wheel_is_tried_before_it_is_taken(name: str, job: str) -> None:
    ran = commands(jobs(name)[job])
    assert ran.index("python -m build") < ran.index("bash .ci/try-wheel")


def test_the_wheel_is_tried_on_every_version_of_python_that_is_named() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert jobs("ci")["wheel"]["strategy"]["matrix"]["python-version"] == named


def test_versions_of_what_builds_and_publishes_are_pinned() -> None:
    (backend,) = PROJECT["build-system"]["requires"]
    assert re.fullmatch(r"hatchling==[\d.]+", backend)
    pinned = (ROOT / "constraints.txt").read_text()
    for tool in ("build", "pip", "torch", "twine"):
        assert re.search(rf"^{tool}==[\d.]+$", pinned, re.MULTILINE), tool


def test_the_demo_installs_the_experiments_alone() -> None:
    """It needs no Ray, no library of another's optimizers, and nothing that makes pages."""
    (rule,) = re.findall(r"^\$\(DEMO\):.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert re.findall(r"\[(.*?)\]", rule) == ["experiments"]
    assert re.search(r"^demo: \$\(DEMO\)$", MAKEFILE, re.MULTILINE)
    assert re.search(r"^test: \$\(STAMP\)$", MAKEFILE, re.MULTILINE)
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = re.findall(r"^\$\(STAMP\):.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert set(re.findall(r"\[(.*?)\]", everything)[0].split(",")) == set(extras)


def test_files_whose_tests_begin_first_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).exists()] == []
