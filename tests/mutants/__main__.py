"""``python -m tests.mutants FILES --tests TESTS``: which mistakes in the code would no test notice?

A mutant is a file with one mistake: a comparison, a sign, a constant, the order of two arguments, a
statement dropped (:mod:`tests.mutants.operators`). For each mutant of a random sample, the tests that
run its line run until the first failure. A mutant that none of them notices has survived, and is
printed: a test is missing, or the mistake changes nothing but speed.

The tests run once without a mistake before that, under coverage, to learn which test runs which line. A
line that runs when a module is imported belongs to all tests of the file, and so does a line that
coverage cannot see, as in a kernel. For kernels set ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.mutants.operators import Mutant, mutants_of, mutated

PACKAGE = Path("src/polarstep")
ENDED_LATE, CRASHED = -1, -2
MOST_TESTS = 80  # functions for one mutant
MOST_PARAMETERS = 12  # of a test function; some have thousands
MOST_MEMORY = 24 * 2**30  # of addresses; a mutant may ask for any amount


def main(argv: list[str] | None = None) -> int:
    """Print what becomes of each mutant of a sample; return 1 if one survives."""
    given = _arguments(argv)
    _import_large_libraries()
    files = [each for path in given.paths for each in _files(path)]
    possible = [(file, mutant) for file in files for mutant in mutants_of(file.read_text())]
    sample = random.Random(given.seed).sample(possible, min(given.sample, len(possible)))
    with tempfile.TemporaryDirectory() as folder:
        tests = _tests_of_lines(given.tests, files, Path(folder) / "coverage")
    survivors = 0
    for file, mutant in sample:
        survived = _survives(file, mutant, tests(file, mutant.line), given.limit)
        survivors += survived
        told = (
            f"{file}:{mutant.line} in {mutant.where or 'the module'}: {mutant.was}  →  {mutant.now}"
        )
        print(f"{'SURVIVED' if survived else 'killed'}  {told}", flush=True)
    print(f"{len(sample)} of {len(possible)} possible mutants, {survivors} survived")
    return 1 if survivors else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders of the package")
    parser.add_argument("--tests", nargs="+", required=True, help="test files or folders")
    parser.add_argument("--sample", type=int, default=40, help="how many mutants (40)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants (0)")
    parser.add_argument(
        "--limit", type=int, default=300, help="seconds of CPU for one mutant (300)"
    )
    return parser.parse_args(argv)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _import_large_libraries() -> None:
    """Import what children then need not import: all but the package, which they have with a mistake."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    assert "polarstep" not in sys.modules, "children would have the package without the mistake"


def _tests_of_lines(
    tests: list[str], files: list[Path], data_file: Path
) -> Callable[[Path, int], list[str]]:
    """A function of a file and a line: the test functions that run the line."""
    from coverage import Coverage, CoverageData

    def run() -> int:
        measured = Coverage(data_file=str(data_file), source=[str(PACKAGE)], config_file=False)
        measured.set_option("run:dynamic_context", "test_function")
        measured.start()
        status = int(pytest.main([*_options(), *tests], plugins=[_FewParameters()]))
        measured.stop()
        measured.save()
        return status

    status = _in_child(run, cpu_seconds=3600)
    if status != 0:
        raise SystemExit(f"the tests fail without any mistake: exit status {status}")
    data = CoverageData(str(data_file))
    data.read()
    lines = {file: data.contexts_by_lineno(str(file.resolve())) for file in files}

    def of_line(file: Path, line: int) -> list[str]:
        near = {_test(each) for each in lines[file].get(line, []) if each}
        if not near:
            near = {_test(each) for found in lines[file].values() for each in found if each}
        return sorted(near)[:MOST_TESTS] or tests

    return of_line


def _test(context: str) -> str:
    """pytest's name of a function: coverage has ``tests.maps.test_auto.test_x``.

    >>> _test("tests.maps.test_auto.test_x")
    'tests/maps/test_auto.py::test_x'
    """
    module, _, name = context.rpartition(".")
    while not (file := Path(*module.split(".")).with_suffix(".py")).exists() and "." in module:
        module, _, outer = module.rpartition(".")
        name = f"{outer}::{name}"
    return f"{file}::{name}"


def _survives(file: Path, mutant: Mutant, tests: list[str], limit: int) -> bool:
    """Whether no test fails with the mutant in place of the file."""
    with tempfile.TemporaryDirectory() as folder:
        # With __pycache__: a child compiles the changed file alone.
        shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name)
        changed = Path(folder) / file.relative_to(PACKAGE.parent)
        changed.write_text(mutated(file.read_text(), mutant))

        def run() -> int:
            sys.path.insert(0, folder)
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
            return int(pytest.main([*_options(), "-x", *tests], plugins=[_FewParameters()]))

        return _in_child(run, cpu_seconds=limit) == 0


def _options() -> list[str]:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    addopts = "--override-ini=addopts=--import-mode=importlib"
    return [addopts, "-q", "-p", "no:cacheprovider", "--tb=no", "--no-header"]


class _FewParameters:
    """A pytest plugin that keeps a fixed sample of each function's parameters."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_function: dict[str, list[pytest.Item]] = {}
        for item in items:
            by_function.setdefault(item.nodeid.split("[")[0], []).append(item)
        kept = {
            id(item)
            for name, those in by_function.items()
            for item in random.Random(name).sample(those, min(MOST_PARAMETERS, len(those)))
        }
        items[:] = [item for item in items if id(item) in kept]


def _in_child(work: Callable[[], int], *, cpu_seconds: int) -> int:
    """The exit status of ``work`` in a forked process; ``ENDED_LATE``, or ``CRASHED``.

    The limit is one of CPU time, which does not depend on how busy the machine is. A child that waits
    for ever is ended by the clock.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            status = work()
        finally:
            os._exit(status)
    end, status = time.monotonic() + 10 * cpu_seconds, None
    while status is None and time.monotonic() < end:
        finished, found = os.waitpid(child, os.WNOHANG)
        status = found if finished else None
        time.sleep(0 if finished else 0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with all processes that its tests have started
    if status is None:
        os.waitpid(child, 0)
        return ENDED_LATE
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    late = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    return ENDED_LATE if late else CRASHED


if __name__ == "__main__":
    sys.exit(main())
