"""``polarstep tune`` with real trainings of a network that is as small as it gets."""

from __future__ import annotations

import json

import pytest
from tests.lab.experiments.small import SMALLEST_GPT as TINY
from typer.testing import CliRunner

from polarstep_lab.cli import app
from polarstep_lab.methods import find_method
from polarstep_lab.recipes import find_recipe, resolve
from polarstep_lab.records.record import RunRecord
from polarstep_lab.tune import search_of, trials_of

SET = [word for key, value in TINY.items() for word in ("--set", f"{key}={json.dumps(value)}")]


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["tune", *map(str, arguments)])


@pytest.mark.usefixtures("forked_workers")
def test_every_method_gets_the_same_budget_and_a_recipe_that_runs(invoke, tmp_path):
    result = invoke(
        "nanogpt-toy", "-m", "adamw,muon,rand-muon", "-n", 2, *SET, "--collect", "values.json"
    )
    assert result.exit_code == 0, result.stderr
    values = json.loads((tmp_path / "values.json").read_text())["methods"]
    assert len(values) == 3
    for slug, entry in values.items():
        path = tmp_path / "tuned" / f"nanogpt-toy-{slug}.json"
        config = resolve(str(path))
        assert config.rule.slug == slug
        assert config.optimizer.lr == entry["overrides"]["optimizer.lr"]
        assert config.model.width == 16
        assert entry["tuned"]["trials"] == 2
        assert f"polarstep run tuned/nanogpt-toy-{slug}.json\n" in result.stdout


@pytest.mark.usefixtures("forked_workers")
def test_a_trial_is_judged_by_the_last_validation_loss(invoke, tmp_path):
    result = invoke("nanogpt-toy", "-m", "muon", "-n", 1, *SET, "--study", "s")
    assert result.exit_code == 0, result.stderr
    (trial,) = trials_of(search_of("nanogpt-toy", "muon", tmp_path / "s", TINY))
    assert list(trial["reported"]) == ["1", "2", "3"]  # steps 2, 4 and 6; not step 0
    assert trial["val_loss"] == trial["reported"]["3"]
    run = RunRecord.load(tmp_path / "s/nanogpt-toy/muon/trial-000")
    assert trial["val_loss"] == run.rows("val")[-1].loss


def test_the_value_in_the_recipes_code_is_tried_first_and_not_a_tuned_one(tmp_path):
    search = search_of("nanogpt-toy", "adamw", tmp_path)
    method = find_method("adamw")
    assert search.start["optimizer.lr"] == find_recipe("nanogpt-toy").build(method).optimizer.lr
    assert search.start["optimizer.lr"] != resolve("nanogpt-toy", method).optimizer.lr
    outside = search_of("nanogpt-toy", "adamw", tmp_path, {"optimizer.lr": 1e3})
    assert outside.start == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nanogpt-toi", "-m", "muon"], "did you mean 'nanogpt-toy'"),
        (["nanogpt-toy", "-m", "moun"], "did you mean 'muon'"),
        (["nanogpt-toy", "-m", "muon", "--set", "model.widht=3"], "width"),
        (["nanogpt-toy", "-m", "muon", "--pruner", "secateurs"], "expected median or none"),
        (["nanogpt-toy", "-m", "muon", "--set", "optimizer.lr=0.1"], "tries optimizer.lr from"),
    ],
)
def test_bad_requests_are_named(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "taken"], "taken is a file, expected a folder: choose another --out"),
        (["--out", "taken/below"], "taken is a file, expected a folder: choose another --out"),
        (["--out", "others"], "is not a tuned recipe of nanogpt-toy for muon"),
        (["--collect", "others"], "others is a folder, expected a file: choose another --collect"),
        (["--collect", "taken"], "taken exists and does not hold tuned values of nanogpt-toy"),
    ],
)
def test_a_place_that_cannot_be_written_is_named_before_the_first_trial(
    invoke, tmp_path, arguments, message
):
    (tmp_path / "taken").write_text("{}")
    (tmp_path / "others").mkdir()
    (tmp_path / "others/nanogpt-toy-muon.json").write_text("{}")
    result = invoke("nanogpt-toy", "-m", "adamw,muon", "-n", 1, *SET, "--study", "s", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "s").exists()
