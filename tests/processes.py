"""Child processes of tests: started so that Ctrl-C reaches them, and waited for patiently."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["PATIENCE", "ROOT", "environment", "start", "wait_until"]

PATIENCE = 600.0
"""Seconds until a process counts as hanging; far more than a busy machine needs."""

ROOT = Path(__file__).resolve().parents[1]


def environment(changes: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a child process: one thread, and this checkout's package and tests."""
    # PYTHONPATH comes first: a mutation run puts the changed package there.
    path = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT)])
    )
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | (changes or {})


def start(
    *arguments: str,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int = subprocess.PIPE,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Run Python with ``arguments`` in a process group of its own, where SIGINT has its effect.

    A child inherits an ignored SIGINT, which is what nohup and background jobs of a script have;
    Python then raises no KeyboardInterrupt.
    """
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env=environment(env),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as ``condition()`` holds; raise TimeoutError if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened for {PATIENCE:g} s")
        time.sleep(0.01)
