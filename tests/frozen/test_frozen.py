"""The comparison of two trees notices a change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.frozen.__main__ import ROOT, main

# Another learning rate, for the rows with weight decay alone.
CHANGE = """
import functools

_made = Muon.__init__


@functools.wraps(_made)
def _with_another_rate(self, params, lr, **options):
    _made(self, params, lr * (1 + 1e-6 * bool(options["weight_decay"])), **options)


Muon.__init__ = _with_another_rate
"""


def test_a_tree_with_another_learning_rate_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "src" / "polarstep", tmp_path / "src" / "polarstep")
    with (tmp_path / "src" / "polarstep" / "__init__.py").open("a") as file:
        file.write(CHANGE)
    arguments = ["--before", str(tmp_path), "--selection", "alone", "--only"]
    assert main([*arguments, "exact, "]) == 1
    told = capsys.readouterr().out
    assert "differs by" in told
    assert "8 rows, 4 differ" in told
