"""Figures are whole SVG files that say in words what they show."""

from __future__ import annotations

import importlib
import itertools
import re
import xml.etree.ElementTree as ET

import pytest

figures = importlib.import_module("pages.figures")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_on_disk_has_words_and_nothing_outside_of_it(name, write, made):
    drawn = figures.FIGURES[name](made)
    if not name.endswith("rooms.svg"):  # its lines change with every import of the package
        assert (write.ROOT / name).read_text(encoding="utf-8") == drawn
    root = ET.fromstring(drawn)
    assert root.find(f"{SVG}title").text
    assert len(root.find(f"{SVG}desc").text) > 40
    assert "prefers-color-scheme: dark" in drawn
    width, height = float(root.get("width")), float(root.get("height"))
    assert width <= 560, "letters would be too small on a phone"
    for each in root.iter(f"{SVG}text"):
        assert 0 <= float(each.get("x")) <= width
        assert 0 <= float(each.get("y")) <= height
    for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", drawn):
        assert 0 <= float(x) <= width
        assert 0 <= float(y) <= height


def test_names_beside_lines_do_not_meet():
    moved = figures.apart([10.0, 12.0, 11.0, 80.0], 20)
    order = sorted(moved)
    assert all(b - a >= 20 - 1e-6 for a, b in itertools.pairwise(order))
    assert [sorted(moved).index(each) for each in moved] == [0, 2, 1, 3]


def test_the_rooms_are_there_and_no_line_says_what_others_say():
    rooms = importlib.import_module("pages.rooms")
    for row in (*rooms.ROWS, *rooms.BESIDE):
        for room in row:
            for module in room.modules:
                path = rooms.PACKAGE / module
                assert path.is_dir() or path.with_suffix(".py").exists(), room.name
    imports, lines = rooms.imported(), rooms.arrows()
    assert lines <= imports
    assert {("optimizer.py", "muon.py"), ("muon.py", "engines"), ("ops", "kernels")} <= lines
    assert not any((a, c) in lines for a, b in imports for d, c in imports if b == d)
