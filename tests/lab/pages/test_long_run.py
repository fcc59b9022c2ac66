"""Tables, figures and claims of the longest runs, at one rate and at the best of several."""

from __future__ import annotations

import importlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.lab.experiments.synthetic import write_run

from polarstep.maps import auto
from polarstep_lab.models.gpt import GPT
from polarstep_lab.optimizers.build import build_polar
from polarstep_lab.records.archive import ARCHIVE
from polarstep_lab.records.pack import pack
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.storage import StorageError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def long_run(module, tmp_path, monkeypatch):
    """Archives of the long run, made by the test: full space and the paper's sketch have two seeds."""
    names = ("pages.records.long_run", "pages.figures.over_time", "long_run")
    found, figures, study = map(importlib.import_module, names)
    for slug, seed, final in (
        ("muon-polar-express", 1, 40.0),
        ("muon-polar-express", 2, 50.0),
        ("rand-muon", 1, 42.0),
        ("rand-muon", 2, 53.0),
        ("deflated", 1, 41.0),
        ("muon-polar-express-slow", 1, 50.0),
        ("deflated-48-slow", 1, 51.0),
        ("deflated-120-slow", 1, 49.0),
        ("adamw", 1, 80.0),
        ("muon", 1, 44.0),
    ):
        (row,) = (row for row in study.ROWS if row.slug == slug)
        write_planned(
            study.whole_run(row, seed, 0.018, tmp_path / ("slow" if row.earlier else "runs")),
            final=final,
            status="diverged" if slug == "muon" else "finished",
            validation=final + 1,
        )
    for slug, lr, final, status in (
        ("adamw", 0.01, 310.0, "finished"),
        ("adamw", 0.018, 300.0, "finished"),
        ("adamw", 0.5, 9.0, "diverged"),
        ("adamw-head", 0.01, 200.0, "finished"),
        ("adamw-head", 0.018, 250.0, "finished"),
        ("adamw-slow", 0.018, 450.0, "finished"),
        ("muon-polar-express", 0.018, 30.0, "finished"),
        ("muon-polar-express-rows", 0.032, 31.0, "finished"),
    ):
        (row,) = (row for row in study.ROWS if row.slug == slug)
        write_planned(
            study.short_run(
                row, study.SEED_OF_RATES, lr, tmp_path / ("slow-rates" if row.earlier else "rates")
            ),
            final=final,
            status=status,
            validation=final,
        )
    pack([tmp_path / "runs"], tmp_path / found.FOLDER)
    pack([tmp_path / "slow"], tmp_path / found.SLOW_FOLDER)
    pack([tmp_path / "rates"], tmp_path / found.RATES)
    pack([tmp_path / "slow-rates"], tmp_path / found.SLOW_RATES)
    better = importlib.import_module("pages.records.best_rates")
    full = study.find_rows("muon-polar-express")
    (planned,) = study.other_rate_runs(full, [1], 0.0097, tmp_path / "other")
    write_planned(planned, 38.0, "finished", validation=39.0)
    pack([tmp_path / "other"], tmp_path / better.OTHER_RATES)
    monkeypatch.setattr(better, "ROOT", tmp_path)
    monkeypatch.setattr(found, "ROOT", tmp_path)
    monkeypatch.setattr(
        found,
        "steps",
        lambda: {("AdamW, fused", "nanoGPT"): {"state_mib": 612.0, "extra_mib": 0.1}},
    )
    for cached in (found.runs, found.rates, better.finished):
        cached.cache_clear()
    yield found, figures, study
    for cached in (found.runs, found.rates, better.finished):
        cached.cache_clear()


def write_planned(planned, final, status, validation=None):
    """A made-up run in the place of a planned one, with its identity."""
    folder = write_run(planned.directory, final=final, status=status, metric="test_perplexity")
    planned.identity.save(folder)
    if validation is not None:
        result = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps(result | {"validation": validation}))
    return folder


def test_the_long_run_names_what_is_missing_and_claims_nothing_from_one_seed(long_run, module):
    found, _, _ = long_run
    text = "\n".join(found.table()).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "| AdamW | 0.018 | 80.00 (one seed) | +100.0% (one seed) | 2.0 | 52.0 | 612 + 0 |" in text
    )
    assert re.search(
        r"\| Muon \(PolarExpress 5\) \| 0\.018 \| 45\.00 ± 63\.53 \(n = 2\) \| – \|", text
    )
    # +5% and +6%: the t-interval of two seeds is 12.7 standard errors to either side.
    assert "| +5.5% ± 6.4 (n = 2) |" in text
    assert "| Muon (Nesterov) | 0.018 | diverged | – |" in text
    assert "not measured" in text
    missing = module.made("long-run-missing")
    assert re.search(r"all seeds of [^;]*`deflated-rows`[^;]*`sgd`", missing)
    assert re.search(r"seeds 2 and 3 of [^;]*`adamw`", missing)
    assert "seed 3 of `muon-polar-express`, `rand-muon`" in missing
    assert "slow" not in missing  # not run again
    claim = module.made("long-run").replace("\N{NO-BREAK SPACE}", " ")
    assert "after 72.7M tokens" in claim
    assert "Rand Muon (Nes.-Gaussian): +5.5% ± 6.4 (n = 2)" in claim


@pytest.fixture
def peers_of_the_long_run(long_run):
    """``long_run`` with a run and short runs of two peers."""
    found, _, study = long_run
    for slug, final in (("dion-normuon", 39.0), ("soap", 38.0)):
        (row,) = study.find_rows(slug)
        short = study.rates_runs([row], found.ROOT / "peer-rates")
        for k, planned in enumerate(short):
            write_planned(planned, 200.0, "finished", validation=200.0 + k % 3)
        lr = study.best_rates(found.ROOT / "peer-rates")[slug]
        write_planned(study.whole_run(row, 1, lr, found.ROOT / "peers"), final, "finished")
    pack([found.ROOT / "peers"], found.ROOT / found.FOLDER)
    pack([found.ROOT / "peer-rates"], found.ROOT / found.RATES)
    return long_run


def test_without_a_run_of_a_peer_no_page_speaks_of_peers(long_run, module):
    found, figures, study = long_run
    titles = [row.title for row in study.PEER_TABLE]
    assert len(titles) == 7
    made = [*found.table(), *found.table_of_rates(), figures.long_run(), module.made("long-run")]
    assert not [title for title in titles if title in "\n".join(made)]
    assert "dash" not in figures.long_run()
    assert "soap" not in module.made("long-run-missing")


def test_a_run_of_a_peer_is_a_row_a_line_and_a_column(peers_of_the_long_run, module, tables):
    found, figures, _ = peers_of_the_long_run
    text = "\n".join(found.table()).replace("\N{NO-BREAK SPACE}", " ")
    assert "| NorMuon of dion | 0.0097 | 39.00 (one seed) | −2.5% (one seed) | 2.0 |" in text
    assert "| SOAP of pytorch_optimizer | 0.00031 | 38.00 (one seed) | −5.0% (one seed) |" in text
    assert "| SOAP of pytorch_optimizer | **0.00031: 200.0**" in "\n".join(found.table_of_rates())
    drawn = figures.long_run()
    assert drawn.count("stroke-dasharray") == 2
    assert "NorMuon, 39.0" in drawn
    assert "Dashed: other libraries, without a CUDA graph." in drawn
    missing = module.made("long-run-missing")
    assert re.search(r"all seeds of [^;]*`torch-muon`", missing)
    assert re.search(r"seeds 2 and 3 of [^;]*`soap`", missing)
    assert "NorMuon of dion: −2.5% (one seed)" in module.made("long-run").replace(
        "\N{NO-BREAK SPACE}", " "
    )
    lines = tables.TABLES["peers"](ROOT).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert lines[0].endswith("| test, after 72.7M tokens |")
    (normuon,) = (line for line in lines if line.startswith("| NorMuon of dion"))
    assert normuon.endswith(
        "| −2.5% (one seed), at 0.0097 against 0.018; +2.6% (one seed) to full space at 0.0097 |"
    )
    (jordan,) = (line for line in lines if line.startswith("| Muon of K. Jordan"))
    assert jordan.endswith("| not run |")


def test_peers_have_the_rates_of_our_rows_and_four_of_their_own(long_run):
    _, _, study = long_run
    rows = study.find_rows("peers")
    assert [row.slug for row in rows] == [row.slug for row in study.PEER_TABLE]
    (ours,) = study.find_rows("muon-polar-express")
    settings = study.whole_run(ours, 1, 0.03).config.optimizer
    for row in rows:
        config = study.whole_run(row, 1, 0.03).config
        assert config.rule.peer == row.slug
        for name in ("embedding_lr", "head_lr", "vector_lr", "other_momentum", "weight_decay"):
            assert getattr(config.optimizer, name) == getattr(settings, name), (row.slug, name)
        assert len(list(study.rates_runs([row], Path()))) == len(study.FACTORS_OF_MUON)


def test_two_ranks_of_one_method_are_two_rows(long_run):
    found, _, study = long_run
    text = "\n".join(found.table(study.SLOW_TABLE)).replace("\N{NO-BREAK SPACE}", " ")
    first = "| Deflated Muon, rank 48, smaller δ | 0.018 | 51.00 (one seed) | +2.0% (one seed) |"
    assert first in text  # against full space of its own table
    assert "| Deflated Muon, rank 120 | 0.018 | 49.00 (one seed) | −2.0% (one seed) |" in text
    assert "| Deflated Muon | " not in text
    assert "rank 120" not in "\n".join(found.table())


def test_perplexity_over_time_has_a_line_for_each_row(long_run):
    found, figures, _ = long_run
    drawn = figures.long_run()
    assert "Muon (full space), 40.0" in drawn  # the lower of two seeds, the middle one of three
    assert "Each line is of the run with the middle end" in drawn
    assert len(re.findall(r'class="line', drawn)) == 3
    assert drawn.count('class="line full"') == 1
    assert "Above the figure: AdamW (80.0)" in drawn
    times = found.seconds(found.runs()["adamw"][1])
    assert times[-1] == (pytest.approx(200 * 0.052), pytest.approx(80.0))  # 52 ms a step


def test_of_several_runs_the_one_in_the_middle_is_drawn(module):
    middle = importlib.import_module("pages.figures.over_time").middle
    runs = [[(1.0, 90.0), (2.0, end)] for end in (43.0, 42.5, 42.7)]
    assert middle(runs) == runs[2]
    assert middle(runs[:2]) == runs[1]
    assert middle(runs[:1]) == runs[0]


def test_a_run_that_shared_the_gpu_has_no_times_and_no_line(long_run):
    found, figures, study = long_run
    (row,) = study.find_rows("adamw-warmup")
    folder = write_planned(study.whole_run(row, 1, 0.018, found.ROOT / "shared"), 41.5, "finished")
    environment = folder / "environment.json"
    known = json.loads(environment.read_text())
    for shared, lines in ((True, 3), (False, 4)):
        environment.write_text(json.dumps(known | {"device_shared": shared}))
        pack([found.ROOT / "shared"], found.ROOT / found.FOLDER, force=True)
        found.runs.cache_clear()
        assert len(re.findall(r'class="line', figures.long_run())) == lines
        (told,) = (line for line in found.table() if line.startswith("| AdamW, warm-up |"))
        assert ("| not timed | not timed |" in told) == shared
        assert (found.times("adamw-warmup") is None) == shared


def test_the_rate_with_the_lowest_validation_perplexity_is_chosen(long_run, module):
    found, _, study = long_run
    assert found.rates()["adamw"] == {0.01: 310.0, 0.018: 300.0, 0.5: math.inf}
    lines = [*found.table_of_rates()]
    assert "| AdamW | 0.01: 310.0, **0.018: 300.0**, 0.5: diverged |" in lines
    assert "| AdamW, head at the rate of the matrices | **0.01: 200.0**, 0.018: 250.0 |" in lines
    assert not any("450" in line for line in lines)
    assert "| AdamW | **0.018: 450.0** |" in [*found.table_of_rates(study.SLOW_TABLE)]
    assert study.best_rates(found.ROOT / found.RATES, found.ROOT / found.SLOW_RATES) == {
        "adamw": 0.018,
        "adamw-head": 0.01,
        "adamw-slow": 0.018,
        "muon-polar-express": 0.018,
        "muon-polar-express-rows": 0.032,
        "deflated-rows": 0.032,  # that of full space with normalized rows
    }
    assert module.made("long-run-edges") == (
        "Muon (PolarExpress 5); Muon (PolarExpress 5, normalized rows); "
        "AdamW, head at the rate of the matrices"
    )


def test_validation_chooses_the_best_rate_over_all_steps(long_run):
    found, _, study = long_run
    better = importlib.import_module("pages.records.best_rates")
    for slug, seed, lr, test, validation, status in (
        ("muon-polar-express", 2, 0.0097, 44.0, 45.0, "finished"),
        ("deflated", 1, 0.0097, 38.38, 40.0, "finished"),
        ("deflated", 2, 0.0097, 44.88, 46.0, "finished"),
        ("deflated", 1, 0.0053, 30.0, 90.0, "finished"),  # lowest on the text that does not choose
        ("rand-muon", 2, 0.0097, 20.0, 20.0, "finished"),  # not with the seed that chooses
        ("adamw", 1, 0.0097, 9.0, 9.0, "diverged"),
    ):
        (row,) = study.find_rows(slug)
        (planned,) = study.other_rate_runs([row], [seed], lr, found.ROOT / "other")
        write_planned(planned, test, status, validation)
    pack([found.ROOT / "other"], found.ROOT / better.OTHER_RATES)
    assert {row.slug for row in better.rows()} == {"muon-polar-express", "deflated"}
    assert better.tried("deflated") == {0.0053: 90.0, 0.0097: 40.0, 0.018: 42.0}
    assert (better.best("muon-polar-express"), better.best("deflated")) == (0.0097, 0.0097)
    assert [row.slug for row in better.at_an_end()] == ["muon-polar-express"]
    assert better.gap("deflated").value == pytest.approx(1.5)  # +1% and +2%, each of its seed
    text = "\n".join(better.table()).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "| 0.0053: 90.00, **0.0097: 40.00**, 0.018: 42.00 | 41.63 ± 41.30 (n = 2) | +1.5%" in text
    )
    told = better.told_gap("adamw").replace("\N{NO-BREAK SPACE}", " ")
    at_one_rate, to_best = told.split("; ")
    assert at_one_rate == "+100.0% (one seed), both at 0.018"  # the rate of full space's table
    assert to_best == "+110.5% (one seed) to full space at 0.0097"  # 80 against 38
    assert better.told_gap("deflated") == better.gap("deflated").told(unit="%")
    assert better.told_gap("sgd") is None
    # The runs that tables show: two at the best rate, where the table of one rate has one.
    assert (len(better.sources("deflated")), len(found.sources("deflated"))) == (2, 1)
    assert better.sources("adamw") == found.sources("adamw")


def test_a_row_of_an_earlier_map_is_shown_and_not_run_again(long_run):
    found, _, study = long_run
    assert "deflated-48-slow" in found.runs()
    with pytest.raises(ValueError, match="--methods deflated-48-slow: expected some of"):
        study.find_rows("deflated-48-slow")


def test_a_run_with_settings_of_no_row_is_refused(long_run):
    found, _, study = long_run
    (row,) = study.find_rows("deflated")
    other = study.Row("deflated-24", "rank 24", row.method, {"optimizer.polar.rank": 24})
    write_planned(study.whole_run(other, 1, 0.018, found.ROOT / "more"), 38.0, "finished")
    pack([found.ROOT / "more"], found.ROOT / found.FOLDER)
    with pytest.raises(StorageError, match=r"optimizer\.polar\.rank=24.*is no run of this study"):
        found.runs()


def test_the_archived_long_runs_are_those_that_the_program_plans(module):
    """Started again with the archives unpacked, ``long_run.py`` makes none of their runs again."""
    found, best_rates, study = map(
        importlib.import_module,
        ("pages.records.long_run", "pages.records.best_rates", "long_run"),
    )
    rates = study.best_rates(ROOT / found.RATES, ROOT / found.SLOW_RATES)
    plans = {}
    for folder, folder_of_rates, rows in (
        (found.FOLDER, found.RATES, study.SHOWN),
        (found.SLOW_FOLDER, found.SLOW_RATES, study.SLOW_TABLE),
    ):
        own = [row for row in rows if row.rate_of is None]
        plans[folder_of_rates] = [*study.rates_runs(own, Path())]
        known = [row for row in rows if row.slug in rates]
        plans[folder] = [*study.table_runs(known, [1, 2, 3], rates, Path())]
    plans[best_rates.OTHER_RATES] = [
        planned
        for lr in (0.00031, 0.00054, 0.0097, 0.018)
        for planned in study.other_rate_runs(study.SHOWN, [1, 2, 3], lr, Path())
    ]
    for folder, runs in plans.items():
        planned = {str(run.directory): run.identity for run in runs}
        archive = ROOT / folder / ARCHIVE
        for path in find_runs([archive.parent]):
            recorded = RunRecord.load(path).identity
            made = planned[str(path.relative_to(archive))]
            assert (made.method, made.command) == (recorded.method, recorded.command)
            assert made.config == recorded.config, path


def test_auto_takes_the_deflated_map_of_the_long_run_for_its_matrices(module, monkeypatch):
    """So that the runs of ``deflated-120`` say what ``auto`` reaches on an H200."""
    study = importlib.import_module("long_run")
    monkeypatch.setattr(auto, "_kind_of", lambda device: "H200")
    monkeypatch.setattr(auto, "_CHOICES", {})
    (row,) = study.find_rows("deflated-120")
    config = study.whole_run(row, 1, 0.018).config
    ran = build_polar(config.optimizer.polar, config.benchmark)
    with torch.device("meta"):
        shapes = set(GPT(config.model).matrix_shapes())
    assert shapes
    for m, n in shapes:
        taken = auto.Auto().on(m, n, torch.device("cuda"))
        assert (taken.rest, taken.float8) == (ran.rest, ran.float8)
        assert replace(taken.head, always_sketch=True) == ran.head
