"""What a heat map shows: cells, axes, colours, and the file."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from polarstep.diagnostics import heatmap, read_rows

matplotlib = pytest.importorskip("matplotlib")
pyplot = pytest.importorskip("matplotlib.pyplot")


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
    save = pyplot.Figure.savefig

    def keep(figure, *args, **options):
        saved.append(figure)
        return save(figure, *args, **options)

    monkeypatch.setattr(pyplot.Figure, "savefig", keep)

    def draw(rows, *column, name="map.png"):
        heatmap(rows, tmp_path / name, *column)
        return saved.pop()

    return draw


def test_layers_go_down_and_steps_across(drawn):
    figure = drawn(ROWS)
    axes, bar = figure.axes
    grid = axes.images[0].get_array().filled(np.nan)
    expected = [[0.25, np.nan], [0.5, np.nan], [np.nan, 0.75]]
    np.testing.assert_array_equal(grid, expected)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "a [1]", "b"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["10", "1,000"]
    assert axes.get_xlabel() == "step"
    assert axes.get_title("left").startswith("γ")
    assert axes.images[0].get_interpolation() == "nearest"
    assert not any(spine.get_visible() for spine in axes.spines.values())
    assert not bar.spines["outline"].get_visible()


def test_empty_cells_are_grey_unlike_the_page_and_every_value(drawn):
    figure = drawn(ROWS)
    (axes, _), page = figure.axes, figure.get_facecolor()
    red, green, blue, _ = axes.get_facecolor()
    assert red == green == blue != page[0]
    colours = axes.images[0].cmap(np.linspace(0, 1, 256))[:, :3]
    assert np.abs(colours - red).max(1).min() > 0.1


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
    assert np.ptp(np.diff(shown)) <= 1
    assert [int(tick) for tick in axes.get_xticks()] == shown


def test_more_layers_make_a_higher_picture(drawn):
    few, many = (drawn([row(str(k), 1, 0.5) for k in range(n)]).get_size_inches() for n in (1, 50))
    assert few[0] == many[0]
    assert many[1] > 5 * few[1]


def test_a_layer_takes_one_to_three_lines_of_its_label(drawn):
    heights = [drawn([row(str(k), 1, 0.5) for k in range(n)]).get_size_inches()[1] for n in (1, 50)]
    line = drawn(ROWS).axes[0].get_yticklabels()[0].get_fontsize() / 72
    assert line < (heights[1] - heights[0]) / 49 < 3 * line


def test_the_suffix_is_the_format_and_png_the_usual_one(drawn, tmp_path):
    for name, start in (
        ("a.png", b"\x89PNG"),
        ("b", b"\x89PNG"),
        ("c.svg", b"<?xml"),
        ("d.pdf", b"%PDF"),
    ):
        drawn(ROWS, name=name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_rows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in ROWS[:2]))
    assert read_rows(path) == ROWS[:2]


def test_the_users_own_plots_are_left_alone(tmp_path):
    """In a notebook the backend shows plots inline; a heat map must not switch that off."""
    figures, backend = pyplot.get_fignums(), matplotlib.get_backend()
    try:
        pyplot.switch_backend("svg")
        heatmap(ROWS, tmp_path / "map.png")
        assert matplotlib.get_backend() == "svg"
        assert pyplot.get_fignums() == figures
    finally:
        pyplot.switch_backend(backend)
