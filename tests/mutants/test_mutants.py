"""The mutation run: how a file is made wrong in one place, and who notices."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.mutants.operators import mutants_of, mutated

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


WRONG_IN_ONE_PLACE = """
from pathlib import Path
from tests.mutants import __main__ as run

run.PACKAGE = Path("small")
raise SystemExit(run.main(["small/sums.py", "--tests", "tests/test_sums.py", "--sample", "99"]))
"""


def test_a_mistake_that_no_test_notices_survives(tmp_path):
    """In a folder of its own, with a package of one file and one test of half of it."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small/__init__.py").write_text("")
    (tmp_path / "small/sums.py").write_text(
        "def sum_of(a, b):\n    return a + b\n\n\ndef far(a):\n    return a > 3\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_sums.py").write_text(
        "from small.sums import far, sum_of\n\n\n"
        "def test_sum():\n    assert sum_of(2, 3) == 5\n\n\n"
        "def test_far():\n    assert far(9) and not far(1)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path.cwd())])
    done = subprocess.run(
        [sys.executable, "-c", WRONG_IN_ONE_PLACE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    verdicts = {
        line.split("  ", 1)[0] + line.split(":", 2)[2] for line in done.stdout.splitlines()[:-1]
    }
    assert verdicts == {"killed a + b  →  a - b", "SURVIVED a > 3  →  a >= 3", "SURVIVED 3  →  4"}
    assert done.returncode == 1
