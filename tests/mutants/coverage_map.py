"""Which tests of a folder run which lines of the package, and how long each takes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.child import in_child, pytest_options

__all__ = ["Map", "map_of"]

CACHE = Path("build/mutants")
# pytest takes seconds to collect a test with hundreds of parameters.
FEW_PARAMETERS, AT_FIRST = 40, 30


@dataclass(frozen=True)
class Map:
    """What one run of a folder's tests showed."""

    seconds: dict[str, float]  # by test
    lines: dict[str, dict[str, list[str]]]  # tests by file and line number
    started_processes: list[str]  # tests of which a part runs in other processes

    def tests_for(self, file: str, line: int, most: int) -> list[list[str]]:
        """The tests that run the line, at most ``most``: a few that start quickly, then the others.

        Both parts take the quickest test of every function first, then the second of each. A line
        that runs when its module is imported belongs to every test of the file. A line that no test
        runs in its own process may be run by the tests that start processes.
        """
        of_file = self.lines.get(file, {})
        tests = of_file.get(str(line)) or []
        if not tests and str(line) in self.lines.get("", {}).get(file, []):
            tests = sorted({test for each in of_file.values() for test in each})
        tests = _in_turn(tests or self.started_processes, self.seconds)[:most]
        sizes = Counter(test.split("[")[0] for test in self.seconds)
        small = [test for test in tests if sizes[test.split("[")[0]] <= FEW_PARAMETERS][:AT_FIRST]
        chosen = set(small)
        return [part for part in (small, [t for t in tests if t not in chosen]) if part]


def _in_turn(tests: list[str], seconds: dict[str, float]) -> list[str]:
    seen: dict[str, int] = {}
    turns = []
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        function = test.split("[")[0]
        seen[function] = seen.get(function, 0) + 1
        turns.append((seen[function], seconds[test], test))
    return [test for *_, test in sorted(turns)]


def map_of(tests: Path, package: Path) -> Map:
    """The map of a folder of tests, from an earlier run if nothing that it depends on has changed."""
    digest = hashlib.blake2b(digest_size=8)
    own = tests.rglob("*.py") if tests.is_dir() else [tests]
    for path in sorted([*package.rglob("*.py"), *Path("tests").glob("*.py"), *own]):
        digest.update(str(path).encode() + path.read_bytes())
    cached = CACHE / f"{tests.stem}-{digest.hexdigest()}.json"
    if not cached.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        status = in_child(lambda: _record(tests, package, cached), quiet=False)
        if status != 0:
            raise SystemExit(f"{tests} fails without any mutant: exit status {status}")
    return Map(**json.loads(cached.read_text()))


def _record(tests: Path, package: Path, to: Path) -> int:
    from coverage import Coverage

    measured = Coverage(data_file=None, source=[str(package)], config_file=False)
    recorder = _Recorder(measured)
    measured.start()
    status = pytest.main([*pytest_options(), str(tests)], plugins=[recorder])
    measured.stop()
    data = measured.get_data()
    lines: dict[str, Any] = {"": {}}
    for file in data.measured_files():
        name = str(Path(file).relative_to(Path.cwd()))
        by_line = data.contexts_by_lineno(file)
        lines[name] = {str(n): [t for t in found if t] for n, found in by_line.items()}
        lines[""][name] = [str(n) for n, found in by_line.items() if "" in found]
    found = {
        "seconds": recorder.seconds,
        "lines": lines,
        "started_processes": sorted(recorder.started_processes),
    }
    unfinished = to.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(found))
    unfinished.replace(to)
    return int(status)


class _Recorder:
    """A pytest plugin that tells coverage which test runs."""

    def __init__(self, measured: Any) -> None:
        self._measured = measured
        self._now = ""
        self.seconds: dict[str, float] = {}
        self.started_processes: set[str] = set()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _: Any) -> None:
        if event == "subprocess.Popen" and self._now:
            self.started_processes.add(self._now)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now = item.nodeid
        self._measured.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._measured.switch_context("")
            self._now = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
