"""Runs and trials on a real local Ray: the records of a run at home, also when a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.experiments.objectives import Bowl, Dies
from tests.lab.experiments.small import SMALLEST_GPT
from tests.processes import ROOT

from polarstep_lab.config import ConfigError
from polarstep_lab.methods import find_methods
from polarstep_lab.recipes import Range
from polarstep_lab.records.record import TIME_FIELDS, RunRecord
from polarstep_lab.suites.parallel import Event
from polarstep_lab.suites.places import Place, place_for
from polarstep_lab.suites.suite import PlannedRun, comparison_runs, pending
from polarstep_lab.train.run import Interrupted, Observer, train
from polarstep_lab.tune import StudyProgress

SMALL = SMALLEST_GPT | {"runtime.device": "cpu", "runtime.log_every": 1}


@pytest.fixture(scope="module")
def ray() -> Iterator[Place]:
    """A Ray on this machine, whose workers import what this process imports."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        # Ray starts its workers at niceness 15: beside other tests they would hardly run at all.
        patch.setenv("RAY_worker_niceness", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        with place_for("ray", workers=2, device="cpu") as place:
            yield place


def planned(folder: Path, methods: str = "muon", **changes: object) -> list[PlannedRun]:
    overrides = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    return comparison_runs("nanogpt-toy", find_methods(methods), [0], overrides, folder)


def losses(run: PlannedRun) -> list[dict[str, object]]:
    record = RunRecord.load(run.directory)
    assert record.result is not None
    assert record.result.status == "finished"
    times = set(TIME_FIELDS)
    return [
        {key: value for key, value in row.to_dict().items() if key not in times}
        for row in record.metrics
    ]


AsAtHome = Callable[[list[PlannedRun]], None]


@pytest.fixture(scope="module")
def assert_as_at_home(tmp_path_factory: pytest.TempPathFactory) -> AsAtHome:
    """Compare runs with those of the same configs at home, which are made once for all tests."""
    made: dict[str, PlannedRun] = {}

    def compare(runs: list[PlannedRun]) -> None:
        for run in runs:
            config = repr(run.config)
            if config not in made:
                made[config] = replace(run, directory=tmp_path_factory.mktemp("home") / "run")
                train(run.config, made[config].directory, identity=run.identity)
            home = made[config]
            assert losses(run) == losses(home)
            assert {p.name for p in run.directory.iterdir()} == {
                p.name for p in home.directory.iterdir()
            }

    return compare


def test_the_records_are_those_of_runs_at_home(
    ray: Place, tmp_path: Path, assert_as_at_home: AsAtHome
) -> None:
    runs = planned(tmp_path / "ray", "adamw,muon,rand-muon", **RANK)
    events = list(ray.make(runs))
    assert {event.label for event in events if event.result} == {run.label for run in runs}
    assert any(event.validation for event in events)
    assert pending(runs) == []
    assert not list((tmp_path / "ray").glob(".polarstep-head-*"))
    assert_as_at_home(runs)


LONG = {
    "data__stages": [{"steps": 120, "sequences": 2, "sequence_length": 16}],
    "evaluation__every": 120,
    "runtime__checkpoint_seconds": 0,
}
RANK = {"optimizer__polar__rank": 6, "optimizer__polar__oversample": 2}


def test_an_interrupted_suite_keeps_checkpoints_and_goes_on(
    ray: Place, tmp_path: Path, assert_as_at_home: AsAtHome
) -> None:
    runs = planned(tmp_path / "ray", **LONG)
    events = ray.make(runs)
    while next(events).step < 4:
        pass
    events.close()  # what a Ctrl-C does to the loop over the events
    stopped = RunRecord.load(runs[0].directory)
    assert stopped.result is not None
    assert stopped.result.status == "stopped"
    assert (runs[0].directory / "checkpoint.pt").exists()
    assert not list((tmp_path / "ray").glob(".polarstep-head-*"))
    list(ray.make(pending(runs)))
    assert_as_at_home(runs)


class StopAt(Observer):
    """An observer that stands for Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def advance(self, step: int) -> None:
        if step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("force", [False, True])
def test_a_worker_without_the_heads_files_sends_the_run_back(
    ray: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assert_as_at_home: AsAtHome,
    force: bool,
) -> None:
    from polarstep_lab.suites.on_ray.run_job import HeadFiles

    monkeypatch.setattr(
        HeadFiles, "below", lambda folder: HeadFiles(tmp_path / "elsewhere", "x", tmp_path)
    )
    runs = planned(tmp_path / "ray")
    with pytest.raises(Interrupted):
        train(runs[0].config, runs[0].directory, identity=runs[0].identity, observers=[StopAt(3)])
    (runs[0].directory / "notes.txt").write_text("not the run's")
    events = list(ray.make(runs, force))
    environment = json.loads((runs[0].directory / "environment.json").read_text())
    assert len(environment.get("resumed", [])) == (0 if force else 1)
    assert any("--force removes" in event.notice for event in events) == force
    (runs[0].directory / "notes.txt").unlink()
    assert_as_at_home(runs)


def test_a_run_that_fails_says_why_and_the_others_go_on(ray: Place, tmp_path: Path) -> None:
    good = planned(tmp_path / "good")
    bad = [
        replace(run, label="bad")
        for run in planned(tmp_path / "bad", data__train=["nowhere/*.bin"], data__val=["n/*.bin"])
    ]
    errors = [event for event in ray.make(bad + good) if isinstance(event, Event) and event.error]
    assert [event.label for event in errors] == ["bad"]
    assert "nowhere/*.bin" in errors[0].error
    assert pending(good) == []


def test_an_interrupted_study_goes_on(ray: Place, tmp_path: Path) -> None:
    from polarstep_lab.tune import StudySpec

    space = {"optimizer.lr": Range(0.001, 1.0, log=True)}
    spec = StudySpec(tmp_path / "s.journal", "nanogpt-toy", "muon", space, pruner="none")

    def interrupt(now: StudyProgress) -> None:
        if now.running:
            raise KeyboardInterrupt

    waits = Bowl(tmp_path / "log", workers=3)  # for a third worker, which there is not
    with pytest.raises(KeyboardInterrupt):
        ray.tune(spec, waits, 4, interrupt)
    finished = ray.tune(spec, Bowl(), 4, lambda _: None)
    assert (finished.done, finished.running) == (4, 0)


# Workers are kept for the next test, and a new one takes long to start. So the tests that kill theirs
# come last.
def test_a_study_on_ray_tunes_and_makes_a_dead_workers_trial_again(
    ray: Place, tmp_path: Path
) -> None:
    from polarstep_lab.tune import StudySpec, trial_table

    space = {"optimizer.lr": Range(0.001, 10.0, log=True)}
    spec = StudySpec(tmp_path / "s.journal", "nanogpt-toy", "muon", space)
    seen = []
    progress = ray.tune(spec, Bowl(), 12, seen.append)
    assert progress.done == 12
    assert progress.pruned > 0
    assert seen[-1] == progress
    rows = [json.loads(line) for line in trial_table(spec).splitlines()]
    assert {row["state"] for row in rows} == {"complete", "pruned"}

    other = StudySpec(tmp_path / "t.journal", "nanogpt-toy", "muon", space)
    marker = tmp_path / "died"
    assert ray.tune(other, Dies(marker), 3, lambda _: None).done == 3
    tried = [json.loads(line) for line in trial_table(other).splitlines()]
    assert [row["state"] for row in tried] == ["complete"] * 3
    assert float(marker.read_text()) in [row["overrides"]["optimizer.lr"] for row in tried]


def test_a_run_whose_worker_is_killed_goes_on_with_another(
    ray: Place, tmp_path: Path, assert_as_at_home: AsAtHome
) -> None:
    runs = planned(tmp_path / "ray", **LONG)
    killed, events = 0, []
    for event in ray.make(runs):
        events.append(event)
        if event.step >= 4 and not killed:
            killed = json.loads((runs[0].directory / ".lock").read_text())["process"]
            os.kill(killed, signal.SIGKILL)
    notices = [event.notice for event in events if event.notice]
    assert any("died" in notice and "made again" in notice for notice in notices), notices
    environment = json.loads((runs[0].directory / "environment.json").read_text())
    assert len(environment["resumed"]) == 1
    assert_as_at_home(runs)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ConfigError, match=r'pip install "polarstep\[ray\]"'),
        place_for("ray", None),
    ):
        pass


def test_a_numbered_gpu_is_refused() -> None:
    pytest.importorskip("ray")
    with (
        pytest.raises(ConfigError, match="Ray gives each run a GPU"),
        place_for("ray", 1, "cuda:1"),
    ):
        pass
