"""Tables and figures of maps: rates, test halves, prices, and what is missing."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def records_of_maps():
    names = "pages.records.quality", "pages.records.maps"
    return tuple(map(importlib.import_module, names))


@pytest.fixture
def quality(module, monkeypatch):
    """Records of qualities and of maps, and the runs and times that they read, which the test fills."""
    found, maps = records_of_maps()
    runs: dict[tuple[str, float], dict[int, float]] = {}
    times: dict[tuple[str, str], dict[str, float]] = {}

    def records():
        return [
            {"map": name, "lr": lr, "seed": seed, "perplexity": perplexity, "steps": 1500}
            for (name, lr), seeds in runs.items()
            for seed, perplexity in seeds.items()
        ]

    monkeypatch.setattr(found, "records", records)
    monkeypatch.setattr(maps, "steps", lambda record=None: times)
    return found, maps, runs, times


def test_a_rate_is_chosen_on_one_seed_and_reported_on_others(quality):
    found, _, runs, _ = quality
    for rate, perplexity in ((0.01, 52.0), (0.014, 50.0), (0.02, 51.0)):
        runs["full", rate] = {3: perplexity, 0: 100.0, 1: 100.0}
        runs["low-rank", rate] = {3: 200 - perplexity, 0: 900.0}
    runs["low-rank", 0.01] |= {0: 101.0, 1: 103.0, 3: 40.0}
    assert (found.chosen("full"), found.chosen("low-rank")) == (0.014, 0.01)
    gap = found.at_chosen_rates("low-rank")
    assert gap.rate == 0.01
    assert gap.tried == {0.01: 40.0, 0.014: 150.0, 0.02: 149.0}
    assert gap.change.value == pytest.approx(2.0)
    assert gap.change.pairs == 2  # seed 3 chose, and does not count
    assert found.quality(("low-rank", 0.01)).pairs == 2
    assert (
        found.quality(("low-rank", 0.014)).pairs == 1
    )  # at the rate of full space it does not either
    runs["full", 0.014][2] = runs["low-rank", 0.014][2] = 100.0
    assert found.quality(("low-rank", 0.014)).pairs == 2
    del runs["low-rank", 0.02]
    assert found.chosen("low-rank") is None
    assert found.at_chosen_rates("low-rank") is None


def test_runs_with_halves_are_judged_by_the_test_half(quality, monkeypatch):
    found, _, runs, _ = quality
    for rate in (0.01, 0.014, 0.02):
        runs["full", rate] = {3: 50.0, 0: 50.0}
        runs["low-rank", rate] = {3: 60.0 + 100 * rate, 0: 60.0}
    whole = found.records()
    halves = {"full": 0.98, "low-rank": 1.0}  # the test half is easier for full space
    with_halves = [
        run | {"validation": run["perplexity"] + 7, "test": run["perplexity"] * halves[run["map"]]}
        for run in whole
    ]
    monkeypatch.setattr(found, "records", lambda: with_halves)
    assert found.judged_by(("full", 0.014), ("low-rank", 0.014)) == "test"
    assert found.quality(("low-rank", 0.02)).value == pytest.approx(100 * (60 / 49 - 1))
    gap = found.at_chosen_rates("low-rank")
    assert (gap.rate, gap.text) == (0.01, "test")
    assert gap.tried[0.01] == pytest.approx(68.0)  # of the validation half
    assert gap.change.value == pytest.approx(100 * (60 / 49 - 1))
    # One run without halves, and all of the held-out text counts for what it is compared with.
    places = {(run["lr"], run["seed"], run["map"]): i for i, run in enumerate(whole)}
    last = places[0.02, 0, "full"]
    with_halves[last] = whole[last]
    assert found.quality(("low-rank", 0.02)).value == pytest.approx(100 * (60 / 49 - 1))
    assert found.quality(("low-rank", 0.01), ("full", 0.02)).value == pytest.approx(20.0)
    # That run has no part in a comparison at chosen rates, but one of the seed that chooses has.
    assert found.at_chosen_rates("low-rank").text == "test"
    last = places[0.02, 3, "low-rank"]
    with_halves[last] = whole[last]
    gap = found.at_chosen_rates("low-rank")
    assert (gap.text, gap.tried[0.01]) == ("perplexity", pytest.approx(61.0))


def test_tables_that_say_test_have_the_test_half_of_every_run(module):
    found, maps = records_of_maps()
    trained = [each.trained for each in (*maps.weighed(), *maps.peers()) if each.trained]
    assert len(trained) > 15
    assert found.judged_by(*trained) == found.TEST


def test_a_peer_is_shown_in_its_fastest_form_and_at_its_best_rate(quality):
    found, maps, runs, times = quality
    runs["full", 0.014] = {0: 50.0}
    runs["peer:dion-muon", 0.014], runs["peer:dion-muon", 0.02] = {0: 52.0}, {0: 51.0}
    runs["peer:soap", 0.002] = {0: 53.0}
    forms = {
        "Muon of dion": 2.0,
        "Muon of dion, CUDA graph": 1.0,
        "Muon of dion, CUDA graph, Triton": 1.5,
    }
    for load in maps.HELD:
        for name, ms in (forms | {"torch.optim.Muon": 9.0}).items():
            times[name, load] = {"ms": ms}
    torch_muon, dion, soap = maps.peers()
    assert (dion.title, dion.timed) == ("Muon of dion", "Muon of dion, CUDA graph")
    assert dion.trained == ("peer:dion-muon", 0.02)
    assert (torch_muon.timed, torch_muon.trained) == ("torch.optim.Muon", None)
    assert (soap.timed, soap.trained) == (None, ("peer:soap", 0.002))
    for rate, perplexity in ((0.01, 50.0), (0.014, 49.0), (0.02, 51.0)):
        runs.setdefault(("peer:dion-muon", rate), {})[3] = perplexity
    runs["full", 0.014][3] = 50.0
    dion = maps.peers()[1]
    assert dion.trained == (
        "peer:dion-muon",
        0.014,
    )  # seed 3 chose it, although 0.02 has a lower mean
    assert found.quality(dion.trained).value == pytest.approx(4.0)  # of seed 0 alone
    for rate in (0.01, 0.014, 0.02):
        runs["peer:dion-muon+warmup", rate] = {3: 48.5, 0: 50.0}
    assert maps.peers()[1].trained[0] == "peer:dion-muon+warmup"  # seed 3 has it lower
    runs["peer:dion-muon", 0.014][3] = 48.0
    assert maps.peers()[1].trained == ("peer:dion-muon", 0.014)


def test_the_table_of_peers_says_what_is_missing(tables, quality, monkeypatch):
    _, maps, runs, times = quality
    runs["full", 0.014], runs["peer:torch-muon", 0.02] = {0: 50.0, 1: 50.0}, {0: 51.0, 1: 51.5}
    runs["peer:soap", 0.002] = {0: 53.0}
    shown = [maps.Weighed("full space", "full space", ("full", 0.014))]
    for name, ratio in (("full space", 4.0), ("torch.optim.Muon", 38.27), ("Muon of dion", 8.0)):
        for load in maps.HELD:
            times[name, load] = {
                "ms": ratio / 2,
                "ratio": ratio,
                "state_mib": 306.2,
                "extra_mib": 26.3,
            }
    faster = {"ms": 5.0, "ratio": 9.5}

    def on_hosts(name, load):
        assert name not in {each.title for each in shown}, "rows of ours changed between hosts"
        return [times[name, load], faster] if (name, load) == ("Muon of dion", "nanoGPT") else []

    times["Muon of dion", "nanoGPT"]["ms"] = 6.0
    monkeypatch.setattr(tables, "weighed", lambda: shown)
    monkeypatch.setattr(tables, "steps", lambda record=None: times)
    monkeypatch.setattr(tables, "on_hosts", on_hosts)
    monkeypatch.setattr(importlib.import_module("pages.records.long_run"), "runs", dict)
    text = tables.TABLES["peers"](ROOT).replace("\N{NO-BREAK SPACE}", " ")
    _, _, full, torch_muon, dion, soap = text.splitlines()
    assert full == "| full space | 2.00 ms, 4.00× | 2.00 ms, 4.00× | 306 + 26 | 0.014 | – |"
    assert torch_muon.startswith(
        "| torch.optim.Muon | 19.14 ms, 38.27× | 19.14 ms, 38.27× | 306 + 26 |"
    )
    assert "| 0.02 | +2.5% ± " in torch_muon
    on_two_hosts = "5.00 to 6.00 ms, 8.00 to 9.50× (2 hosts)"
    assert dion == f"| Muon of dion | {on_two_hosts} | 4.00 ms, 8.00× | 306 + 26 | – | not run |"
    assert soap == (
        "| SOAP of pytorch_optimizer | not timed | not timed | not measured | 0.002 | +6.0% (one seed) |"
    )


def test_the_price_of_auto_is_that_of_the_row_of_its_name(tables):
    """And of no row of a map that ``auto`` takes, of which the same record has another time."""
    record = json.loads((ROOT / "results/step-cost/h200-maps.json").read_text())
    ratios = {(row["optimizer"], row["workload"]): row["ratio"] for row in record["steps"]}
    lines = tables.TABLES["headline"](ROOT).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    shown = [line for line in lines if "128 (17%), 512 (12%)" in line]
    names = ["auto", "auto, rows normalized", "auto, rows normalized"]
    for line, name in zip(shown, names, strict=True):
        told = [f"{ratios[name, load]:.1f}×" for load in ("nanoGPT", "8B layer")]
        assert line.split(" | ")[2:4] == told


def test_one_seed_chooses_no_map(tables, quality, monkeypatch):
    _, maps, runs, times = quality
    runs["full", 0.014], runs["low-rank", 0.014] = {0: 50.0, 1: 50.0}, {0: 52.0, 1: 52.5}
    runs["flat-48-warm", 0.014] = {0: 40.0}
    shown = [
        maps.Weighed(name, name, (name, 0.014)) for name in ("full", "low-rank", "flat-48-warm")
    ]
    for _, _, _, load in tables.PLACES:
        for name, ratio in (("full", 4.0), ("low-rank", 1.5), ("flat-48-warm", 1.2)):
            times[name, load] = {"ratio": ratio}
    monkeypatch.setattr(tables, "weighed", lambda: shown)
    monkeypatch.setattr(tables, "steps", lambda record=None: times)
    text = tables.TABLES["choice"](ROOT / "results/step-cost")
    assert "| 1.5× | low-rank |" in text
    assert "| 4.0× | full |" in text
    assert "flat-48-warm" not in text


def test_a_price_stands_beside_a_perplexity_of_the_same_part_of_the_width(
    tables, quality, monkeypatch
):
    _, maps, runs, times = quality
    runs["full", 0.014], runs["low-rank", 0.014] = {0: 50.0, 1: 50.0}, {0: 52.0, 1: 52.5}
    shown = [
        maps.Weighed("full", "full", ("full", 0.014)),
        maps.Weighed("wide", "wide", ("low-rank", 0.014), (208, 1108)),
        maps.Weighed("narrow", "narrow", ("low-rank", 0.014), (208, 256)),
    ]
    for _, _, _, load in tables.PLACES:
        for name, ratio in (("full", 4.0), ("wide", 1.5), ("narrow", 1.2)):
            times[name, load] = {"ratio": ratio}
    for each in (tables, maps):
        monkeypatch.setattr(each, "weighed", lambda: shown)
        monkeypatch.setattr(each, "steps", lambda record=None: times)
    assert [each.trained_columns for each in shown] == [None, 208, 208]
    text = tables.TABLES["choice"](ROOT / "results/step-cost")
    lines = text.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    gpu, layer, arm = (
        next(k for k, line in enumerate(lines) if line.startswith(f"| {place[0]} |"))
        for place in tables.PLACES
    )
    assert "| 1.2× | narrow | 208 (27%) | 208 (27%) |" in lines[gpu]
    assert "| 1.5× | wide | 1108 (27%) | 208 (27%) |" in lines[layer]
    assert "narrow" not in "".join(lines[layer:arm])
    assert "| 1.2× | narrow | 210 (27%) | 208 (27%) |" in lines[arm]
    assert [each.title for each in maps.timed_with_less("8B layer")] == ["narrow"]
    assert maps.timed_with_less("nanoGPT") == []


def test_the_figure_of_maps_has_no_point_of_a_sketch_that_was_not_trained(module):
    figure = importlib.import_module("pages.figures.frontier")
    _, first, second = figure.draw().split(">AdamW</text>")  # above the line of each panel
    for name in ("LowRank, h = 0", "h = 1, scaled"):
        assert f">{name}<" in first
        assert f">{name}<" not in second
    assert ">Deflated 1/6<" in second
    assert "6 sketches with 6% of the width, as they were trained with 27%" in second
