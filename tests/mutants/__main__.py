"""``python -m tests.mutants``: make the core wrong in one place at a time, and see which test notices.

For a fixed sample of the mutants of each room, the tests of the room that run the changed line run until
the first failure. A mutant that none of them notices has survived. Survivors with a reason are listed in
``survivors.toml``: they change nothing but speed, or nothing at all.

The verdicts are in ``record.jsonl``. A run that was broken off goes on there: a verdict is taken again
only if its file has changed, or, of a survivor, the tests. ``--again`` takes all of them again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.mutants import record, table
from tests.mutants.child import (
    CRASHED,
    TIMED_OUT,
    Thinned,
    import_what_tests_import,
    in_child,
    pytest_options,
    use_package_in,
)
from tests.mutants.coverage_map import HELPERS, Map, map_of
from tests.mutants.operators import Mutant, mutated
from tests.mutants.record import Verdict
from tests.mutants.rooms import PACKAGE, ROOMS, Room, drawn, possible

MOST_TESTS = 80  # for one mutant, taken in turn from every test function that runs its line


def main(argv: list[str] | None = None) -> int:
    """Run the sample; return 0 if at least 95% were killed and every survivor has a reason."""
    given = _arguments(argv)
    if not given.table:
        import_what_tests_import()
        for name in given.rooms or ROOMS:
            _run_room(name, ROOMS[name], given)
    verdicts = list(record.load().values())
    if given.write:
        table.write(verdicts)
    return table.report(verdicts)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("rooms", nargs="*", choices=[[], *ROOMS], help="these rooms alone")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn (0)")
    parser.add_argument("--most", type=int, help="at most so many of each room")
    parser.add_argument("--only", default="", help="mutants of files whose path contains this text")
    parser.add_argument(
        "--whole", default="", help="run this test function alone, with all its parameters"
    )
    parser.add_argument("--again", action="store_true", help="take known verdicts again")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is known")
    parser.add_argument("--write", action="store_true", help="write the table to the docs")
    return parser.parse_args(argv)


def _run_room(name: str, room: Room, given: argparse.Namespace) -> None:
    os.environ.update(room.environment)
    known = record.load()
    tests = record.digest([*room.test_files(), *HELPERS])
    sample = drawn(room, given.seed, min(room.sample, given.most or room.sample))
    count = len(possible(room))
    map_of_room: Map | None = None
    for file, mutant in sample:
        if given.only not in str(file):
            continue
        before = known.get(record.name_of(file, mutant))
        source = record.digest([file])
        if before is not None and before.holds(source, tests) and not given.again:
            continue
        if map_of_room is None:
            map_of_room = map_of(room.test_files(), room.files(), PACKAGE)
        chosen = map_of_room.tests_for(str(file), mutant.line, MOST_TESTS)
        if before is not None and before.killed_by in map_of_room.seconds:
            chosen = list(dict.fromkeys([before.killed_by, *chosen]))
        killed_by, ran = _trial(
            file, mutant, [] if given.whole else chosen, map_of_room, given.whole
        )
        if given.whole and killed_by is None:
            continue  # other tests may notice it
        verdict = Verdict(
            name,
            str(file),
            mutant.line,
            mutant.where,
            mutant.was,
            mutant.now,
            mutant.nth,
            killed_by,
            ran,
            source,
            tests,
            given.seed,
            count,
        )
        known = record.load() | {verdict.name: verdict}
        record.save(known.values())
        print(f"{'killed' if killed_by else 'SURVIVED'} after {ran:2} tests: {verdict}", flush=True)
    names = {record.name_of(file, mutant) for file, mutant in sample}
    kept = [each for each in record.load().values() if each.room != name or each.name in names]
    record.save(replace(each, possible=count) if each.room == name else each for each in kept)
    for variable in room.environment:
        del os.environ[variable]


def _trial(
    file: Path, mutant: Mutant, tests: list[str], known: Map, whole: str
) -> tuple[str | None, int]:
    """The test that fails with the mutant in place of the file, and how many tests ran."""
    if not tests and not whole:
        return None, 0
    with tempfile.TemporaryDirectory() as folder:
        copy, told = Path(folder), Path(folder) / "told"
        # With __pycache__: a child compiles the changed file alone.
        shutil.copytree(PACKAGE, copy / PACKAGE.name)
        (copy / file.relative_to(PACKAGE.parent)).write_text(mutated(file.read_text(), mutant))
        expected = sum(known.seconds[test] for test in tests)
        status = in_child(
            lambda: _run(tests, whole, copy, told),
            cpu_seconds=int((300 if whole else 60) + 5 * expected),
            seconds=1200 + 100 * expected,
        )
        names = told.read_text().splitlines() if told.exists() else []
    # 1: a test failed; 2, 3, 4: a test file, pytest itself or conftest.py tripped over the mutant.
    if status not in (0, 1, 2, 3, 4, TIMED_OUT, CRASHED):
        raise SystemExit(f"pytest ended with status {status} on {file}:{mutant.line} {mutant.now}")
    if status == 0:
        return None, len(names)
    if status in (TIMED_OUT, CRASHED):
        return "the limit of time" if status == TIMED_OUT else "a crash", len(names)
    return names[-1] if status == 1 else "the import of the tests", len(names)


def _run(tests: list[str], whole: str, package: Path, told: Path) -> int:
    use_package_in(package)
    names = [test.split("[")[0] for test in [whole, *tests] if test]
    functions = list(dict.fromkeys(names))
    plugins = [_Only(tests, whole, told), Thinned(whole)]
    return int(pytest.main([*pytest_options(), "-x", *functions], plugins=plugins))


class _Only:
    """A pytest plugin that runs the given tests, in their order, and writes down each that begins."""

    def __init__(self, tests: list[str], whole: str, told: Path) -> None:
        self._place = {test: place for place, test in enumerate(tests)}
        self._whole = whole
        self._told = told

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        places = {item.nodeid: self._place.get(item.nodeid) for item in items}
        places |= {test: -1 for test in places if test.split("[")[0] == self._whole}
        items[:] = [item for item in items if places[item.nodeid] is not None]
        items.sort(key=lambda item: places[item.nodeid] or 0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self._told.open("a") as file:
            file.write(nodeid + "\n")


if __name__ == "__main__":
    sys.exit(main())
