"""A run on several ranks has the results of one process, and goes on with any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
from tests.forking import Forked, fork
from tests.lab.experiments import ranks_worker as worker
from tests.lab.experiments.small import SMALLEST_GPT, fake_cifar10, tiny_gpt
from tests.processes import PATIENCE, wait_until
from typer.testing import CliRunner

import polarstep.__main__
from polarstep_lab.cli import app
from polarstep_lab.config import ConfigError, RunConfig
from polarstep_lab.records.record import TIME_FIELDS, Result, RunRecord
from polarstep_lab.train.ranks import Ranks, launched
from polarstep_lab.train.run import train

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)

ROUNDING = 2e-5
"""How far two runs may be apart whose sums differ in their order, relative to the loss."""


def finish(process: Forked) -> tuple[str, str]:
    """What a process has written to standard output and to standard error when it ends."""
    try:
        return process.communicate(timeout=PATIENCE)
    finally:
        process.kill()


def work(jobs: str, folder: Path, *ranks: int) -> str:
    """Do ``jobs``, on several ranks if a number is given, and return what was written to stderr."""
    process = fork("-m", worker.__name__, jobs, str(folder), *map(str, ranks))
    _, errors = finish(process)
    assert process.returncode == 0, errors
    return errors


def two_ranks(*arguments: str) -> list[Forked]:
    """Two processes of one group, in the environment that torchrun makes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    group |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [fork(*arguments, env=group | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one, two and four ranks, some of them started by one number and ended by another."""
    folder = tmp_path_factory.mktemp("ranks")
    fake_cifar10(folder / "data")
    for name, (_, config) in worker.interrupted().items():
        worker.start_and_stop(config, folder / "from-1" / name, Ranks())
    shutil.copytree(folder / "from-1", folder / "from-1-to-2")
    work("alone", folder)
    (folder / "errors.txt").write_text(work("compare,go_on,stop", folder, 2))
    for count in (1, 4):
        shutil.copytree(folder / "from-2", folder / f"from-2-to-{count}")
    work("go_on,stop", folder, 4)
    shutil.copytree(folder / "from-4", folder / "from-4-to-1")
    return folder


def assert_equal_up_to_rounding(directory: Path, reference: Path) -> None:
    there, here = RunRecord.load(directory), RunRecord.load(reference)
    assert len(there.metrics) == len(here.metrics)
    for ours, theirs in zip(there.metrics, here.metrics, strict=True):
        ours, theirs = ours.to_dict(), theirs.to_dict()
        for key in ours.keys() - set(TIME_FIELDS):
            expected = theirs[key]
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=ROUNDING, nan_ok=True)
            assert ours[key] == expected, (ours["step"], key)
    assert there.result is not None
    assert here.result is not None
    assert there.result.status == here.result.status
    expected = pytest.approx(here.result.value, rel=ROUNDING, nan_ok=True)
    assert there.result.value == expected
    assert there.result.optimizer_gflops_per_step == here.result.optimizer_gflops_per_step


CASES = list(worker.cases(Path()))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_results_of_one_process(name: str, made: Path) -> None:
    parallel, _ = worker.cases(made)[name]
    ranks, alone = made / "ranks" / name, made / "alone" / name
    assert_equal_up_to_rounding(ranks, alone)
    files = {path.name for path in ranks.iterdir()}
    assert files == {path.name for path in alone.iterdir()}
    environment = json.loads((ranks / "environment.json").read_text())
    assert (environment["processes"], environment["parallel"]) == (2, parallel)
    for log in ("gamma.jsonl", "noise.jsonl"):
        if log in files:
            ours, theirs = (
                [json.loads(line) for line in (folder / log).read_text().splitlines()]
                for folder in (ranks, alone)
            )
            assert len(ours) == len(theirs) > 0
            for a, b in zip(ours, theirs, strict=True):
                assert a["parameter"] == b["parameter"]
                key = "gamma" if "gamma" in b else "sigma"
                if b.get(key) is not None:
                    assert a[key] == pytest.approx(b[key], rel=1e-3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The runs of ``worker.interrupted`` by one process that nothing stopped."""
    folders: dict[RunConfig, Path] = {}
    for _, config in worker.interrupted().values():
        if config not in folders:  # two of the runs differ in how ranks share them alone
            folders[config] = tmp_path_factory.mktemp("whole")
            train(config, folders[config])
    return {name: folders[config] for name, (_, config) in worker.interrupted().items()}


@pytest.mark.parametrize(
    ("start", "end", "name"),
    [(*change, name) for change, names in worker.CHANGES.items() for name in names],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    start: int, end: int, name: str, made: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    _, config = worker.interrupted()[name]
    directory = made / f"from-{start}-to-{end}" / name
    if end == 1:
        directory = Path(shutil.copytree(directory, tmp_path / "stopped"))
        train(config, directory, resume=True)
    assert_equal_up_to_rounding(directory, whole[name])
    ours, theirs = (
        torch.load(folder / "checkpoint.pt")["model"] for folder in (directory, whole[name])
    )
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=1e-4, rtol=0)


def test_other_ranks_say_nothing(made: Path) -> None:
    told = (made / "errors.txt").read_text()
    assert "rank1" not in told
    assert "Warning" not in told, told


def test_a_rank_that_fails_ends_all_with_its_own_message(tmp_path: Path) -> None:
    ranks = two_ranks("-m", worker.__name__, "on_fire", str(tmp_path))
    errors = "".join(finish(rank)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert errors.count("the disk of rank 1 is on fire") == 1, errors
    assert "Traceback" not in errors
    result = Result.load(tmp_path / "failed")
    assert result is not None
    assert result.status == "failed"
    assert result.message == "rank 1: OSError: the disk of rank 1 is on fire"


def test_a_rank_that_is_killed_ends_all_with_a_line_that_says_so(tmp_path: Path) -> None:
    """Without torchrun, which may end the other rank before it has said anything."""
    left, killed = two_ranks("-m", worker.__name__, "killed", str(tmp_path))
    finish(killed)
    _, errors = finish(left)
    assert killed.returncode == -signal.SIGKILL
    assert left.returncode == 1
    assert errors.count("another process of this run has gone without a message") == 1, errors
    assert "Traceback" not in errors


def settings_of(values: dict[str, object]) -> list[str]:
    texts = (f"{key}={json.dumps(value)}" for key, value in values.items())
    return [word for text in texts for word in ("--set", text)]


def test_the_command_stops_at_ctrl_c_with_a_checkpoint(tmp_path: Path) -> None:
    many = {"data.stages": [{"steps": 100_000, "sequences": 2, "sequence_length": 16}]}
    arguments = [polarstep.__main__.__file__, "run", "nanogpt-toy", "--method", "muon"]
    arguments += ["--device", "cpu", "--parallel", "fsdp", "--out", str(tmp_path / "run")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--run-path", "--start-method", "fork"]  # ranks have what torchrun has imported
    settings = settings_of(SMALLEST_GPT | many)
    process = fork(*torchrun, *arguments, *settings)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_until(
            lambda: (
                process.poll() is not None
                or (metrics.exists() and '"step": 4' in metrics.read_text())
            )
        )
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to torchrun and all ranks
        _, errors = finish(process)
    finally:
        process.kill()
    assert errors.count("the checkpoint is in") == 1, errors
    assert "torchrun --nproc-per-node 2 -m polarstep run nanogpt-toy" in errors
    assert not (tmp_path / "run" / ".lock").exists()
    saved = torch.load(tmp_path / "run" / "checkpoint.pt")
    assert saved["progress"]["step"] >= 4
    assert Result.load(tmp_path / "run") is None


def test_a_batch_that_cannot_be_divided_is_refused_once(tmp_path: Path) -> None:
    odd = {"data.stages": [{"steps": 6, "sequences": 3, "sequence_length": 16}]}
    arguments = ["-m", "polarstep", "run", "nanogpt-toy", "--method", "muon", "--device", "cpu"]
    arguments += ["--out", str(tmp_path / "run"), *settings_of(SMALLEST_GPT | odd)]
    ranks = two_ranks(*arguments)
    out, errors = ("".join(texts) for texts in zip(*map(finish, ranks), strict=True))
    assert [rank.returncode for rank in ranks] == [1, 1]
    message = "data.stages.0.sequences=3 with 2 processes: expected a multiple of 2"
    assert errors.count(message) == 1, errors
    assert not (tmp_path / "run").exists()
    assert out == ""


def test_noise_of_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--parallel ddp, or a single process"):
        train(
            tiny_gpt("muon", **worker.NOISE),
            tmp_path / "run",
            ranks=Ranks(parallel="fsdp"),
        )


def test_parallel_needs_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"), launched("ddp"):
        pass


def test_many_runs_are_not_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for arguments in (
        ["compare", "nanogpt-toy"],
        ["ablate", "nanogpt-toy", "rank"],
        ["tune", "nanogpt-toy", "--method", "muon"],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        said = " ".join(result.stderr.split())
        assert f"torchrun with polarstep {arguments[0]}: expected polarstep run" in said
