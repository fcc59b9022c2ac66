"""What the command loads before it is asked for anything, and what it says when a package is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tests.forking import fork
from tests.processes import PATIENCE, start
from typer.testing import CliRunner

import polarstep
import polarstep_lab
from polarstep_lab.cli import SUBCOMMANDS, app

HEAVY = ("torch", "numpy", "matplotlib", "optuna", "pandas", "tensorboard")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(polarstep_lab.__file__).parents[1])
    path = f"import sys; sys.path.insert(0, {source!r})\n"
    return subprocess.run(
        [sys.executable, "-c", path + code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("arguments", [["--help"], [], ["rnu"], ["--version"]], ids=str)
def test_the_overview_imports_nothing_heavy(arguments):
    done = python(
        f"""
import atexit
atexit.register(lambda: print("loaded", [m for m in {HEAVY} if m in sys.modules]))
sys.argv = ["polarstep", *{arguments}]
from polarstep_lab.__main__ import main
main()
"""
    )
    assert done.stdout.splitlines()[-1] == "loaded []"
    said = done.stdout + done.stderr
    if arguments == ["--version"]:
        assert said.startswith("polarstep ")
        return
    assert "'run'" in said if arguments == ["rnu"] else all(name in said for name in SUBCOMMANDS)


def test_the_version_is_that_of_the_package():
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0
    assert shown.output == f"polarstep {polarstep.__version__}\n"


def test_ctrl_c_while_the_command_still_imports_ends_it_without_a_word():
    """torch catches a Ctrl-C while it imports NumPy, and the next import of NumPy fails."""
    code = """
import signal, sys
import polarstep_lab.cli

def interrupted(name):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("cannot load module more than once per process") from None

polarstep_lab.cli.import_module = interrupted
sys.argv = ["polarstep", "list"]
from polarstep_lab.__main__ import main
main()
"""
    process = start("-c", code, stdout=subprocess.PIPE)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output, errors) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_overview_says_what_the_sub_command_says(name):
    module, function, summary = SUBCOMMANDS[name]
    command = getattr(import_module(f"polarstep_lab.cli.{module}"), function)
    first, *_ = command.__doc__.split("\n\n")
    assert summary == " ".join(first.split())
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert f"polarstep {name} " in shown.output
    assert " ".join(summary.split()[:4]) in shown.output


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("typer", ["--help"]),
        ("optuna", ["tune", "nanogpt-toy", "--method", "muon"]),
        ("matplotlib", ["report", "."]),
        ("jinja2", ["report", "."]),
        ("pandas", ["demo", "--out", "unused"]),
        ("tensorboard", ["run", "nanogpt-toy", "-m", "muon", "--tensorboard", "--out", "unused"]),
        ("tiktoken", ["tokenize", "unused.txt", "--vocab", "unused", "--out", "unused"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_missing_package_is_named_before_anything_is_done(
    missing, arguments, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code = f"""
import sys
sys.modules[{missing!r}] = None
sys.argv = ["polarstep", *{arguments}]
from polarstep_lab.__main__ import main
main()
"""
    process = fork("-c", code, imported=("torch",))
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    expected = f"needs '{missing}', which is not installed: pip install 'polarstep[experiments]'"
    assert expected in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_without_utf8_gets_marks_in_place_of_signs():
    code = """
sys.argv = ["polarstep", "list"]
from polarstep_lab.__main__ import main
main()
"""
    done = python(code, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "nanogpt-toy" in done.stdout
    assert "? to 2 ? the recipe's" in done.stdout
