"""What lies under results/ is what its records say, and the commands that repeat it exist."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
from pathlib import Path

import pytest
import torch
from tests.lab.experiments.synthetic import write_ablation, write_table_2
from typer.testing import CliRunner

from polarstep.storage import StorageError
from polarstep_lab.cli import app
from polarstep_lab.config import RunConfig
from polarstep_lab.methods import METHODS, find_method
from polarstep_lab.models.convnet import ConvNet
from polarstep_lab.models.gpt import GPT
from polarstep_lab.records.archive import ARCHIVE
from polarstep_lab.records.pack import pack
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.report import stale_tables, write_report
from polarstep_lab.report.runs import setting_of
from polarstep_lab.suites.suite import ablation_runs, comparison_runs
from polarstep_lab.training.optimizers import optimizer_gflops

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted(folder for folder in (ROOT / "results").iterdir() if [*folder.rglob(ARCHIVE)])


def test_the_reports_under_results_are_those_of_their_archives():
    for folder in PUBLISHED:
        stale = stale_tables([folder], folder)
        assert not stale, f"{stale} in {folder.relative_to(ROOT)} are out of date: make results"


def test_the_gflops_of_every_record_are_the_ledgers():
    """They follow from the config alone, so that a repair of the ledger reaches older records too."""
    expected = {}
    for run in map(RunRecord.load, find_runs(PUBLISHED)):
        if run.result is None:
            continue
        setting = setting_of(run)
        if setting not in expected:
            config = RunConfig.from_dict(run.identity.config)
            with torch.device("meta"):
                model = (GPT if config.benchmark == "nanogpt" else ConvNet)(config.model)
            expected[setting] = optimizer_gflops(model, config)
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


@pytest.fixture
def published(tmp_path):
    """A folder as under results/: two archives, and the report of both."""
    folder = tmp_path / "results" / "cifar10"
    write_table_2(tmp_path / "runs" / "table2", "cifar10", seeds=2)
    write_ablation(tmp_path / "runs" / "rank", "cifar10", "rank", [16, 128], seeds=2)
    for name in ("table2", "rank"):
        pack([tmp_path / "runs" / name], folder / name)
    write_report([folder], folder)
    return folder


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
    """Bit for bit in its tables, but for where a run lies."""
    pages = {}
    for name in ("runs", "results/cifar10"):
        write_report([tmp_path / name], tmp_path / "page" / name)
        pages[name] = tmp_path / "page" / name
    for table in ("summary.md", "summary.csv"):
        first, second = (folder / table for folder in pages.values())
        assert first.read_bytes() == second.read_bytes()


def update_docs():
    spec = importlib.util.spec_from_file_location("update_docs", ROOT / "benchmarks/update_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_page_is_filled_from_archives_and_claims_nothing_without(published, monkeypatch):
    module = update_docs()
    monkeypatch.setattr(module, "ROOT", published.parent.parent)
    page = "## Results\n\n<!-- results: results/cifar10 -->\nold\n<!-- end -->\n\nmore\n"
    text = module.filled(page, "docs/results.md")
    assert "old" not in text
    assert "**cifar10**, seeds: 2, Synthetic GPU ([report](../results/cifar10/summary.md)" in text
    assert "[table2](../results/cifar10/table2/records.jsonl)" in text
    assert "| Muon (Nesterov) | 0.93" in text
    assert "0.9370 ± 0.0016" in text  # the paper's
    assert text.endswith("<!-- end -->\n\nmore\n")
    assert module.filled(text, "docs/results.md") == text
    without = page.replace("results/cifar10", "results/nothing").replace("old\n", "")
    assert module.filled(without, "docs/results.md") == without


def test_the_commands_of_the_results_can_be_planned():
    commands = re.findall(
        r"`(polarstep (?:compare|ablate) [^`]+)`", (ROOT / "docs/results.md").read_text()
    )
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command)[1:]
        options = {key: value for key, value in itertools.pairwise(words) if "--" in key}
        methods = [find_method(m) for m in options.get("--methods", "").split(",") if m] or METHODS
        if words[0] == "compare":
            assert comparison_runs(words[1], methods, [0], {}, Path("x"))
        else:
            assert ablation_runs(
                words[1], find_method("rand-muon"), words[2], [], [0], {}, Path("x")
            )
        shown = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200"})
        assert all(option in shown.stdout for option in options)


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="no run directories"):
        stale_tables([tmp_path], tmp_path)
