"""Figures are whole SVG files that say in words what they show."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from tests.imports import imported

from pages import ROOT, figures, rooms

PACKAGE = ROOT / "src/polarstep"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_on_disk_has_words_and_nothing_outside_of_it(name, made):
    drawn = figures.FIGURES[name](made)
    assert (ROOT / name).read_text(encoding="utf-8") == drawn
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


def test_the_picture_of_the_rooms_has_the_imports_of_the_package():
    """Each line is an import, and each import from an upper row to a lower one is along lines."""
    row_of = {room.name: k for k, row in enumerate(rooms.ROWS) for room in row}
    name_of = {name.removesuffix(".py"): name for name in row_of}
    found = {
        (name_of.get(path.relative_to(PACKAGE).parts[0].removesuffix(".py")), name_of.get(part))
        for path in PACKAGE.rglob("*.py")
        for part in imported(path, "polarstep")
    }
    imports = {(a, b) for a, b in found if a and b and row_of[a] < row_of[b]}
    assert set(rooms.ARROWS) <= imports

    def reaches(one, other):
        return one == other or any(reaches(b, other) for a, b in rooms.ARROWS if a == one)

    assert [pair for pair in sorted(imports) if not reaches(*pair)] == []
    assert all((PACKAGE / room.name).exists() for row in rooms.BESIDE for room in row)
