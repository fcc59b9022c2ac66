"""A study is data: a student's own map in a file, and the studies that the package has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.lab.experiments.small import SMALLEST_GPT, tiny_gpt
from typer.testing import CliRunner

import polarstep as ps
from polarstep_lab import studies
from polarstep_lab.cli import app
from polarstep_lab.config import ConfigError
from polarstep_lab.data.corpus import corpus_tokens
from polarstep_lab.jobs.job import chosen_rate, jobs_of, rate_jobs
from polarstep_lab.models.gpt import GPT
from polarstep_lab.optimizers.build import build_optimizer
from polarstep_lab.optimizers.schedule import RunSchedule
from polarstep_lab.recipes import resolve
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.study import Rates, Study, Variant, load_study
from polarstep_lab.train.run import train

MINE = """
from dataclasses import dataclass
import polarstep as ps
from polarstep_lab.study import Rates, Study, Variant

@dataclass(frozen=True)
class Fewer(ps.NewtonSchulz):
    steps: int = 2

study = Study(
    name="mine", recipe="nanogpt-toy", against="full space",
    variants=[
        Variant("full space", "muon"),
        Variant("rank 4", "rand-muon", {"optimizer.polar.rank": 4, "optimizer.polar.oversample": 2}),
        Variant("my idea", "muon", {"optimizer.polar.map": "mine"}, rates=(0.02,)),
    ],
    maps={"mine": Fewer}, rates=Rates((0.01, 0.03), seed=3), seeds=(0, 1),
)
"""


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_student_runs_an_experiment_of_their_own(tmp_path, monkeypatch, workers):
    """One file: a map of one's own beside two methods, rates chosen, and a report at the end."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    small = [w for k, v in SMALLEST_GPT.items() for w in ("--set", f"{k}={json.dumps(v)}")]
    words = ["study", "mine.py", "--workers", workers, "--device", "cpu", *small]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Report: runs/mine/report/index.html" in result.output
    runs = [RunRecord.load(path) for path in find_runs(["runs/mine"])]
    assert len(runs) == 2 * 2 + 3 * 2
    final = [run for run in runs if run.spec.study["rate"] != "chooses"]
    assert {run.spec.study["variant"] for run in final} == {"full space", "rank 4", "my idea"}
    for run in final:
        study = run.spec.study
        assert (study["name"], study["against"], study["program"]) == ("mine", "full space", MINE)
        chosen = "given" if study["variant"] == "my idea" else "best of 0.01, 0.03 on seed 3"
        assert study["rate"] == chosen
    again = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "6 of 6 runs are finished already" in again.output


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_map_that_fails_does_not_keep_the_others_from_being_made(tmp_path, monkeypatch, workers):
    """The report has the other variants, and the status says that a run failed."""
    monkeypatch.chdir(tmp_path)
    broken = MINE.replace(
        "    steps: int = 2\n", "    def step(self, *_): raise ZeroDivisionError\n"
    )
    Path("mine.py").write_text(broken.replace("rates=Rates((0.01, 0.03), seed=3), ", ""))
    small = [w for k, v in SMALLEST_GPT.items() for w in ("--set", f"{k}={json.dumps(v)}")]
    words = ["study", "mine.py", "--workers", workers, "--device", "cpu", *small]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert "my idea, seed 0: failed" in result.output
    assert "Report: runs/mine/report/index.html" in result.output
    runs = {path: RunRecord.load(path) for path in find_runs(["runs/mine"])}
    ended = {(run.spec.study["variant"], run.status) for run in runs.values()}
    assert ended == {("full space", "finished"), ("rank 4", "finished"), ("my idea", "failed")}


def test_a_variant_that_trains_at_no_rate_says_how_each_ended(tmp_path):
    study = Study(
        "s", "nanogpt-toy", [Variant("hot", "sgd")], rates=Rates((1e30, 1e31, 1e32)),
        overrides=SMALLEST_GPT | {"runtime.device": "cpu"},
    )  # fmt: skip
    for job in rate_jobs(study, tmp_path)[:2]:
        train(job.config, job.directory, spec=job.spec)
    expected = (
        r"no rate of 'hot' trains \(1e\+30 diverged: .*; 1e\+31 diverged: .*; 1e\+32 was not made"
    )
    with pytest.raises(ConfigError, match=expected):
        chosen_rate(study, study.variants[0], tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nstudy = Study(", r"mine\.py, line 2: SyntaxError: '\(' was never closed"),
        ("import nowhere", r"mine\.py, line 1: ModuleNotFoundError: No module named 'nowhere'"),
        (
            MINE.replace("seeds=(0, 1)", "seeds=(3,)"),
            r"line \d+: ConfigError: rates are chosen on seed 3",
        ),
    ],
)
def test_what_is_wrong_in_the_file_of_a_study_is_told_with_its_line(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_study(tmp_path / "mine.py")


def test_a_map_of_a_study_is_the_map_that_trains(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    load_study(tmp_path / "mine.py")
    config = tiny_gpt("muon", optimizer__polar__map="mine")
    model = GPT(config.model, torch.Generator().manual_seed(0))
    optimizer = build_optimizer(model, config, RunSchedule(config.schedule, 10)).optimizer
    assert type(optimizer.param_groups[0]["polar"]).__name__ == "Fewer"
    with pytest.raises(ConfigError, match="expected one of mine"):
        build_optimizer(
            model,
            tiny_gpt("muon", optimizer__polar__map="other"),
            RunSchedule(config.schedule, 10),
        )
    with pytest.raises(ConfigError, match="chooses the map itself: expected the defaults"):
        tiny_gpt("rand-muon", optimizer__polar__map="mine")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"variants": []}, "has no variants"),
        (
            {"variants": [Variant("a", "muon"), Variant("a", "adamw")]},
            "names and folders that differ",
        ),
        ({"against": "b"}, "against='b' .* expected one of its variants, a"),
        ({"rates": Rates((0.1,), seed=0)}, "seed 0 .* is among its seeds"),
    ],
)
def test_a_study_that_cannot_be_made_is_refused(changed, message):
    whole = {
        "name": "s",
        "recipe": "nanogpt-toy",
        "variants": [Variant("a", "muon")],
        "seeds": (0,),
    }
    with pytest.raises(ConfigError, match=message):
        Study(**whole | changed)


def test_a_file_without_a_study_is_refused(tmp_path):
    (tmp_path / "none.py").write_text("study = 3\n")
    with pytest.raises(ConfigError, match="defines 0 studies: expected one"):
        load_study(tmp_path / "none.py")
    with pytest.raises(ConfigError, match="does not exist"):
        load_study(tmp_path / "missing.py")


PUBLISHED = sorted(Path(studies.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_study_can_be_planned(path, tmp_path):
    study = load_study(path)
    rates = {variant.name: (0.01, "given") for variant in study.variants}
    jobs = [*rate_jobs(study, tmp_path), *jobs_of(study, tmp_path, path, rates)]
    assert len({job.directory for job in jobs}) == len(jobs)
    assert len({job.label for job in jobs}) == len(jobs)


@pytest.mark.parametrize("method", ["muon-polar-express", "adamw"])
def test_nanogpt_25m_is_a_plain_loop(method, tmp_path):
    """The recipe of the studies: one pass in torch's order of windows, weights from the seed itself."""
    seed, steps, sequences, length = 2, 12, 4, 32
    config = resolve("nanogpt-25m", method, seed, {
        "model.width": 64, "model.layers": 2, "model.heads": 4, "model.context": length,
        "model.vocab_size": 65, "optimizer.lr": 0.014, "runtime.log_every": 1,
        "data.stages": [{"steps": steps, "sequences": sequences, "sequence_length": length}],
        "data.train": "corpus:tinyshakespeare", "data.val": "corpus:tinyshakespeare",
        "evaluation.every": steps, "evaluation.tokens": 128, "runtime.device": "cpu",
    })  # fmt: skip
    train(config, tmp_path / "run")
    recorded = [row.loss for row in RunRecord.load(tmp_path / "run").rows("train")]

    tokens = torch.from_numpy(corpus_tokens()[0].astype(np.int64))
    model = GPT(config.model, torch.Generator().manual_seed(seed))
    ours = ps.muon_for(
        model, lr=0.014, polar=None, weight_decay=0.0, shape_scale="spectral", transform=None,
        embeddings=ps.AdamW(lr=0.3), heads=ps.AdamW(lr=0.004), vectors=ps.AdamW(lr=0.004), seed=seed,
    )  # fmt: skip
    optimizer: torch.optim.Optimizer = ours
    if method == "adamw":
        groups = [
            {"params": g["params"], "lr": g["lr"] * g.get("lr_factor", 1.0)}
            for g in ours.param_groups
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    order = torch.randperm(steps * sequences, generator=torch.Generator().manual_seed(1000 + seed))
    losses = []
    for step in range(steps):
        done = step / steps
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1.0 if done < 0.4 else 1 - (done - 0.4) / 0.6 * 0.95)
            if group.get("algorithm") == "muon":
                group["momentum"] = 0.85 + 0.1 * min(1.0, done / 0.1)
        starts = order[sequences * step : sequences * (step + 1)] * length
        batch = tokens[starts[:, None] + torch.arange(length + 1)]
        loss = model.loss(batch[:, :-1], batch[:, 1:]) / (sequences * length)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert recorded == pytest.approx(losses, rel=1e-6)


def test_a_run_of_one_pass_needs_its_text(tmp_path):
    with pytest.raises(Exception, match=r"data.draws=plain and 400,000 windows .* the data has"):
        train(
            tiny_gpt(
                data__draws="plain",
                data__stages=[{"steps": 100_000, "sequences": 4, "sequence_length": 32}],
            ),
            tmp_path / "run",
        )


def test_low_precision_is_a_setting():
    config = tiny_gpt("muon", optimizer__momentum_dtype="int8", optimizer__rounding="compensated")
    model = GPT(config.model, torch.Generator().manual_seed(0)).bfloat16()
    optimizer = build_optimizer(model, config, RunSchedule(config.schedule, 10)).optimizer
    group = optimizer.param_groups[0]
    assert (group["momentum_dtype"], group["rounding"]) == (torch.int8, "compensated")


def test_the_page_of_studies_shows_this_file():
    page = (Path(__file__).parents[2] / "docs/experiments.md").read_text(encoding="utf-8")
    assert re.search(r"polarstep study \S+\.py", page)
