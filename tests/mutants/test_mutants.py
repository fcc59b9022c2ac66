"""The mutation run: what is changed, what is drawn, which verdicts are kept, and the table."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.mutants import record, table
from tests.mutants.child import CRASHED, TIMED_OUT, in_child
from tests.mutants.coverage_map import Map
from tests.mutants.operators import mutants_of, mutated
from tests.mutants.record import Verdict
from tests.mutants.rooms import ROOMS, drawn, possible

SOURCE = '''
"""Words: 1 + 1."""
__all__ = ["f"]
LIMIT: int = 3

def f(x: int, y: int = 2) -> int:
    """More words."""
    assert x > 0
    if x < y and not x == 1:
        raise ValueError(f"{x + 1} is too small")
    for a, b in zip([x], [y], strict=True):
        x += min(a, b) * -a
    return g(x, y, exact=True)
'''


def changes(source: str) -> list[tuple[str, str]]:
    return [(mutant.was, mutant.now) for mutant in mutants_of(source)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", [("a < b", "a <= b")]),
        ("x = a ** b", [("a ** b", "a * b")]),
        ("x //= a", [("x //= a", "x *= a")]),
        ("x = a and b", [("a and b", "a or b")]),
        ("x = -a", [("-a", "a")]),
        ("x = not a", [("not a", "a")]),
        ("x = True", [("True", "False")]),
        ("x = 0.0", [("0.0", "1.0")]),
        ("x = a if b else c", [("a if b else c", "a if not b else c")]),
        ("x = f(a, b, c)", [("f(a, b, c)", "f(b, a, c)")]),
        ("x = max(a, b)", []),
        ("x = f(a, a)", []),
        ("f(a)", [("f(a)", "pass")]),
        ("x.y = a", [("x.y = a", "pass")]),
        ("del a", [("del a", "pass")]),
        ("assert a < b", []),
    ],
)
def test_a_line_is_made_wrong_in_each_of_its_places(line, expected):
    assert changes(line) == expected


def test_every_mutant_of_a_file_is_another_program_with_a_name_of_its_own():
    plain = ast.unparse(ast.parse(SOURCE))
    mutants = mutants_of(SOURCE)
    programs = {mutated(SOURCE, mutant) for mutant in mutants}
    assert len(programs) == len(mutants) == len({replace(m, line=0, site=0) for m in mutants})
    assert plain not in programs
    for program in programs:
        compile(program, "mutant", "exec")
        lines = zip(plain.splitlines(), program.splitlines(), strict=True)
        assert sum(one != other for one, other in lines) == 1


def test_annotations_messages_and_assertions_are_left_alone():
    assert {mutant.where for mutant in mutants_of(SOURCE)} == {"", "f"}
    for mutant in mutants_of(SOURCE):
        program = mutated(SOURCE, mutant)
        for text in ("Words: 1 + 1.", "strict=True", "assert x > 0", "__all__ = ['f']"):
            assert text in program


def test_a_larger_sample_begins_with_the_smaller_one():
    room = ROOMS["rng.py"]
    whole = drawn(room, 0, 10**6)
    assert len(whole) == len(possible(room))
    assert drawn(room, 0, 5) == whole[:5]
    assert drawn(room, 1, 5) != whole[:5]


def test_every_file_of_the_package_is_in_one_room_or_needs_a_gpu():
    of_rooms = [file for room in ROOMS.values() for file in room.files()]
    assert len(of_rooms) == len(set(of_rooms))
    names = ("__init__.py", "__main__.py")
    package = {each for each in Path("src/polarstep").rglob("*.py") if each.name not in names}
    left = {str(each.relative_to("src/polarstep")) for each in package - set(of_rooms)}
    assert left == {"engines/replay.py", "ops/cuda.py"}
    assert all(
        room.test_files() and all(map(Path.exists, room.test_files())) for room in ROOMS.values()
    )


def test_tests_of_a_line_come_in_turns_and_the_quickest_first():
    seconds = {"f[a]": 1.0, "f[b]": 0.1, "g": 0.5, "h": 9.0, "i": 0.2}
    known = Map(seconds, {"file": {"3": ["f[a]", "f[b]", "g"], "4": ["g"]}}, {"file": ["1"]}, ["h"])
    assert known.tests_for("file", 3, 9) == ["f[b]", "g", "f[a]", "h"]  # h starts processes
    assert known.tests_for("file", 3, 2) == ["f[b]", "g"]
    assert known.tests_for("file", 1, 9) == ["f[b]", "g", "f[a]", "i", "h"]  # runs at import
    assert known.tests_for("file", 7, 9) == ["h"]  # runs in another process, if at all


def test_a_child_ends_by_itself_or_by_a_limit_or_by_a_crash():
    def killed_by(its: signal.Signals) -> int:
        def work() -> int:
            signal.signal(its, signal.SIG_DFL)  # a library may have put a handler of its own there
            os.kill(os.getpid(), its)
            return 0

        return in_child(work)

    assert in_child(lambda: 3) == 3
    assert killed_by(signal.SIGXCPU) == TIMED_OUT
    assert killed_by(signal.SIGTERM) == CRASHED  # faulthandler would report SIGSEGV


def test_the_run_itself_does_not_import_the_package():
    """Its children would have the package as it is, and not the mutant."""
    names = "[name for name in sys.modules if name.split('.')[0] == 'polarstep']"
    told = [sys.executable, "-c", f"import sys, tests.mutants.__main__; print({names})"]
    assert subprocess.check_output(told, text=True) == "[]\n"


VERDICT = Verdict(
    "rng.py",
    "src/polarstep/rng.py",
    3,
    "f",
    "1",
    "2",
    0,
    "tests/test_rng.py::test",
    4,
    "s",
    "t",
    0,
    26,
)
SURVIVOR = replace(VERDICT, was="3", now="4", killed_by=None)


def test_a_survivor_is_tried_again_when_there_are_other_tests():
    assert VERDICT.holds("s", "t")
    assert VERDICT.holds("s", "other")
    assert not VERDICT.holds("other", "t")
    assert SURVIVOR.holds("s", "t")
    assert not SURVIVOR.holds("s", "other")


def test_verdicts_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORD", tmp_path / "record.jsonl")
    assert record.load() == {}
    record.save([VERDICT, SURVIVOR])
    assert record.load() == {VERDICT.name: VERDICT, SURVIVOR.name: SURVIVOR}


def test_a_survivor_without_a_reason_fails_the_run(capsys, monkeypatch):
    many = [replace(VERDICT, nth=n) for n in range(30)]
    assert table.report(many) == 0
    assert table.report([*many, SURVIVOR]) == 1
    assert "1 of 1 survivors have no reason" in capsys.readouterr().out
    for nothing, row in ((True, "26 | 31 | 1 | 30 | 100%"), (False, "26 | 31 | 0 | 30 | 96%")):
        known = {SURVIVOR.name: record.Reason("It is late.", nothing)}
        monkeypatch.setattr(table, "reasons", lambda known=known: known)
        assert table.report([*many, SURVIVOR]) == 0
        assert f"| `rng.py` | {row} |" in capsys.readouterr().out
    assert table.report([VERDICT, SURVIVOR]) == 1  # half is too little


def test_every_reason_is_that_of_a_mutant_that_exists():
    """Code that has changed may need its reason no more, or another one."""
    files = {Path(file) for file, *_ in record.reasons()}
    names = {
        record.name_of(file, mutant)
        for file in files & set(Path("src").rglob("*.py"))
        for mutant in mutants_of(file.read_text())
    }
    assert [name for name in record.reasons() if name not in names] == []


def test_the_docs_have_the_table_of_the_record():
    assert table.table(record.load().values()) in table.PAGE.read_text()
