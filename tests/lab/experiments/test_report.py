"""The report: which runs make a row, what tables and figures say of them, the page and its folder."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from tests.lab.experiments.synthetic import markdown, write_comparison, write_run
from typer.testing import CliRunner

from polarstep_lab.cli import app
from polarstep_lab.estimates import Estimate
from polarstep_lab.paper import ABLATED_METHOD, ABLATIONS, METHODS, TABLE_2
from polarstep_lab.records.record import Ablation
from polarstep_lab.report import report_files, write_report
from polarstep_lab.report.ablations import ablation_figure, estimates_of
from polarstep_lab.report.comparison import curve_of
from polarstep_lab.report.figures import Drawing, Panel, Series, looks
from polarstep_lab.report.gamma import gamma_figure, gamma_of, gamma_table
from polarstep_lab.report.gradient_noise import noise_figure, noise_table
from polarstep_lab.report.page import MANIFEST
from polarstep_lab.report.rows import sections_of
from polarstep_lab.report.runs import at_a_time, collect_runs
from polarstep_lab.storage import StorageError, read_json, write_json


def sections(*paths):
    return sections_of(collect_runs(paths))


def section(*paths):
    (found,), _ = sections(*paths)
    return found


def change(path, **values):
    write_json(path, read_json(path) | values)


# --- rows -----------------------------------------------------------------------------------------


def test_a_row_is_the_mean_and_sample_deviation_over_seeds(tmp_path):
    finals = [30.0, 31.0, 33.0]
    for seed, final in enumerate(finals):
        write_run(tmp_path / str(seed), seed=seed, final=final)
    (row,) = section(tmp_path).rows
    assert row.metric == Estimate(statistics.fmean(finals), statistics.stdev(finals), 3)
    assert list(row.runs["seed"]) == [0, 1, 2]


def test_one_seed_has_no_spread(tmp_path):
    write_run(tmp_path / "a")
    assert section(tmp_path).rows[0].metric.std is None
    text = markdown((section(tmp_path),), ())
    assert "±" not in "".join(re.findall(r"^\|.*", text, re.MULTILINE))


def test_methods_come_in_the_order_of_the_paper(tmp_path):
    write_comparison(tmp_path, "gpt-small", "nanogpt", seeds=1)
    assert [row.method for row in section(tmp_path).rows] == [method.name for method in METHODS]


def test_runs_judged_by_validation_and_by_test_are_in_sections_of_their_own(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"old-{seed}", seed=seed, final=30.0 + seed)
        write_run(tmp_path / f"new-{seed}", seed=seed, final=40.0 + seed, metric="test_perplexity")
    write_run(tmp_path / "cut", seed=2, status=None)
    (new, old), notices = sections(tmp_path)
    assert not notices
    assert (new.rows[0].metric.mean, old.rows[0].metric.mean) == (40.5, 30.5)
    assert new.rows[0].seeds_text == "2 of 3 (1 unfinished)"
    assert re.findall("^## .*", markdown((new, old), ()), re.MULTILINE) == [
        "## gpt-small (nanogpt)",
        "## gpt-small (nanogpt), validation only",
    ]


def test_runs_that_did_not_finish_are_counted_and_kept_out_of_the_mean(tmp_path):
    write_run(tmp_path / "good", seed=0, final=30.0)
    for seed, status in enumerate(["diverged", "failed", "stopped", None], start=1):
        write_run(tmp_path / str(status), seed=seed, status=status, optimizer_ms=61.24)
    write_run(tmp_path / "lost", method="Muon (Nesterov)", status="diverged", gflops=7.0)
    found = section(tmp_path)
    row, lost = found.rows
    assert row.metric.mean == 30.0
    text = markdown((found,), ())
    assert "1 of 5 (1 diverged, 1 failed, 1 stopped, 1 unfinished)" in text
    assert lost.metric is None
    assert "| 0 of 1 (1 diverged) | — |  | 7.000 | — | — | — |" in text
    assert "61.24" not in text
    assert found.best(found.rows) is row


def test_runs_with_different_configs_are_never_averaged(tmp_path):
    """And a label leaves out what all rows of its method share."""
    shared = {"runtime.keep_checkpoint": False}
    write_run(tmp_path / "a", seed=0, overrides={**shared, "lr": 0.1})
    write_run(tmp_path / "b", seed=1, overrides={**shared, "lr": 0.2})
    write_run(tmp_path / "d", method="Muon (Nesterov)", overrides={"lr": 0.1})
    write_run(tmp_path / "e", method="Muon (Nesterov)")
    found = section(tmp_path)
    assert [row.label for row in found.rows] == [
        "AdamW, lr=0.1",
        "AdamW, lr=0.2",
        "Muon (Nesterov), lr=0.1",
        "Muon (Nesterov), recipe's own settings",
    ]
    assert [row.metric.n for row in found.rows] == [1] * 4
    assert "no best" not in markdown((found,), ())


def test_rows_of_other_networks_or_lengths_have_no_best(tmp_path):
    write_run(tmp_path / "a", settings={"model": {"width": 64}})
    write_run(tmp_path / "b", method="Muon (Nesterov)", settings={"model": {"width": 128}})
    text = markdown((section(tmp_path),), ())
    assert "The rows differ in model.width, so that no best of them is named." in text
    assert "**" not in text


def test_a_seed_run_twice_counts_once_and_the_first_that_finished_counts(tmp_path):
    """Whatever its folder is called: a run made again for its times does not replace a metric."""
    write_run(tmp_path / "0", seed=3, status="stopped")
    for name, final, day in (("z", 29.0, 15), ("a", 28.0, 16)):
        folder = write_run(tmp_path / name, seed=3, final=final)
        change(folder / "environment.json", started=f"2026-11-{day}T01:00:00Z")
    (found,), notices = sections(tmp_path)
    assert found.rows[0].metric.mean == 29.0
    assert len(notices) == 2
    assert f"{tmp_path.name}/a is left out for {tmp_path.name}/z" in " ".join(notices)


def test_times_of_different_devices_are_not_mixed(tmp_path):
    write_run(tmp_path / "a", seed=0, device="one")
    write_run(tmp_path / "b", seed=1, device="another")
    (row,) = section(tmp_path).rows
    assert row.times[["optimizer_ms_per_step", "step_ms"]].isna().all()
    assert row.metric.n == 2


@pytest.mark.parametrize(
    ("moments", "most"), [((0, 9, 18), 1), ((0, 4, 8), 3), ((0, 5, 30), 2), ((None, None), 1)]
)
def test_runs_that_shared_a_device_are_noticed(tmp_path, moments, most):
    """Runs of ten seconds each; a start at 9.9 is recorded as 9."""
    for seed, second in enumerate(moments):
        folder = write_run(tmp_path / str(seed), seed=seed)
        started = None if second is None else f"2026-11-15T01:00:{second:02}Z"
        change(folder / "environment.json", started=started)
    assert at_a_time(collect_runs([tmp_path]).frame) == most
    said = "one run at a time" if most == 1 else f"with up to {most} runs at a time"
    assert said in markdown((section(tmp_path),), ())


def test_the_report_of_a_study_has_its_names_and_what_it_compares_with(tmp_path):
    for method, finals in (("AdamW", (40.0, 42.0)), ("Muon (Nesterov)", (36.0, 39.0))):
        variant = {"AdamW": "base", "Muon (Nesterov)": "my idea"}[method]
        study = {"name": "s", "variant": variant, "against": "base", "rate": ""}
        for seed, final in enumerate(finals):
            folder = write_run(
                tmp_path / variant / str(seed), method=method, seed=seed, final=final
            )
            change(folder / "config.json", study=study)
    tried = write_run(tmp_path / "rates", method="AdamW", seed=3, final=10.0)
    change(tried / "config.json", study={**study, "rate": "chooses"})
    found = section(tmp_path)
    assert [row.label for row in found.rows] == ["base", "my idea"]
    assert {len(row.runs) for row in found.rows} == {2}
    expected = (
        "my idea has validation perplexity 37.50 ± 2.12, base 41.00 ± 1.41: 3.50 ± 6.35 lower (95% "
        "t-interval, 2 common seeds, zero within it); a whole step takes 1.00 times as long."
    )
    assert expected in markdown((found,), ())


def test_each_row_of_a_study_stands_against_its_own(tmp_path):
    """As in a study of lengths: against full space of the same length."""
    for steps, finals in {10: (40.0, 41.0), 20: (30.0, 28.0)}.items():
        for name, final in zip((f"full, {steps}", f"mine, {steps}"), finals, strict=True):
            settings = {"data": {"steps": steps}, "optimizer": {"map": name}}
            folder = write_run(tmp_path / name, method=name, settings=settings, final=final)
            study = {"name": "s", "variant": name, "against": f"full, {steps}"}
            change(folder / "config.json", study=study)
    text = markdown((section(tmp_path),), ())
    assert "| mine, 10 | 41.00 | — | 1 | +1.00 | 1 |" in text
    assert "| mine, 20 | 28.00 | — | 1 | −2.00 | 1 |" in text
    assert "| full, 20 | 30.00 | — | 1 | — |  |" in text
    assert "The rows differ in data.steps" in text


def test_rows_stand_against_the_best_of_adamws(tmp_path):
    for lr, final in ((0.1, 31.0), (0.2, 30.0)):
        write_run(tmp_path / str(lr), overrides={"lr": lr}, final=final)
    write_run(tmp_path / "muon", method="Muon (Nesterov)", final=29.0)
    text = markdown((section(tmp_path),), ())
    assert "| Against AdamW, lr=0.2 | Pairs |" in text
    assert "| Muon (Nesterov) | **29.00** | — | 1 | −1.00 | 1 |" in text
    assert (
        "Muon (Nesterov) has validation perplexity 29.00, AdamW, lr=0.2 30.00: 1.00 lower" in text
    )


# --- the paper ------------------------------------------------------------------------------------


def test_the_paper_stands_beside_its_own_recipe_only(tmp_path):
    write_comparison(tmp_path / "paper", "nanogpt", "nanogpt", seeds=2)
    write_comparison(tmp_path / "other", "gpt-small", "nanogpt", seeds=2)
    write_run(tmp_path / "changed", recipe="nanogpt", overrides={"optimizer.lr": 0.5})
    write_run(
        tmp_path / "text",
        recipe="nanogpt",
        overrides={"data.train": ["w.bin"]},
        method="SGD (Nesterov)",
    )
    (other, paper), _ = sections(tmp_path)
    published = [row for row in paper.rows if row.paper]
    assert {row.method: row.paper for row in published} == TABLE_2["nanogpt"]
    assert len(paper.rows) == len(published) + 2
    text = markdown((paper,), ())
    assert "28.0773 ± 0.3372" in text
    assert "The GPT here is a plain one." in text
    assert "aper" not in markdown((other,), ())


@pytest.mark.parametrize(("moved", "marked"), [(0.0, False), (0.02, True)])
def test_a_mark_stands_at_the_authors_figures_that_ours_are_off(tmp_path, moved, marked):
    common = {"recipe": "cifar10", "benchmark": "cifar10", "method": ABLATED_METHOD}
    published = ABLATIONS["rank"][16]
    for seed, spread in enumerate((-0.001, 0.0, 0.001)):
        final = published.mean + moved + spread
        folder = tmp_path / str(seed)
        write_run(folder, **common, ablation=Ablation("rank", 16), seed=seed, final=final)
        write_run(tmp_path / f"own-{seed}", **common, seed=seed, final=0.93 + spread)
    text = markdown((section(tmp_path),), ())
    figure = f"{published.mean:.4f} ± {published.std:.4f}"
    assert figure in text
    assert (f"{figure}‡" in text) == marked
    # The authors' default has a figure of its own on each axis of their file.
    own = ABLATIONS["rank"][128]
    assert "| 128 (recipe) | " in text
    assert f"{own.mean:.4f} ± {own.std:.4f}" in text


# --- ablations ------------------------------------------------------------------------------------

RECIPE = {0: 150.0, 1: 140.0, 2: 148.0}


def ablated(root, values, lost=(), axis="rank", recipe=RECIPE):
    """The ablation of one recipe: its own row, and ``{value: {seed: metric}}``."""
    for value, finals in {"": recipe, **values}.items():
        for seed, final in finals.items():
            write_run(
                root / f"{value}-{seed}",
                method=ABLATED_METHOD,
                seed=seed,
                final=final,
                ablation=Ablation(axis, value) if value != "" else None,
                status="diverged" if (value, seed) in lost else "finished",
            )
    found = section(root)
    (ablation,) = found.ablations
    return found, ablation, ablation.difference(ablation.rows[0])


def test_ablations_are_sorted_by_value_and_apart_from_the_comparison(tmp_path):
    found, ablation, _ = ablated(tmp_path, {128: RECIPE, 16: RECIPE, 64: RECIPE})
    assert [row.value for row in ablation.rows] == [16, 64, 128]
    assert ablation.base is found.rows[0]
    assert len(found.rows) == 1


def test_the_base_is_the_row_with_the_recipes_own_value(tmp_path):
    common = {"recipe": "cifar10", "benchmark": "cifar10", "method": ABLATED_METHOD, "final": 0.93}
    for value in (16, 128):
        write_run(tmp_path / str(value), **common, ablation=Ablation("rank", value))
    (ablation,) = section(tmp_path).ablations
    assert ablation.base.value == ablation.own == 128


def test_an_axis_varied_with_several_settings_is_several_ablations(tmp_path):
    """One with another setting is not compared with the recipe's own row."""
    write_run(tmp_path / "plain")
    for setting in ({}, {"optimizer.polar.power": 0}):
        for rate in (0.015, 0.03):
            write_run(
                tmp_path / f"{len(setting)}-{rate}",
                ablation=Ablation("lr", rate),
                overrides=setting | {"runtime.device": "cpu"},
                settings=setting | {"optimizer.lr": rate},
            )
    found = section(tmp_path)
    assert [a.setting for a in found.ablations] == ["", "power=0"]
    assert [a.base and a.base.label for a in found.ablations] == ["AdamW", None]
    assert "#### lr, AdamW, power=0" in markdown((found,), ())
    drawing = ablation_figure(found)
    assert [panel.ylabel for panel in drawing.panels] == [
        "Difference in validation perplexity",
        "Validation perplexity",
    ]


def test_a_difference_is_taken_on_the_seeds_that_both_have(tmp_path):
    """A seed that is worth ten moves both sides: it must not move their difference."""
    found, _, difference = ablated(tmp_path, {8: {0: 151.0, 1: 143.0, 7: 100.0}})
    assert difference.value == pytest.approx(2.0)  # of +1 and +3
    assert difference.error == pytest.approx(1.0)
    assert "| +2.00 ± 12.71 | 2 |" in markdown((found,), ())  # t of one degree of freedom


@pytest.mark.parametrize(
    ("values", "lost", "cells"),
    [
        ({1: 141.5}, (), "| 8 | **141.50** | — | 1 | +1.50 | 1 |"),
        ({0: 151.0, 1: 143.0}, ((8, 1),), "| 8 | 151.00 | — | 1 of 2 (1 diverged) | +1.00 | 1 |"),
        ({0: 151.0}, ((8, 0),), "| 8 | — | — | 0 of 1 (1 diverged) | — |"),
        ({5: 151.0}, (), "| 8 | 151.00 | — | 1 | +5.00 | means |"),  # no seed is common
    ],
)
def test_a_difference_says_what_it_rests_on(tmp_path, values, lost, cells):
    found, _, _ = ablated(tmp_path, {8: values}, lost)
    assert cells in markdown((found,), ())


def test_the_figure_has_the_differences_of_the_table(tmp_path):
    found, ablation, _ = ablated(
        tmp_path, {48: {0: 149.5}, 8: {0: 155.0, 1: 143.5, 2: 155.0}, 4: {0: 1.0}}, lost=((4, 0),)
    )
    (panel,) = ablation_figure(found).panels
    (series,) = panel.series
    drawn = estimates_of(ablation)
    by_row = {row.value: round(d.value, 9) for row, d in drawn.items()}
    assert by_row == {None: 0.0, 8: 5.166666667, 48: -0.5}
    assert sorted(series.y) == sorted(d.value for d in drawn.values())
    by_value = dict(zip(series.y, series.high - series.y, strict=True))
    assert np.isnan(by_value[-0.5])
    assert by_value[0.0] == 0.0
    figure = Figure(layout="constrained")
    ablation_figure(found).paint(figure)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["recipe", "8", "48"]


def test_a_base_that_diverged_leaves_the_means(tmp_path):
    lost = [("", seed) for seed in RECIPE]
    found, ablation, _ = ablated(tmp_path, {4: {0: 45.0, 1: 43.0}, 8: {0: 41.0}}, lost)
    assert [d.value for d in estimates_of(ablation).values()] == [44.0, 41.0]
    assert ablation_figure(found).panels[0].ylabel == "Validation perplexity"


def test_many_values_and_names_leave_room_for_the_panels(tmp_path):
    rates = {round(0.001 * 1.3**k, 6): {0: 40.0 + k} for k in range(16)}
    found, _, _ = ablated(tmp_path, rates, axis="lr")
    figure = Figure(layout="constrained")
    ablation_figure(found).paint(figure)
    assert figure.axes[0].get_xticklabels()[0].get_rotation() == 60
    heights = []
    for count in (2, 24):
        names = [f"{'a long name of a method ' * 4}{i}" for i in range(count)]
        line = [Series(name, looks(1)[0], [1, 2], [1, 2]) for name in names]
        drawing = Drawing("names", "", "", (9.0, 3.0), [Panel(line)], 1)
        figure = Figure(figsize=drawing.size, layout="constrained")
        drawing.paint(figure)
        figure.draw_without_rendering()
        (axes,), (legend,) = figure.axes, figure.legends
        assert legend.get_window_extent().y1 < axes.get_window_extent().y0
        heights.append(axes.get_position().height * figure.get_figheight())
    assert heights[1] > 0.8 * heights[0]


# --- γ, ν and noise -------------------------------------------------------------------------------


def test_the_table_of_inexactness_has_the_worst_of_each_row(tmp_path):
    """Zero matrices and rounding are no inexactness, and what diverged has its row."""
    folder = write_run(tmp_path / "a", method="Muon (Nesterov)")
    rows = [
        {"step": 0, "parameter": "a.weight", "gamma": 0.25, "nu": -1e-9, "stable_rank": 2.0},
        {"step": 10, "parameter": "b", "block": 2, "gamma": 0.5, "nu": 0.1, "stable_rank": 2.0},
        {"step": 10, "parameter": "c", "gamma": None, "nu": None, "stable_rank": 2.0},
        {"step": 10, "parameter": "zero", "gamma": 1.0, "nu": 0.0, "stable_rank": 0.0},
    ]
    (folder / "gamma.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lost = write_run(tmp_path / "b", method="Muon (Polyak)", status="diverged")
    (lost / "gamma.jsonl").write_text(json.dumps(rows[0] | {"nu": 1998.4756}) + "\n")
    found = section(tmp_path)
    assert gamma_table({row: row.label for row in found.rows}).rows == [
        ["Muon (Polyak)", "0 of 1 (1 diverged)", "step 0", "0.2500", "0.2500", "1998", "a, step 0"],
        ["Muon (Nesterov)", "1", "2, last 10", "0.3750", "0.5000", "0.1000", "b [2], step 10"],
    ]
    assert list(gamma_of([found.rows[1].first])["matrix"]) == ["a", "b [2]", "c"]
    drawing = gamma_figure({row: row.label for row in found.rows}, "gamma")
    assert [panel.title for panel in drawing.panels] == ["Muon\n(Nesterov)", ""]
    assert len(drawing.panels[0].series[0].x) == 2


STEPS = (0, 3, 20, 200)


def noise_rows(units=("batch", "example"), alpha=4.0):
    for step in STEPS:
        for unit in units:
            for name in ("all", "hidden", "blocks.0.mlp.up", "blocks.1.mlp.up"):
                high = None if alpha > 9 else 1.3 * alpha
                tail = {"alpha": alpha, "low": 0.8 * alpha, "high": high, "used": 200}
                sums = ((4, 1.7), (16, 1.9))
                yield {
                    "step": step,
                    "unit": unit,
                    "examples": 1 if unit == "example" else 16,
                    "draws": 512,
                    "parameter": name,
                    "gradient": 2 / (1 + step),
                    "moments": {"1.25": 1.0, "1.5": 1.1, "1.75": 1.2, "2": 1.3},
                    "tail": tail | {"gaussian": [20.0, 50.0, None]},
                    "growth": [
                        {"examples": n, "alpha": a, "low": 0.9 * a, "high": 1.1 * a}
                        for n, a in sums
                    ],
                }


def write_noise(folder, rows):
    (folder / "noise.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.rendered
def test_the_figure_of_noise_has_every_panel_and_says_what_was_drawn(tmp_path):
    planned = {"runtime": {"noise": {"points": 5}}}
    write_noise(write_run(tmp_path / "a", status=None, overrides=planned), noise_rows())
    found = section(tmp_path)
    figure = noise_figure(found.rows[0], "noise")
    assert "seed 0, unfinished, with 4 of 5 points: gradients" in figure.caption
    assert "512 of one sequence and 512 of one batch of 16 at each point" in figure.caption
    assert "grows by 30.0% at most" in figure.caption
    for words in ("Gaussian noise", "single matrices", "sums of 4 examples", "sums of 16 examples",
                  "one batch", "‖∇f‖", "no variance above"):  # fmt: skip
        assert words in figure.svg, words
    assert "| AdamW, unfinished | sequence | 4 of 5 |" in markdown((found,), ())


@pytest.mark.rendered
def test_infinite_indices_silent_points_and_runs_without_examples_are_drawn(tmp_path):
    rows = list(noise_rows(units=("batch",), alpha=12.0))
    for row in rows:
        if row["step"] == 0:  # no noise at all, as of matrices behind a zero initialization
            del row["tail"], row["growth"]
            row["moments"] = dict.fromkeys(row["moments"], 0.0)
            row["gradient"] = 0.0
        elif row["step"] == 3:
            row["tail"]["alpha"] = None
            del row["tail"]["gaussian"]
    write_noise(write_run(tmp_path / "a"), rows)
    figure = noise_figure(section(tmp_path).rows[0], "noise")
    assert "nan" not in figure.svg.lower().replace("dominant", "")


def test_the_noise_table_has_the_heaviest_point_of_each_unit(tmp_path):
    rows = list(noise_rows())
    for row in rows:
        if row["step"] == 20 and row["unit"] == "example" and row["parameter"] == "hidden":
            row["tail"] |= {"alpha": 1.19, "low": 0.91, "high": None}
            row["growth"][1] |= {"alpha": 1.53, "low": 1.34, "high": 1.77}
            row["growth"][0] |= {"alpha": 1.1}  # shorter sums do not count
        if row["step"] == 3:
            row["tail"]["alpha"] = None
        if row["unit"] == "batch":
            row["tail"]["gaussian"] = [1.4e7, 1.8e7, None]
    write_noise(write_run(tmp_path / "a", method="Muon (Nesterov)"), rows)
    example, batch = noise_table(section(tmp_path).all_rows).rows
    assert example[1:] == ["sequence", "4", "1.19 (0.910 to ∞) at step 20", "20.0 to ∞",
                           "1.53 (1.34 to 1.77) at step 20"]  # fmt: skip
    assert (batch[1], batch[4]) == ("batch of 16", "∞")
    assert batch[3] == "4.00 (3.20 to 5.20) at step 0"


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("records") / "runs"
    write_comparison(root / "compare", "nanogpt", "nanogpt", seeds=2)
    write_run(root / "lost", recipe="nanogpt", seed=5, status="diverged")
    for value in (16, 64):
        write_run(root / f"rank-{value}", recipe="nanogpt", ablation=Ablation("rank", value))
    return root


@pytest.fixture(scope="module")
def files(runs):
    return report_files([runs])


class Outline(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_data(self, data):
        self.text += data


@pytest.mark.rendered
def test_the_same_records_give_the_same_bytes(runs, files):
    assert report_files([runs]) == files


def test_the_page_needs_no_network(files):
    page = Outline(files["index.html"])
    loads = [(t, k, v) for t, k, v in page.attributes if k in ("src", "srcset", "data")]
    assert all(value.startswith("data:") for _, _, value in loads)
    links = [v for tag, key, v in page.attributes if tag in ("a", "link") and key == "href"]
    assert all(v.startswith("#") or v in files for v in links)
    assert "@import" not in files["index.html"]


def test_the_page_says_everything(files, runs):
    text = Outline(files["index.html"]).text
    for method in METHODS:
        assert text.count(method.name) >= 2
        assert f"polarstep run nanogpt --method '{method.name}' --seed 1" in text
    assert "1 diverged" in text
    assert "the loss was not finite at step 66" in text
    assert "Synthetic CPU, 2 threads" in text
    assert str(runs.parent) not in text


def test_of_many_seeds_the_first_command_stands_for_all(tmp_path):
    for seed in range(7):
        write_run(tmp_path / str(seed), seed=seed)
    first, others = section(tmp_path).rows[0].commands.splitlines()
    assert first.endswith("--seed 0")
    assert others == "# and with the seeds 1, 2, 3, 4, 5, 6"


def test_csv_keeps_every_digit_and_every_run(tmp_path):
    final = 29.716712345678901
    write_run(tmp_path / "a", final=final)
    write_run(tmp_path / "b", seed=1, status="diverged")
    lines = list(csv.DictReader(io.StringIO(report_files([tmp_path])["runs.csv"])))
    assert [line["status"] for line in lines] == ["finished", "diverged"]
    assert float(lines[0]["value"]) == final
    assert lines[1]["value"] == ""
    assert lines[1]["message"] == "the loss was not finite at step 66"


def test_the_first_sentence_is_the_best_row_against_adamw(tmp_path):
    write_run(tmp_path / "c", method="Muon (Polyak)", final=30.0)
    page = report_files([tmp_path])["index.html"]
    assert "lowest" not in page
    write_run(tmp_path / "d", method="Muon (Nesterov)", final=31.0)
    page = report_files([tmp_path])["index.html"]
    assert "Muon (Polyak) has the lowest validation perplexity of 2 rows, 30.00." in page
    write_run(tmp_path / "e", method="AdamW", final=32.0)
    (first, *_) = re.findall(r"<p[ >].*?</p>", report_files([tmp_path])["index.html"], re.DOTALL)
    assert (
        "Muon (Polyak) has validation perplexity 30.00, AdamW 32.00: 2.00 lower (1 common seed); a "
        "whole step takes 1.00 times as long." in first
    )


HOSTILE = "x|y <script>alert(1)</script>\n# [a](b) `c` **d** &amp;"


@pytest.mark.rendered
def test_text_from_records_cannot_become_html_or_break_a_table(tmp_path):
    folder = write_run(tmp_path / HOSTILE.replace("/", ""), recipe=HOSTILE, method=HOSTILE)
    write_run(tmp_path / "other", recipe=HOSTILE, method="AdamW", final=31.0)
    (tmp_path / "<b>broken").mkdir()
    (tmp_path / "<b>broken" / "config.json").write_text("{")
    change(folder / "config.json", command="polarstep\n```\n<script>alert(2)</script>")
    files = report_files([tmp_path])
    page, text = files["index.html"], files["summary.md"]
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    outside, fence = [], None
    for line in text.splitlines():
        ticks = re.match("`{3,}", line)
        if ticks and fence in (None, line):
            fence = None if fence else ticks[0]
        elif fence is None:
            outside.append(line)
    assert fence is None  # no command ends its block early
    assert not any("<" in line for line in outside)
    assert not any(line.startswith("# [a]") for line in outside)
    rows = [line for line in outside if line.startswith("| ")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rows}) == 1
    shown = r"x\|y &lt;script&gt;alert(1)&lt;/script&gt; # \[a\](b) \`c\` \*\*d\*\* &amp;amp;"
    assert any(shown in line for line in rows)


def test_every_figure_is_on_the_page_and_beside_it(files):
    names = {name.split("/")[1].rsplit(".", 1)[0] for name in files if name.startswith("figures/")}
    kinds = ("trajectories", "cost", "ablations", "gamma")
    assert all(any(kind in name for name in names) for kind in kinds)
    page = files["index.html"]
    for name in names:
        ElementTree.fromstring(files[f"figures/{name}.svg"])
        assert f'aria-labelledby="{name}-caption"' in page
        assert f'id="{name}-caption"' in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    clips = [name for name in ids if re.fullmatch(r"p[0-9a-f]{10,}", name)]
    assert clips
    assert len(clips) == len(set(clips))
    assert set(re.findall(r'url\(#([^)"]+)\)', page)) <= set(ids)


def test_a_band_is_one_deviation_and_a_lost_run_stays_out_of_it(runs):
    row = section(runs).rows[0]
    curve = curve_of(row, "nanogpt")
    last = [run.rows("val")[-1].perplexity for run in row.finished["record"]]
    assert curve["mean"].iloc[-1] == pytest.approx(np.mean(last))
    assert curve["std"].iloc[-1] == pytest.approx(np.std(last, ddof=1))


def test_environments_are_told_apart_and_may_be_missing(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1)
    write_run(tmp_path / "c", seed=2, device="Another CPU")
    (write_run(tmp_path / "d", seed=3) / "environment.json").unlink()
    page = report_files([tmp_path])["index.html"].split("<h2>Environment</h2>")[1]
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t", page)
    devices = ["Another CPU, 2 threads", "Synthetic CPU, 2 threads", "unknown device"]
    assert cells[:8] == ["device", *devices, "runs", "1", "2", "1"]
    assert cells[cells.index("torch") :][:4] == ["torch", "2.13.0", "2.13.0", "not recorded"]


# --- the folder and the command -------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    write_run(tmp_path / "runs" / "a")
    return tmp_path / "runs"


def test_a_report_replaces_an_earlier_report_and_nothing_else(small, tmp_path):
    out = tmp_path / "out"
    write_run(small / "rank", ablation=Ablation("rank", 8))
    write_report([small], out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    write_report([small], out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (out / "mine.md").write_text("my notes")
    stale = next(out.glob("figures/*ablation*.svg"))
    (small / "rank" / "config.json").unlink()
    write_report([small], out)
    assert not stale.exists()
    assert (out / "mine.md").read_text() == "my notes"
    assert not list(out.rglob("*.part"))


def test_an_interrupted_write_can_be_repeated(small, tmp_path, monkeypatch):
    import polarstep_lab.report.page as page

    real, names = page.write_atomically, []

    def fails(path, write):
        names.append(path.name)
        if len(names) == 3:
            raise KeyboardInterrupt
        real(path, write)

    monkeypatch.setattr(page, "write_atomically", fails)
    with pytest.raises(KeyboardInterrupt):
        write_report([small], tmp_path / "out")
    assert MANIFEST not in names
    monkeypatch.setattr(page, "write_atomically", real)
    assert write_report([small], tmp_path / "out").exists()


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_several_directories_make_one_report(invoke, tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b" / "deep" / "inside", seed=1)
    result = invoke("a", "b", "--out", "page")
    assert result.exit_code == 0
    assert result.stdout.strip() == "Report: page/index.html"
    assert (tmp_path / "page" / "index.html").read_text().startswith("<!DOCTYPE html>")
    assert "| AdamW | 30.00 ± 0.00 | ± 0.00 | 2 |" in (tmp_path / "page/summary.md").read_text()


@pytest.mark.parametrize("value", ["x", 7, -1.5, None, [], {}, True], ids=str)
def test_one_bad_run_does_not_cost_the_report_of_the_others(invoke, tmp_path, value):
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"good-{seed}", seed=seed)
    fields = {}
    for file in ("config.json", "result.json", "environment.json"):
        for key in read_json(tmp_path / "runs" / "good-0" / file):
            directory = write_run(tmp_path / "runs" / f"{file}-{key}", seed=2 + len(fields))
            change(directory / file, **{key: value})
            fields[directory.name] = key
    assert {"metric", "benchmark", "started"} <= set(fields.values())
    result = invoke("runs", "--out", "page")
    assert result.exit_code == 0, result.stderr
    table = (tmp_path / "page" / "runs.csv").read_text()
    assert "runs/good-0," in table
    assert "runs/good-1," in table
    assert "result.json-metric is left out" in (tmp_path / "page" / "summary.md").read_text()


def test_a_broken_archive_is_named_and_does_not_stop_the_others(tmp_path):
    write_run(tmp_path / "good")
    archive = tmp_path / "packed" / "records.jsonl.gz"
    archive.parent.mkdir()
    archive.write_text("no archive")
    runs = collect_runs([tmp_path])
    assert len(runs.frame) == 1
    name = f"{tmp_path.name}/packed/records.jsonl.gz"
    (notice,) = runs.notices
    assert notice.startswith(f"{name} is left out: {name} cannot be read as records")
    with pytest.raises(StorageError, match="cannot be read as records"):
        collect_runs([archive])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "no run directories in runs"),
        (lambda path: None, "runs does not exist"),
        (lambda path: write_run(path / "a", status="diverged"), "none of the 1 runs has finished"),
    ],
)
def test_nothing_to_report_is_an_error(invoke, tmp_path, make, message):
    make(tmp_path / "runs")
    result = invoke("runs", "--out", "page")
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            "page",
            "files that no report wrote: index.html. Nothing was changed; choose another --out",
        ),
        ("today/page.html", "--out today/page, in which the page is index.html"),
        ("page/index.html", "is a file; --out expects a folder"),
        ("page/index.html/far/below", "index.html is a file, expected a folder"),
    ],
)
def test_what_no_report_wrote_is_not_overwritten(small, invoke, tmp_path, out, message):
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("mine")
    result = invoke("runs", "--out", out)
    assert result.exit_code == 1
    assert message in result.stderr
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["index.html"]
    assert (tmp_path / "page" / "index.html").read_text() == "mine"
    assert not (tmp_path / "today").exists()


@pytest.mark.parametrize("package", ["pandas", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(invoke, monkeypatch, package):
    for name in [*sys.modules]:
        if name.startswith("polarstep_lab.report") or name.split(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = invoke("runs")
    assert result.exit_code == 1
    assert f"a report needs '{package}', which is not installed" in result.stderr
    assert "pip install 'polarstep[experiments]'" in result.stderr


def test_the_command_line_imports_neither_pandas_nor_matplotlib():
    code = "import sys, polarstep_lab.cli; print({'pandas', 'matplotlib'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
