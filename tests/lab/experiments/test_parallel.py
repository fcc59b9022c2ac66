"""Runs in several processes: how the command ends when its workers do not make all runs."""

from __future__ import annotations

import subprocess
import sys

from tests.processes import PATIENCE, environment

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


def test_runs_that_no_worker_took_do_not_keep_the_command_from_ending(tmp_path):
    script = tmp_path / "ends_early.py"
    script.write_text(ENDS_EARLY)
    ended = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    assert "the worker processes ended early" in ended.stdout
