"""Which runs make a row, and what the tables say about them."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics

import pytest
from tests.lab.experiments.small import ablation_runs, comparison_runs
from tests.lab.experiments.synthetic import markdown, write_comparison, write_planned, write_run

from polarstep_lab.paper import METHODS, TABLE_2
from polarstep_lab.records.record import Ablation
from polarstep_lab.report.ablation_figure import ablation_figure
from polarstep_lab.report.grouping import sections_of
from polarstep_lab.report.runs import collect_runs
from polarstep_lab.report.tables import runs_csv, summary_csv
from polarstep_lab.storage import StorageError, read_json, write_json


def sections(*paths):
    found, notices = sections_of(collect_runs(paths))
    return found, notices


def test_a_row_is_the_mean_and_sample_deviation_over_seeds(tmp_path):
    finals = [30.0, 31.0, 33.0]
    for seed, final in enumerate(finals):
        write_run(tmp_path / str(seed), seed=seed, final=final)
    ((section,), _) = sections(tmp_path)
    (row,) = section.rows
    assert row.metric.mean == pytest.approx(statistics.fmean(finals))
    assert row.metric.std == pytest.approx(statistics.stdev(finals))
    assert row.metric.n == 3
    assert list(row.runs["seed"]) == [0, 1, 2]


def test_one_seed_has_no_spread(tmp_path):
    write_run(tmp_path / "a")
    ((section,), _) = sections(tmp_path)
    assert section.rows[0].metric.std is None
    assert "±" not in "".join(re.findall(r"^\|.*", markdown((section,), ()), re.MULTILINE))


def test_methods_come_in_the_order_of_the_paper(tmp_path):
    write_comparison(tmp_path, "gpt-small", "nanogpt", seeds=1)
    ((section,), _) = sections(tmp_path)
    assert [row.method for row in section.rows] == [method.name for method in METHODS]


def test_runs_judged_by_validation_and_by_test_are_in_sections_of_their_own(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"old-{seed}", seed=seed, final=30.0 + seed)
        write_run(tmp_path / f"new-{seed}", seed=seed, final=40.0 + seed, metric="test_perplexity")
    write_run(tmp_path / "cut", seed=2, status=None)
    (new, old), notices = sections(tmp_path)
    assert not notices
    assert (new.metric.name, old.metric.name) == ("Test perplexity", "Validation perplexity")
    assert (new.rows[0].metric.mean, old.rows[0].metric.mean) == (40.5, 30.5)
    assert new.rows[0].seeds_text == "2 of 3 (1 unfinished)"
    assert new.slug != old.slug
    assert re.findall("^## .*", markdown((new, old), ()), re.MULTILINE) == [
        "## gpt-small (nanogpt)",
        "## gpt-small (nanogpt), validation only",
    ]
    lines = list(csv.DictReader(io.StringIO(summary_csv((new, old)))))
    assert [line["metric"] for line in lines] == ["test_perplexity", "val_perplexity"]


def test_runs_that_did_not_finish_are_counted_and_kept_out_of_the_mean(tmp_path):
    write_run(tmp_path / "good", seed=0, final=30.0)
    for seed, status in enumerate(["diverged", "failed", "stopped", None], start=1):
        write_run(tmp_path / str(status), seed=seed, status=status)
    ((section,), _) = sections(tmp_path)
    (row,) = section.rows
    assert row.metric.mean == 30.0
    assert row.seeds_text == "1 of 5 (1 diverged, 1 failed, 1 stopped, 1 unfinished)"
    assert row.seeds_text in markdown((section,), ())
    (line,) = csv.DictReader(io.StringIO(summary_csv((section,))))
    assert [line[s] for s in ("finished", "diverged", "failed", "unfinished")] == list("1111")


def test_a_method_whose_every_run_diverged_keeps_its_row(tmp_path):
    write_run(tmp_path / "a", status="diverged", gflops=7.0)
    write_run(tmp_path / "b", method="Muon (Nesterov)")
    ((section,), _) = sections(tmp_path)
    lost = next(row for row in section.rows if row.method == "AdamW")
    assert lost.metric is None
    assert lost.gflops == 7.0
    assert section.best(section.rows).method == "Muon (Nesterov)"
    assert "0 of 1 (1 diverged)" in markdown((section,), ())


def test_runs_with_different_configs_are_never_averaged(tmp_path):
    write_run(tmp_path / "a", seed=0, overrides={"lr": 0.1})
    write_run(tmp_path / "b", seed=1, overrides={"lr": 0.2})
    ((section,), _) = sections(tmp_path)
    assert [row.label for row in section.rows] == ["AdamW, lr=0.1", "AdamW, lr=0.2"]
    assert [row.metric.n for row in section.rows] == [1, 1]


def test_a_label_leaves_out_what_all_rows_of_its_method_share(tmp_path):
    shared = {"runtime.keep_checkpoint": False}
    write_run(tmp_path / "a", overrides={**shared, "lr": 0.1})
    write_run(tmp_path / "b", overrides={**shared, "lr": 0.2})
    write_run(tmp_path / "c", overrides={**shared})
    write_run(tmp_path / "d", method="Muon (Nesterov)", overrides={"lr": 0.1})
    write_run(tmp_path / "e", method="Muon (Nesterov)")
    ((section,), _) = sections(tmp_path)
    assert [row.label for row in section.rows] == [
        "AdamW",  # not the recipe's own settings
        "AdamW, lr=0.1",
        "AdamW, lr=0.2",
        "Muon (Nesterov), lr=0.1",
        "Muon (Nesterov), recipe's own settings",
    ]


def test_rows_of_two_recipes_with_the_same_overrides_name_them(tmp_path):
    shared = {"runtime.keep_checkpoint": False}
    for lr in (0.1, 0.2):  # the recipe's default, then and now
        write_run(tmp_path / f"{lr}", overrides=shared, settings={"optimizer": {"lr": lr}})
    ((section,), _) = sections(tmp_path)
    assert [row.label for row in section.rows] == ["AdamW, runtime.keep_checkpoint=False"] * 2


def test_a_seed_run_twice_counts_once_and_is_reported(tmp_path):
    write_run(tmp_path / "a", seed=3, status="stopped")
    write_run(tmp_path / "b", seed=3, final=29.0)
    ((section,), notices) = sections(tmp_path)
    assert section.rows[0].metric.n == 1
    assert section.rows[0].metric.mean == 29.0
    assert len(notices) == 1
    assert "seed 3" in notices[0]


def test_a_run_made_later_for_its_times_does_not_replace_a_metric(tmp_path):
    """Whatever its folder is called, and although both finished."""
    for name, final, started in (
        ("z", 29.0, "2026-11-15T01:00:00Z"),
        ("a", 28.0, "2026-11-16T01:00:00Z"),
    ):
        folder = write_run(tmp_path / name, seed=3, final=final)
        environment = read_json(folder / "environment.json")
        write_json(folder / "environment.json", environment | {"started": started})
    ((section,), notices) = sections(tmp_path)
    assert section.rows[0].metric.mean == 29.0
    assert notices[0].endswith(f"{tmp_path.name}/a is left out for {tmp_path.name}/z")


def test_one_config_counts_once_however_it_was_asked_for(tmp_path):
    """An override may repeat a default, and two folders may give their runs the same name."""
    for folder, overrides in (("x", {}), ("y", {"optimizer.lr": 0.03})):
        settings = {"optimizer": {"lr": 0.03}}
        write_run(tmp_path / folder / "runs" / "a", overrides=overrides, settings=settings)
    ((section,), notices) = sections(tmp_path / "x" / "runs", tmp_path / "y" / "runs")
    (row,) = section.rows
    assert len(row.runs) == 1
    assert notices == (
        "AdamW: seed 0 was run twice with the same config; runs/a is left out for runs/a",
    )


def test_times_of_different_devices_are_not_mixed(tmp_path):
    write_run(tmp_path / "a", seed=0, device="one")
    write_run(tmp_path / "b", seed=1, device="another")
    ((section,), _) = sections(tmp_path)
    (row,) = section.rows
    assert math.isnan(row.times["optimizer_ms_per_step"])
    assert math.isnan(row.times["step_ms"])
    assert row.metric.n == 2


def test_the_paper_stands_beside_its_own_recipe_only(tmp_path):
    write_comparison(tmp_path / "paper", "nanogpt", "nanogpt", seeds=2)
    write_comparison(tmp_path / "other", "gpt-small", "nanogpt", seeds=2)
    found, _ = sections(tmp_path)
    by_recipe = {section.recipe: section for section in found}
    for row in by_recipe["nanogpt"].rows:
        assert row.paper == TABLE_2["nanogpt"].rows[row.method]
    assert all(row.paper is None for row in by_recipe["gpt-small"].rows)
    assert "FineWeb10B" in markdown((by_recipe["nanogpt"],), ())
    assert "aper" not in markdown((by_recipe["gpt-small"],), ())


def test_an_override_takes_the_paper_away(tmp_path):
    write_run(tmp_path / "a", recipe="nanogpt", overrides={"lr": 0.5})
    ((section,), _) = sections(tmp_path)
    assert section.rows[0].paper is None


def test_ablations_are_sorted_by_value_and_apart_from_the_comparison(tmp_path):
    for value in (128, 16, 64):
        write_run(tmp_path / str(value), ablation=Ablation("rank", value))
    write_run(tmp_path / "plain")
    ((section,), _) = sections(tmp_path)
    (ablation,) = section.ablations
    assert [row.value for row in ablation.rows] == [16, 64, 128]
    assert ablation.numeric
    assert len(section.rows) == 1


@pytest.mark.rendered
def test_an_axis_varied_with_several_settings_is_several_ablations(tmp_path):
    """One with another setting is not compared with the recipe's own row."""
    lr = {"optimizer.lr": 0.03}
    write_run(tmp_path / "plain", settings=lr)
    for power in (0, 2):
        settings = lr | {"optimizer.polar.power": power}
        write_run(tmp_path / f"p{power}", ablation=Ablation("power", power), settings=settings)
    for setting in ({}, {"optimizer.polar.power": 0}):
        for rate in (0.015, 0.03):
            write_run(
                tmp_path / f"{len(setting)}-{rate}",
                ablation=Ablation("lr", rate),
                overrides=setting | {"runtime.device": "cpu"},
                settings=setting | {"optimizer.lr": rate},
            )
    ((section,), notices) = sections(tmp_path)
    assert not notices
    power, plain, fast = section.ablations
    assert [a.setting for a in section.ablations] == ["", "", "power=0"]
    labels = [section.label_in(a, a.rows[0]) for a in (power, fast)]
    assert labels == [power.rows[0].label, f"{fast.rows[0].label} with {fast.method}, power=0"]
    assert [a.base and a.base.label for a in (power, plain, fast)] == ["AdamW", "AdamW", None]
    assert "#### lr, AdamW, power=0" in markdown((section,), ())
    svg, _ = ablation_figure(section, "ablations").files
    assert svg.count("AdamW, power=0") == 1  # in the legend: a line beside that of the plain method


def planned(root, method, axis=None, value=None, final=40.0, **overrides):
    """A finished run of ``nanogpt-toy`` as ``compare`` or ``ablate`` plans it."""
    rule = next(rule for rule in METHODS if rule.slug == method)
    if axis is None:
        (run,) = comparison_runs("nanogpt-toy", [rule], [0], overrides, root)
    else:
        (run,) = ablation_runs("nanogpt-toy", rule, axis, [value], [0], overrides, root)
    write_planned(run, final)


STAGES = {
    n: {"data.stages": [{"steps": n, "sequences": 4, "sequence_length": 64}]} for n in (20, 40)
}


def test_a_broken_run_directory_is_named_and_does_not_stop_the_others(tmp_path):
    write_run(tmp_path / "good")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    runs = collect_runs([tmp_path])
    assert len(runs.frame) == 1
    assert len(runs.notices) == 1
    assert f"{tmp_path.name}/broken" in runs.notices[0]
    assert str(tmp_path) not in runs.notices[0]


def test_a_broken_archive_is_named_and_does_not_stop_the_others(tmp_path):
    write_run(tmp_path / "good")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "records.jsonl.gz").write_text("no archive")
    runs = collect_runs([tmp_path])
    assert len(runs.frame) == 1
    archive = f"{tmp_path.name}/packed/records.jsonl.gz"
    (notice,) = runs.notices
    assert notice.startswith(f"{archive} is left out: {archive} cannot be read as records")
    with pytest.raises(StorageError, match="cannot be read as records"):
        collect_runs([tmp_path / "packed" / "records.jsonl.gz"])


def test_csv_keeps_every_digit_and_every_run(tmp_path):
    final = 29.716712345678901
    write_run(tmp_path / "a", final=final)
    write_run(tmp_path / "b", seed=1, status="diverged")
    runs = collect_runs([tmp_path])
    lines = list(csv.DictReader(io.StringIO(runs_csv(runs))))
    assert [line["status"] for line in lines] == ["finished", "diverged"]
    assert float(lines[0]["value"]) == final
    assert lines[1]["value"] == ""
    assert lines[1]["message"] == "the loss was not finite at step 66"
