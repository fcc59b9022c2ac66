"""``python -m tests.mutants``: make the core wrong in one place at a time, and see which test notices.

For a fixed sample of the mutants of each file, the tests of the file's own folder that run the changed
line run until the first failure. A mutant that none of them notices has survived. Survivors with a
reason are listed in ``survivors.toml``: they change nothing but speed, or nothing at all.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.mutants.child import (
    TIMED_OUT,
    import_what_tests_import,
    in_child,
    pytest_options,
    use_package_in,
)
from tests.mutants.coverage_map import Map, map_of
from tests.mutants.operators import Mutant, mutants_of

PACKAGE = Path("src/polarstep")
# The core's rooms, each with its own tests. Kernels and graphs need a GPU or an interpreter, and their
# tests take minutes: tests/kernels.
ROOMS = {
    "polar": "tests/polar",
    "optim": "tests/optim",
    "sketch": "tests/sketch",
    "products": "tests/products",
    "matrix.py": "tests/test_matrix.py",
    "rng.py": "tests/test_rng.py",
}
ON_A_GPU = {"replay.py", "by_tables.py", "cuda.py", "triton.py", "small.py"}
MOST_TESTS = 150  # for one mutant, taken in turn from every test function that runs its line
LEAST_KILLED = 0.95


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    file: str
    mutant: Mutant
    killed: bool

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.mutant.where, self.mutant.was, self.mutant.now

    def __str__(self) -> str:
        its = self.mutant
        return f"{self.file}:{its.line} in {its.where or 'the module'}: {its.was}  →  {its.now}"


def main(argv: list[str] | None = None) -> int:
    """Run the sample; return 0 if at least 95% were killed or have a reason to survive."""
    given = _arguments(argv)
    import_what_tests_import()
    reasons = known_reasons()
    verdicts = []
    for room, tests in ROOMS.items():
        files = [file for file in _files(room) if given.only in str(file)]
        if not files:
            continue
        known = map_of(Path(tests), PACKAGE)
        for file in files:
            of_file = list(_verdicts(file, known, given.per_file, given.seed))
            verdicts += of_file
            killed = sum(each.killed for each in of_file)
            print(f"{killed:4} of {len(of_file):3} killed  {file}", flush=True)
    return _report(verdicts, reasons)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--per-file", type=int, default=6, help="mutants of each file (6)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are in the sample (0)")
    parser.add_argument("--only", default="", help="files whose path contains this text")
    return parser.parse_args(argv)


def _files(room: str) -> list[Path]:
    path = PACKAGE / room
    found = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [each for each in found if each.name not in ON_A_GPU | {"__init__.py", "__main__.py"}]


def _verdicts(file: Path, known: Map, per_file: int, seed: int) -> Iterator[Verdict]:
    mutants = mutants_of(file.read_text())
    sample = random.Random(f"{seed} {file}").sample(mutants, min(per_file, len(mutants)))
    for mutant in sorted(sample, key=lambda each: each.line):
        parts = known.tests_for(str(file), mutant.line, MOST_TESTS)
        killed = any(_is_noticed(file, mutant, tests, known) for tests in parts)
        verdict = Verdict(str(file), mutant, killed)
        if not killed:
            print(f"     survived {sum(map(len, parts))} tests: {verdict}", flush=True)
        yield verdict


def _is_noticed(file: Path, mutant: Mutant, tests: list[str], known: Map) -> bool:
    """Whether one of ``tests`` fails with the mutant in place of the file."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(PACKAGE, copy / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / file.relative_to(PACKAGE.parent)).write_text(ast.unparse(mutant.code))
        seconds = 60 + 10 * sum(known.seconds[test] for test in tests)
        status = in_child(lambda: _run(tests, copy), seconds=seconds)
    # 1: a test failed; 2, 3, 4: a test file, pytest itself or conftest.py tripped over the mutant.
    if status not in (0, 1, 2, 3, 4, TIMED_OUT):
        raise SystemExit(f"pytest ended with status {status} on {file}:{mutant.line} {mutant.now}")
    return status != 0


def _run(tests: list[str], package: Path) -> int:
    use_package_in(package)
    functions = list(dict.fromkeys(test.split("[")[0] for test in tests))
    return int(pytest.main([*pytest_options(), "-x", *functions], plugins=[_Only(tests)]))


class _Only:
    """A pytest plugin that runs the given tests, in their order."""

    def __init__(self, tests: list[str]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._place]
        items.sort(key=lambda item: self._place[item.nodeid])


def known_reasons() -> dict[tuple[str, str, str, str], str]:
    """Why a mutant may survive, by file, definition, old and new code."""
    listed = tomllib.loads(Path(__file__).with_name("survivors.toml").read_text())["survivor"]
    return {(s["file"], s["where"], s["was"], s["now"]): s["reason"] for s in listed}


def _report(verdicts: list[Verdict], reasons: dict[tuple[str, str, str, str], str]) -> int:
    survivors = [each for each in verdicts if not each.killed]
    killed = len(verdicts) - len(survivors)
    share = killed / max(1, len(verdicts))
    print(f"\n{killed} of {len(verdicts)} mutants killed by the tests of their folder: {share:.1%}")
    for survivor in survivors:
        print(f"  {survivor}\n      {reasons.get(survivor.key, 'NO REASON: a test is missing')}")
    unexplained = sum(each.key not in reasons for each in survivors)
    print(f"{unexplained} of {len(survivors)} survivors have no reason to survive")
    return 0 if share >= LEAST_KILLED and unexplained == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
