"""Runs on a real local Ray: the records of a run at home, also when a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.experiments.test_jobs import LONG, RANK, assert_as_alone, planned
from tests.processes import PATIENCE, ROOT

from polarstep_lab.config import ConfigError
from polarstep_lab.jobs.job import Job, unfinished
from polarstep_lab.jobs.local import Workers, run_jobs
from polarstep_lab.jobs.ray import RayWorkers
from polarstep_lab.recipes import Range
from polarstep_lab.records.record import LOCK
from polarstep_lab.tune import Search, trials_of, tune

LONGER = {key.replace(".", "__"): value for key, value in LONG.items()}


@pytest.fixture(scope="module")
def ray() -> Iterator[Workers]:
    """A Ray on this machine, whose workers import what this process imports."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        # Ray starts its workers at niceness 15: beside other tests they would hardly run at all.
        patch.setenv("RAY_worker_niceness", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        workers = RayWorkers(2, "cpu")
        yield workers
        workers.close()


def lines(job: Job) -> int:
    metrics = job.directory / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.usefixtures("one_thread")
def test_the_records_are_those_of_runs_at_home(ray: Workers, tmp_path: Path) -> None:
    jobs = planned(tmp_path / "ray", "adamw", "muon", "rand-muon", **RANK)
    outcomes = run_jobs(jobs, ray)
    assert not any(outcome.error for outcome in outcomes.values())
    assert unfinished(jobs) == []
    assert_as_alone(jobs, tmp_path / "alone")


@pytest.mark.usefixtures("one_thread")
def test_an_interrupted_study_keeps_checkpoints_and_goes_on(ray: Workers, tmp_path: Path) -> None:
    jobs = planned(tmp_path / "ray", **LONGER)

    def interrupt() -> None:
        if lines(jobs[0]) > 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, ray, on_wait=interrupt)
    assert (jobs[0].directory / "checkpoint.pt").exists()
    assert unfinished(jobs) == jobs
    run_jobs(jobs, ray)
    environment = json.loads((jobs[0].directory / "environment.json").read_text())
    assert len(environment["resumed"]) == 1
    assert_as_alone(jobs, tmp_path / "alone")


def test_a_worker_that_does_not_see_the_folder_says_so(
    ray: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = planned(tmp_path / "ray")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *_, **__: None)
        ray.start(jobs[0])
    ((_, outcome),) = ray.ended(PATIENCE)
    assert "does not see" in outcome.error
    assert "that all machines share" in outcome.error


def test_a_search_on_ray(ray: Workers, tmp_path: Path) -> None:
    small = planned(tmp_path)[0].spec.overrides
    space = {"optimizer.lr": Range(0.001, 1.0, log=True)}
    search = Search(tmp_path / "trials", "nanogpt-toy", "muon", space, overrides=small)
    assert tune(search, 3, ray).done == 3
    assert [trial["state"] for trial in trials_of(search)] == ["complete"] * 3


# A worker is kept for the next test, and a new one takes long to start: this test comes last.
@pytest.mark.usefixtures("one_thread")
def test_a_run_whose_worker_is_killed_goes_on_with_another(ray: Workers, tmp_path: Path) -> None:
    jobs, killed = planned(tmp_path / "ray", **LONGER), []

    def kill() -> None:
        if not killed and lines(jobs[0]) > 4:
            killed.append(json.loads((jobs[0].directory / LOCK).read_text())["process"])
            os.kill(killed[0], signal.SIGKILL)

    outcomes = run_jobs(jobs, ray, on_wait=kill)
    assert killed
    assert not any(outcome.error for outcome in outcomes.values())
    environment = json.loads((jobs[0].directory / "environment.json").read_text())
    assert len(environment["resumed"]) == 1
    assert_as_alone(jobs, tmp_path / "alone")


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "polarstep\[ray\]"'):
        RayWorkers(None)


def test_a_numbered_gpu_is_refused() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match="Ray gives each run a GPU"):
        RayWorkers(1, "cuda:1")
