"""``polarstep demo`` with the network made as small as it gets."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from polarstep.cli import app
from polarstep.experiments import demo
from polarstep.experiments.methods import METHODS
from polarstep.experiments.recipes import resolve
from polarstep.experiments.record import Result, RunRecord, find_runs
from polarstep.storage import StorageError

TINY = {
    "model.width": 16,
    "model.layers": 1,
    "model.heads": 1,
    "model.context": 16,
    "data.stages": [{"steps": 6, "sequences": 2, "sequence_length": 16}],
    "evaluation.every": 2,
    "evaluation.tokens": 128,
    "evaluation.batch": 4,
}


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        demo, "resolve", lambda recipe, method, seed, _: resolve(recipe, method, seed, TINY)
    )
    return lambda *arguments: CliRunner().invoke(app, ["demo", *map(str, arguments)])


def test_it_compares_all_methods_and_ends_with_the_path_of_the_report(invoke, tmp_path):
    result = invoke("--workers", 2)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "Report: runs/demo/report/index.html"
    for method in METHODS:
        assert result.stdout.count(f"│ {method.name} ") == 1
    runs = [RunRecord.load(path) for path in find_runs([tmp_path / "runs" / "demo"])]
    assert len(runs) == 14
    assert {run.identity.seed for run in runs} == set(demo.SEEDS)
    assert {run.status for run in runs} == {"finished"}
    page = (tmp_path / "runs/demo/report/index.html").read_text()
    assert "polarstep run nanogpt-toy --method rand-muon-kaczmarz --seed 2" in page

    stamps = {run.directory: (run.directory / "result.json").stat().st_mtime_ns for run in runs}
    again = invoke("--workers", 2)  # nothing is trained twice, nor overwritten
    assert "All runs are there from before" in again.stdout
    assert stamps == {path: (path / "result.json").stat().st_mtime_ns for path in stamps}


def test_runs_under_other_settings_are_not_overwritten(tmp_path):
    first = demo.plan(tmp_path, seeds=[1], overrides=TINY)[0]
    first.directory.mkdir()
    first.identity.save(first.directory)
    Result("val_perplexity", 30.0, "finished", 6, 1.0, 1.0, 1.0).save(first.directory)
    finished = [each.finished for each in demo.plan(tmp_path, seeds=[1], overrides=TINY)]
    assert finished == [True, *[False] * 6]
    with pytest.raises(StorageError, match="--again"):
        demo.plan(tmp_path, seeds=[1], overrides=TINY | {"model.width": 32})


def test_runs_that_diverge_or_fail_are_told_and_do_not_stop_the_others(tmp_path, capfd):
    def only(slug, **overrides):
        plans = demo.plan(tmp_path, seeds=[1], overrides=TINY | overrides)
        return next(each for each in plans if each.config.rule.slug == slug)

    plans = [
        only("sgd", **{"optimizer.lr": 1e30}),
        only("adamw", **{"data.val": ["none/*.bin"]}),
        only("muon"),
    ]
    events = list(demo.run_all(plans, workers=1))
    assert [event.status for event in events if event.status] == ["diverged", "finished"]
    (error,) = [event.error for event in events if event.error]
    assert "none/*.bin" in error
    assert "Traceback" in capfd.readouterr().err


def test_the_rates_were_tuned_with_equal_budgets():
    tuning = demo.tuning_budget()
    assert tuning is not None
    assert tuning.trials >= 8
    assert tuning.command.startswith("polarstep tune nanogpt-toy --method all")
    for method in METHODS:
        assert resolve(demo.RECIPE, method).optimizer.lr != 0
