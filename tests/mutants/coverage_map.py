"""Which tests of a folder run which lines of the package, and how long each takes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.child import Thinned, in_child, pytest_options
from tests.mutants.record import digest

__all__ = ["HELPERS", "Map", "map_of"]

CACHE = Path("build/mutants")
HELPERS = [each for each in Path("tests").glob("*.py") if not each.name.startswith("test_")]


@dataclass(frozen=True)
class Map:
    """What one run of a folder's tests showed."""

    seconds: dict[str, float] = field(default_factory=dict)  # of CPU time, by test
    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # tests by file and line
    imported: dict[str, list[str]] = field(default_factory=dict)  # lines by file, run by an import
    started_processes: list[str] = field(default_factory=list)  # tests that run in others as well

    def add(self, other: Map) -> None:
        """Add what another run showed."""
        self.seconds.update(other.seconds)
        self.started_processes.extend(other.started_processes)
        for file, lines in other.imported.items():
            self.imported[file] = sorted({*self.imported.get(file, ()), *lines})
        for file, by_line in other.lines.items():
            ours = self.lines.setdefault(file, {})
            for line, tests in by_line.items():
                ours.setdefault(line, []).extend(tests)

    def tests_for(self, file: str, line: int, most: int) -> list[str]:
        """The tests that may notice a change of the line, at most ``most``.

        First come those that run the line, the quickest of every function first. A line that runs when
        a module is imported belongs to every test: first to those that run other lines of its file.
        So does a line that coverage cannot see, as in a kernel. Processes that tests start may run any
        line: such tests come last.
        """
        of_file = self.lines.get(file, {})
        at_import = str(line) in self.imported.get(file, ())
        near = {*of_file.get(str(line), ())}
        if not near and (at_import or "/kernels/" in file):
            near = {test for each in of_file.values() for test in each}
        far = {*(self.seconds if at_import else self.started_processes)} - near
        return [*_in_turn(near, self.seconds), *_in_turn(far, self.seconds)][:most]


def _in_turn(tests: set[str], seconds: dict[str, float]) -> list[str]:
    seen: dict[str, int] = {}
    turns = []
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        function = test.split("[")[0]
        seen[function] = seen.get(function, 0) + 1
        turns.append((seen[function], seconds[test], test))
    return [test for *_, test in sorted(turns)]


def map_of(tests: list[Path], sources: list[Path], package: Path) -> Map:
    """The map of a room's tests; that of a test file is kept until it or the ``sources`` change."""
    whole = Map()
    for file in tests:
        cached = CACHE / f"{file.parent.name}-{file.stem}-{digest([*sources, *HELPERS, file])}.json"
        if not cached.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            status = in_child(lambda: _record(file, package, cached), quiet=False)  # noqa: B023
            if status not in (0, 5):  # 5: all its tests are for a GPU
                raise SystemExit(f"{file} fails without any mutant: exit status {status}")
        whole.add(Map(**json.loads(cached.read_text())))
    return whole


def _record(tests: Path, package: Path, to: Path) -> int:
    from coverage import Coverage

    measured = Coverage(data_file=None, source=[str(package)], config_file=False)
    recorder = _Recorder(measured)
    measured.start()
    status = pytest.main([*pytest_options(), str(tests)], plugins=[recorder, Thinned()])
    measured.stop()
    data = measured.get_data()
    lines, imported = {}, {}
    for file in data.measured_files():
        name = str(Path(file).relative_to(Path.cwd()))
        by_line = data.contexts_by_lineno(file)
        lines[name] = {str(n): [t for t in found if t] for n, found in by_line.items()}
        imported[name] = [str(n) for n, found in by_line.items() if "" in found]
    found = {
        "seconds": recorder.seconds(),
        "lines": lines,
        "imported": imported,
        "started_processes": sorted(recorder.started_processes),
    }
    if status in (0, 5):
        unfinished = to.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(found))
        unfinished.replace(to)
    return int(status)


class _Recorder:
    """A pytest plugin that tells coverage which test runs, and measures its CPU time.

    A fixture of the whole session is made in the first test that asks for it. Its time is added to
    every such test, as each may be the first of a mutant's tests.
    """

    def __init__(self, measured: Any) -> None:
        self._measured = measured
        self._now = ""
        self._own: dict[str, float] = {}
        self._fixtures: dict[str, float] = {}
        self._uses: dict[str, list[str]] = {}
        self.started_processes: set[str] = set()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _: Any) -> None:
        # The last is how a test asks an interpreter that forks for a process.
        starts = ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.sendmsg")
        if event in starts and self._now:
            self.started_processes.add(self._now)

    def seconds(self) -> dict[str, float]:
        """The time of each test, with its session's fixtures."""
        return {
            test: own + sum(self._fixtures.get(name, 0.0) for name in self._uses[test])
            for test, own in self._own.items()
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now = item.nodeid
        self._uses[item.nodeid] = list(getattr(item, "fixturenames", ()))
        self._measured.switch_context(item.nodeid)
        before, made = _cpu_time(), sum(self._fixtures.values())
        try:
            return (yield)
        finally:
            self._measured.switch_context("")
            made = sum(self._fixtures.values()) - made
            self._own[item.nodeid] = max(0.0, _cpu_time() - before - made)
            self._now = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        before = _cpu_time()
        try:
            return (yield)
        finally:
            if fixturedef.scope == "session":
                self._fixtures[fixturedef.argname] = _cpu_time() - before


def _cpu_time() -> float:
    return sum(os.times()[:4])
