"""Tuning with objectives that cost nothing: budgets, pruning, interruptions, workers, results."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.trial import TrialState
from tests.forking import fork
from tests.lab.experiments.objectives import Arrives, Bowl, Dies
from tests.processes import PATIENCE, start

from polarstep_lab.config import ConfigError
from polarstep_lab.recipes import Range, resolve
from polarstep_lab.storage import StorageError
from polarstep_lab.tune import (
    StudySpec,
    best_recipe,
    trial_table,
    tune,
    write_recipe,
    write_tuned,
)
from polarstep_lab.tune.study import at_work, open_study, opening_values

posix = pytest.mark.skipif(os.name != "posix", reason="signals to a process group")

SPACE = {"optimizer.lr": Range(1e-4, 10.0, log=True)}


@pytest.fixture(params=["study.journal", "study.db"])
def spec(request, tmp_path):
    return StudySpec(
        storage=tmp_path / request.param,
        recipe="nanogpt-toy",
        method="muon",
        space=SPACE,
        start={"optimizer.lr": 0.3},
    )


@pytest.fixture
def journal(tmp_path):
    return StudySpec(tmp_path / "s.journal", "nanogpt-toy", "muon", SPACE)


def learning_rates(spec):
    return [json.loads(line)["overrides"]["optimizer.lr"] for line in trial_table(spec).split("\n")
            if line]  # fmt: skip


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    """With an objective in place of training, which takes half a minute a trial."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polarstep_lab.tune.TrainingObjective", lambda recipe, method: Bowl())
    page = (Path(__file__).parents[3] / "docs" / "tuning.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(block, "docs/tuning.md", "exec"), names)
    assert len(open_study(names["spec"]).trials) == 4


def test_the_best_trial_is_found_near_the_minimum(journal):
    spec = replace(journal, start={"optimizer.lr": 0.3})
    progress = tune(spec, Bowl(), trials=15)
    assert progress.done == 15
    assert learning_rates(spec)[0] == 0.3  # the recipe's own value comes first
    assert progress.best_overrides["optimizer.lr"] == pytest.approx(0.03, rel=1.5)
    assert progress.best < 1.0 + 1.0  # better than the recipe's own


def test_the_opening_is_spread_over_the_whole_range(tmp_path):
    space = {"a": Range(1e-4, 1.0, log=True), "b": Range(0.0, 1.0)}
    opening = opening_values(StudySpec(tmp_path / "s", "nanogpt-toy", "muon", space))
    assert len(opening) == 4
    for key, position in (("a", lambda x: 1 + math.log10(x) / 4), ("b", lambda x: x)):
        shares = sorted(position(values[key]) for values in opening)
        assert 0 <= shares[0] < 0.4
        assert 0.6 < shares[-1] <= 1
        assert min(b - a for a, b in itertools.pairwise(shares)) > 0.05


def test_trials_that_fall_behind_or_diverge_are_pruned(journal):
    progress = tune(journal, Bowl(), trials=20)
    assert 0 < progress.pruned < 20
    rows = [json.loads(line) for line in trial_table(journal).splitlines()]
    assert all(row["val_loss"] is None for row in rows if row["state"] == "pruned")
    reasons = {row["ended"] for row in rows if row["state"] == "pruned"}
    assert reasons <= {"diverged", "behind the others"}
    assert all(len(row["reported"]) < 5 for row in rows if row["state"] == "pruned")
    diverged = [row for row in rows if row["overrides"]["optimizer.lr"] > 1.0]
    assert all(row["state"] == "pruned" for row in diverged)


def test_without_a_pruner_every_trial_that_does_not_diverge_ends(journal):
    tune(replace(journal, pruner="none"), Bowl(), trials=12)
    rows = [json.loads(line) for line in trial_table(replace(journal, pruner="none")).splitlines()]
    assert {row["state"] for row in rows if row["overrides"]["optimizer.lr"] <= 1} == {"complete"}


def test_a_study_continues_to_its_budget_and_not_beyond(spec, tmp_path):
    log = tmp_path / "log"
    tune(spec, Bowl(log), trials=3)
    tune(spec, Bowl(log), trials=8)
    tune(spec, Bowl(log), trials=8)
    assert len(log.read_text().splitlines()) == 8


def test_interrupted_and_continued_tries_the_same_values(journal, tmp_path):
    whole = replace(journal, storage=tmp_path / "whole.journal")
    tune(whole, Bowl(), trials=9)
    tune(journal, Bowl(), trials=4)
    tune(journal, Bowl(), trials=9)
    assert learning_rates(journal) == learning_rates(whole)
    assert len(set(learning_rates(whole))) == 9


def test_ctrl_c_gives_the_trial_back(journal, tmp_path):
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        tune(journal, Bowl(log, interrupt_at=3), trials=6)
    interrupted = float(log.read_text().splitlines()[-1].split()[1])
    progress = tune(journal, Bowl(log), trials=6)
    assert progress.done == 6
    assert progress.running == 0
    tried = [float(line.split()[1]) for line in log.read_text().splitlines()]
    assert interrupted in tried[3:]
    assert len(set(tried)) == 6


@pytest.mark.usefixtures("forked_workers")
def test_a_killed_worker_loses_only_its_trial(journal, tmp_path):
    objective = Dies(tmp_path / "marker")
    with pytest.raises(ChildProcessError, match="exit codes"):
        tune(journal, objective, trials=5, workers=2)
    lost = float((tmp_path / "marker").read_text())
    progress = tune(journal, objective, trials=5)
    assert progress.done == 5
    study = open_study(journal)
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    assert lost in [trial.params["optimizer.lr"] for trial in complete]
    assert not study.get_trials(states=(TrialState.RUNNING,))


def tuning_in_a_group(spec, objective, begin=fork, workers="spawn"):
    """A process that tunes with two workers, all three in a process group of their own."""
    script = f"""
import multiprocessing
import sys
from pathlib import Path
from polarstep_lab.tune import tune
from tests.forking import fork
from tests.lab.experiments.objectives import Arrives, Bowl
from tests.lab.experiments.test_tune import SPACE, StudySpec
PosixPath = Path
context = multiprocessing.get_context({workers!r})
multiprocessing.get_context = lambda method: context
try:
    tune(StudySpec({spec.storage!r}, "nanogpt-toy", "muon", SPACE), {objective!r}, 100, 2)
except KeyboardInterrupt:
    sys.exit(130)
"""
    return begin("-c", script)


def wait_for_lines(log, lines):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if log.exists() and len(log.read_text().splitlines()) >= lines:
            return
        time.sleep(0.1)
    raise AssertionError(f"{log} has fewer than {lines} lines")


@posix
def test_ctrl_c_stops_all_workers_and_loses_nothing_finished(journal, tmp_path):
    log = tmp_path / "log"
    process = tuning_in_a_group(journal, Bowl(log, seconds=0.2))
    wait_for_lines(log, 6)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "")
    study = open_study(journal)
    done = len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)))
    assert 0 < done < 100
    assert not study.get_trials(states=(TrialState.RUNNING,))
    assert study.get_trials(states=(TrialState.WAITING,))
    assert tune(journal, Bowl(), trials=done + 3).done == done + 3


@posix
def test_ctrl_c_while_workers_start_prints_no_traceback(journal, tmp_path):
    log = tmp_path / "log"
    process = tuning_in_a_group(journal, Arrives(log))
    wait_for_lines(log, 1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "")


@posix
def test_a_study_whose_processes_were_all_killed_is_continued(journal, tmp_path):
    log = tmp_path / "log"
    process = tuning_in_a_group(journal, Bowl(log, seconds=0.2), start, workers="fork")
    wait_for_lines(log, 3)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)  # until all three have closed standard error
    running = open_study(journal).get_trials(states=(TrialState.RUNNING,))
    progress = tune(journal, Bowl(), trials=10)
    assert (progress.done, progress.running) == (10, 0)
    ended = open_study(journal).get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    lost = {trial.params["optimizer.lr"] for trial in running if trial.params}
    assert lost <= {trial.params["optimizer.lr"] for trial in ended}


@pytest.mark.usefixtures("forked_workers")
def test_several_workers_share_one_study(journal, tmp_path):
    log = tmp_path / "log"
    progress = tune(journal, Bowl(log, workers=2), trials=8, workers=2)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert progress.done == len(lines) == 8
    assert len({pid for pid, _ in lines}) == 2
    assert len({lr for _, lr in lines}) == 8


def test_a_study_is_not_continued_under_other_settings(journal):
    tune(journal, Bowl(), trials=1)
    with pytest.raises(ConfigError, match=r"another overrides.*choose another --study"):
        tune(replace(journal, overrides={"model.layers": 2}), Bowl(), trials=2)
    with pytest.raises(ConfigError, match="another space"):
        tune(replace(journal, space={"optimizer.lr": Range(0.1, 1.0)}), Bowl(), trials=2)


def test_methods_share_a_file_and_not_their_trials(journal):
    other = replace(journal, method="adamw")
    tune(journal, Bowl(), trials=8)
    tune(other, Bowl(), trials=6)
    ours, theirs = learning_rates(journal), learning_rates(other)
    assert (len(ours), len(theirs)) == (8, 6)
    assert ours[:4] == theirs[:4]  # every method opens alike
    assert set(ours[4:]).isdisjoint(theirs[4:])


def test_a_trial_under_way_elsewhere_counts_towards_the_budget(journal):
    tune(journal, Bowl(), trials=1)
    with at_work(journal) as study:
        elsewhere = study.ask()
        assert tune(journal, Bowl(), trials=4).done == 3
        study.tell(elsewhere, 2.0)
    assert tune(journal, Bowl(), trials=4).done == 4


def test_a_trial_that_nobody_works_on_is_run_again(spec, tmp_path):
    """Whoever ran it: a process id may be in use again, as after a restart of the machine."""
    tune(spec, Bowl(), trials=1)
    lost = open_study(spec).ask()
    lost.set_user_attr("worker", f"machine:{os.getpid()}")
    tried = lost.suggest_float("optimizer.lr", 1e-4, 10.0, log=True)
    assert tune(spec, Bowl(tmp_path / "log"), trials=4).running == 0
    assert repr(tried) in (tmp_path / "log").read_text()


def test_a_worker_killed_before_it_knew_its_values_loses_no_value_of_the_opening(spec):
    opening = [values["optimizer.lr"] for values in opening_values(spec)]
    tune(spec, Bowl(), trials=1)
    open_study(spec).ask()
    assert tune(spec, Bowl(), trials=4).done == 4
    ended = open_study(spec).get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    assert sorted(trial.params["optimizer.lr"] for trial in ended) == sorted(opening)


def test_a_journal_cut_inside_its_last_line_is_continued(journal, tmp_path, caplog):
    tune(journal, Bowl(), trials=3)
    content = journal.storage.read_bytes()
    last = len(content) - len(content[:-1].rpartition(b"\n")[2]) - 1
    for number, end in enumerate((last + 1, (last + len(content)) // 2, len(content) - 1)):
        cut = replace(journal, storage=tmp_path / f"{number}.journal")
        cut.storage.write_bytes(content[:end])
        (tmp_path / f"{number}.journal.lock").touch()  # who was killed while writing held it
        caplog.clear()
        progress = tune(cut, Bowl(), trials=6)
        assert (progress.done, progress.running) == (6, 0)
        assert f"its last {end - last} bytes are dropped" in caplog.text
        assert cut.storage.read_bytes().startswith(content[:last])
        assert tune(cut, Bowl(), trials=7).done == 7
    caplog.clear()
    tune(journal, Bowl(), trials=4)
    assert not caplog.text


def test_a_line_that_another_process_is_writing_is_left_alone(journal, caplog):
    tune(journal, Bowl(), trials=1)
    content = journal.storage.read_bytes()
    with at_work(journal):
        journal.storage.write_bytes(content + b'{"op_code":')
        with at_work(journal):
            assert journal.storage.read_bytes() == content + b'{"op_code":'
        journal.storage.write_bytes(content)
    assert not caplog.text


def test_reading_a_study_writes_nothing(spec):
    tune(spec, Bowl(), trials=2)
    content = spec.storage.read_bytes()
    trial_table(spec)
    best_recipe(spec)
    assert spec.storage.read_bytes() == content


def test_a_broken_line_further_up_is_named(journal):
    tune(journal, Bowl(), trials=2)
    lines = journal.storage.read_bytes().splitlines(keepends=True)
    journal.storage.write_bytes(b"".join([*lines[:3], b'{"op_c{"op_code":9}\n', *lines[3:]]))
    with pytest.raises(StorageError, match=r"s\.journal, line 4, is not valid JSON"):
        tune(journal, Bowl(), trials=3)


@pytest.mark.parametrize(("trials", "workers"), [(0, 1), (1, 0)])
def test_impossible_budgets_are_refused(journal, trials, workers):
    with pytest.raises(ConfigError, match="expected at least 1"):
        tune(journal, Bowl(), trials, workers)


def test_an_empty_search_space_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="marks nothing to tune"):
        StudySpec(tmp_path / "s", "nanogpt-toy", "muon", {})


def test_the_best_trial_becomes_a_recipe_that_resolves(journal, tmp_path):
    spec = replace(journal, overrides={"model.layers": 2})
    progress = tune(spec, Bowl(), trials=6)
    recipe = best_recipe(spec, "polarstep tune nanogpt-toy")
    assert recipe["tuned"]["trials"] == 6
    path = tmp_path / "best.json"
    write_recipe(path, recipe)
    config = resolve(str(path))
    assert config.optimizer.lr == progress.best_overrides["optimizer.lr"]
    assert config.model.layers == 2
    assert config.method == "Muon (Nesterov)"
    write_recipe(path, recipe)  # again, over its own
    with pytest.raises(StorageError, match="is not a tuned recipe"):
        write_recipe(path, recipe | {"method": "adamw"})


def test_a_foreign_recipe_file_is_left_alone(journal, tmp_path):
    tune(journal, Bowl(), trials=1)
    path = tmp_path / "mine.json"
    mine = {"recipe": "nanogpt-toy", "method": "muon", "overrides": {}}
    path.write_text(json.dumps(mine))
    with pytest.raises(StorageError, match="move it away"):
        write_recipe(path, best_recipe(journal))
    assert json.loads(path.read_text()) == mine


def test_no_finished_trial_is_an_error(journal):
    with pytest.raises(ConfigError, match="no trial that ran to its end"):
        best_recipe(journal)


def test_what_all_trials_shared_is_no_tuned_value(journal, tmp_path):
    spec = replace(journal, overrides={"model.layers": 2})
    tune(spec, Bowl(), trials=2)
    best = best_recipe(spec)
    write_tuned(tmp_path / "values.json", best)
    entry = json.loads((tmp_path / "values.json").read_text())["methods"]["muon"]
    assert entry["overrides"] == {"optimizer.lr": best["overrides"]["optimizer.lr"]}
    assert entry["tuned"]["under"] == {"model.layers": 2}


def test_tuned_values_of_several_methods_collect_in_one_file(journal, tmp_path):
    path = tmp_path / "nanogpt-toy.json"
    for trials, method in enumerate(("muon", "adamw"), start=2):
        spec = replace(journal, method=method)
        tune(spec, Bowl(), trials)
        write_tuned(path, best_recipe(spec))
    methods = json.loads(path.read_text())["methods"]
    assert set(methods) == {"muon", "adamw"}
    assert methods["muon"]["tuned"]["trials"] == 2
    assert methods["adamw"]["tuned"]["trials"] == 3
    with pytest.raises(StorageError, match="does not hold tuned values"):
        write_tuned(path, best_recipe(journal) | {"recipe": "cifar10"})
