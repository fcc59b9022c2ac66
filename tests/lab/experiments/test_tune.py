"""Tuning with workers that do not train: budgets, pruning, interruptions, results."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import filelock
import pytest
from tests.lab.experiments.workers import Bowls

from polarstep_lab.config import ConfigError
from polarstep_lab.recipes import Range, resolve
from polarstep_lab.storage import StorageError
from polarstep_lab.tune import (
    Search,
    best_recipe,
    opening_values,
    trials_of,
    tune,
    write_recipe,
    write_tuned,
)

SPACE = {"optimizer.lr": Range(1e-4, 10.0, log=True)}


@pytest.fixture
def search(tmp_path):
    return Search(tmp_path / "trials", "nanogpt-toy", "muon", SPACE)


def rates(search):
    return [trial["overrides"]["optimizer.lr"] for trial in trials_of(search)]


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    """With workers in place of those that train, which takes half a minute a trial."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polarstep_lab.jobs.local.LocalWorkers", Bowls)
    page = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text("utf-8")
    _, block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {"__name__": "__main__"}
    exec(compile(block, "docs/experiments.md", "exec"), names)
    assert len(trials_of(names["search"])) == 4


def test_the_best_trial_is_found_near_the_minimum(search):
    search = replace(search, start={"optimizer.lr": 0.3})
    standing = tune(search, 15, Bowls())
    assert standing.done == 15
    assert rates(search)[0] == 0.3  # the recipe's own value comes first
    best = best_recipe(search)
    assert best["overrides"]["optimizer.lr"] == pytest.approx(0.03, rel=1.5)
    assert standing.best == best["tuned"]["val_loss"] < 2.0  # better than the recipe's own


def test_the_opening_is_spread_over_the_whole_range(tmp_path):
    space = {"a": Range(1e-4, 1.0, log=True), "b": Range(0.0, 1.0)}
    opening = opening_values(Search(tmp_path / "s", "nanogpt-toy", "muon", space))
    assert len(opening) == 4
    for key, position in (("a", lambda x: 1 + math.log10(x) / 4), ("b", lambda x: x)):
        shares = sorted(position(values[key]) for values in opening)
        assert 0 <= shares[0] < 0.4
        assert 0.6 < shares[-1] <= 1
        assert min(b - a for a, b in itertools.pairwise(shares)) > 0.05


def test_trials_that_fall_behind_or_diverge_are_pruned(search):
    standing = tune(search, 20, Bowls())
    assert 0 < standing.pruned < 20
    pruned = [trial for trial in trials_of(search) if trial["state"] == "pruned"]
    assert len(pruned) == standing.pruned
    assert all(trial["val_loss"] is None and len(trial["reported"]) < 5 for trial in pruned)
    assert {trial["ended"] for trial in pruned} <= {"diverged", "behind the others"}
    fast = [trial for trial in trials_of(search) if trial["overrides"]["optimizer.lr"] > 1.0]
    assert all(trial["state"] == "pruned" for trial in fast)


def test_without_a_pruner_every_trial_that_does_not_diverge_ends(search):
    search = replace(search, pruner="none")
    tune(search, 12, Bowls())
    slow = [trial for trial in trials_of(search) if trial["overrides"]["optimizer.lr"] <= 1]
    assert {trial["state"] for trial in slow} == {"complete"}


def test_a_search_continues_to_its_budget_and_not_beyond(search):
    workers = Bowls()
    for trials in (3, 8, 8):
        tune(search, trials, workers)
    assert len(workers.rates) == 8


@pytest.mark.parametrize("pruner", ["median", "none"])
def test_interrupted_and_continued_tries_the_same_values(search, tmp_path, pruner):
    search = replace(search, pruner=pruner)
    whole = replace(search, folder=tmp_path / "whole")
    tune(whole, 12, Bowls())
    tune(search, 3, Bowls())
    for after in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            tune(search, 12, Bowls(interrupt_at=after))
    tune(search, 12, Bowls())
    assert trials_of(search) == trials_of(whole)
    assert len(set(rates(whole))) == 12


def test_a_trial_that_was_interrupted_goes_on(search):
    with pytest.raises(KeyboardInterrupt):
        tune(search, 6, stopped := Bowls(interrupt_at=3))
    tune(search, 6, again := Bowls())
    assert again.rates[0] == stopped.rates[-1]
    assert len(again.rates) == 4
    assert len(set(rates(search))) == 6


def test_several_workers_share_one_search(search):
    standing = tune(search, 8, workers := Bowls(count=2))
    assert standing.done == len(set(workers.rates)) == 8


def test_a_search_in_use_is_refused(search):
    search.folder.mkdir()
    with (
        filelock.FileLock(search.folder / ".search.lock"),
        pytest.raises(StorageError, match="another process is tuning"),
    ):
        tune(search, 1, Bowls())


def test_a_search_is_not_continued_under_other_settings(search):
    tune(search, 1, Bowls())
    with pytest.raises(ConfigError, match=r"another overrides.*choose another --study"):
        tune(replace(search, overrides={"model.layers": 2}), 2, Bowls())
    with pytest.raises(ConfigError, match="another space"):
        tune(replace(search, space={"optimizer.lr": Range(0.1, 1.0)}), 2, Bowls())


def test_every_method_opens_alike(search, tmp_path):
    other = replace(search, method="adamw", folder=tmp_path / "other")
    tune(search, 8, Bowls())
    tune(other, 6, Bowls())
    assert rates(search)[:4] == rates(other)[:4]
    assert set(rates(search)[4:]).isdisjoint(rates(other)[4:])


def test_impossible_requests_are_refused(search):
    with pytest.raises(ConfigError, match="expected at least 1"):
        tune(search, 0, Bowls())
    with pytest.raises(ConfigError, match="marks nothing to tune"):
        replace(search, space={})
    with pytest.raises(ConfigError, match="expected median or none"):
        replace(search, pruner="secateurs")
    with pytest.raises(ConfigError, match="ran to its end"):
        best_recipe(search)


def test_the_best_trial_becomes_a_recipe_that_resolves(search, tmp_path):
    search = replace(search, overrides={"model.layers": 2})
    tune(search, 6, Bowls())
    recipe = best_recipe(search, "polarstep tune nanogpt-toy")
    assert recipe["tuned"]["trials"] == 6
    path = tmp_path / "best.json"
    write_recipe(path, recipe)
    config = resolve(str(path))
    assert config.optimizer.lr == recipe["overrides"]["optimizer.lr"]
    assert config.model.layers == 2
    assert config.method == "Muon (Nesterov)"
    write_recipe(path, recipe)  # again, over its own
    with pytest.raises(StorageError, match="is not a tuned recipe"):
        write_recipe(path, recipe | {"method": "adamw"})


def test_a_foreign_recipe_file_is_left_alone(search, tmp_path):
    tune(search, 1, Bowls())
    path = tmp_path / "mine.json"
    mine = {"recipe": "nanogpt-toy", "method": "muon", "overrides": {}}
    path.write_text(json.dumps(mine))
    with pytest.raises(StorageError, match="move it away"):
        write_recipe(path, best_recipe(search))
    assert json.loads(path.read_text()) == mine


def test_tuned_values_of_several_methods_collect_in_one_file(search, tmp_path):
    path = tmp_path / "nanogpt-toy.json"
    for trials, method in enumerate(("muon", "adamw"), start=2):
        folder = tmp_path / method
        its = replace(search, method=method, folder=folder, overrides={"model.layers": 2})
        tune(its, trials, Bowls())
        write_tuned(path, best := best_recipe(its))
    methods = json.loads(path.read_text())["methods"]
    assert {slug: entry["tuned"]["trials"] for slug, entry in methods.items()} == {
        "muon": 2,
        "adamw": 3,
    }
    # What all trials shared is no tuned value.
    assert methods["adamw"]["overrides"] == {"optimizer.lr": best["overrides"]["optimizer.lr"]}
    assert methods["adamw"]["tuned"]["under"] == {"model.layers": 2}
    with pytest.raises(StorageError, match="does not hold tuned values"):
        write_tuned(path, best | {"recipe": "cifar10"})
