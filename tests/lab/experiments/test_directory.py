"""Run directories: which folders are ours, who may write in them, and what --force removes."""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.forking import fork
from tests.lab.experiments.small import TINY_GPT, tiny_gpt
from tests.processes import PATIENCE
from typer.testing import CliRunner

from polarstep_lab.cli import app
from polarstep_lab.records import record
from polarstep_lab.records.directory import RunLock, claim_directory
from polarstep_lab.records.record import LOCK, MARK, Result, RunRecord, RunSpec
from polarstep_lab.storage import StorageError
from polarstep_lab.train.run import identify, train

SMALL = [
    part
    for key, value in TINY_GPT.items()
    for part in ("--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}")
]
HUGGING_FACE = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 12,
    "vocab_size": 50257,
}


def polarstep(*arguments: str, status: int = 0) -> str:
    """Everything a command printed, in one line."""
    outcome = CliRunner().invoke(app, list(arguments))
    if outcome.exception and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    assert outcome.exit_code == status, outcome.output
    return " ".join(outcome.output.split())


def run_command(out: Path, *more: str) -> list[str]:
    return ["run", "nanogpt-toy", "-m", "adamw", *SMALL, "--out", str(out), *more]


def content(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


# --- which folders are ours -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        json.dumps(HUGGING_FACE),
        json.dumps(HUGGING_FACE | {"seed": 0, "config": {}}),
        json.dumps({"recipe": "pancakes", "method": "frying", "seed": 1, "config": {}}),
        "[]",
        "{",
        "null",
    ],
)
def test_force_leaves_a_folder_that_is_no_run_alone(config, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"weights of a month")
    before = content(folder)
    for more in (["--force"], [], ["--resume"]):
        said = polarstep(*run_command(folder, *more), status=1)
        assert f"{folder} exists and is not a run directory (it holds config.json, model" in said
        assert "Traceback" not in said
    assert content(folder) == before


def test_an_out_that_is_a_file_is_named(tmp_path):
    (tmp_path / "out").write_text("notes")
    said = polarstep(*run_command(tmp_path / "out", "--force"), status=1)
    assert "out is a file, expected a folder" in said
    assert (tmp_path / "out").read_text() == "notes"


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_an_out_that_cannot_be_written_to_is_named(more, tmp_path, monkeypatch):
    """It ended in the system's words, as [Errno 20] or [Errno 30], without a remedy."""
    (tmp_path / "file").write_text("notes")
    said = polarstep(*run_command(tmp_path / "file" / "run", *more), status=1)
    assert "file is a file, expected a folder: choose another --out" in said
    allowed = os.access  # root may write anywhere
    monkeypatch.setattr(
        os, "access", lambda place, mode: place != tmp_path and allowed(place, mode)
    )
    said = polarstep(*run_command(tmp_path / "below" / "run", *more), status=1)
    assert f"{tmp_path} is a folder that cannot be written to: choose another --out" in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_force_says_what_it_removes_and_removes_the_run_alone(tmp_path):
    out = tmp_path / "run"
    polarstep(*run_command(out, "--tensorboard"))
    (out / "notes.txt").write_text("the loss looks odd")
    (out / "nested").mkdir()
    (out / "nested" / "config.json").write_text("{}")
    (out / "tensorboard" / "mine").write_text("kept")
    files = [path.name for path in out.rglob("*") if path.is_file()]
    said = polarstep(*run_command(out, "--force"))
    removed = said.partition(f"--force removes the run in {out}: ")[2].split(", ")
    assert {"config.json", "environment.json", "metrics.jsonl", "result.json"} <= set(removed)
    assert sum(name.startswith("events.") for name in files) == 1
    assert not list(out.glob("tensorboard/events.*"))
    assert RunRecord.load(out).status == "finished"
    for kept in ("notes.txt", "nested/config.json", "tensorboard/mine"):
        assert (out / kept).exists()


@pytest.mark.usefixtures("forked_workers")
def test_runs_in_processes_of_their_own_say_what_they_remove(tmp_path):
    out = str(tmp_path / "all")
    compare = ["compare", "nanogpt-toy", "-m", "adamw,sgd", *SMALL, "--out", out]
    polarstep(*compare)
    said = polarstep(*compare, "--workers", "2", "--force")
    for method in ("adamw", "sgd"):
        assert f"--force removes the run in {tmp_path / 'all' / method / 'seed-0'}: " in said


def test_what_is_removed_is_said_first(tmp_path):
    directory = tmp_path / "run"
    train(tiny_gpt("adamw"), directory)
    before = content(directory)
    seen = []

    def notify(text: str) -> None:
        left = content(directory)
        left.pop(LOCK)
        seen.append((text, left))

    train(tiny_gpt("adamw"), directory, force=True, notify=notify)
    ((text, left),) = seen
    assert left == before
    assert all(name in text for name in before if name != MARK)


def test_a_run_with_a_damaged_config_can_be_replaced(tmp_path):
    directory = tmp_path / "run"
    train(tiny_gpt("adamw"), directory)
    (directory / "config.json").write_text('{"recipe": "nano')
    with pytest.raises(StorageError, match=r"config\.json is not valid JSON"):
        train(tiny_gpt("adamw"), directory, resume=True)
    assert train(tiny_gpt("adamw"), directory, force=True).status == "finished"


def test_a_kill_while_a_run_is_removed_leaves_no_half_run(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    config = tiny_gpt("adamw")
    train(config, directory)
    real = Path.unlink

    def kill_at_the_result(path: Path, missing_ok: bool = False) -> None:
        if path.name == record.RESULT:
            raise KeyboardInterrupt
        real(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kill_at_the_result)
        with pytest.raises(KeyboardInterrupt):
            train(config, directory, force=True)
    assert (directory / record.RESULT).exists()
    for resume in (True, False):
        with pytest.raises(StorageError, match=r"a run without its config\.json .*--force"):
            train(config, directory, resume=resume)
    assert train(config, directory, force=True).status == "finished"


def test_parts_of_files_that_a_kill_left_are_removed(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / ".checkpoint.pt.0a1b2c3d.part").write_bytes(b"half")
    train(tiny_gpt("adamw"), directory)
    assert not list(directory.glob(".*.part"))


# --- who may write in them --------------------------------------------------------------------------


def test_a_lock_says_who_holds_it(tmp_path):
    with (
        RunLock(tmp_path / "run", "Muon, seed 3"),
        pytest.raises(StorageError) as caught,
    ):
        RunLock(tmp_path / "run")
    said = str(caught.value)
    assert f"another process is running in {tmp_path / 'run'} (Muon, seed 3, process" in said
    assert f"process {os.getpid()} on " in said
    assert "wait for it to end, or give another --out" in said


def test_a_lock_leaves_nothing_where_nothing_was_claimed(tmp_path):
    (tmp_path / "there").mkdir()
    RunLock(tmp_path / "there").release()
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    lock = RunLock(tmp_path / "new" / "folders" / "run")
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]


def test_missing_data_leaves_no_folder_and_the_run_that_was_there(tmp_path):
    out = tmp_path / "a" / "run"
    missing = ["--set", "data.val=no.bin"]
    assert "no token shard" in polarstep(*run_command(out, *missing), status=1)
    assert not (tmp_path / "a").exists()
    polarstep(*run_command(out))
    before = content(out)
    assert "no token shard" in polarstep(*run_command(out, *missing, "--force"), status=1)
    assert content(out) == before


RACE = """
import os, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.lab.experiments.small import tiny_gpt
from polarstep_lab.storage import StorageError
from polarstep_lab.train.run import train

directory, count = Path(sys.argv[1]), int(sys.argv[2])
gate = directory.parent / "gate"
configs = [tiny_gpt(("adamw", "sgd")[seed % 2], seed) for seed in range(count)]
children = []
for seed in range(count):
    child = os.fork()
    if child == 0:
        while not gate.exists():
            time.sleep(0.001)
        try:
            train(configs[seed], directory)
            outcome = "finished"
        except StorageError as error:
            outcome = str(error)
        except BaseException as error:
            outcome = f"raised {error!r}"
        (directory.parent / f"{seed}.outcome").write_text(outcome)
        os._exit(0)
    children.append(child)
gate.touch()
for child in children:
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its processes with fork")
def test_of_twenty_starts_in_one_directory_one_runs_and_is_recorded(tmp_path):
    directory = tmp_path / "run"
    process = fork("-c", RACE, str(directory), "20")
    assert process.wait(PATIENCE) == 0
    outcomes = {int(path.stem): path.read_text() for path in tmp_path.glob("*.outcome")}
    winners = [seed for seed, outcome in outcomes.items() if outcome == "finished"]
    assert len(outcomes) == 20
    assert len(winners) == 1, outcomes
    for seed, outcome in outcomes.items():
        # Who comes late finds the run finished already.
        assert seed in winners or "another process" in outcome or "finished run" in outcome
    found = RunRecord.load(directory)
    won = tiny_gpt(("adamw", "sgd")[winners[0] % 2], winners[0])
    assert found.spec == identify(won)
    assert found.status == "finished"
    assert [row.step for row in found.rows("train")] == list(range(1, 7))
    alone = train(won, tmp_path / "alone")
    assert found.result.value == pytest.approx(alone.value, rel=1e-4)


CLAIM = """
import os, sys, time
from pathlib import Path
from polarstep_lab.storage import StorageError
from polarstep_lab.records import directory as rules
from polarstep_lab.records.directory import claim_directory
from polarstep_lab.records.directory import RunLock
from polarstep_lab.records.record import RunSpec

rules.PATIENCE = 300.0  # a busy machine may stop the holder before it has said who it is
directory, count, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for number in range(rounds):
    run, told = directory / f"run-{number}", directory / f"told-{number}"
    told.mkdir()
    children = []
    for seed in range(count):
        child = os.fork()
        if child == 0:
            while not (told / "gate").exists():
                time.sleep(0.0005)
            try:
                with RunLock(run, f"seed {seed}"):
                    spec = RunSpec("nanogpt-toy", "nanogpt", "AdamW", seed, {})
                    claim_directory(run, spec, force=True, notify=lambda text: None)
                    (told / f"{seed}.has").touch()
                    latest = time.monotonic() + 400
                    while len(list(told.glob("*.not"))) < count - 1 and time.monotonic() < latest:
                        time.sleep(0.001)
            except StorageError as error:
                (told / f"{seed}.not").write_text(str(error))
            os._exit(0)
        children.append(child)
    (told / "gate").touch()
    for child in children:
        os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its processes with fork")
def test_of_many_claims_with_force_one_succeeds_and_the_others_name_it(tmp_path):
    """The holder waits until all others were refused."""
    process = fork("-c", CLAIM, str(tmp_path), "4", "20")
    assert process.wait(PATIENCE) == 0
    for number in range(20):
        (has,) = (tmp_path / f"told-{number}").glob("*.has")
        assert RunSpec.load(tmp_path / f"run-{number}").seed == int(has.stem)
        refusals = [path.read_text() for path in (tmp_path / f"told-{number}").glob("*.not")]
        assert len(refusals) == 3
        assert all(f"(seed {has.stem}, process" in text for text in refusals)


def test_a_run_under_way_is_not_replaced_and_a_killed_one_is(tmp_path):
    out = tmp_path / "run"
    steps = 'data.stages=[{"steps": 100000, "sequences": 2, "sequence_length": 32}]'
    long = run_command(out, "--set", steps, "--set", "runtime.checkpoint_seconds=0")
    first = fork("-m", "polarstep", *long)
    try:
        while not (out / record.PREVIOUS_CHECKPOINT).exists():
            assert first.poll() is None
            time.sleep(0.02)
        for command in (run_command(out, "--force"), [*long, "--resume"], long):
            said = polarstep(*command, status=1)
            assert (
                f"another process is running in {out} (AdamW, seed 0, process {first.pid}" in said
            )
        assert first.poll() is None
    finally:
        first.kill()
        first.wait(PATIENCE)
    killed = RunRecord.load(out)
    assert killed.spec.config["data"]["stages"][0]["steps"] == 100000
    assert killed.rows("train")
    said = polarstep(*run_command(out, "--force"))
    assert "--force removes the run" in said
    assert Result.load(out).status == "finished"


def test_a_claim_needs_no_run_there(tmp_path):
    spec = identify(tiny_gpt("adamw"))
    with RunLock(tmp_path / "run", spec.label):
        told = []
        assert not claim_directory(tmp_path / "run", spec, force=True, notify=told.append)
        assert not told
        assert claim_directory(tmp_path / "run", spec, resume=True)
    assert RunSpec.load(tmp_path / "run") == spec
    assert not (tmp_path / "run" / LOCK).exists()


# --- resuming ---------------------------------------------------------------------------------------


def test_nothing_to_resume_is_said(tmp_path):
    out = tmp_path / "run"
    said = polarstep(*run_command(out, "--resume"), status=1)
    assert f"--resume: there is no run in {out} to go on with; leave --resume out" in said
    assert not out.exists()
    spec = identify(tiny_gpt("adamw"))
    spec.save(out)
    told = []
    assert train(tiny_gpt("adamw"), out, resume=True, notify=told.append).status == "finished"
    assert told == [f"{out} has no checkpoint yet: the run starts again at step 0"]
    finished = polarstep(*run_command(out, "--resume"), status=1)
    assert "holds a finished run" in finished


def test_the_command_that_resumes_a_run_with_other_settings_does_so(tmp_path):
    out = tmp_path / "my run"
    with pytest.raises(RuntimeError, match="no power"):
        train(tiny_gpt("adamw"), out, observers=[Stopping()])
    spec = RunSpec.load(out)
    command = shlex.join(["polarstep", "run", "nanogpt-toy", "--method", "adamw", *SMALL])
    replace(spec, command=command).save(out)
    said = polarstep(*run_command(out, "--set", "optimizer.lr=0.5", "--resume"), status=1)
    told = said.partition("resume it with `")[2].partition("`")[0]
    polarstep(*shlex.split(told)[1:])
    assert Result.load(out).status == "finished"


class Stopping:
    """An observer that raises an error after the second step."""

    def start(self, config, steps, step): ...
    def row(self, row): ...
    def end(self, result): ...

    def advance(self, step):
        if step == 2:
            raise RuntimeError("no power")
