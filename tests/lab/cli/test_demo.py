"""``polarstep demo`` with the network made as small as it gets."""

from __future__ import annotations

import pytest
from tests.forking import fork
from tests.lab.experiments.small import SMALLEST_GPT as TINY
from tests.processes import PATIENCE
from typer.testing import CliRunner

from polarstep_lab.cli import app
from polarstep_lab.cli import demo as command
from polarstep_lab.demo import RECIPE, SEEDS, demo_runs, tuning_budget
from polarstep_lab.methods import METHODS
from polarstep_lab.recipes import resolve, tuned
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.suites.parallel import run_in_processes
from polarstep_lab.suites.suite import comparison_runs, pending


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        command, "demo_runs", lambda out: comparison_runs(RECIPE, METHODS, SEEDS, TINY, out)
    )
    return lambda *arguments: CliRunner().invoke(app, ["demo", *map(str, arguments)])


@pytest.mark.usefixtures("forked_workers")
def test_it_compares_all_methods_and_ends_with_the_path_of_the_report(invoke, tmp_path):
    result = invoke("--workers", 2)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "Report: runs/demo/report/index.html"
    for method in METHODS:
        assert result.stdout.count(f"│ {method.name} ") == 1
    runs = [RunRecord.load(path) for path in find_runs([tmp_path / "runs" / "demo"])]
    assert len(runs) == 14
    assert {run.status for run in runs} == {"finished"}
    page = (tmp_path / "runs/demo/report/index.html").read_text()
    assert "polarstep run nanogpt-toy --method rand-muon-kaczmarz --seed 2" in page

    stamps = {run.directory: (run.directory / "result.json").stat().st_mtime_ns for run in runs}
    again = invoke("--workers", 2)  # nothing is trained twice, nor overwritten
    assert "14 of them are finished already" in again.stdout
    assert again.stdout.splitlines()[-1] == result.stdout.splitlines()[-1]
    assert stamps == {path: (path / "result.json").stat().st_mtime_ns for path in stamps}


def test_runs_that_diverge_or_fail_are_told_and_do_not_stop_the_others(tmp_path, capfd):
    def planned(slug, **overrides):
        method = next(method for method in METHODS if method.slug == slug)
        return comparison_runs(RECIPE, [method], [1], TINY | overrides, tmp_path)

    runs = [
        *planned("sgd", **{"optimizer.lr": 1e30}),
        *planned("adamw", **{"data.val": ["none/*.bin"]}),
        *planned("muon"),
    ]
    events = list(run_in_processes(runs, workers=1))
    ends = [event.result.status for event in events if event.result]
    assert ends == ["diverged", "finished"]
    (error,) = [event.error for event in events if event.error]
    assert "none/*.bin" in error
    assert "Traceback" not in capfd.readouterr().err  # the message says what to do


@pytest.mark.usefixtures("forked_workers")
def test_ctrl_c_keeps_checkpoints_and_the_runs_go_on_to_the_same_end(tmp_path):
    stages = [{"steps": 40, "sequences": 2, "sequence_length": 16}]
    longer = TINY | {"data.stages": stages, "evaluation.every": 15}
    runs = comparison_runs(RECIPE, METHODS[4:5], [1], longer, tmp_path / "whole")
    list(run_in_processes(runs, workers=1))
    script = tmp_path / "cut.py"
    script.write_text(f"""
import os, signal
from pathlib import Path
from polarstep_lab.methods import METHODS
from polarstep_lab.suites import parallel
from polarstep_lab.suites.suite import comparison_runs

class CtrlC(parallel.Messenger):
    def advance(self, step):
        if step == 20:
            os.killpg(0, signal.SIGINT)  # to this worker and its parent, as a terminal does

parallel.Messenger = CtrlC  # the worker imports this file too
if __name__ == "__main__":
    runs = comparison_runs({RECIPE!r}, METHODS[4:5], [1], {longer!r}, Path({str(tmp_path / "cut")!r}))
    list(parallel.run_in_processes(runs, workers=1))
""")
    process = fork(str(script))
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0, errors
    cut = comparison_runs(RECIPE, METHODS[4:5], [1], longer, tmp_path / "cut")
    assert pending(cut) == cut
    assert (cut[0].directory / "checkpoint.pt").exists()
    steps = [event.step for event in run_in_processes(cut, workers=1) if event.steps]
    assert steps[0] == 20  # it went on, rather than starting anew
    values = [RunRecord.load(each[0].directory).result.value for each in (runs, cut)]
    assert values[0] == values[1]


def test_ctrl_c_while_workers_start_prints_no_traceback(tmp_path):
    """The worker is interrupted before its first line of ours runs, and dies without a word."""
    script = tmp_path / "early.py"
    script.write_text(f"""
import os, signal, sys
from pathlib import Path
from polarstep_lab.methods import METHODS
from polarstep_lab.suites import parallel
from polarstep_lab.suites.suite import comparison_runs

if __name__ == "__main__":
    runs = comparison_runs({RECIPE!r}, METHODS[4:5], [1], {TINY!r}, Path({str(tmp_path / "runs")!r}))
    try:
        list(parallel.run_in_processes(runs, workers=1))
    except KeyboardInterrupt:
        sys.exit("stopped")
else:  # the worker imports this file before anything else of ours
    os.killpg(0, signal.SIGINT)  # to this worker and its parent, as a terminal does
""")
    process = fork(str(script))
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert errors == "stopped\n"
    assert not (tmp_path / "runs").exists()


def test_the_comparison_is_not_on_the_seed_of_the_tuning(tmp_path):
    seeds = {run.config.seed for run in demo_runs(tmp_path)}
    assert seeds == set(SEEDS)
    assert 0 not in seeds


def test_the_rates_were_tuned_with_equal_budgets():
    tuning = tuning_budget()
    assert tuning is not None
    assert tuning.trials >= 8
    assert tuning.command.startswith("polarstep tune nanogpt-toy --method all")
    for method in METHODS:
        assert resolve(RECIPE, method).optimizer.lr == tuned(RECIPE, method)["optimizer.lr"]
