"""Every command of docs/experiments.md runs: the real command on the real recipe, with small sizes.

What decides whether a command is accepted stays: the sequences of each stage and the images of a batch,
and the number of ranks. Widths, layers, lengths, steps and texts are small.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from tests.forking import fork
from tests.lab.experiments.small import fake_cifar10
from tests.processes import PATIENCE
from typer.testing import CliRunner

import polarstep.__main__
from polarstep_lab.cli import app
from polarstep_lab.config import TextData
from polarstep_lab.recipes.resolve import resolve
from polarstep_lab.records.record import find_runs
from polarstep_lab.train.ranks import Ranks

PAGE = Path(__file__).resolve().parents[3] / "docs/experiments.md"
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    for line in block.splitlines()
    if re.search(r"\bpolarstep\b", line) and not line.startswith("pip")
]
ELSEWHERE = {
    "--on ray": "tests/lab/experiments/test_on_ray.py starts clusters",
    "polarstep demo": "tests/lab/cli/test_demo.py makes small runs of it",
    "polarstep tune": "tests/lab/experiments/test_tune.py has trials that end at once",
    "polarstep download": "needs a network",
    "POLARSTEP_PEERS": "needs a checkout of another library",
    "--vocab": "needs OpenAI's file; tests/lab/data/test_tokenizer.py has one like it",
}
HERE = [each for each in COMMANDS if not any(words in each for words in ELSEWHERE)]
ALONE = [each for each in HERE if not each.startswith("torchrun")]
LAUNCHED = [each for each in HERE if each.startswith("torchrun")]


def small(recipe: str) -> list[str]:
    """Options that make runs of a recipe small."""
    config = resolve(recipe, "rand-muon")
    settings: dict[str, object] = {"evaluation.every": 100}
    if isinstance(config.data, TextData):
        share = 16 / config.data.window
        settings |= {
            "schedule.warmup": 0,
            "schedule.extension": 0,
            "schedule.momentum_cooldown": 0,
            "model.width": 64,
            "model.heads": 2,
            "model.layers": 1,
            "model.context": 16,
            "model.vocab_size": 65,
            "model.attention_free": [],
            "data.train": ["corpus:tinyshakespeare"],
            "data.val": ["corpus:tinyshakespeare"],
            "data.stages": [
                {
                    "steps": 1,
                    "sequences": stage.sequences,
                    "sequence_length": int(stage.sequence_length * share),
                }
                for stage in config.data.stages
            ],
            "evaluation.tokens": 128,
            "evaluation.batch": 4,
        }
    else:
        settings |= {"model.widths": [4, 4, 4], "data.epochs": 0.05, "data.held_out": 40}
        settings |= {"data.train_images": 4000}  # the largest batch
    texts = (f"{key}={json.dumps(value)}" for key, value in settings.items())
    return [word for text in texts for word in ("--set", text)] + ["--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the page says is there: CIFAR-10 in ``data/``, and a book."""
    folder = tmp_path_factory.mktemp("page")
    fake_cifar10(folder / "data", per_file=820)
    test_images = folder / "data/cifar-10-batches-bin/test_batch.bin"
    test_images.write_bytes(test_images.read_bytes()[: 40 * 3073])
    text = PAGE.read_text(encoding="utf-8")
    (study,) = re.findall(r"```python\n(# mine\.py\n.*?)```", text, re.S)
    (folder / "mine.py").write_text(study)
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    return folder


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("command", ALONE)
def test_a_command_of_the_page_runs(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    words = shlex.split(command)[1:]
    if words[0] in ("run", "compare", "ablate", "study"):
        words += small("nanogpt-toy" if words[0] == "study" else words[1])
        if words[0] != "run":
            words += ["--seeds", "1"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", LAUNCHED)
def test_a_command_for_several_processes_runs(command, tmp_path):
    words = shlex.split(command)
    at = words.index("polarstep")
    processes = int(words[words.index("--nproc-per-node") + 1])
    torchrun = ["-m", "torch.distributed.run", "--standalone", *words[1 : at - 1]]
    torchrun += ["--run-path", "--start-method", "fork", polarstep.__main__.__file__]
    out = ["--out", str(tmp_path / "run")]
    process = fork(*torchrun, *words[at + 1 :], *small(words[at + 2]), *out)
    try:
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    (run,) = find_runs([tmp_path])
    environment = json.loads((run / "environment.json").read_text())
    assert environment["processes"] == processes


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_batches_of_the_paper_divide_among_its_ranks(ranks):
    """The authors train on eight GPUs, and their script takes two and four as well."""
    data = resolve("nanogpt", "rand-muon").data
    for number, stage in enumerate(data.stages):
        Ranks(count=ranks).check_divides(f"data.stages.{number}.sequences", stage.sequences)


def test_the_commands_of_the_page_are_found():
    assert len(HERE) > 14
    assert len(LAUNCHED) == 3
    assert all(any(words in each for each in COMMANDS) for words in ELSEWHERE)
