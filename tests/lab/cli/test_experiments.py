"""The commands: what they print, what they leave, and how they fail."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch
import typer
from rich.text import Text
from tests.forking import fork
from tests.lab.experiments.small import TINY_GPT, fake_cifar10
from tests.processes import PATIENCE, wait_until
from typer.testing import CliRunner

from polarstep_lab.cli import SUBCOMMANDS, app
from polarstep_lab.methods import METHODS, OURS
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.train.language import LanguageTask

SMALL = [
    part
    for key, value in (TINY_GPT | {"optimizer.head_lr": 0.01}).items()
    for part in ("--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}")
]
LOW_RANK = ["--set", "optimizer.polar.rank=6", "--set", "optimizer.polar.oversample=2"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def polarstep(*arguments: str, status: int = 0):
    outcome = CliRunner().invoke(app, list(arguments))
    if outcome.exception and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    assert outcome.exit_code == status, outcome.output
    return outcome


def said(outcome) -> str:
    """Everything printed, in one line: the width of the terminal does not matter."""
    return " ".join(outcome.output.split())


def test_run_records_and_does_not_overwrite():
    polarstep("run", "nanogpt-toy", "-m", "muon", *SMALL)
    directory = Path("runs/nanogpt-toy/muon/seed-0")
    loaded = RunRecord.load(directory)
    assert loaded.status == "finished"
    assert loaded.environment["packages"]["torch"]
    assert loaded.environment["device"] == "cpu"
    again = polarstep("run", "nanogpt-toy", "-m", "muon", *SMALL, status=1)
    assert "holds a finished run (Muon (Nesterov), seed 0): nothing was overwritten" in said(again)
    assert RunRecord.load(directory) == loaded
    polarstep("run", "nanogpt-toy", "-m", "muon", *SMALL, "--force")


def test_the_recorded_command_makes_the_same_run():
    polarstep("run", "nanogpt-toy", "-m", "rand-muon", "-s", "3", "--vary", "rank=5", *SMALL)
    first = RunRecord.load("runs/nanogpt-toy/rand-muon-rank-5/seed-3")
    assert first.spec.ablation.value == 5
    words = shlex.split(first.spec.command)
    assert words[0] == "polarstep"
    polarstep(*words[1:], "--out", "again")
    second = RunRecord.load("again")
    assert second.spec == first.spec
    assert second.result.value == first.result.value


def test_the_record_of_a_recipe_file_does_not_depend_on_the_file():
    content = {"recipe": "nanogpt-toy", "method": "muon", "overrides": {"optimizer.lr": 0.125}}
    Path("best.json").write_text(json.dumps(content))
    polarstep("run", "best.json", *SMALL, "--out", "r")
    found = RunRecord.load("r").spec
    assert found.overrides["optimizer.lr"] == 0.125
    assert "--set optimizer.lr=0.125" in found.command
    assert "best.json" not in found.command


def test_a_diverged_run_in_a_comparison_is_said_each_time():
    hot = [*SMALL, "--set", "optimizer.lr=1e30", "--out", "r"]
    for _ in range(2):
        outcome = polarstep("compare", "nanogpt-toy", "-m", "adamw,sgd", *hot, status=3)
        assert "diverged" in said(outcome)


def test_show_prints_the_complete_config_and_does_nothing():
    outcome = polarstep("run", "nanogpt", "-m", "adamw", "--set", "optimizer.lr=0.5", "--show")
    shown = json.loads(outcome.stdout)
    assert (shown["optimizer"]["lr"], shown["model"]["layers"]) == (0.5, 11)
    assert not Path("runs").exists()


def test_compare_makes_all_methods_and_seeds_and_resumes():
    few = [*SMALL, "--set", 'data.stages=[{"steps": 2, "sequences": 2, "sequence_length": 32}]']
    few += ["--set", "optimizer.polar.oversample=2", "--seeds", "2", "--out", "all"]
    first = polarstep("compare", "nanogpt-toy", "-m", "adamw,muon", *few)
    runs = find_runs(["all"])
    assert len(runs) == 4
    assert {RunRecord.load(run).spec.study["name"] for run in runs} == {"compare"}
    assert "±" in first.output
    assert "polarstep report all" in said(first)
    times = {run: (run / "result.json").stat().st_mtime_ns for run in runs}
    second = polarstep("compare", "nanogpt-toy", "-m", "adamw,muon,sgd", *few)
    assert "4 of 6 runs are finished already" in said(second)
    assert times == {run: (run / "result.json").stat().st_mtime_ns for run in runs}
    other = polarstep(
        "compare", "nanogpt-toy", "-m", "adamw", *few, "--set", "optimizer.lr=1", status=1
    )
    assert "holds a run with other settings" in said(other)


def test_methods_may_be_given_one_by_one():
    few = [*SMALL, "--set", 'data.stages=[{"steps": 1, "sequences": 2, "sequence_length": 32}]']
    polarstep(
        "compare", "nanogpt-toy", "--methods", "adamw", "--method", "muon", *few, "--out", "a"
    )
    assert {RunRecord.load(run).spec.method for run in find_runs(["a"])} == {
        "AdamW",
        "Muon (Nesterov)",
    }


def test_the_advice_of_a_disk_that_was_full_at_the_start_is_right(monkeypatch):
    words = ["run", "nanogpt-toy", "-m", "adamw", *SMALL, "--out", "r"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_room)
        outcome = polarstep(*words, status=1)
    assert "no space left to write r/" in said(outcome)
    assert "run the same command again; where a run has begun, " in said(outcome)
    assert not Path("r/config.json").exists()
    polarstep(*words)


def no_room(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.usefixtures("forked_workers")
def test_several_workers_make_the_same_runs():
    few = [*SMALL, "--seeds", "2", "-m", "adamw,muon"]
    polarstep("compare", "nanogpt-toy", *few, "--out", "alone")
    outcome = polarstep("compare", "nanogpt-toy", *few, "--out", "together", "--workers", "2")
    assert "4 runs in together" in said(outcome)
    alone, together = (
        {run.relative_to(folder): RunRecord.load(run).result.value for run in find_runs([folder])}
        for folder in ("alone", "together")
    )
    assert len(alone) == 4
    assert together == pytest.approx(alone, rel=0.01)  # the number of threads rounds differently


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_fails_is_told_and_the_others_go_on():
    few = [*SMALL, "-m", "adamw,muon", "--out", "all"]
    bad = ["--set", "data.val=no.bin", "--workers", "2"]
    outcome = polarstep("compare", "nanogpt-toy", *few, *bad, status=1)
    assert "failed: no token shard matches 'no.bin'" in said(outcome)
    assert "none of 2 runs was made" in said(outcome)
    again = polarstep("compare", "nanogpt-toy", *few)
    assert "2 runs in all" in said(again)


def test_compare_knows_all_seven_methods():
    one = 'data.stages=[{"steps": 1, "sequences": 1, "sequence_length": 32}]'
    outcome = polarstep("compare", "nanogpt-toy", *SMALL, "--set", one, "--out", "all")
    for method in METHODS:
        assert method.name in said(outcome)
    assert len(find_runs(["all"])) == 7


def test_compare_knows_our_methods():
    one = 'data.stages=[{"steps": 1, "sequences": 1, "sequence_length": 32}]'
    few = ("--methods", "ours,adamw", *SMALL, "--set", one, "--out", "ours")
    outcome = polarstep("compare", "nanogpt-toy", *few)
    assert f"{len(OURS) + 1} runs in ours" in said(outcome)
    found = {run.spec.method for run in map(RunRecord.load, find_runs(["ours"]))}
    assert found == {method.name for method in OURS} | {"AdamW"}
    again = polarstep("compare", "nanogpt-toy", *few)
    assert f"{len(OURS) + 1} of {len(OURS) + 1} runs are finished already" in said(again)


def test_ablate_varies_one_setting():
    outcome = polarstep(
        "ablate", "nanogpt-toy", "rank", "--values", "4,8", *SMALL, "--out", "ranks"
    )
    found = [RunRecord.load(run) for run in find_runs(["ranks"])]
    assert [r.spec.config["optimizer"]["polar"]["rank"] for r in found] == [4, 8]
    assert [r.spec.study["variant"] for r in found] == ["rank=4", "rank=8"]
    assert "rank=4" in said(outcome)
    bad = polarstep("ablate", "nanogpt-toy", "rank", "--values", "4,0", "--out", "b", status=1)
    assert "optimizer.polar.rank=0" in said(bad)
    assert not Path("b").exists()
    wide = polarstep("ablate", "nanogpt-toy", "rank", "--values", "8,200", "--out", "b", status=1)
    assert "rank=200: no matrix would be sketched" in said(wide)
    assert not Path("b").exists()
    none = polarstep("ablate", "cifar10-tiny", "sequence-length", status=1)
    assert "give the values yourself" in said(none)


def test_tensorboard_on_request():
    polarstep("run", "nanogpt-toy", "-m", "adamw", *SMALL, "--tensorboard", "--out", "r")
    assert list(Path("r/tensorboard").glob("events.*"))


@pytest.mark.parametrize("twice", [["--values", "6,8", "--seeds", "3,3"], ["--values", "6,8,6"]])
def test_a_seed_or_a_value_that_is_given_twice_is_one_run(twice):
    small = [*SMALL, "--set", "optimizer.polar.oversample=2", "--out", "a"]
    polarstep("ablate", "nanogpt-toy", "rank", *small, *twice)
    assert len(find_runs(["a"])) == 2
    again = polarstep("ablate", "nanogpt-toy", "rank", *small, *twice)
    assert "2 runs in a" in said(again)
    assert "±" not in said(again)


def test_divergence_has_a_status_of_its_own():
    hot = [*SMALL, "--set", "optimizer.lr=1e30", "--out", "r"]
    outcome = polarstep("run", "nanogpt-toy", "-m", "sgd", *hot, status=3)
    assert "diverged at step" in said(outcome)
    assert RunRecord.load("r").status == "diverged"


IN_PROSE = ["--set", "data.train=corpus:prose"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nanogpt-toy"], "no method given"),
        (["run", "nope"], "recipe 'nope': expected one of cifar10"),
        (["run", "nanogtp", "-m", "muon"], "did you mean 'nanogpt'?"),
        (["run", "nanogpt-toy", "-m", "muno"], "did you mean 'muon'?"),
        (["run", "nanogpt-toy", "--methods", "muon,adamw"], "RECIPE --methods muon,adamw"),
        (["ablate", "nanogpt-toy", "rank", "--methods", "all"], "expected one method"),
        (["run", "cifar10", "-m", "muon"], "no CIFAR-10 in"),
        (["run", "nanogpt", "-m", "muon"], "no token shard matches"),
        (["run", "nanogpt-toy", "-m", "muon", "--device", "gpu0"], "expected auto, cpu, cuda"),
        (["run", "nanogpt-toy", "-m", "muon", "--device", "meta"], "expected auto, cpu, cuda"),
        (["run", "nanogpt-toy", "-m", "muon", "--device", "mps"], "expected auto, cpu, cuda"),
        (["run", "nanogpt-toy", "-m", "muon", *IN_PROSE], "no text named 'prose' is shipped"),
        (["compare", "nanogpt-toy", "--seeds", "many"], "expected a number of seeds"),
        (["compare", "nanogpt-toy", "--seeds", "2", "--set", "seed=5"], "choose it with --seed 5"),
        (["run", "missing.json", "-m", "muon"], "missing.json does not exist"),
        (["list", "nowhere"], "nowhere does not exist"),
        (["download", "imagenet"], "expected cifar10 or fineweb"),
        (["tokenize", "a.txt", "--out", "o", "--characters"], "no such file: a.txt"),
        (["compare", "nanogpt-toy", "--seeds", "0"], "4, is seed 4 alone"),
        (["ablate", "nanogpt-toy", "rank", "--values", ""], "--values '': expected values, as"),
        (["ablate", "nanogpt-toy", "rank", "--values", "6,,8"], "--values '6,,8': expected values"),
        (["tokenize", "a.txt", "--out", "o"], "say which tokens"),
        (
            ["tokenize", "a.txt", "--out", "o", "--characters", "--vocab", "v"],
            "--vocab and --characters exclude each other",
        ),
    ],
)
def test_failures_are_one_message_and_leave_nothing(arguments, message):
    outcome = polarstep(*arguments, status=1)
    assert message in said(outcome)
    assert "Traceback" not in outcome.output
    assert not list(Path().rglob("config.json"))


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    outcome = polarstep("run", "nanogpt-toy", "-m", "muon", "--device", "cuda:2", status=1)
    assert "runtime.device='cuda:2': torch finds the GPUs cuda:0 to cuda:1 here" in said(outcome)


def test_a_damaged_shard_ends_a_run_with_its_name():
    Path("a_train_1.bin").write_bytes(b"\0" * 3000)
    outcome = polarstep(
        "run", "nanogpt-small", "-m", "muon", "--set", "data.train=a_train_*.bin", status=1
    )
    assert "a_train_1.bin starts with 0, not with the magic number" in said(outcome)


def test_text_to_shards_to_a_run():
    Path("poem.txt").write_text("so much depends upon a red wheel barrow\n" * 60)
    outcome = polarstep("tokenize", "poem.txt", "--out", "shards", "--characters")
    settings = shlex.split(outcome.output.splitlines()[-1].partition("with: ")[2])
    assert "--set" in settings
    polarstep(
        "run", "nanogpt-toy", "-m", "muon", *SMALL, "--set", "evaluation.tokens=96", *settings
    )
    again = polarstep("tokenize", "poem.txt", "--out", "shards", "--characters", status=1)
    assert "nothing was overwritten" in said(again)


def test_more_validation_tokens_than_there_are():
    outcome = polarstep(
        "run", "nanogpt-toy", "-m", "muon", "--set", "evaluation.tokens=99999999", status=1
    )
    assert "evaluation.tokens=99,999,999, but a half of the validation data has 55," in said(
        outcome
    )


def test_images_from_a_folder():
    fake_cifar10(Path("data"))
    polarstep(
        "run", "cifar10-tiny", "-m", "rand-muon", "--set", "model.widths=[8,16,16]",
        "--set", "data.held_out=40", "--set", "data.train_images=null",
        "--set", "data.batch_size=32", "--set", "data.epochs=1",
        "--set", "optimizer.polar.rank=3", "--out", "r", "--device", "cpu",
    )  # fmt: skip
    assert RunRecord.load("r").result.metric == "test_accuracy"


def test_list_shows_what_there_is():
    outcome = polarstep("list")
    for word in ("nanogpt-toy", "cifar10", "rand-muon-kaczmarz", "sequence-length"):
        assert word in outcome.output
    for word in ("deflated", "auto-rows", "peer:torch-muon"):
        assert word in outcome.output
    assert "Not the paper's: power, rest, auto, sequence-length and lr; solver" in said(outcome)
    assert "sketch also takes warm" in said(outcome)
    assert "Other recipes vary rank and batch and sequence-length in" in said(outcome)
    polarstep("run", "nanogpt-toy", "-m", "adamw", *SMALL)
    assert "finished" in polarstep("list", "runs").output


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on():
    long = 'data.stages=[{"steps": 100000, "sequences": 2, "sequence_length": 32}]'
    arguments = ["run", "nanogpt-toy", "-m", "rand-muon", *SMALL, *LOW_RANK, "--set", long]
    process = fork("-m", "polarstep", *arguments, "--out", "r")
    log = Path("r/metrics.jsonl")
    wait_until(lambda: process.poll() is not None or (log.exists() and log.stat().st_size > 2000))
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    message = " ".join(errors.split())
    assert "of 100000; the checkpoint is in r. Go on with: polarstep run nanogpt-toy" in message
    assert message.endswith("--resume")
    assert Path("r/checkpoint.pt").exists()
    assert RunRecord.load("r").status == "unfinished"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "words",
    [["compare", "nanogpt-toy"], ["ablate", "nanogpt-toy", "rank"], ["demo", "--workers", "2"]],
    ids=lambda words: words[0],
)
def test_a_folder_that_cannot_hold_the_runs_is_refused_before_the_first(words, force):
    Path("taken").touch()
    outcome = polarstep(*words, "--out", "taken", *["--force"] * force, status=1)
    assert said(outcome).endswith("taken is a file, expected a folder: choose another --out")


@pytest.mark.parametrize("option", ["--method", "--methods", "-m"])
@pytest.mark.parametrize("command", ["run", "compare", "ablate", "tune"])
def test_method_and_methods_are_the_same_option(command, option):
    axis = ["rank"] if command == "ablate" else []
    outcome = polarstep(command, "nanogpt-toy", *axis, option, "muno", status=1)
    assert "method 'muno': did you mean 'muon'?" in said(outcome)


def test_resume_without_a_run_says_so():
    outcome = polarstep("run", "nanogpt-toy", "-m", "muon", *SMALL, "--resume", status=1)
    assert "--resume: there is no run in runs/nanogpt-toy/muon/seed-0 to go on with" in said(
        outcome
    )
    assert not Path("runs").exists()


def test_list_passes_over_the_config_of_another_program():
    polarstep("run", "nanogpt-toy", "-m", "muon", *SMALL)
    for name, text in {"model": '{"model_type": "gpt2"}', "list": "[1]"}.items():
        Path("runs", name).mkdir()
        Path("runs", name, "config.json").write_text(text)
    shown = polarstep("list", "runs")
    assert "seed-0" in said(shown)
    assert find_runs(["runs"]) == [Path("runs/nanogpt-toy/muon/seed-0")]


def test_list_shows_the_other_runs_and_names_those_that_are_damaged():
    for seed in range(4):
        polarstep("run", "nanogpt-toy", "-m", "muon", *SMALL, "--seed", str(seed))
    runs = Path("runs/nanogpt-toy/muon")
    (runs / "seed-0/config.json").write_text("{")
    (runs / "seed-1/result.json").write_text("[]")
    known = json.loads((runs / "seed-3/config.json").read_text())
    (runs / "seed-3/config.json").write_text(json.dumps(known | {"method": "of-tomorrow"}))
    Path("runs/packed").mkdir()
    Path("runs/packed/records.jsonl.gz").write_text("no archive")
    outcome = polarstep("list", "runs", status=1)
    assert "nanogpt-toy/muon/seed-2" in outcome.stdout
    assert "finished" in outcome.stdout
    assert all(f"seed-{seed}" not in outcome.stdout for seed in (0, 1, 3))
    for message in (
        f"{runs}/seed-0/config.json is not valid JSON",
        f"{runs}/seed-1/result.json holds [], expected a JSON object",
        f"{runs}/seed-3: method 'of-tomorrow'",
        "runs/packed/records.jsonl.gz cannot be read as records",
    ):
        assert message in outcome.stderr


def test_list_says_that_there_are_no_runs():
    Path("empty").mkdir()
    Path("notes.txt").write_text("no run")
    for path in ("empty", "notes.txt"):
        shown = said(polarstep("list", path))
        assert f"no runs in {path}: expected folders with a config.json" in shown


def test_runs_behind_symbolic_links_are_found_once():
    polarstep("run", "nanogpt-toy", "-m", "muon", *SMALL, "-o", "disk/run")
    Path("runs").mkdir()
    Path("runs/linked").symlink_to("../disk/run", target_is_directory=True)
    Path("runs/loop").symlink_to(".", target_is_directory=True)
    assert find_runs(["runs"]) == [Path("runs/linked")]
    assert find_runs(["disk", "runs", Path("disk").absolute()]) == [Path("disk/run")]
    assert "linked" in said(polarstep("list", "runs"))


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_help_prints_the_whole_text_of_each_option(command):
    """Typer reads [word] in a help text as a style, and prints nothing in its place."""
    group = typer.main.get_command(app)
    _, found, _ = group.resolve_command(group.make_context("polarstep", [command]), [command])
    texts = [getattr(parameter, "help", None) or "" for parameter in found.params]
    assert any(texts)
    assert [Text.from_markup(text).plain for text in texts] == texts


def test_folders_are_told_from_files_before_any_token_is_made():
    Path("text.txt").write_text("some text")
    outcome = polarstep("tokenize", ".", "-o", "shards", "--characters", status=1)
    assert ". is no file: expected text files, as ./*.txt" in said(outcome)
    outcome = polarstep("tokenize", "text.txt", "-o", "text.txt", "--characters", status=1)
    assert "text.txt is a file: expected a folder for the shards" in said(outcome)


def test_shards_of_another_prefix_keep_their_files_and_their_vocabulary():
    Path("a.txt").write_text("so much depends " * 20)
    Path("b.txt").write_text("upon a red wheel barrow " * 20)
    shards = Path("shards")
    polarstep("tokenize", "a.txt", "-o", "shards", "--characters", "--prefix", "text_old")
    before = {path.name: path.read_bytes() for path in shards.iterdir()}
    refused = polarstep("tokenize", "b.txt", "-o", "shards", "--characters", status=1)
    assert "vocabulary.json is the vocabulary of text_old_train_000001.bin" in said(refused)
    polarstep("tokenize", "a.txt", "-o", "shards", "--characters", "--force")
    assert before.items() <= {path.name: path.read_bytes() for path in shards.iterdir()}.items()
    assert (shards / "text_train_000001.bin").exists()


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (b"caf\xe9", [], "text.txt is not UTF-8 text: .* at byte 3; convert it"),
        (b" \n", [], "the text is empty: .* give text files with more than white space"),
        (b"some text", ["--validation", "1"], r"--validation 1: expected a fraction in \[0, 1\)"),
        (b"some text", ["--separator", ""], "separator='': expected the text between two"),
    ],
)
def test_what_cannot_be_tokenized_is_told_without_a_traceback(text, words, message):
    Path("text.txt").write_bytes(text)
    outcome = polarstep("tokenize", "text.txt", "-o", "shards", "--characters", *words, status=1)
    assert re.search(message, said(outcome))
    assert not Path("shards").exists()


def test_without_a_validation_shard_none_is_recommended():
    Path("a.txt").write_text("so much depends " * 20)
    words = ["a.txt", "-o", "shards", "--characters", "--validation", "0"]
    assert "data.val" not in polarstep("tokenize", *words).output


@pytest.mark.parametrize("noted", ["[]", '{"vocab_size": "many"}', "{", "{}"])
def test_a_vocabulary_file_that_is_not_ours_is_named(noted):
    Path("poem.txt").write_text("so much depends upon a red wheel barrow\n" * 60)
    outcome = polarstep("tokenize", "poem.txt", "--out", "shards", "--characters")
    settings = shlex.split(outcome.output.splitlines()[-1].partition("with: ")[2])
    Path("shards/vocabulary.json").write_text(noted)
    outcome = polarstep("run", "nanogpt-toy", "-m", "muon", *SMALL, *settings, status=1)
    assert "shards/vocabulary.json" in said(outcome)


def test_text_that_is_trained_on_is_not_held_out():
    Path("poem.txt").write_text("so much depends upon a red wheel barrow\n" * 60)
    polarstep("tokenize", "poem.txt", "--out", "shards", "--characters")
    both = ["--set", "data.train=shards/*.bin", "--set", "data.val=shards/text_val_*.bin"]
    more = ["--set", "model.vocab_size=20", "--set", "evaluation.tokens=96", "--out", "r"]
    outcome = polarstep("run", "nanogpt-toy", "-m", "muon", *SMALL, *both, *more, status=1)
    assert "text_val_000000.bin is matched by data.train" in said(outcome)
    assert not Path("r").exists()


@pytest.fixture
def ctrl_c_at_the_end(monkeypatch):
    """A Ctrl-C while the test text of a run is read, after its last step."""
    test_metric = LanguageTask.test_metric

    def interrupted(self, last):
        signal.raise_signal(signal.SIGINT)
        return test_metric(self, last)

    monkeypatch.setattr(LanguageTask, "test_metric", interrupted)


@pytest.mark.usefixtures("ctrl_c_at_the_end")
def test_ctrl_c_during_the_last_evaluation_stops_a_suite():
    arguments = ["compare", "nanogpt-toy", "-m", "adamw,sgd", *SMALL, "--out", "all"]
    outcome = polarstep(*arguments, status=130)
    assert "the run had ended, its result is in all/adamw/seed-0. Run the same" in said(outcome)
    (made,) = Path("all").rglob("config.json")
    assert RunRecord.load(made.parent).status == "finished"


@pytest.mark.usefixtures("ctrl_c_at_the_end")
def test_ctrl_c_during_the_last_evaluation_of_a_single_run():
    outcome = polarstep("run", "nanogpt-toy", "-m", "adamw", *SMALL, "--out", "r", status=130)
    assert "the run had ended, its result is in r" in said(outcome)
    assert "--resume" not in said(outcome)
    assert RunRecord.load("r").status == "finished"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.batch_size=161", "data.batch_size=161: expected at most 160"),
        ("data.whitening_images=0", "data.whitening_images=0: expected at least 1"),
        ("schedule.extension=5", "schedule.extension=5 leaves nothing of the 5 steps"),
        ("schedule.momentum_cooldown=-1", "momentum_cooldown=-1: expected at least 0"),
        ("optimizer.lr=" + "1" * 5000, "optimizer.lr='111"),
    ],
)
def test_settings_that_cannot_be_trained_with_are_named(setting, message):
    fake_cifar10(Path("data"))
    outcome = polarstep(
        "run", "cifar10-tiny", "-m", "muon", "--set", "model.widths=[8,16,16]",
        "--set", "data.held_out=40", "--set", "data.train_images=null",
        "--set", "data.batch_size=32", "--set", "data.epochs=1",
        "--set", setting, "--out", "r", "--device", "cpu", status=1,
    )  # fmt: skip
    assert message in said(outcome)
    assert not Path("r").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"overrides": None}, "overrides is None, expected settings by name"),
        ({"recipe": ["nanogpt-toy"]}, "recipe is ['nanogpt-toy'], expected a name"),
        ({"method": 3}, "method is 3, expected a name"),
    ],
)
def test_a_recipe_file_of_another_shape_is_named(changed, message):
    content = {"recipe": "nanogpt-toy", "method": "muon", "overrides": {}} | changed
    Path("mine.json").write_text(json.dumps(content))
    assert f"mine.json: {message}" in said(polarstep("run", "mine.json", status=1))
