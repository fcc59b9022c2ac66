"""Sentences of the pages about rates, baselines and texts say what the records have."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.storage import read_lines

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def made():
    """A claim as a page has it, with plain spaces."""
    claims = importlib.import_module("pages.claims")
    return lambda name: claims.made(name).replace("\N{NO-BREAK SPACE}", " ")


def table(kind):
    tables = importlib.import_module("pages.tables")
    text = tables.TABLES[kind](ROOT / "results/step-cost").replace("\N{NO-BREAK SPACE}", " ")
    return [line.strip("| ").split(" | ") for line in text.splitlines()]


def test_a_column_of_perplexities_names_the_rate_of_its_baseline():
    """In the long run, where rows have several, the cells do."""
    for kind in ("headline", "weighed", "peers", "choice"):
        titles = [each for each in table(kind)[0] if "perplexity" in each or "24.6M tokens" in each]
        short = [each for each in titles if "72.7M tokens" not in each]
        assert short
        for title in short:
            assert re.search(r"to full space at 0\.0\d+$", title), (kind, title)


def test_rows_are_shown_against_full_space_at_two_rates():
    """The rate at which it ends lower on the seeds shown, and the one that seed 3 chose for it."""
    names = "pages.records.quality", "pages.records.maps"
    quality, maps = map(importlib.import_module, names)
    lower, choice = quality.BASE, (quality.BASE[0], quality.chosen(quality.BASE[0]))
    assert lower != choice
    assert quality.quality(choice, lower).value > 0
    head, _, *rows = table("weighed")
    at = [k for k, title in enumerate(head) if title.endswith(("full space at 0.014", "at 0.02"))]
    assert len(at) == 2
    for each, row in zip(maps.weighed(), rows, strict=True):
        told = [
            quality.quality(each.trained, base).told(unit="%") if each.trained else "not run"
            for base in (lower, choice)
        ]
        if each.trained == lower:
            told[0] = "–"
        assert [row[k] for k in at] == [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in told]


def test_the_rates_beside_muon_are_those_of_the_runs(made):
    """Of the loop, as it builds its optimizer, and of the configs that the long runs recorded."""
    frontier = importlib.import_module("frontier")
    model = GPT(GPTConfig(64, 32, 1, 1, 16))
    optimizer, _ = frontier.optimizer_of("full", model, 0.02, 0)
    rates = {
        name: round(group["lr"] * group["lr_factor"], 12)
        for group in optimizer.param_groups
        for name, parameter in model.named_parameters()
        if any(parameter is each for each in group["params"])
    }
    assert {rates.pop("embedding.weight"), rates.pop("head.weight")} == {0.3, 0.004}
    assert {*rates.values()} == {0.02}
    told = made("rates-beside-muon")
    assert "0.3 for the embedding (0.4 in AdamW's own row over 72.7M tokens)" in told
    assert "0.004 for the head" in told
    assert "rises from 0.85 to 0.95, over 72.7M tokens to 0.966" in told
    assert "`muon_for` has 0.15 times the size of the entries for both, at `lr=0.02`" in told
    assert "a momentum of 0.95" in told


def test_the_spacing_of_rates_is_told(made):
    told = made("rates-of-maps")
    assert "a factor of 1.4 apart (0.01, 0.014 and 0.02)" in told
    assert "a factor of 2 (0.00025, 0.0005, 0.001 and 0.002)" in told


def test_runs_that_name_their_commit_are_counted(made):
    runs = read_lines(ROOT / "results/frontier/runs.jsonl")
    named = [run for run in runs if run.get("git_commit") or run.get("git_tree")]
    assert made("frontier-commits").startswith(f"{len(named)} of the {len(runs)} runs")


def test_a_map_is_within_a_hundredth_only_if_both_texts_say_so():
    within = importlib.import_module("pages.records.heads").within
    change = importlib.import_module("differences").change
    narrow, wide, above = change([0.1, 0.2, 0.3]), change([-0.8, 0.2, 1.2]), change([1.0, 1.2, 1.4])
    assert within(narrow, narrow) == "with its interval"
    assert within(narrow, wide) == "by its mean"
    assert within(wide, narrow) == "by its mean"
    assert within(narrow, above) == "no"
    assert within(above, narrow) == "no"


def test_the_gain_of_rows_at_own_rates_comes_before_that_at_equal_rates(made):
    """Full space without rows is at the rate of the tables, which is the better one of two."""
    told = made("pairs-with-rows")
    own, equal = re.findall(r"(\d+) of (\d+) pairs", told)
    assert told.index("its own rates") < told.index("both have one rate")
    assert int(own[1]) > int(equal[1])
    rows = {row[0]: row for row in table("weighed")[2:] if "not run" not in row[3]}
    pairs = [
        (row, rows[name.replace(", `NormalizedRows`", "")])
        for name, row in rows.items()
        if "NormalizedRows" in name and "fan-ratio" not in name
    ]

    def gap(row):
        return 0.0 if row[3] == "–" else float(row[3].split("%")[0].replace("−", "-"))

    mean = sum(gap(plain) - gap(row) for row, plain in pairs) / len(pairs)
    (value,) = re.match(r"by (\S+)% ± \S+ \(n = 3\) in the mean of 8 maps", told).groups()
    assert float(value) == pytest.approx(mean, abs=0.1)


def test_the_share_on_narrow_matrices_is_told_of_whole_steps_and_of_the_device(made):
    rows = json.loads((ROOT / "results/step-cost/h200-between.json").read_text())["steps"]
    times = {row["optimizer"]: row for row in rows if row["workload"] == "width 512"}
    ours, full = times["Deflated, ℓ = a sixth"], times["full space, PolarExpress 5"]
    whole, device = (f"{ours[key] / full[key]:.0%} at 512" for key in ("ms", "device_ms"))
    told, alone = made("narrow-share").split("on the device alone")
    assert whole in told
    assert device in alone


def test_the_price_of_full_space_has_a_range_over_records(made):
    told = made("full-space-again")
    found = re.search(r"in (\d+) records, .* takes (\S+) to (\S+) times AdamW's on nano", told)
    ratios = []
    for path in (ROOT / "results/step-cost").glob("h200*.json"):
        for row in json.loads(path.read_text()).get("steps", []):
            if isinstance(row, dict) and row["workload"] == "nanoGPT":
                ratios += [row["ratio"]] * (row["optimizer"] == "full space, PolarExpress 5")
    assert [*found.groups()] == [str(len(ratios)), f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
