"""The loop: every method trains, and interruptions leave no trace in the result."""

from __future__ import annotations

import functools
import json
import math
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.forking import fork
from tests.lab.experiments.small import fake_cifar10, tiny_cnn, tiny_gpt
from tests.processes import PATIENCE

from polarstep_lab.config import RunConfig
from polarstep_lab.data.corpus import corpus_tokens
from polarstep_lab.data.tokens import TokenWindows
from polarstep_lab.records import record
from polarstep_lab.records.record import TIME_FIELDS, MetricRow, Result, RunRecord
from polarstep_lab.storage import StorageError
from polarstep_lab.train import checkpoint
from polarstep_lab.train.run import Interrupted, StopTraining, build_task, train


def without_time(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / record.METRICS).read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k not in TIME_FIELDS} for x in lines]


def state(directory: Path) -> dict[str, Any]:
    return torch.load(directory / record.CHECKPOINT, weights_only=True)


def assert_same_state(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same_state(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_state(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def assert_same_run(a: Path, b: Path) -> None:
    assert without_time(a) == without_time(b)
    first, second = state(a), state(b)
    assert_same_state(first["model"], second["model"])
    assert_same_state(first["optimizer"], second["optimizer"])
    assert Result.load(a).value == Result.load(b).value


class StopAt:
    """An observer that sends Ctrl-C, or an order to stop, after a step."""

    def __init__(self, step: int, how: str) -> None:
        self.step, self.how = step, how

    def start(self, config: RunConfig, steps: int, step: int) -> None: ...

    def row(self, row: MetricRow) -> None:
        if self.how == "prune" and row.step >= self.step:
            raise StopTraining("not promising")

    def advance(self, step: int) -> None:
        if step == self.step and self.how == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        if step == self.step and self.how == "fail":
            raise RuntimeError("a bug")

    def end(self, result: Result | None) -> None: ...


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a config's run that nothing interrupts, made when it is first asked for."""

    @functools.cache
    def made(config: RunConfig) -> Path:
        directory = tmp_path_factory.mktemp("whole") / "run"
        train(config, directory)
        return directory

    return made


# One method for each way that an optimizer is built.
OF_TEXT = ("adamw", "sgd", "muon-polyak", "rand-muon-kaczmarz", "default", "deflated", "auto-rows")


@pytest.mark.parametrize("method", OF_TEXT)
def test_every_method_learns_text(method, tmp_path):
    stages = [{"steps": 15, "sequences": 8, "sequence_length": 32, "lr": 1.0}]
    config = tiny_gpt(method, data__stages=stages, evaluation__every=15)
    result = train(config, tmp_path / "run")
    rows = RunRecord.load(tmp_path / "run").rows("val")
    assert result.status == "finished"
    assert result.validation == rows[-1].perplexity == math.exp(rows[-1].loss)
    assert 1 < result.value < 0.7 * rows[0].perplexity
    assert rows[-1].loss < rows[0].loss - 0.4
    assert rows[-1].tokens == 15 * 8 * 32


def test_the_test_text_is_read_once_after_the_last_step(tmp_path, monkeypatch):
    read = []
    whole = TokenWindows.in_order

    def in_order(self, first, count):
        inputs, targets = whole(self, first, count)
        read.append((self.shards, torch.cat([inputs[:, :1], targets], 1)))
        return inputs, targets

    monkeypatch.setattr(TokenWindows, "in_order", in_order)
    result = train(tiny_gpt("muon"), tmp_path / "run")  # validates at steps 0, 3 and 6
    loaded = RunRecord.load(tmp_path / "run")
    assert (result.metric, loaded.result) == ("test_perplexity", result)
    assert result.validation == loaded.rows("val")[-1].perplexity != result.value
    *validations, test = read
    assert len(validations) == 3
    held_out = corpus_tokens()[1].astype(int)
    half = len(held_out) // 2
    for _, windows in validations:
        assert windows.flatten()[:33].tolist() == held_out[:33].tolist()
        assert windows[-1, -1] == held_out[256]
    assert test[1][0].tolist() == held_out[half : half + 33].tolist()
    assert np.concatenate(test[0]).tolist() == held_out[half:].tolist()


@pytest.mark.parametrize("method", ["adamw", "sgd", "muon", "rand-muon-polyak"])
def test_every_method_learns_images(method, tmp_path):
    # The recipe's rates are for 720 steps; AdamW, whose steps are as long as its rate, needs a
    # larger one to get anywhere in 40.
    rate = {"optimizer__lr": 0.03} if method == "adamw" else {}
    steps = {"data__batch_size": 8, "data__train_images": None, "evaluation__every": 40}
    config = tiny_cnn(fake_cifar10(tmp_path / "data"), method, **steps, **rate)
    result = train(config, tmp_path / "run")
    loaded = RunRecord.load(tmp_path / "run")
    assert result.metric == "test_accuracy"
    assert result.value > 0.25
    assert result.validation == loaded.rows("val")[-1].accuracy
    assert loaded.rows("val")[-1].loss < loaded.rows("val")[0].loss
    assert loaded.rows("train")[-1].images == result.steps * 8 == 320


@pytest.mark.parametrize("method", ["rand-muon-kaczmarz", "adamw"])
@pytest.mark.parametrize("step", [1, 4])
def test_ctrl_c_then_resume_equals_one_run(method, step, whole, tmp_path):
    config = tiny_gpt(method)
    with pytest.raises(Interrupted, match=f"step {step} of 6"):
        train(config, tmp_path / "parts", observers=[StopAt(step, "ctrl-c")])
    assert Result.load(tmp_path / "parts") is None
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(whole(config), tmp_path / "parts")
    environment = RunRecord.load(tmp_path / "parts").environment
    assert [later["device"] for later in environment["resumed"]] == ["cpu"]


def test_ctrl_c_then_resume_equals_one_run_on_images(whole, tmp_path):
    config = tiny_cnn(fake_cifar10(tmp_path / "data"), "rand-muon")
    with pytest.raises(Interrupted):
        train(config, tmp_path / "parts", observers=[StopAt(7, "ctrl-c")])
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(whole(config), tmp_path / "parts")


KILLED = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.lab.experiments.small import tiny_gpt
from polarstep_lab.train.run import train
train(tiny_gpt("rand-muon", runtime__checkpoint_seconds=0.0, data__stages=[STAGE]),
      Path(sys.argv[1]), resume=True)
"""
STAGE = {"steps": 60, "sequences": 4, "sequence_length": 32, "lr": 1.0}


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_sigkill_at_a_random_moment_then_resume_equals_one_run(kills, tmp_path):
    script = KILLED.replace("STAGE", repr(STAGE))
    moments = random.Random(int.from_bytes(random.SystemRandom().randbytes(4)))
    parts, log = tmp_path / "parts", tmp_path / "parts" / record.METRICS
    for _ in range(kills):
        process = fork("-c", script, str(parts))
        while not log.exists() and process.poll() is None:
            time.sleep(0.01)
        before = log.stat().st_size
        while log.stat().st_size <= before and process.poll() is None:
            time.sleep(0.002)  # the process is training again
        time.sleep(moments.uniform(0.0, 0.15))
        process.kill()
        assert process.wait(PATIENCE) in (-signal.SIGKILL, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over threads round differently
    try:
        config = tiny_gpt("rand-muon", runtime__checkpoint_seconds=0.0, data__stages=[STAGE])
        if Result.load(parts) is None:
            train(config, parts, resume=True)
        train(config, tmp_path / "whole")
    finally:
        torch.set_num_threads(threads)
    assert_same_run(tmp_path / "whole", parts)


@pytest.mark.parametrize(
    "moment", ["before the first checkpoint", "between log and checkpoint", "before the result"]
)
def test_kill_at_chosen_moments(moment, whole, tmp_path, monkeypatch):
    """The same as above at the moments a random kill seldom hits."""

    class Killed(BaseException):
        pass

    def kill(*args: Any, **kwargs: Any) -> None:
        raise Killed

    config = tiny_gpt(runtime__checkpoint_seconds=0.0)
    with monkeypatch.context() as patch:
        if moment == "before the first checkpoint":
            patch.setattr("polarstep_lab.train.loop.save_checkpoint", kill)
        elif moment == "between log and checkpoint":
            saved = iter(range(3))
            real = checkpoint.save_checkpoint
            patch.setattr(
                "polarstep_lab.train.loop.save_checkpoint",
                lambda *a: real(*a) if next(saved, None) is not None else kill(),
            )
        else:
            patch.setattr(Result, "save", kill)
        with pytest.raises(Killed):
            train(config, tmp_path / "parts")
    with (tmp_path / "parts" / record.METRICS).open("a") as log:
        log.write('{"step": 99, "ki')  # the line that was being written
    assert RunRecord.load(tmp_path / "parts").status == "unfinished"
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(whole(config), tmp_path / "parts")


def test_the_record_says_what_was_trained_on(whole, tmp_path):
    configs = tiny_gpt("muon"), tiny_cnn(fake_cifar10(tmp_path), "muon", data__epochs=0.5)
    text, images = (RunRecord.load(whole(config)).environment for config in configs)
    assert text["data"].startswith("tinyshakespeare: ")
    assert images["data"] == "CIFAR-10: 80 images, 40 held out, 40 for the test"
    assert images["held_out"] == "CIFAR-10: 40 held out, 40 for the test"
    assert images["data_digest"] != images["held_out_digest"]


def test_a_finished_run_may_leave_no_checkpoint(whole, tmp_path):
    config = tiny_gpt(runtime__keep_checkpoint=False, runtime__checkpoint_seconds=0.0)
    train(config, tmp_path / "run")
    assert not (tmp_path / "run" / record.CHECKPOINT).exists()
    assert without_time(tmp_path / "run") == without_time(whole(tiny_gpt()))
    with pytest.raises(Interrupted):
        train(config, tmp_path / "stopped", observers=[StopAt(4, "ctrl-c")])
    assert (tmp_path / "stopped" / record.CHECKPOINT).exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("method", ["muon", "rand-muon", "adamw"])
def test_a_captured_backward_pass_trains_like_a_plain_one(method, tmp_path):
    root = fake_cifar10(tmp_path / "data")
    common = {"runtime__device": "cuda", "runtime__precision": "float32", "data__epochs": 4.0}
    for name, graph in (("graph", True), ("plain", False)):
        config = tiny_cnn(root, method, **common, runtime__cuda_graph=graph)
        train(config, tmp_path / name)
    graph, plain = (RunRecord.load(tmp_path / name).rows("val") for name in ("graph", "plain"))
    for a, b in zip(graph, plain, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=0.02)  # rounding grows along a trajectory


def test_seeds_differ_and_repeat(tmp_path):
    values = [
        train(tiny_gpt(seed=seed), tmp_path / name).value
        for name, seed in (("a", 0), ("b", 1), ("c", 0))
    ]
    assert values[0] == values[2] != values[1]


def test_gradient_accumulation_gives_the_same_gradients(whole, tmp_path):
    at_once = Result.load(whole(tiny_gpt("muon")))
    parts = train(tiny_gpt("muon", runtime__micro_batch=1), tmp_path / "parts")
    assert parts.value == pytest.approx(at_once.value, rel=1e-4)


def test_lower_precision_is_used_where_configured(whole, tmp_path):
    exact = Result.load(whole(tiny_gpt("muon")))
    rounded = train(tiny_gpt("muon", runtime__precision="bfloat16"), tmp_path / "bfloat16")
    assert rounded.value != exact.value
    assert rounded.value == pytest.approx(exact.value, rel=0.02)
    model = state(tmp_path / "bfloat16")["model"]
    assert {p.dtype for p in model.values()} == {torch.float32}


def test_the_compiled_functions_are_the_ones_that_are_run(tmp_path, monkeypatch):
    calls = []

    def compiled(function):
        def counted(*args):
            calls.append(function.__name__)
            return function(*args)

        return counted

    monkeypatch.setattr("polarstep_lab.train.language.compiled", compiled)
    plain = train(tiny_gpt("muon", runtime__compile=None), tmp_path / "plain")
    assert not calls  # left open, a run on a CPU is not compiled
    fast = train(tiny_gpt("muon", runtime__compile=True), tmp_path / "compiled")
    assert fast.value == plain.value
    # Two layers, and one batch a step or validation.
    assert calls.count("_layer") == 2 * calls.count("loss_of_rows") >= 2 * 6
    # Checkpoints hold the model's own names, with which it can be loaded uncompiled.
    assert state(tmp_path / "compiled")["model"].keys() == state(tmp_path / "plain")["model"].keys()


def test_runs_of_one_seed_begin_with_equal_weights_of_their_own(tmp_path):
    config = tiny_gpt("muon")
    first = build_task(config, torch.device("cpu"))
    train(config, tmp_path / "run")  # trains a model of its own
    second = build_task(tiny_gpt("adamw"), torch.device("cpu"))
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
    other = build_task(tiny_gpt("muon", seed=1), torch.device("cpu"))
    assert not torch.equal(other.model.head.weight, first.model.head.weight)
    again = build_task(config, torch.device("cpu"))
    assert torch.equal(again.model.head.weight, first.model.head.weight)


def test_a_diverging_loss_is_recorded(tmp_path):
    result = train(tiny_gpt("sgd", optimizer__lr=1e30), tmp_path / "run")
    loaded = RunRecord.load(tmp_path / "run")
    assert result.status == loaded.status == "diverged"
    assert math.isnan(loaded.result.value)
    assert "lower the learning rate" in result.message
    assert math.isfinite(loaded.rows("train")[0].loss)
    assert not math.isfinite(loaded.metrics[-1].loss)


def test_a_stopped_run_keeps_its_figure_and_can_go_on(whole, tmp_path):
    config = tiny_gpt()
    result = train(config, tmp_path / "run", observers=[StopAt(4, "prune")])
    assert (result.status, result.steps, result.message) == ("stopped", 4, "not promising")
    assert math.isnan(result.value)  # the test text was not read
    assert result.validation == RunRecord.load(tmp_path / "run").rows("val")[-1].perplexity
    train(config, tmp_path / "run", resume=True)
    assert_same_run(whole(config), tmp_path / "run")


def test_a_failure_is_recorded_and_raised(tmp_path):
    with pytest.raises(RuntimeError, match="a bug"):
        train(tiny_gpt(), tmp_path / "run", observers=[StopAt(2, "fail")])
    loaded = RunRecord.load(tmp_path / "run")
    assert loaded.status == "failed"
    assert loaded.result.message == "RuntimeError: a bug"
    assert len(loaded.rows("train")) == 2


def test_a_full_disk_is_said_and_leaves_the_record(whole, tmp_path, monkeypatch):
    def full(file: Any) -> None:
        raise OSError(28, "No space left on device")

    config = tiny_gpt(runtime__checkpoint_seconds=0.0)
    with monkeypatch.context() as patch:
        patch.setattr("polarstep_lab.train.checkpoint.torch.save", lambda _, file: full(file))
        with pytest.raises(StorageError, match=r"no space left to write .*checkpoint\.pt"):
            train(config, tmp_path / "run")
    assert [row.step for row in RunRecord.load(tmp_path / "run").rows("train")] == [1]
    assert not list((tmp_path / "run").glob(".*.part"))
    train(config, tmp_path / "run", resume=True)
    assert_same_run(whole(config), tmp_path / "run")


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files as POSIX does")
@pytest.mark.parametrize("name", [record.METRICS, record.CHECKPOINT])
def test_a_file_that_may_not_grow_is_said_and_leaves_the_record(name, whole, tmp_path, monkeypatch):
    """The operating system itself refuses a write."""
    import resource

    config = tiny_gpt()
    directory = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(config, directory, observers=[StopAt(2, "ctrl-c")])
    # No file may be larger than the log is, or by half a line; or than half a checkpoint.
    size = (directory / name).stat().st_size
    limit = size + 50 if name == record.METRICS else size // 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        patch.setattr("polarstep_lab.train.run.record_environment", lambda *_: None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(StorageError, match=rf"{name} would be larger .*ulimit -f"):
                train(config, directory, resume=True, observers=[StopAt(5, "ctrl-c")])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(directory.glob(".*.part"))
    assert train(config, directory, resume=True).status == "finished"
    assert_same_run(whole(config), directory)


@pytest.mark.parametrize("what", ["finished", "unfinished", "other settings", "foreign"])
def test_nothing_is_overwritten_silently(what, tmp_path):
    directory = tmp_path / "run"
    config = tiny_gpt()
    if what == "foreign":
        directory.mkdir()
        (directory / "thesis.txt").write_text("years of work")
    elif what == "finished":
        train(config, directory)
    else:
        with pytest.raises(Interrupted):
            train(config, directory, observers=[StopAt(2, "ctrl-c")])
    before = {path: path.read_bytes() for path in directory.iterdir()}
    message = {
        "finished": "holds a finished run",
        "unfinished": "add --resume",
        "other settings": "other settings",
        "foreign": "not a run directory",
    }[what]
    changed = what == "other settings"
    wanted = tiny_gpt(optimizer__lr=0.5) if changed else config
    with pytest.raises(StorageError, match=message):
        train(wanted, directory, resume=changed)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    if what != "foreign":
        assert train(config, directory, force=True).status == "finished"


def test_optimizer_time_and_cost_are_recorded(whole):
    result = Result.load(whole(tiny_gpt("muon")))
    assert 0 < result.optimizer_ms_per_step < result.step_ms
    # Per layer four 32×32 and two 128×32, quintic with q = 7: the polynomial alone.
    polynomial = 2 * 7 * (4 * 6 * 32**3 + 2 * (4 * 128 * 32**2 + 2 * 32**3))
    assert polynomial < 1e9 * result.optimizer_gflops_per_step < 1.3 * polynomial


def test_monitoring_records_gamma_and_changes_nothing(whole, tmp_path):
    plain = whole(tiny_gpt("rand-muon"))
    config = tiny_gpt("rand-muon", runtime__monitor_every=2)
    seen = train(config, tmp_path / "seen")
    assert seen.value == Result.load(plain).value
    assert_same_state(state(plain)["model"], state(tmp_path / "seen")["model"])
    rows = RunRecord.load(tmp_path / "seen").logs["gamma"]
    assert sorted({row["step"] for row in rows}) == [0, 2, 4]
    assert len({row["parameter"] for row in rows}) == 12
    # Rank 6+2 of 32 leaves something out; the quintic never overshoots.
    late = [row["gamma"] for row in rows if row["step"] == 4]
    assert 0 < max(late) < 1
    assert max(row["nu"] for row in rows) < 1e-5
    with pytest.raises(Interrupted):
        train(config, tmp_path / "parts", observers=[StopAt(3, "ctrl-c")])
    train(config, tmp_path / "parts", resume=True)
    assert (tmp_path / "parts" / record.GAMMA).read_bytes() == (
        tmp_path / "seen" / record.GAMMA
    ).read_bytes()
