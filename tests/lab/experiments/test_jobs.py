"""Runs made by worker processes: kills, interruptions and failures, through the run directory alone."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.forking import fork
from tests.lab.experiments.small import SMALLEST_GPT, tiny_gpt
from tests.processes import PATIENCE, wait_until

from polarstep_lab.jobs.job import Job, jobs_of, unfinished
from polarstep_lab.jobs.local import LocalWorkers, Outcome, run_jobs
from polarstep_lab.records.record import LOCK, RESULT, STOP, TIME_FIELDS, RunRecord
from polarstep_lab.storage import StorageError
from polarstep_lab.study import Study, Variant
from polarstep_lab.train.run import Interrupted, train

SMALL = SMALLEST_GPT | {"runtime.device": "cpu", "runtime.log_every": 1}
LONG = {
    "data.stages": [{"steps": 120, "sequences": 2, "sequence_length": 16}],
    "evaluation.every": 120,
    "runtime.checkpoint_seconds": 0,
}

RANK = {"optimizer__polar__rank": 6, "optimizer__polar__oversample": 2}


def planned(folder: Path, *methods: str, **changes: Any) -> list[Job]:
    """A run of each method; a double underscore in a name stands for a dot."""
    overrides = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    variants = [Variant(method, method) for method in methods or ("muon",)]
    return jobs_of(Study("s", "nanogpt-toy", variants, overrides=overrides), folder)


def losses(job: Job) -> list[dict[str, Any]]:
    record = RunRecord.load(job.directory)
    assert record.status == "finished"
    return [
        {key: value for key, value in row.to_dict().items() if key not in TIME_FIELDS}
        for row in record.metrics
    ]


def assert_as_alone(jobs: list[Job], folder: Path) -> None:
    """The records are those of the same configs in this process."""
    for job in jobs:
        directory = folder / job.spec.method
        train(job.config, directory, spec=job.spec)
        assert losses(job) == [
            {key: value for key, value in row.to_dict().items() if key not in TIME_FIELDS}
            for row in RunRecord.load(directory).metrics
        ]


@pytest.mark.usefixtures("forked_workers", "one_thread")
def test_a_worker_that_is_killed_loses_only_what_is_after_its_checkpoint(tmp_path):
    jobs = planned(tmp_path / "runs", **{k.replace(".", "__"): v for k, v in LONG.items()})
    told, killed = [], []
    workers = LocalWorkers(1, told.append)

    def kill() -> None:
        metrics = jobs[0].directory / "metrics.jsonl"
        if not killed and metrics.exists() and len(metrics.read_text().splitlines()) > 4:
            killed.append(json.loads((jobs[0].directory / LOCK).read_text())["process"])
            os.kill(killed[0], signal.SIGKILL)

    run_jobs(jobs, workers, on_wait=kill)
    workers.close()
    assert killed
    assert told == ["muon, seed 0: a worker died; the run is made again"]
    environment = json.loads((jobs[0].directory / "environment.json").read_text())
    assert len(environment["resumed"]) == 1
    assert_as_alone(jobs, tmp_path / "alone")


@pytest.mark.usefixtures("forked_workers")
def test_runs_that_diverge_or_fail_are_told_and_do_not_stop_the_others(tmp_path, capfd):
    jobs = [
        *planned(tmp_path, "sgd", optimizer__lr=1e30),
        *planned(tmp_path, "adamw", data__val=["none/*.bin"]),
        *planned(tmp_path),
    ]
    workers = LocalWorkers(1)
    outcomes = run_jobs(jobs, workers)
    workers.close()
    assert [outcome.error == "" for outcome in outcomes.values()] == [True, False, True]
    assert "none/*.bin" in outcomes["adamw, seed 0"].error
    assert "Traceback" not in capfd.readouterr().err  # the message says what to do
    statuses = [RunRecord.load(jobs[i].directory).status for i in (0, 2)]
    assert statuses == ["diverged", "finished"]


SCRIPT = """
import os, signal, sys
from pathlib import Path
from tests.lab.experiments.test_jobs import LONG, planned
from polarstep_lab.jobs.local import LocalWorkers, run_jobs

if __name__ == "__main__":
    long = {key.replace(".", "__"): value for key, value in LONG.items()}
    long["data__stages"] = [{"steps": 4000, "sequences": 2, "sequence_length": 16}]
    long["evaluation__every"] = 4000
    try:
        run_jobs(planned(Path(sys.argv[1]), **long), LocalWorkers(1))
    except KeyboardInterrupt:
        sys.exit("stopped")
"""


@pytest.mark.parametrize("how", ["Ctrl-C", "the parent is killed"])
def test_workers_write_a_checkpoint_when_they_are_left(how, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = fork(str(script), str(tmp_path / "runs"))
    directory = tmp_path / "runs/muon/seed-0"
    metrics = directory / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # to the parent and its worker, as a terminal does
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (1, "stopped\n")
    else:
        process.kill()
        process.wait(PATIENCE)
    wait_until(lambda: not (directory / LOCK).exists())
    assert (directory / "checkpoint.pt").exists()
    assert not (directory / RESULT).exists()
    assert not (directory / STOP).exists()


def test_ctrl_c_while_workers_start_prints_no_traceback(tmp_path):
    """The worker imports the script before anything else of ours, and sends the signal there."""
    script = tmp_path / "early.py"
    early = "else:\n    os.killpg(0, signal.SIGINT)  # to this worker and its parent\n"
    script.write_text(SCRIPT + early)
    process = fork(str(script), str(tmp_path / "runs"))
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (1, "stopped\n")


@pytest.mark.parametrize("reason", ["", "behind the others"])
def test_the_file_stop_ends_a_run_that_can_go_on(reason, tmp_path):
    class AtStep2:
        def start(self, config, steps, step): ...
        def row(self, row): ...
        def end(self, result): ...
        def advance(self, step):
            if step == 2:
                (tmp_path / "run" / STOP).write_text(reason)

    config = tiny_gpt()
    if reason:
        result = train(config, tmp_path / "run", observers=[AtStep2()])
        assert (result.status, result.steps, result.message) == ("stopped", 2, reason)
    else:
        with pytest.raises(Interrupted, match="step 2 of 6"):
            train(config, tmp_path / "run", observers=[AtStep2()])
    assert not (tmp_path / "run" / STOP).exists()
    again = train(config, tmp_path / "run", resume=True)
    assert again.value == train(config, tmp_path / "whole").value


def test_a_study_goes_on_where_it_stopped(tmp_path):
    jobs = planned(tmp_path, "adamw", "muon")
    train(jobs[0].config, jobs[0].directory, spec=jobs[0].spec)
    assert unfinished(jobs) == jobs[1:]
    assert unfinished(jobs, force=True) == jobs
    other = planned(tmp_path, "adamw", optimizer__lr=0.5)
    with pytest.raises(StorageError, match="holds a run with other settings"):
        unfinished(other)


def test_the_outcomes_are_those_of_the_runs(tmp_path):
    class Fails:
        count = 1

        def start(self, job, force=False):
            self.job = job

        def ended(self, seconds):
            return [(self.job, Outcome(error="3 workers died of this run"))]

    jobs = planned(tmp_path, "adamw", "muon")
    outcomes = run_jobs(jobs, Fails())
    assert [outcome.error for outcome in outcomes.values()] == ["3 workers died of this run"] * 2
