"""The code in docs/theory.md runs, and its table is the output of the code."""

from __future__ import annotations

import re
from pathlib import Path

from polarstep.theory import schedules

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"


def test_examples_run_in_order():
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code) == 4
    exec("\n".join(code), {})


def test_rate_table_is_made_by_the_code():
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("rate_table() -->\n")[1].split("\n<!-- /rates -->")[0]
    assert table == schedules.rate_table()


def test_every_name_in_the_page_exists():
    from polarstep import certificate
    from polarstep.theory import bounds

    for name in re.findall(r"`theory\.bounds\.(\w+)`", PAGE.read_text(encoding="utf-8")):
        assert hasattr(bounds, name), name
    for name in ("cheap_certificate", "Monitor", "certified"):
        assert hasattr(certificate, name)
