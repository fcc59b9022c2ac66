"""pytest in a forked process: torch is imported once, the package anew for every mutant."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

__all__ = [
    "CRASHED",
    "TIMED_OUT",
    "Thinned",
    "import_what_tests_import",
    "in_child",
    "pytest_options",
    "use_package_in",
]

TIMED_OUT, CRASHED = -1, -2
OUT_OF_TIME = (signal.SIGXCPU, signal.SIGKILL)  # past the soft limit of CPU time, and the hard one
MOST_MEMORY = 24 * 2**30  # of addresses; a mutant may ask for any amount
PARAMETERS = 12  # of a test function; some functions have thousands of them


def import_what_tests_import() -> None:
    """Import the large libraries, which every child then has."""
    import hypothesis
    import numpy
    import scipy.stats
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    imported = (hypothesis, numpy, scipy.stats, torch)
    ours = [name for name in sys.modules if name.split(".")[0] in ("polarstep", "polarstep_lab")]
    assert imported
    assert not ours, f"{ours[0]} is imported already: a mutant of it would have no effect"


def pytest_options() -> list[str]:
    """The options of every run, without doctests and without pytest's plugins."""
    addopts = "--override-ini=addopts=--import-mode=importlib"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return [addopts, "-q", "-p", "no:cacheprovider", "--tb=no", "--no-header"]


class Thinned:
    """A pytest plugin that keeps a fixed sample of each function's parameters, but for ``whole``."""

    def __init__(self, whole: str = "") -> None:
        self._whole = whole

    @pytest.hookimpl(wrapper=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> Iterator[None]:
        """Drop parameters before pytest makes an object of each, which takes longer than many tests."""
        yield
        calls = metafunc._calls
        if len(calls) > PARAMETERS and metafunc.definition.nodeid != self._whole:
            kept = random.Random(metafunc.function.__name__).sample(range(len(calls)), PARAMETERS)
            metafunc._calls = [calls[i] for i in sorted(kept)]


def in_child(
    work: Callable[[], int], *, cpu_seconds: int = 7200, seconds: float = 7200, quiet: bool = True
) -> int:
    """The exit status of ``work`` in a process of its own, or ``TIMED_OUT``, or ``CRASHED``.

    A kernel that reads memory out of bounds crashes its process, unless a test notices it first.
    The limit that a mutant should meet is that of CPU time, which does not depend on how busy the
    machine is. The limit of the clock ends a child that waits for ever.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
            if quiet:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.dup2(nowhere, 2)
            status = work()
        finally:
            sys.stdout.flush()
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            _end_group(child)
            if os.WIFEXITED(status):
                return os.WEXITSTATUS(status)
            return TIMED_OUT if os.WTERMSIG(status) in OUT_OF_TIME else CRASHED
        time.sleep(0.02)
    _end_group(child)
    os.waitpid(child, 0)
    return TIMED_OUT


def _end_group(leader: int) -> None:
    """End a child with all processes that its tests have started."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def use_package_in(folder: Path) -> None:
    """Import the package from ``folder``, in processes that tests start as well."""
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
