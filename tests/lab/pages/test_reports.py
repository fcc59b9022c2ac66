"""Reports under results/ are those of their archives, and an edited one is noticed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.lab.experiments.synthetic import write_ablation
from typer.testing import CliRunner

from polarstep_lab.cli import app
from polarstep_lab.config import RunConfig
from polarstep_lab.models.convnet import ConvNet
from polarstep_lab.models.gpt import GPT
from polarstep_lab.records.archive import ARCHIVE
from polarstep_lab.records.pack import pack
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.records.settings import setting_of
from polarstep_lab.report import stale_tables, write_report
from polarstep_lab.storage import StorageError
from polarstep_lab.training.optimizers import optimizer_gflops

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = sorted(folder for folder in (ROOT / "results").iterdir() if [*folder.rglob(ARCHIVE)])


def test_the_reports_under_results_are_those_of_their_archives():
    for folder in PUBLISHED:
        stale = stale_tables([folder], folder)
        assert not stale, f"{stale} in {folder.relative_to(ROOT)} are out of date: make results"


def test_the_gflops_of_every_record_are_the_ledgers():
    """They follow from config and device, so that a repair of the ledger reaches older records too."""
    expected = {}
    for run in map(RunRecord.load, find_runs(PUBLISHED)):
        if run.result is None:
            continue
        device = torch.device(run.environment["device"])
        setting = (setting_of(run), device)
        if setting not in expected:
            config = RunConfig.from_dict(run.identity.config)
            if config.rule.peer is not None:
                continue  # not counted
            with torch.device("meta"):
                model = (GPT if config.benchmark == "nanogpt" else ConvNet)(config.model)
            expected[setting] = optimizer_gflops(model, config, device)
        found = run.result.optimizer_gflops_per_step
        assert found == pytest.approx(expected[setting], rel=1e-12), run.directory
    assert len(expected) > 50


def test_pages_carry_no_path_of_a_machine():
    for folder in PUBLISHED:
        for path in [*folder.rglob("*.jsonl"), *folder.glob("*.html"), *folder.glob("*.md")]:
            found = re.search(
                r"(?<![\w./~-])/(?:home|root|tmp|mnt|Users|work)/\S+", path.read_text()
            )
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_an_edited_table_and_a_new_run_are_noticed(published, tmp_path, monkeypatch):
    assert stale_tables([published], published) == []
    table = published / "summary.md"
    original = table.read_text()
    table.write_text(original.replace("0.93", "0.94", 1))
    assert stale_tables([published], published) == ["summary.md"]
    monkeypatch.chdir(published.parent)
    checked = CliRunner().invoke(app, ["report", "cifar10", "--out", "cifar10", "--check"])
    assert checked.exit_code == 1
    assert "summary.md in cifar10 are not what the records say" in checked.stderr
    table.write_text(original)
    checked = CliRunner().invoke(app, ["report", "cifar10", "--out", "cifar10", "--check"])
    assert checked.exit_code == 0, checked.stderr
    write_ablation(tmp_path / "more", "cifar10", "steps", [1], seeds=1)
    pack([tmp_path / "more"], published / "rank")
    assert stale_tables([published], published) == ["summary.md", "summary.csv", "runs.csv"]


def test_the_report_of_archives_is_that_of_the_directories(published, tmp_path):
    """Bit for bit in its tables, but for where a run lies; test_archive.py compares figures too."""
    pages = {}
    for name in ("runs", "results/cifar10"):
        write_report([tmp_path / name], tmp_path / "page" / name)
        pages[name] = tmp_path / "page" / name
    for table in ("summary.md", "summary.csv"):
        first, second = (folder / table for folder in pages.values())
        assert first.read_bytes() == second.read_bytes()


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="no run directories"):
        stale_tables([tmp_path], tmp_path)
