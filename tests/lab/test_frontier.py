"""The studies of perplexity: tables are those of their records, and runs go on where they stopped."""

from __future__ import annotations

import copy
import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from polarstep_lab.data.shards import digest_of, write_shard
from polarstep_lab.models import gpt
from polarstep_lab.storage import read_lines

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def modules():
    """``frontier`` and ``scaling``."""
    return importlib.import_module("frontier"), importlib.import_module("scaling")


@pytest.fixture
def frontier(modules):
    return modules[0]


@pytest.fixture
def scaling(modules):
    return modules[1]


def row(name, seed, perplexity, lr=0.014, steps=1500, width=768):
    return {"map": name, "seed": seed, "perplexity": perplexity, "test": perplexity} | {
        "lr": lr,
        "steps": steps,
        "width": width,
    }


def test_an_interval_is_students_over_paired_seeds(frontier):
    rows = [row("full", s, 100.0 + s) for s in range(3)]
    rows += [row("joint-2", s, (100.0 + s) * (1.01 + 0.01 * s)) for s in range(3)]
    rows += [row("low-rank", 7, 9e4), row("low-rank", 0, 9e4)]
    text = "\n".join(frontier.table(rows)).replace("\N{NO-BREAK SPACE}", " ")
    assert "| +2.0% ± 2.5 (n = 3) |" in text  # t = 4.30, standard deviation 1, three seeds
    assert "| diverged |" in text


def test_a_rate_without_full_space_is_compared_with_the_best_of_full_space(frontier):
    rows = [row("full", 0, 50.0), row("full", 0, 52.0, lr=0.02)]
    rows += [row("adamw", 0, 55.0, lr=0.001), row("peer:dion3", 0, 53.04, lr=0.02)]
    text = "\n".join(frontier.table(rows)).replace("\N{NO-BREAK SPACE}", " ")
    assert "| AdamW, rate 0.001 | 55.00 | +10.0% (one seed) |" in text
    assert "| Dion3 (a quarter of the rows), rate 0.02 | 53.04 | +2.0% (one seed) |" in text


def test_options_follow_a_map_after_a_plus(frontier):
    text = "\n".join(frontier.table([row("full", 0, 50.0), row("full+rows+fans", 0, 49.0)]))
    assert "| full space, PolarExpress 5, rows normalized, rate times √(m/n) | 49.00 |" in text
    with pytest.raises(SystemExit, match="colums is no option; expected rows, fans, warmup"):
        frontier.parts_of("full+colums")


def test_rates_by_fans_are_those_of_dion(frontier):
    model = torch.nn.Sequential(*(torch.nn.Linear(n, m) for n, m in ((4, 16), (16, 4), (4, 4))))
    moved = {}
    for name in ("full", "full+fans"):
        optimizer, _ = frontier.optimizer_of(name, copy.deepcopy(model), 0.01, 0)
        (group,) = (g for g in optimizer.param_groups if g["algorithm"] == "muon")
        before = [p.detach().clone() for p in group["params"]]
        for p in group["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        for old, new in zip(before, group["params"], strict=True):
            moved[name, tuple(old.shape)] = float((old - new.detach()).norm())
    shapes = {shape for _, shape in moved}
    assert shapes >= {(16, 4), (4, 16)}
    for m, n in shapes:
        ratio = moved["full+fans", (m, n)] / moved["full", (m, n)]
        assert ratio == pytest.approx(min(1, m / n) ** 0.5, rel=1e-4)


def test_rates_may_rise_at_first_and_fall_at_the_end(frontier):
    assert [frontier.rate_factor(done) for done in (0.0, 0.05, 0.39)] == [1.0] * 3
    assert frontier.rate_factor(1.0) == pytest.approx(0.05)
    assert frontier.rate_factor(0.7) == pytest.approx(1 - 0.5 * 0.95)
    risen = [frontier.rate_factor(done, warm_up=0.1) for done in (0.0, 0.025, 0.1, 0.7)]
    assert risen == pytest.approx([0.0, 0.25, 1.0, frontier.rate_factor(0.7)])


def test_the_best_rate_is_that_of_the_seed_that_chooses(frontier):
    rows = [row("full", 3, 57.0, lr=0.01), row("full", 3, 56.0, lr=0.02), row("full", 0, 1.0)]
    assert frontier.best_rate(rows, "full") == 0.02
    assert frontier.best_rate(rows, "low-rank") is None
    assert frontier.best_rate(rows, "full", steps=3) is None
    halves = [{"validation": 3.0, "test": 9.0}, {"validation": 4.0, "test": 1.0}]
    chosen = [row | half for row, half in zip(rows, halves, strict=False)]
    assert frontier.best_rate(chosen, "full") == 0.01  # by the half that no table shows
    assert frontier.best_rate([chosen[0], rows[1]], "full") == 0.02  # one of them has no halves


@pytest.fixture
def small(frontier, scaling, tmp_path, monkeypatch):
    """Shards of 200 tokens, and constants for short runs on them, of a vocabulary of 512."""
    for module in (frontier, scaling):
        monkeypatch.setattr(module, "SEQUENCES", 1)
        monkeypatch.setattr(module, "LENGTH", 16)
    monkeypatch.setattr(frontier, "HEAD_WIDTH", 16)
    config = gpt.GPTConfig
    monkeypatch.setattr(gpt, "GPTConfig", lambda vocabulary, *sizes: config(512, *sizes))
    rng = np.random.default_rng(0)
    for name in ("train", "val"):
        write_shard(tmp_path / f"{name}.bin", rng.integers(0, 512, 200))
    return tmp_path


def called(module, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
    module.main()


def test_the_held_out_text_has_a_half_to_choose_on_and_a_half_to_test_on(frontier):
    found = frontier.perplexities_of([1.0, 2.0, 4.0, 5.0])
    assert found == pytest.approx(
        {"perplexity": math.exp(3), "validation": math.exp(1.5), "test": math.exp(4.5)}
    )
    assert frontier.perplexities_of([2.0]) == pytest.approx({"perplexity": math.exp(2)})


def test_a_run_is_made_once_and_its_rate_may_be_chosen(frontier, small, monkeypatch, capsys):
    out = small / "runs.jsonl"
    shards = (small / "train.bin", small / "val.bin")
    where = ("--device", "cpu", "--width", 32, "--steps", 2, "--out", out)
    names = "full,lift-48-warm+rows,adamw,adamw+warmup,peer:torch-muon,peer:torch-muon+warmup"
    first = ("--maps", names, "--seeds", 3, "--lr", "0.01,0.02")
    called(frontier, monkeypatch, "run", *shards, *first, *where)
    rows = read_lines(out)
    assert [(r["map"], r["lr"]) for r in rows] == [
        (name, lr) for name in names.split(",") for lr in (0.01, 0.02)
    ]
    assert all(math.isfinite(r["perplexity"]) and r["width"] == 32 for r in rows)
    assert len({r["perplexity"] for r in rows}) == len(rows)
    assert all(r["validation"] != r["test"] for r in rows)

    out.write_bytes(out.read_bytes()[:-30])  # killed while the last line was written
    called(frontier, monkeypatch, "run", *shards, *first, *where)
    again = read_lines(out)
    assert again == rows
    assert "full, seed 3, rate 0.01: in " in capsys.readouterr().out

    best = ("--maps", "full", "--seeds", "3,0", "--lr", "best")
    called(frontier, monkeypatch, "run", *shards, *best, *where)
    (new,) = read_lines(out)[len(rows) :]
    full = {r["perplexity"]: r["lr"] for r in rows if r["map"] == "full"}
    assert (new["map"], new["seed"], new["lr"]) == ("full", 0, full[min(full)])

    with pytest.raises(SystemExit, match=r"no run of low-rank on seed 3, .* --seeds 3"):
        called(frontier, monkeypatch, "run", *shards, "--maps", "low-rank", "--lr", "best", *where)


def test_a_curve_ends_at_the_validation_half_and_leaves_the_run_as_it_was(
    frontier, small, monkeypatch
):
    shards = (small / "train.bin", small / "val.bin")
    plain, curved = small / "plain.jsonl", small / "curved.jsonl"
    asked = ("--maps", "lift-48-warm", "--seeds", 0, "--device", "cpu", "--width", 32, "--steps", 4)
    called(frontier, monkeypatch, "run", *shards, *asked, "--out", plain)
    called(frontier, monkeypatch, "run", *shards, *asked, "--out", curved, "--every", 2)
    ((before,), (row,)) = (read_lines(path) for path in (plain, curved))
    assert row["step_ms"] > 0
    assert [step for step, _ in row["curve"]] == [2, 4]
    assert row["curve"][-1][1] == row["validation"] != row["curve"][0][1]
    assert before == {key: row[key] for key in row if key not in ("curve", "step_ms")}


def test_a_record_names_its_text_and_a_run_on_another_text_is_refused(frontier, small, monkeypatch):
    out, shards = small / "runs.jsonl", (small / "train.bin", small / "val.bin")
    asked = ("--maps", "full", "--seeds", 0, "--device", "cpu", "--width", 32, "--steps", 1)
    called(frontier, monkeypatch, "run", *shards, *asked, "--out", out)
    (row,) = read_lines(out)
    # As the environment of `polarstep run` has them.
    assert row["data_digest"] == digest_of([shards[0]])
    assert row["held_out_digest"] == digest_of([shards[1]])
    write_shard(shards[1], np.arange(200))
    with pytest.raises(ValueError, match="runs on 2 held-out texts: full, seed 0"):
        called(frontier, monkeypatch, "run", *shards, *asked, "--out", out)
    assert read_lines(out) == [row]


def test_a_scaling_study_on_another_text_has_a_frontier_of_its_own(
    frontier, scaling, small, monkeypatch, capsys
):
    own, shards = small / "frontier.jsonl", (small / "train.bin", small / "val.bin")
    frontier.append(small / "theirs.jsonl", row("full", 0, 50.0) | {"data_digest": "b" * 32})
    monkeypatch.setattr(scaling, "plan", lambda: iter([scaling.Planned(1500, 768, "full", 0)]))
    monkeypatch.setattr(scaling, "LENGTHS", (2,))
    monkeypatch.setattr(scaling, "FRONTIER", small / "theirs.jsonl")
    command = ("run", *shards, "--device", "cpu", "--out", small / "out.jsonl", "--seconds", 1)
    with pytest.raises(ValueError, match="runs on 2 training texts: full, seed 0"):
        called(scaling, monkeypatch, *command)
    called(scaling, monkeypatch, *command, "--frontier", own)
    assert "would take" in capsys.readouterr().out


def test_too_short_a_shard_is_refused(frontier, small, monkeypatch):
    shards = (small / "train.bin", small / "val.bin")
    with pytest.raises(SystemExit, match="has 200 tokens: expected 3,201; lower --steps"):
        called(frontier, monkeypatch, "run", *shards, "--device", "cpu", "--steps", 200)


def test_the_plan_has_every_point_of_three_seeds_once(scaling):
    planned = list(scaling.plan())
    assert len(planned) == len(set(planned))
    points = {(p.steps, p.width) for p in planned}
    assert len(points) == len(scaling.LENGTHS) + len(scaling.WIDTHS)
    assert {p.map for p in planned if p.width == scaling.WIDEST} == {*scaling.AT_WIDEST}
    assert len(planned) == (len(points) - 1) * 3 * 3 + 2 * 3
    assert [scaling.million(steps) for steps in scaling.LENGTHS] == pytest.approx(
        [6.1, 12.3, 24.6, 49.2, 72.7], abs=0.06
    )
    # The first four minutes tell of three lengths.
    early, spent = set(), 0.0
    for run in planned:
        spent += run.seconds
        if spent < 300:
            early.add(run.steps)
    assert early == {375, 750, 3000}


@pytest.mark.parametrize("width", [384, 768, 1152])
def test_the_maps_of_the_study_sketch_at_every_width(scaling, width):
    made = scaling.maps(width)
    cuda = torch.device("cuda")
    for shape in ((width, width), (4 * width, width)):
        for name in ("low-rank", "deflated-sixth"):
            assert made[name].full_space_reason(*shape, cuda) is None
    assert made["low-rank"].width / width == pytest.approx(208 / 768, abs=1e-3)


def test_at_768_the_maps_are_those_of_the_frontier(frontier, scaling):
    """So that the frontier's runs of 24.6 million tokens are points of the study."""
    here, there = scaling.maps(768), frontier.maps()
    assert here["full"] == there["full"][1]
    for name, other in (("low-rank", "low-rank"), ("deflated-sixth", "lift-120-warm")):
        ours, theirs = here[name], there[other][1]
        settings = str(ours).replace("always_sketch=True", "always_sketch=False")
        assert settings == str(theirs)
        for shape in ((768, 768), (3072, 768)):
            assert theirs.full_space_reason(*shape, torch.device("cuda")) is None


def test_the_study_goes_on_and_ends_in_time(scaling, small, monkeypatch, capsys):
    out, shards = small / "runs.jsonl", (small / "train.bin", small / "val.bin")
    points = [scaling.Planned(2, width, name, 0) for width in (96, 128) for name in scaling.NAMES]
    monkeypatch.setattr(scaling, "plan", lambda: iter(points))
    monkeypatch.setattr(scaling, "LENGTHS", (2,))
    monkeypatch.setattr(scaling, "MILLISECONDS", {96: 1.0, 128: 1e9})
    monkeypatch.setattr(scaling, "FRONTIER", small / "none.jsonl")
    command = ("run", *shards, "--device", "cpu", "--out", out)
    called(scaling, monkeypatch, *command, "--seconds", 3600)
    assert [(r["map"], r["width"]) for r in read_lines(out)] == [
        (name, 96) for name in scaling.NAMES
    ]
    assert "would take 2000004 s of" in capsys.readouterr().out
    called(scaling, monkeypatch, *command, "--width", 96)
    assert len(read_lines(out)) == len(scaling.NAMES)
    called(scaling, monkeypatch, *command)
    rows = read_lines(out)
    assert [(r["map"], r["width"]) for r in rows] == [(p.map, p.width) for p in points]
    assert len({r["perplexity"] for r in rows}) == len(rows)


def test_gaps_are_paired_and_their_slope_is_least_squares(scaling):
    rows = []
    for doubling, (steps, off) in enumerate({375: 0.01, 750: -0.02, 1500: 0.01}.items()):
        for seed, noise in enumerate((-0.1, 0.1)):
            rows.append(row("full", seed, 50.0 + seed, steps=steps))
            gap = 1 + 0.5 * doubling + off + noise
            rows.append(row("deflated", seed, (50.0 + seed) * (1 + gap / 100), steps=steps))
    rows.append(row("deflated", 9, 1.0))  # no run in full space beside it
    found = scaling.gaps(rows)
    assert found["deflated"][750, 768] == pytest.approx({0: 1.38, 1: 1.58})
    line = scaling.fits(found, "deflated")["tokens"]
    assert (line.slope, line.gap, line.n) == (pytest.approx(0.5), pytest.approx(2.0), 3)
    # The means of two seeds are off by 0.01, 0.02 and 0.01; one degree of freedom, log2 x of −2, −1, 0.
    assert line.error == pytest.approx(math.sqrt(0.0006 / 1 / 2))
    assert line.half == pytest.approx(12.706 * line.error, rel=1e-3)
    assert line.verdict == "grows"
    assert line.at(scaling.million(375)) == pytest.approx(1.0)
    assert "width" not in scaling.fits(found, "deflated")
    text = "\n".join(scaling.table(rows, "tokens")).replace("\N{NO-BREAK SPACE}", " ")
    assert "| 12.3M | +1.5% ± 1.3 (n = 2) |" in text
    # Over all pairs the scatter of the seeds counts: ±0.1 about the means, six pairs, four degrees.
    assert line.pairs.slope == pytest.approx(0.5)
    assert line.pairs.error == pytest.approx(math.sqrt((2 * 0.0006 + 6 * 0.01) / 4 / 4))
    assert line.pairs.half == pytest.approx(2.776 * line.pairs.error, rel=1e-3)
    assert "+0.50 ± 0.22 points (standard error 0.02), over all pairs +0.50 ± 0.17: grows" in text
    assert "72.7M" not in text


def test_a_slope_that_the_scatter_of_seeds_explains_is_not_told(scaling):
    rows = []
    for doubling, steps in enumerate((375, 750, 1500)):
        for seed, noise in enumerate((-2, 2)):
            rows.append(row("full", seed, 50.0, steps=steps))
            gap = 0.5 * doubling + noise + (0.001 if doubling == 1 else 0)
            rows.append(row("low-rank", seed, 50.0 * (1 + gap / 100), steps=steps))
    line = scaling.fits(scaling.gaps(rows), "low-rank")["tokens"]
    assert line.tells
    assert not line.pairs.tells
    assert line.verdict == "no change can be told"


def test_a_slope_is_told_without_each_place_in_turn(scaling):
    points = [(1.0, 0.0), (2.0, 1.0), (2.0, 3.0), (4.0, 1.0)]
    # Without 1 the slope is −1, without 2 it is ½, without 4 it is 2.
    assert scaling.without_one(points) == pytest.approx((-1.0, 2.0))
    with pytest.raises(ValueError, match="points at 2 places: expected three or more"):
        scaling.without_one(points[:3])


def test_a_slope_of_two_points_has_no_error(scaling):
    line = scaling.fit([(1.0, 3.0), (4.0, 1.0)], 2.0)
    assert (line.slope, line.gap) == (-1.0, 2.0)
    assert math.isnan(line.half)
    assert line.verdict == "no change can be told"
    assert scaling.fit([(1.0, 3.0), (1.0, 1.0)], 2.0) is None


def test_runs_of_the_frontier_are_points_at_width_768(scaling, tmp_path):
    rows = [row("flat-48-warm", 0, 57.0), row("full", 0, 56.0), row("joint-2", 0, 58.0)]
    rows += [row("full", 0, 56.0, lr=0.02)]
    for each in rows:
        del each["width"]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = scaling.recorded(path, tmp_path / "none.jsonl")
    assert [(r["map"], r["width"], r["lr"]) for r in found] == [
        ("deflated", 768, 0.014),
        ("full", 768, 0.014),
    ]
