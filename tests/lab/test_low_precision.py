"""What the state of each precision takes, and the code of its page."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "precision.md"


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("low_precision")


def test_a_run_says_what_its_state_takes(script):
    its = script.setting([])
    its = replace(its, steps=2, val=its.val[:1000])
    sizes = {name: script.run(name, 0, its)["bytes"] for name in script.VARIANTS}
    assert sizes["float32"] == pytest.approx(4, abs=0.01)
    assert sizes["nearest"] == pytest.approx(2, abs=0.01)
    assert sizes["compensated"] == pytest.approx(4, abs=0.01)
    assert sizes["momentum-16"] == pytest.approx(2, abs=0.01)
    assert sizes["momentum-8"] == pytest.approx(1 + 4 / 128, abs=0.01)
    assert sizes["compensated-8"] == pytest.approx(3 + 4 / 128, abs=0.01)


def test_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
