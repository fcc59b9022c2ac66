"""The table of results/frontier is that of its records."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def frontier():
    path = ROOT / "benchmarks" / "frontier.py"
    spec = importlib.util.spec_from_file_location("frontier", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_comes_from_the_records():
    folder = ROOT / "results" / "frontier"
    lines = (folder / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    made = list(frontier().table([json.loads(line) for line in lines]))
    assert (folder / "summary.md").read_text(encoding="utf-8").splitlines() == made


def test_an_interval_is_students_over_paired_seeds():
    def row(name, seed, perplexity):
        return {"map": name, "seed": seed, "perplexity": perplexity}

    rows = [row("full", s, 100.0 + s) for s in range(3)]
    rows += [row("joint-2", s, (100.0 + s) * (1.01 + 0.01 * s)) for s in range(3)]
    text = "\n".join(frontier().table([*rows, row("low-rank", 7, 9e4), row("low-rank", 0, 9e4)]))
    assert "| +2.0% (± 2.5) |" in text  # t = 4.30, standard deviation 1, three seeds
    assert "| diverged |" in text
