"""polarstep_lab.studies.two_lines: a search finds the best of its grid, and no run is made twice."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch


@pytest.fixture
def study(monkeypatch):
    """The study with one tiny family, of text in which most tokens follow from the one before."""
    study, families = (
        importlib.import_module("polarstep_lab.studies.two_lines.runs"),
        importlib.import_module("polarstep_lab.studies.two_lines.families"),
    )
    models = importlib.import_module("polarstep_lab.studies.two_lines.models")

    def data(folder, device):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 64, (64,), generator=generator).repeat(100)
        drawn = torch.rand(len(tokens), generator=generator) < 0.2
        other = torch.randint(0, 64, (len(tokens),), generator=generator)
        tokens = torch.where(drawn, other, tokens).int()
        return families.text(tokens[:-1100], tokens[-1100:], 8, 16, {"data_digest": "tiny"})

    gpt2 = families.Family("tiny", 20, data, lambda seed, _: models.GPT2(seed, 64, 32, 1, 2, 16))
    llama = families.Family(
        "t", 20, data, lambda seed, _: models.Llama(seed, 64, 32, 1, 4, 2, 48, 16)
    )
    monkeypatch.setattr(families, "FAMILIES", {"gpt2": gpt2, "llama": llama})
    monkeypatch.setattr(study, "EVERY", 10)
    study.opened.cache_clear()
    yield study
    study.opened.cache_clear()


@pytest.fixture
def run(study, monkeypatch, tmp_path):
    """A function that runs jobs and returns all records."""
    out = tmp_path / "runs.jsonl"

    def run(*jobs):
        words = ["two_lines", "--device", "cpu", "--commit", "abc", "--out", str(out), *jobs]
        monkeypatch.setattr(sys, "argv", words)
        study.main()
        return study.recorded(out)

    run.out = out
    return run


def test_the_search_ends_at_the_best_of_what_it_tried(run):
    rows = run("gpt2:adamw")
    tried = [row for row in rows if row["why"] == "search"]
    assert {row["seed"] for row in tried} == {3}
    assert 4 <= len(tried) <= 8
    best = min(tried, key=lambda row: row["validation"])
    reported = rows[len(tried) :]
    assert [row["seed"] for row in reported] == [0, 1, 2]
    for row in reported:
        assert row["options"] == best["options"]
        assert row["why"] == f"best of {len(tried)} runs on seed 3"
        assert row["test"] < 4.15  # log 64 is 4.16
        assert [step for step, _ in row["curve"]] == [10, 20]


def test_a_run_that_is_recorded_is_not_made_again(study, run, monkeypatch):
    rows = run("gpt2:adamw:lr=0.002,weight_decay=0.1:3")
    cut = json.dumps(rows[0])[:50]
    with run.out.open("a") as file:
        file.write(cut)
    made = []
    train = study.train
    monkeypatch.setattr(study, "train", lambda *args: made.append(args[:4]) or train(*args))
    rows = run("gpt2:adamw:lr=0.002,weight_decay=0.1:3,0", "llama:default")
    assert [args[3] for args in made] == [0, 0, 1, 2]
    assert len(rows) == 5
    assert run("gpt2:adamw:lr=0.002,weight_decay=0.1:3,0", "llama:default") == rows
    assert len(made) == 4


@pytest.mark.parametrize("method", ["default", "ours", "ours-full", "torch-muon"])
def test_methods_train_both_models(study, run, method):
    given = importlib.import_module("polarstep_lab.studies.two_lines.methods").METHODS[method].start
    options = ",".join(f"{name}={value}" for name, value in given.items())
    jobs = [
        f"{family}:{method}" + (f":{options}:0" if options else "") for family in ("gpt2", "llama")
    ]
    rows = run(*jobs)
    assert {row["family"] for row in rows} == {"gpt2", "llama"}
    assert all(row["held_out"] < 4.2 for row in rows)


def test_a_run_that_diverges_is_recorded_without_a_loss(run):
    (row,) = run("gpt2:adamw:lr=1e30,weight_decay=0.1:3")
    assert "validation" not in row


def test_each_option_climbs_while_the_loss_falls(study):
    seen = []

    def loss(options):
        seen.append(dict(options))
        return (options["a"] - 4) ** 2 + abs(options["b"] - 1)

    best = study.climb({"a": 2, "b": 3}, {"a": (0, 1, 2, 3, 4, 5), "b": (1, 2, 3, 4)}, loss)
    assert best == {"a": 4, "b": 1}
    assert [tuple(options.values()) for options in seen] == [
        *((2, 3), (3, 3), (4, 3), (5, 3)),
        *((4, 4), (4, 2), (4, 1)),
    ]
    seen.clear()
    study.climb(
        {"a": 0, "b": 3}, {"a": tuple(range(20)), "b": (3,)}, lambda o: seen.append(o) or -o["a"]
    )
    assert len(seen) == study.MOST


def test_the_table_pairs_seeds_with_adamw(study):
    def row(method, seed, test, **more):
        row = {"family": "gpt2", "method": method, "seed": seed, "test": test, "validation": test}
        row |= {"options": {"lr": 0.1}, "steps": 20, "held_out": test, "commit": "abc"}
        return row | {"curve": [(10, test + 0.2), (20, test)]} | more

    rows = [row("adamw", seed, 3.0 + 0.1 * seed) for seed in range(3)]
    rows += [row("default", seed, 2.9 + 0.1 * seed, options={}) for seed in range(3)]
    rows += [row("adamw", 3, 2.0)]
    text = "\n".join(study.table(rows)).replace("\N{NO-BREAK SPACE}", " ")
    assert "| default | at abc | 3.0000 | 20.15 | −9.5% ± 0.0 (n = 3) | 75% |" in text
    assert "| adamw | lr=0.1 | 3.1000 |" in text
    assert "| adamw | lr=0.1 | 2.0000 | 7.39 |" in text


def text_batch():
    x = torch.arange(4 * 9).reshape(4, 9) % 11
    return x[:, :-1], x[:, 1:]


def image_batch():
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(8)


def lora(models):
    return models.LoRA.beside(models.GPT2(0, 16, 32, 1, 2, 8), 2)


SMALL = {
    "experts": (lambda models: models.GPT2(0, 16, 32, 1, 2, 8, experts=4), text_batch),
    "lora": (lora, text_batch),
    "lstm": (lambda models: models.LSTM(16, 32), text_batch),
    "vit": (lambda m: m.Classifier(m.VisionTransformer(0, 32, 1, 2, 16)), image_batch),
    "resnet18": (lambda m: m.Classifier(m.ResNet18(4, 2)), image_batch),
}


@pytest.mark.parametrize("method", ["default", "ours", "adamw"])
@pytest.mark.parametrize("name", SMALL)
def test_each_kind_of_model_learns_a_batch(name, method):
    torch.manual_seed(0)
    build, batch = SMALL[name]
    model = build(importlib.import_module("polarstep_lab.studies.two_lines.models"))
    found = importlib.import_module("polarstep_lab.studies.two_lines.methods").METHODS[method]
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert bool(frozen) == (name == "lora")
    (optimizer,) = found.build(model, **found.start)
    x, y = batch()
    losses = []
    for _ in range(12):
        loss = model.loss(x, y, lambda function: function) / y.numel()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.001
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in frozen.items())


def test_it_needs_torch_and_numpy_alone():
    """The machines with GPUs have nothing else."""
    code = """
import sys
for name in ("typer", "rich", "pydantic", "pandas", "scipy", "optuna", "jinja2"):
    sys.modules[name] = None
import polarstep_lab.studies.two_lines.runs as study
from polarstep_lab.studies.two_lines.families import FAMILIES
from polarstep_lab.studies.two_lines.methods import METHODS
from polarstep_lab.records.environment import source_of_packages
model = FAMILIES["gpt2"]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_workers_make_the_runs_of_a_command(tmp_path):
    text = bytes(range(32, 96)) * 800
    for name in ("tinyshakespeare.txt", "mobydick.txt"):
        (tmp_path / name).write_bytes(text)
    out = tmp_path / "runs.jsonl"
    command = [sys.executable, "-m", "polarstep_lab.studies.two_lines", "--data", str(tmp_path)]
    command += ["--out", str(out), "--device", "cpu", "--workers", "2", "--steps", "2"]
    subprocess.run([*command, "lstm:default::0", "lstm:default::1"], check=True, timeout=300)
    found = [json.loads(line)["config"] for line in out.read_text().splitlines()]
    assert sorted(config["seed"] for config in found) == [0, 1]
