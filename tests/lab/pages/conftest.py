"""What tests of the pages share: the package that writes them, and a made-up folder of results."""

from __future__ import annotations

import importlib

import pytest
from tests.lab.experiments.synthetic import write_ablation, write_table_2

from polarstep_lab.records.pack import pack


@pytest.fixture
def published(tmp_path):
    """A folder as under results/, with two archives."""
    folder = tmp_path / "results" / "cifar10"
    write_table_2(tmp_path / "runs" / "table2", "cifar10", seeds=2)
    write_ablation(tmp_path / "runs" / "rank", "cifar10", "rank", [16, 128], seeds=2)
    for name in ("table2", "rank"):
        pack([tmp_path / "runs" / name], folder / name)
    return folder


@pytest.fixture
def module():
    """What fills the pages."""
    return importlib.import_module("pages.write")


@pytest.fixture
def tables(module):
    """The tables of the pages."""
    return importlib.import_module("pages.tables")
