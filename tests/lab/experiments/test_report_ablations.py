"""The figure of ablations: what is drawn is what the tables say, read from the painted artists."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from tests.lab.experiments.small import ablation_runs, comparison_runs
from tests.lab.experiments.synthetic import markdown, write_planned, write_run

from polarstep_lab.methods import METHODS
from polarstep_lab.records.record import Ablation
from polarstep_lab.report.ablation_figure import ablation_figure
from polarstep_lab.report.grouping import sections_of
from polarstep_lab.report.panels import ALARM, PAGE
from polarstep_lab.report.runs import collect_runs

BASE = {0: 40.0, 1: 44.0, 2: 41.0}


def section(root):
    (found,), _ = sections_of(collect_runs([root]))
    return found


def runs(root, values, method="rand-muon", recipe="nanogpt-toy", **overrides):
    """Runs as ``compare`` and ``ablate`` plan them, from {axis: {value: {seed: metric}}}.

    The axis "" is for the recipe's own runs. A metric of NaN is that of a run that diverged.
    """
    rule = next(rule for rule in METHODS if rule.slug == method)
    for axis, by_value in values.items():
        for value, by_seed in by_value.items():
            folder = root / f"{method}-{axis}-{value}"
            if axis:
                made = ablation_runs(recipe, rule, axis, [value], [*by_seed], overrides, folder)
            else:
                made = comparison_runs(recipe, [rule], [*by_seed], overrides, folder)
            for run in made:
                final = by_seed[run.spec.seed]
                write_planned(run, 40.0 if math.isnan(final) else final)
                if math.isnan(final):
                    path = run.directory / "result.json"
                    lost = json.loads(path.read_text()) | {"status": "diverged", "value": None}
                    path.write_text(json.dumps(lost))


def painted(found):
    """The caption, and the axes of each panel by its title and its label of y."""
    drawing = ablation_figure(found, "ablations")
    assert drawing.files[0].startswith("<?xml")
    with mpl.rc_context({"axes.titlelocation": "left"}):
        figure = Figure(figsize=drawing.size, layout="constrained")
        drawing.paint(figure)
        figure.canvas.draw()
    return drawing.caption, {(a.get_title("left"), a.get_ylabel()): a for a in figure.axes}


def lines(axes) -> Mapping[str, dict[str, tuple[float, float | None]]]:
    """By name of the line and of the tick: value, and half of the bar or ``None``."""
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    found = {}
    for container in axes.containers:
        assert isinstance(container, ErrorbarContainer)
        data, _, bars = container.lines
        segments = bars[0].get_segments() if bars else [np.empty((0, 2))] * len(data.get_xdata())
        named = {}
        for (x, y), segment in zip(data.get_xydata(), segments, strict=True):
            half = None
            if len(segment) and np.isfinite(segment).all():
                (at, low), (_, high) = segment
                assert at == x
                assert (low + high) / 2 == pytest.approx(y, abs=1e-9)
                half = (high - low) / 2
            named[ticks[round(x)]] = (y, half)
        found[container.get_label()] = named
    return found


def marks(axes, marker=None, **wanted):
    """The points that are drawn apart from the lines: those of a marker, size or colour."""
    return [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in axes.lines
        if line.get_linestyle() == "None"
        and (marker is None or line.get_marker() == marker)
        and all(getattr(line, f"get_{name}")() == value for name, value in wanted.items())
    ]


def hollow(axes):
    return [
        point
        for line in axes.lines
        if line.get_marker() not in ("x", "None") and to_hex(line.get_markerfacecolor()) == PAGE
        for point in line.get_xydata().tolist()
    ]


def written(value: float, half: float | None, decimals: int = 2) -> str:
    """As the tables write a difference."""
    size = f"{value:+.{decimals}f}".replace("-", "−")
    return size if half is None else f"{size} ± {half:.{decimals}f}"


def test_points_and_bars_are_the_differences_of_the_tables(tmp_path):
    by_value = {
        8: {0: 45.0, 1: 47.5, 2: 48.0},
        4: {0: 41.0, 1: 43.0, 2: 41.5, 3: 70.0},  # a seed that the base does not have
        48: {0: 39.5},
    }
    runs(tmp_path, {"": {"": BASE}, "rank": by_value})
    found = section(tmp_path)
    caption, panels = painted(found)
    axes = panels["rank", "Difference in validation perplexity"]
    (drawn,) = lines(axes).values()
    assert found.rows[0].polar["rank"] == 32
    assert [*drawn] == ["4", "8", "32\nrecipe", "48"]
    table = markdown((found,), ()).split("#### rank, ")[1].splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in table if " | " in line}
    for value in map(str, by_value):
        assert cells[value][4] == written(*drawn[value])
    assert drawn["8"][0] == pytest.approx(15.5 / 3)  # of +5, +3.5 and +7
    assert drawn["8"][1] == pytest.approx(4.302653 * np.std([5, 3.5, 7], ddof=1) / 3**0.5)
    assert drawn["48"] == (-0.5, None)
    assert drawn["32\nrecipe"] == (0.0, 0.0)
    assert marks(axes, markersize=9) == [(2.0, 0.0)]
    assert hollow(axes) == [[3.0, -0.5]]
    assert axes.get_title("right") == "n = 1 to 3"
    assert "large point at zero" in caption
    assert "points are means" not in caption
    assert "diverged" not in caption


def test_an_axis_whose_base_is_one_of_its_rows(tmp_path):
    runs(tmp_path, {"rank": {4: {0: 42.0, 1: 45.0}, 32: BASE}, "": {"": BASE}})
    _, panels = painted(section(tmp_path))
    (drawn,) = lines(panels["rank", "Difference in validation perplexity"]).values()
    assert [*drawn] == ["4", "32\nrecipe"]
    assert drawn["4"][0] == 1.5
    assert drawn["32\nrecipe"] == (0.0, 0.0)


def test_named_values_stand_in_the_papers_order_and_are_not_joined(tmp_path):
    solvers = dict.fromkeys(("polar-express", "exact", "cubic", "empirical"), BASE)
    runs(tmp_path, {"": {"": BASE}, "solver": solvers})
    _, panels = painted(section(tmp_path))
    axes = panels["solver", "Difference in validation perplexity"]
    ((name, drawn),) = lines(axes).items()
    assert [*drawn] == ["cubic", "quintic (recipe)", "empirical", "polar-express", "exact"]
    assert axes.containers[0].lines[0].get_linestyle() == "None"
    assert name == "Rand Muon (Nes.-Gaussian)"


def test_without_a_base_the_points_are_the_means_of_the_tables(tmp_path):
    values = {4: {0: 45.0, 1: 47.0, 2: 52.0}, 8: {0: 41.0}}
    runs(tmp_path, {"rank": values})
    found = section(tmp_path)
    caption, panels = painted(found)
    axes = panels["rank", "Validation perplexity"]
    (drawn,) = lines(axes).values()
    assert [*drawn] == ["4", "8"]
    mean, half = drawn["4"]
    assert f"| {mean:.2f} ± 3.61 | ± {half:.2f} | 3 |" in markdown((found,), ())
    assert drawn["8"] == (41.0, None)
    assert hollow(axes) == [[1.0, 41.0]]
    assert not marks(axes, markersize=9)
    assert "points are means" in caption
    assert "at zero" not in caption


def test_methods_with_and_without_a_base_have_panels_of_their_own(tmp_path):
    runs(tmp_path, {"": {"": BASE}, "solver": {"cubic": BASE}}, method="muon")
    runs(tmp_path, {"solver": {"cubic": {0: 39.0}, "empirical": {0: 38.0}}})
    caption, panels = painted(section(tmp_path))
    assert [*panels] == [
        ("solver", "Difference in validation perplexity"),
        ("solver", "Validation perplexity"),
    ]
    (compared,), (means,) = map(lines, panels.values())
    assert (compared, means) == ("Muon (Nesterov)", "Rand Muon (Nes.-Gaussian)")
    assert "large point at zero" in caption
    assert "points are means" in caption


def test_lines_of_several_methods_do_not_hide_one_another(tmp_path):
    for method in ("muon", "rand-muon"):
        runs(tmp_path, {"": {"": BASE}, "solver": {"cubic": BASE}}, method=method)
    _, panels = painted(section(tmp_path))
    (axes,) = panels.values()
    (first, second) = (container.lines[0].get_xdata() for container in axes.containers)
    assert np.all(np.abs(first - second) > 0.1)
    assert [*lines(axes)] == ["Muon (Nesterov)", "Rand Muon (Nes.-Gaussian)"]


def test_a_value_that_diverged_has_a_cross_and_no_number(tmp_path):
    lost = {0: math.nan, 1: math.nan}
    values = {4: lost, 8: {0: 45.0, 1: math.nan, 2: 43.0}, 12: {0: 41.0, 1: 45.0}}
    runs(tmp_path, {"": {"": BASE}, "rank": values})
    caption, panels = painted(section(tmp_path))
    axes = panels["rank", "Difference in validation perplexity"]
    (drawn,) = lines(axes).values()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8", "12", "32\nrecipe"]
    assert [*drawn] == ["8", "12", "32\nrecipe"]
    assert drawn["8"][0] == 3.5  # of +5 and +2
    crosses = marks(axes, "x", color=ALARM)
    assert crosses == [(0.0, 1.0), (1.0, 1.0)]  # on the edge where perplexity is high
    assert axes.get_ylim()[1] < 100  # and the cross does not stretch the axis
    assert "× marks a value of which a run diverged" in caption


def test_a_base_that_diverged_leaves_the_means(tmp_path):
    values = {4: {0: 45.0, 1: 43.0}, 8: {0: 41.0}}
    runs(tmp_path, {"": {"": {0: math.nan, 1: math.nan}}, "rank": values})
    caption, panels = painted(section(tmp_path))
    axes = panels["rank", "Validation perplexity"]
    (drawn,) = lines(axes).values()
    assert {name: value for name, (value, _) in drawn.items()} == {"4": 44.0, "8": 41.0}
    assert [x for x, _ in marks(axes, "x")] == [2.0]
    assert "points are means" in caption


def test_no_figure_where_no_value_has_a_number(tmp_path):
    runs(tmp_path, {"": {"": BASE}, "rank": {4: {0: math.nan}}})
    assert ablation_figure(section(tmp_path), "ablations") is None


def test_without_a_common_seed_it_is_said_and_welchs_interval_drawn(tmp_path):
    runs(tmp_path, {"": {"": BASE}, "rank": {4: {7: 45.0, 8: 47.0}}})
    found = section(tmp_path)
    _, panels = painted(found)
    axes = panels["rank", "Difference in validation perplexity"]
    (drawn,) = lines(axes).values()
    assert f"{written(*drawn['4'])} | means" in markdown((found,), ())
    assert axes.get_title("right") == "no common seed"


def test_many_values_have_names_that_do_not_overlap(tmp_path):
    rates = {round(0.001 * 1.3**k, 6): {0: 40.0 + k, 1: 41.0} for k in range(16)}
    runs(tmp_path, {"": {"": BASE}, "lr": rates, "rank": {4: BASE}, "steps": {1: BASE}})
    _, panels = painted(section(tmp_path))
    axes = panels["lr", "Difference in validation perplexity"]
    labels = axes.get_xticklabels()
    assert len(labels) in (16, 17)
    # Turned by θ, lines of text at a distance d along the axis are d·sin θ apart.
    places = [axes.transData.transform((tick, 0))[0] for tick in axes.get_xticks()]
    height = labels[0].get_fontsize() / 72 * axes.figure.dpi
    apart = min(np.diff(places)) * math.sin(math.radians(labels[0].get_rotation()))
    assert apart > 0.9 * height


def test_a_config_that_cannot_be_read_has_its_base_as_recipe(tmp_path):
    """As records of another version: the value is not known, and no line leads to it."""
    for seed, final in BASE.items():
        write_run(tmp_path / f"a{seed}", seed=seed, final=final)
        ablation = Ablation("rank", 8)
        write_run(tmp_path / f"b{seed}", seed=seed, final=final + 1.0, ablation=ablation)
    _, panels = painted(section(tmp_path))
    (axes,) = panels.values()
    (drawn,) = lines(axes).values()
    assert {name: value for name, (value, _) in drawn.items()} == {"8": 1.0, "recipe": 0.0}
    assert axes.containers[0].lines[0].get_linestyle() == "None"
    assert axes.get_title("right") == "n = 3"
