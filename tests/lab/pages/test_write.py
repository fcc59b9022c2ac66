"""Markers on a page are filled from records, and edited text between them is noticed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_a_page_is_filled_from_archives_and_claims_nothing_without(published, module, monkeypatch):
    for each in (module, importlib.import_module("pages.results")):
        monkeypatch.setattr(each, "ROOT", published.parent.parent)
    page = "## Results\n\n<!-- results: results/cifar10 -->\nold\n<!-- end -->\n\nmore\n"
    text = module.filled(page, "docs/results.md")
    assert "old" not in text
    assert "**cifar10**, seeds: 2, Synthetic GPU ([report](../results/cifar10)" in text
    assert "[table2](../results/cifar10/table2/records.jsonl)" in text
    assert "| Muon (Nesterov) | 0.93" in text
    assert "0.9370 ± 0.0016" in text  # the paper's
    assert text.endswith("<!-- end -->\n\nmore\n")
    assert module.filled(text, "docs/results.md") == text
    without = page.replace("results/cifar10", "results/nothing").replace("old\n", "")
    assert module.filled(without, "docs/results.md") == without


def test_an_edited_claim_and_an_edited_table_are_noticed(module):
    page = (ROOT / "docs/which.md").read_text()
    assert module.filled(page, "docs/which.md") == page
    for pattern in (
        r"(<!-- claim: low-rank-loss -->\D*)(\d)",
        r"(<!-- choice: \S+ -->(?s:.*?×.*?))(\d)",
    ):
        edited = re.sub(pattern, lambda m: f"{m[1]}{(int(m[2]) + 1) % 10}", page, count=1)
        assert edited != page
        assert module.filled(edited, "docs/which.md") == page
    with pytest.raises(SystemExit, match="claim 'no-such': expected one of"):
        module.filled("It is <!-- claim: no-such -->good<!-- end -->.", "docs/which.md")
