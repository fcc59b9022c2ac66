"""``polarstep demo`` with the network made as small as it gets, and the default that it shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.lab.experiments.small import SMALLEST_GPT as TINY
from typer.testing import CliRunner

import polarstep as ps
from polarstep_lab.cli import app
from polarstep_lab.cli import runs as command
from polarstep_lab.methods import DEFAULT
from polarstep_lab.models.gpt import GPT
from polarstep_lab.optimizers.build import build_optimizer
from polarstep_lab.optimizers.schedule import RunSchedule
from polarstep_lab.recipes import resolve, tuned
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.studies.demo import study as DEMO


@pytest.mark.usefixtures("forked_workers")
def test_it_says_the_default_against_adamw_and_ends_with_the_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = replace(DEMO, overrides={**DEMO.overrides, **TINY})
    monkeypatch.setattr(command, "DEMO", small)

    def demo():
        result = CliRunner().invoke(app, ["demo", "--workers", "2"])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    shown = demo()
    assert "polarstep (default) ends at a test perplexity of " in shown
    assert shown.splitlines()[-1] == "Report: runs/demo/report/index.html"
    for variant in DEMO.variants:
        assert shown.count(f"│ {variant.name} ") == 1
    runs = [RunRecord.load(path) for path in find_runs([tmp_path / "runs" / "demo"])]
    assert len(runs) == 8
    assert {run.status for run in runs} == {"finished"}

    stamps = {run.directory: (run.directory / "result.json").stat().st_mtime_ns for run in runs}
    assert demo().splitlines()[-1] == shown.splitlines()[-1]  # nothing is trained twice
    assert stamps == {path: (path / "result.json").stat().st_mtime_ns for path in stamps}


def test_the_comparison_is_not_on_the_seed_that_chose_rates():
    assert 0 not in DEMO.seeds
    for variant in DEMO.variants[:3]:
        rates = tuned(DEMO.recipe, resolve(DEMO.recipe, variant.method).rule)
        assert resolve(DEMO.recipe, variant.method).optimizer.lr == rates["optimizer.lr"]


def test_the_default_is_muon_for_without_an_option():
    config = resolve(DEMO.recipe, "default", overrides=TINY)
    models = [GPT(config.model, torch.Generator().manual_seed(0)) for _ in range(2)]
    built = build_optimizer(models[0], config, RunSchedule(config.schedule, 100))
    ours, plain = built.optimizer, ps.muon_for(models[1])
    built.set_step(0)
    assert ours.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    for _ in range(2):
        for model, optimizer in zip(models, (ours, plain), strict=True):
            tokens = torch.arange(17)[None]
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
    assert config.method == DEFAULT.name
