"""Every folder of runs under results/ makes a report."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
import torch

from polarstep_lab.config import ConfigError, RunConfig
from polarstep_lab.models.convnet import ConvNet
from polarstep_lab.models.gpt import GPT
from polarstep_lab.optimizers.build import optimizer_gflops
from polarstep_lab.records import read
from polarstep_lab.records.archive import ARCHIVE
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.report import summary_of
from polarstep_lab.report.runs import setting_of
from polarstep_lab.storage import StorageError

ROOT = Path(__file__).resolve().parents[3]
STUDIES = sorted(path.parent for path in (ROOT / "results").glob(f"*/{ARCHIVE}"))
PUBLISHED = [folder for folder in STUDIES if find_runs([folder])]


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_every_folder_of_runs_makes_a_report(folder):
    """From all of its runs, none of them damaged."""
    summary = summary_of([folder])
    assert summary.count("\n## ") > 0
    assert " is left out: " not in summary


def test_the_gflops_of_every_record_are_the_ledgers():
    """They follow from config and device, so that a repair of the ledger reaches older records too."""
    expected = {}
    for run in map(RunRecord.load, find_runs(PUBLISHED)):
        if run.result is None:
            continue
        device = torch.device(run.environment["device"])
        setting = (setting_of(run), device)
        if setting not in expected:
            try:
                config = RunConfig.from_dict(run.spec.config)
            except ConfigError:
                continue  # a map that this version does not have
            if config.rule.peer is not None:
                continue  # not counted
            with torch.device("meta"):
                model = (GPT if config.benchmark == "nanogpt" else ConvNet)(config.model)
            expected[setting] = optimizer_gflops(model, config, device)
        found = run.result.optimizer_gflops_per_step
        assert found == pytest.approx(expected[setting], rel=1e-12), run.directory
    assert len(expected) > 50


def test_records_carry_no_path_of_a_machine():
    for folder in STUDIES:
        readme = (folder / "README.md").read_text(encoding="utf-8")
        for text in (readme, gzip.decompress((folder / ARCHIVE).read_bytes()).decode()):
            found = re.search(r"(?<![\w./~-])/(?:home|root|tmp|mnt|Users|work)/\S+", text)
            assert not found, f"{folder.name}: {found[0]}"


def test_every_line_says_what_it_is_of():
    for folder in STUDIES:
        for line in read(folder):
            assert line["study"] == folder.name
            assert {"kind", "part", "variant", "config"} <= line.keys()
            assert line["kind"] != "run" or "name" in line or "program" in line


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="no run directories"):
        summary_of([tmp_path])
