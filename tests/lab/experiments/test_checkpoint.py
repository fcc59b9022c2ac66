"""Checkpoints on disk: damage is noticed, and the run goes on from the last good one."""

from __future__ import annotations

import hashlib
import io
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.experiments.small import tiny_gpt
from tests.lab.experiments.test_train import StopAt, assert_same_run, state

from polarstep_lab.records import record
from polarstep_lab.records.record import Result, RunRecord
from polarstep_lab.storage import StorageError
from polarstep_lab.train import checkpoint
from polarstep_lab.train.run import Interrupted, identify, train

OFTEN = {"runtime__checkpoint_seconds": 0.0}


def interrupted(directory: Path, step: int = 4) -> Path:
    """A run stopped after ``step``, with a checkpoint after each step; returns the newest.

    The step it was stopped at has two: the one that was due, and that of the interruption.
    """
    with pytest.raises(Interrupted):
        train(tiny_gpt(**OFTEN), directory, observers=[StopAt(step, "ctrl-c")])
    return directory / record.CHECKPOINT


def resume(directory: Path) -> list[str]:
    """Finish the run in ``directory``; returns what it told."""
    told: list[str] = []
    train(tiny_gpt(**OFTEN), directory, resume=True, notify=told.append)
    return told


def rewrite(path: Path, change: Any) -> None:
    """Change the content of a checkpoint, with a checksum that fits."""
    file = io.BytesIO()
    torch.save(change(torch.load(path, weights_only=True)), file)
    raw = file.getvalue()
    path.write_bytes(raw + checkpoint._LABEL + hashlib.sha256(raw).hexdigest().encode())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run without an interruption."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    train(tiny_gpt(**OFTEN), directory)
    return directory


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path):
    path = interrupted(tmp_path / "run")
    raw = path.read_bytes()
    places = random.Random(3)
    for _ in range(200):
        damaged = bytearray(raw)
        damaged[places.randrange(len(raw) - checkpoint._TRAILER)] ^= 1 << places.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(checkpoint.DamagedCheckpoint, match="SHA-256"):
            checkpoint._verify(path)
    path.write_bytes(raw)
    checkpoint._verify(path)


def test_a_checkpoint_cut_anywhere_is_damaged(tmp_path):
    """Where the end is cut off, torch.load raises many kinds of errors, an OSError among them."""
    path = interrupted(tmp_path / "run")
    raw = path.read_bytes()
    for part in range(200):
        path.write_bytes(raw[: len(raw) * part // 200])
        with pytest.raises(checkpoint.DamagedCheckpoint, match="start the run anew with --force"):
            checkpoint._read(path, torch.device("cpu"))


@pytest.mark.parametrize("damage", ["weights", "cut", "emptied", "checksum", "missing"])
def test_a_run_goes_on_from_the_last_good_checkpoint(damage, whole, tmp_path):
    directory = tmp_path / "run"
    path = interrupted(directory)
    raw = bytearray(path.read_bytes())
    if damage == "weights":
        weight = next(iter(state(directory)["model"].values())).numpy().tobytes()
        raw[raw.index(weight) + len(weight) // 2] ^= 64
    elif damage == "checksum":
        raw[-1] ^= 1
    else:
        del raw[{"cut": len(raw) // 2, "emptied": 0, "missing": 0}[damage] :]
    path.write_bytes(raw)
    if damage == "missing":  # a kill between the two renames of a save
        path.unlink()
    told = resume(directory)
    if damage == "missing":
        assert told == []
    else:
        (text,) = told
        assert text.startswith(f"{path} is damaged (")
        assert text.endswith("the run goes on from the checkpoint before, after step 4")
    assert_same_run(whole, directory)


def test_a_damaged_checkpoint_never_replaces_the_good_one(tmp_path):
    directory = tmp_path / "run"
    path = interrupted(directory)
    path.write_bytes(path.read_bytes()[:1000])
    config = tiny_gpt()  # no checkpoint is due before the interruption
    (directory / record.CONFIG).unlink()
    identify(config).save(directory)
    rewrite(directory / record.PREVIOUS_CHECKPOINT, lambda old: old | {"config": config.to_dict()})
    with pytest.raises(Interrupted):
        train(
            config, directory, resume=True, observers=[StopAt(5, "ctrl-c")], notify=lambda _: None
        )
    for name, step in ((record.CHECKPOINT, 5), (record.PREVIOUS_CHECKPOINT, 4)):
        assert torch.load(directory / name, weights_only=True)["progress"]["step"] == step


def test_two_damaged_checkpoints_are_named(tmp_path):
    path = interrupted(tmp_path / "run")
    for name in (record.CHECKPOINT, record.PREVIOUS_CHECKPOINT):
        path.with_name(name).write_bytes(b"noise" * 30)
    message = r"neither .*checkpoint\.pt \(its end is missing.*previous\.pt .* --force"
    with pytest.raises(StorageError, match=message) as caught:
        resume(tmp_path / "run")
    assert "weights_only" not in str(caught.value)


def test_the_checkpoint_of_another_config_is_refused(tmp_path):
    """As after copying checkpoint.pt from the directory of another run."""
    path = interrupted(tmp_path / "run")
    rewrite(path, lambda old: old | {"config": old["config"] | {"seed": 7}})
    with pytest.raises(StorageError, match=r"belongs to a run with another config \(seed differ\)"):
        resume(tmp_path / "run")


def without(*names):
    return lambda content: {k: v for k, v in content.items() if k not in names}


def with_progress(**values):
    return lambda content: content | {"progress": content["progress"] | values}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("progress"), "progress is nothing, expected dict"),
        (without("model"), "model is nothing, expected dict"),
        (without("version", "config"), "version is nothing, expected int"),
        (lambda content: content | {"optimizer": None}, "optimizer is NoneType, expected dict"),
        (lambda content: [1, 2], "it holds a list, expected a dict"),
        (lambda content: content | {"model": {}}, "its state does not fit the model"),
        (lambda content: content | {"optimizer": {}}, "its state does not fit the model"),
        (lambda content: content | {"progress": {}}, "progress={}, expected step, seconds"),
        (with_progress(pace=3), "'pace': 3"),
        (with_progress(step=-3), "progress.step=-3, expected 0 or more"),
        (with_progress(step=2.5), "progress.step=2.5, expected 0 or more"),
        (with_progress(seconds=float("nan")), "progress.seconds=nan, expected 0 or more"),
        (with_progress(metrics_bytes=-1), "progress.metrics_bytes=-1, expected 0 or more"),
    ],
)
def test_a_checkpoint_of_another_form_is_named(change, message, tmp_path):
    path = interrupted(tmp_path / "run", step=2)
    path.with_name(record.PREVIOUS_CHECKPOINT).unlink()
    rewrite(path, change)
    expected = rf"checkpoint\.pt cannot be read \(.*{re.escape(message)}.*--force"
    with pytest.raises(StorageError, match=expected):
        resume(tmp_path / "run")
    assert Result.load(tmp_path / "run") is None


def test_a_step_beyond_the_last_is_named(tmp_path):
    rewrite(interrupted(tmp_path / "run", step=2), with_progress(step=700))
    with pytest.raises(StorageError, match="after step 700, but the run has 6 steps"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("text", ["null", "[]", '{"resumed": 3}'])
def test_an_environment_of_another_form_is_named(text, tmp_path):
    directory = tmp_path / "run"
    interrupted(directory, step=2)
    path = directory / record.ENVIRONMENT
    path.write_text(text)
    with pytest.raises(StorageError, match=r"environment\.json is not .* delete the file"):
        resume(directory)
    path.unlink()  # the remedy
    resume(directory)
    assert RunRecord.load(directory).status == "finished"


def damage_logs(directory: Path, damage: str) -> None:
    """Damage the metrics of an interrupted run in a part that its checkpoint counts."""
    path = directory / record.METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "missing":
        path.unlink()
        return
    if damage == "line":
        lines[2] = lines[2].replace(b":", b";")
    elif damage == "value":
        lines[2] = lines[2].replace(b'"loss": ', b'"loss": "high", "was": ')
    elif damage == "deleted":
        del lines[2]
    elif damage == "deleted, and rows after the checkpoint":
        del lines[2]
        lines += [lines[-1].replace(b'"step": 4', b'"step": %d' % step) for step in (5, 6)]
    elif damage == "cut":
        lines[-1] = lines[-1][:-9]
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    "damage",
    ["line", "value", "deleted", "deleted, and rows after the checkpoint", "cut", "missing"],
)
def test_a_run_goes_on_without_the_damaged_lines_of_its_log(damage, whole, tmp_path):
    directory = tmp_path / "run"
    interrupted(directory)
    path = directory / record.METRICS
    before = RunRecord.load(directory).metrics
    damage_logs(directory, damage)
    damaged = path.read_bytes() if path.exists() else None
    (text,) = resume(directory)
    assert text.startswith(f"{path} is damaged (")
    assert "the run goes on with its other lines" in text
    kept = directory / "metrics.jsonl.damaged"
    assert (kept.read_bytes() if kept.exists() else None) == damaged

    expected, found = RunRecord.load(whole), RunRecord.load(directory)
    assert found.result.value == expected.result.value
    assert state(directory)["progress"]["step"] == 6
    for name, weight in state(whole)["model"].items():
        assert torch.equal(weight, state(directory)["model"][name])
    of_steps = [(row.step, row.kind, row.loss) for row in found.metrics]
    whole_steps = [(row.step, row.kind, row.loss) for row in expected.metrics]
    lost = len(before) if damage == "missing" else 1
    assert len(of_steps) == len(whole_steps) - lost
    assert of_steps == [row for row in whole_steps if row in of_steps]


def test_the_last_validation_is_made_again_where_its_row_was_damaged(whole, tmp_path, monkeypatch):
    directory = tmp_path / "run"
    monkeypatch.setattr(Result, "save", lambda self, folder: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        train(tiny_gpt(**OFTEN), directory)
    monkeypatch.undo()
    path = directory / record.METRICS
    path.write_bytes(path.read_bytes()[:-5])
    assert len(resume(directory)) == 1
    expected, found = RunRecord.load(whole), RunRecord.load(directory)
    assert found.result.value == expected.result.value
    assert found.result.validation == expected.result.validation
    assert [row.step for row in found.metrics] == [row.step for row in expected.metrics]


def test_a_log_that_no_resume_mends_is_named_before_training(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    interrupted(directory, step=2)
    (directory / "mine.jsonl").write_text("no JSON\n")
    before = (directory / record.ENVIRONMENT).read_bytes()
    with pytest.raises(StorageError, match=r"mine\.jsonl, line 1, is not valid JSON"):
        train(tiny_gpt(**OFTEN), directory, resume=True, observers=[StopAt(3, "failure")])
    assert (directory / record.ENVIRONMENT).read_bytes() == before
