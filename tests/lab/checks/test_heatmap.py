"""What a heat map shows: cells, axes, and the file."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from polarstep_lab.checks.heatmap import heatmap


def row(parameter, step, gamma, block=0, **more):
    return {"parameter": parameter, "block": block, "step": step, "gamma": gamma, **more}


ROWS = [
    row("a", 10, 0.25),
    row("a", 10, 0.5, block=1),
    row("b", 10, math.nan),
    row("b", 1000, 0.75, stable_rank=4.0),
    row("c", 20, None),
]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw rows and return the figure."""
    saved = []
    save = Figure.savefig

    def keep(figure, *args, **options):
        saved.append(figure)
        return save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(rows, *column):
        heatmap(rows, tmp_path / "map.svg", *column)
        return saved.pop()

    return draw


def test_layers_go_down_and_steps_across(drawn):
    axes, _ = drawn(ROWS).axes
    grid = axes.images[0].get_array().filled(np.nan)
    np.testing.assert_array_equal(grid, [[0.25, np.nan], [0.5, np.nan], [np.nan, 0.75]])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "a [1]", "b"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["10", "1,000"]
    assert axes.get_title("left").startswith("γ")


@pytest.mark.parametrize(
    ("column", "limits"),
    [("gamma", (0.0, 0.75)), ("captured_energy", (0.0, 1.0)), ("stable_rank", (2.0, 4.0))],
)
def test_shares_begin_at_zero_and_end_at_one_where_they_do(drawn, column, limits):
    rows = [row("a", 1, 0.5, captured_energy=0.9, stable_rank=2.0)]
    rows += [row("a", 2, 0.75, captured_energy=0.8, stable_rank=4.0)]
    assert drawn(rows, column).axes[0].images[0].get_clim() == limits


def test_a_long_run_has_twelve_labels_from_first_to_last(drawn):
    axes = drawn([row("a", step, 0.5) for step in range(100)]).axes[0]
    shown = [int(text.get_text()) for text in axes.get_xticklabels()]
    assert (len(shown), shown[0], shown[-1]) == (12, 0, 99)
    assert [int(tick) for tick in axes.get_xticks()] == shown


def test_the_suffix_is_the_format_and_png_the_usual_one(tmp_path):
    for name, start in (("a.png", b"\x89PNG"), ("b", b"\x89PNG"), ("c.svg", b"<?xml")):
        heatmap(ROWS, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 3  # no temporary file is left


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match="column='nonsense': expected one of gamma"):
        heatmap(ROWS, tmp_path / "map.png", "nonsense")
    with pytest.raises(ValueError, match="record some steps"):
        heatmap([], tmp_path / "map.png")
