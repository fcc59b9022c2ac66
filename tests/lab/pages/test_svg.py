"""Figures drawn by hand: names do not meet, and axes have round ticks."""

from __future__ import annotations

import importlib
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_names_in_a_figure_do_not_meet(module):
    svg = importlib.import_module("pages.figures.svg")
    frame = svg.Frame(50, 60, 370, 388, (0.5, 30.0), (-3.0, 10.0))
    marks = [(*frame.at(1.0 + 0.1 * k, 0.3 * k), f"optimizer {k}") for k in range(6)]
    drawn = [
        (float(x), float(y), anchor, words)
        for text in frame.names(marks)
        for x, y, anchor, words in re.findall(
            r'x="(.*?)" y="(.*?)" text-anchor="(\w+)".*>(.*)<', text
        )
    ]
    assert [words for *_, words in drawn] == [words for *_, words in marks]
    boxes = []
    for x, y, anchor, words in drawn:
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * 6 * len(words)
        boxes.append((left, y - 9, left + 6 * len(words), y + 2))
    boxes += [(x - 6, y - 6, x + 6, y + 6) for x, y, _ in marks]
    for first, second in itertools.combinations(boxes[: len(marks)], 2):
        assert not svg.meet(first, second)
    for name, mark in itertools.product(boxes[: len(marks)], boxes[len(marks) :]):
        assert not svg.meet(name, mark)


def test_an_axis_has_four_to_eleven_evenly_spaced_round_ticks(module):
    svg = importlib.import_module("pages.figures.svg")
    assert [*svg.even_ticks((1.6, 2.24)).values()] == [
        "1.6",
        "1.7",
        "1.8",
        "1.9",
        "2.0",
        "2.1",
        "2.2",
    ]
    assert [*svg.even_ticks((-130.0, 20.0)).values()] == [*map(str, range(-120, 21, 20))]
    assert [*svg.round_ticks((10.0, 150.0)).values()] == ["10", "20", "30", "40", "50", "70", "100"]
    for k in range(200):
        low, length = 0.37 * k - 20, 0.003 * 1.07**k
        at = [*svg.even_ticks((low, low + length))]
        assert 4 <= len(at) <= 11
        assert low - 1e-9 < at[0] < at[-1] < low + length + 1e-9
