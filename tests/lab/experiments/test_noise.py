"""Noise measured along a run: it changes nothing, survives a kill, and says what was drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.lab.experiments.small import fake_cifar10, tiny_cnn, tiny_gpt
from tests.lab.experiments.test_train import StopAt, assert_same_run

from polarstep_lab.checks.noise import held_still
from polarstep_lab.config import ConfigError
from polarstep_lab.records import record
from polarstep_lab.records.record import RunRecord
from polarstep_lab.train.images import ImageTask
from polarstep_lab.train.noise_log import NoiseLog, points_along
from polarstep_lab.train.run import Interrupted, build_task, train

MEASURED = {
    "runtime__noise__points": 4,
    "runtime__noise__reference": 3,
    "runtime__noise__batches": 5,
    "runtime__noise__examples": 16,
}
# Ten steps of eight images: most of the time of these tests are gradients of whole batches.
FEW_IMAGES = {"data__batch_size": 8, "data__epochs": 1.0}


def config_of(benchmark: str, tmp_path: Path, **overrides):
    if benchmark == "nanogpt":
        return tiny_gpt("rand-muon", **overrides)
    return tiny_cnn(fake_cifar10(tmp_path / "data"), "rand-muon", **FEW_IMAGES, **overrides)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The config and the directory of a measured run of each benchmark that nothing stopped."""
    runs = {}
    torch.manual_seed(11)
    stream = torch.get_rng_state()
    for benchmark in ("nanogpt", "cifar10"):
        folder = tmp_path_factory.mktemp(benchmark)
        runs[benchmark] = config_of(benchmark, folder, **MEASURED), folder / "run"
        train(*runs[benchmark])
        assert torch.equal(torch.get_rng_state(), stream), "the global generator was advanced"
    return runs


@pytest.mark.parametrize("benchmark", ["nanogpt", "cifar10"])
def test_measuring_changes_nothing(benchmark, measured, tmp_path):
    train(config_of(benchmark, tmp_path), tmp_path / "plain")
    _, seen = measured[benchmark]
    assert_same_run(tmp_path / "plain", seen)
    assert not (tmp_path / "plain" / record.NOISE).exists()


@pytest.mark.parametrize("benchmark", ["nanogpt", "cifar10"])
def test_every_point_has_a_row_for_each_matrix_and_unit(benchmark, measured):
    config, directory = measured[benchmark]
    run = RunRecord.load(directory)
    rows = run.logs["noise"]
    assert sorted({row["step"] for row in rows}) == points_along(run.result.steps, 4)
    assert len({row["step"] for row in rows}) == 3  # two of the four points are step 0
    task = build_task(config, torch.device("cpu"))
    matrices = [n for n, p in task.model.named_parameters() if p.ndim > 1 and p.requires_grad]
    size = task.noise_batches(0, 0).size
    for step in {row["step"] for row in rows}:
        for unit, examples, draws in (("batch", size, 5), ("example", 1, 16)):
            here = [row for row in rows if row["step"] == step and row["unit"] == unit]
            assert [row["parameter"] for row in here] == ["all", "hidden", *matrices]
            assert all(row["examples"] == examples for row in here)
            assert all(row["draws"] == draws for row in here)
            assert all(row["reference"] == 3 * size for row in here)
            every = {row["parameter"]: row["noise"] for row in here}
            assert every["all"] > every["hidden"] > 0
    late = {r["unit"]: r["noise"] for r in rows if r["step"] > 0 and r["parameter"] == "all"}
    assert late["batch"] < late["example"]


def test_the_rows_are_those_of_gradients_computed_by_hand(measured):
    """At step 0 of a run on text: gradients of fresh batches, one by one, around their mean."""
    config, directory = measured["nanogpt"]
    rows = RunRecord.load(directory).logs["noise"]
    task = build_task(config, torch.device("cpu"))
    from polarstep.rng import key_to_seed

    draws = task.noise_batches(key_to_seed(config.seed, "noise", 0, "batch"), 0)
    gradients = []
    for i in range(3 + 5):
        task.model.zero_grad()
        draws.backward(i)
        gradients.append(task.model.head.weight.grad.clone().double())
    center = torch.stack(gradients[:3]).mean(0)
    norms = torch.stack([(g - center).norm() for g in gradients[3:]]) / (1 + 1 / 3) ** 0.5
    (row,) = [
        r
        for r in rows
        if r["step"] == 0 and r["unit"] == "batch" and r["parameter"] == "head.weight"
    ]
    assert row["noise"] == pytest.approx(float(norms.mean()), rel=1e-4)


@pytest.mark.parametrize(("benchmark", "step"), [("nanogpt", 1), ("nanogpt", 3), ("cifar10", 3)])
def test_a_resumed_run_has_the_noise_of_an_uninterrupted_one(benchmark, step, measured, tmp_path):
    config, whole = measured[benchmark]
    parts = tmp_path / "parts"
    with pytest.raises(Interrupted):
        train(config, parts, observers=[StopAt(step, "ctrl-c")])
    log = parts / record.NOISE
    with log.open("a") as file:  # a point measured after the checkpoint, and half another line
        file.write('{"step": 2, "unit": "batch"}\n{"step": 2, "un')
    train(config, parts, resume=True)
    assert log.read_bytes() == (whole / record.NOISE).read_bytes()
    assert_same_run(whole, parts)


def test_a_run_killed_between_its_last_checkpoint_and_its_result_measures_once(tmp_path):
    config = tiny_gpt("muon", **MEASURED)
    train(config, tmp_path / "run")
    before = (tmp_path / "run" / record.NOISE).read_bytes()
    (tmp_path / "run" / record.RESULT).unlink()
    train(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / record.NOISE).read_bytes() == before


def test_time_spent_measuring_is_not_the_runs(tmp_path, monkeypatch):
    told = {0: 1000.0, 2: 1000.0}
    monkeypatch.setattr(NoiseLog, "measure", lambda self, step: told.get(step, 0.0))
    train(tiny_gpt("muon", **MEASURED), tmp_path / "run")
    assert -2000 < RunRecord.load(tmp_path / "run").metrics[-1].seconds < -1000


def test_batch_norm_is_held_for_examples_and_for_nothing_else(tmp_path, monkeypatch):
    seen = []
    plain = ImageTask.noise_batches

    def watched(self, *args):
        drawn = plain(self, *args)

        def backward(i):
            norm = self.model.groups[0].norm1
            before = norm.running_mean.clone()
            loss = drawn.backward(i)
            seen.append((drawn.size, norm.training, torch.equal(before, norm.running_mean)))
            return loss

        return replace(drawn, backward=backward)

    monkeypatch.setattr(ImageTask, "noise_batches", watched)
    train(config_of("cifar10", tmp_path, **MEASURED), tmp_path / "run")
    first = seen[: 3 + 5 + 3 + 16]
    assert first == [(8, True, False)] * 8 + [(8, False, True)] * 3 + [(1, False, True)] * 16


def test_draws_of_a_short_stage_are_as_long_as_its_sequences(tmp_path):
    stages = [
        {"steps": 2, "sequences": 4, "sequence_length": 16, "lr": 1.0},
        {"steps": 2, "sequences": 2, "sequence_length": 32, "lr": 1.0},
    ]
    task = build_task(tiny_gpt("muon", data__stages=stages), torch.device("cpu"))
    shapes = []
    for step in (0, 1, 2, 4):
        batch = task.noise_batches(5, step)
        inputs, targets = batch.backward.__self__.batch(7)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        shapes.append((batch.size, *inputs.shape))
    assert shapes == [(4, 4, 16), (4, 4, 16), (2, 2, 32), (2, 2, 32)]


def test_draws_differ_by_seed_and_from_the_run(tmp_path):
    for benchmark in ("nanogpt", "cifar10"):
        task = build_task(config_of(benchmark, tmp_path), torch.device("cpu"))

        def gradient(backward, task=task):
            task.model.zero_grad()
            with held_still(task.model):
                backward(0)
                return next(p.grad for p in task.model.parameters() if p.grad is not None).clone()

        own, one, two = map(
            gradient,
            (task.backward, task.noise_batches(1, 0).backward, task.noise_batches(2, 0).backward),
        )
        assert not torch.equal(one, two)
        assert not torch.equal(own, one)
        assert torch.equal(one, gradient(task.noise_batches(1, 0).backward))


def test_infinite_ends_are_null_and_numbers_are_short(tmp_path):
    many = {"runtime__noise__points": 2, "runtime__noise__examples": 120}
    config = tiny_gpt("muon", **MEASURED | many)
    train(config, tmp_path / "run")
    lines = (tmp_path / "run" / record.NOISE).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert any("tail" in row for row in rows if row["unit"] == "example")
    assert max(len(line) for line in lines) < 1200


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"runtime__noise__points": 1}, "points=1: expected at least 2"),
        ({"runtime__noise__batches": 1}, "batches=1: expected at least 2"),
        ({"runtime__noise__examples": 1}, "examples=1: expected 0, or at least 2"),
    ],
)
def test_bad_settings_are_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        tiny_gpt("muon", **setting)
