"""Runs in several processes: how the command ends when its workers do not make all runs."""

from __future__ import annotations

from tests.forking import fork
from tests.processes import PATIENCE

ENDS_EARLY = """
from dataclasses import replace
from pathlib import Path

from polarstep_lab.methods import METHODS
from polarstep_lab.suites import parallel
from polarstep_lab.suites.suite import comparison_runs


def leave(jobs, events, force):
    "A worker that ends before its first run, as after a Ctrl-C."


if __name__ == "__main__":
    parallel._work = leave
    (run,) = comparison_runs("nanogpt-toy", METHODS[:1], [0], {}, Path("runs"))
    many = [replace(run, label="a" * 10_000)] * 30  # more than a pipe holds
    try:
        list(parallel.run_in_processes(many, workers=1))
    except ChildProcessError as error:
        print(error)
"""


def test_runs_that_no_worker_took_do_not_keep_the_command_from_ending(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "ends_early.py"
    script.write_text(ENDS_EARLY)
    process = fork(str(script))
    try:
        out, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "the worker processes ended early" in out
