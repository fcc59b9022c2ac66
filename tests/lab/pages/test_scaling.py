"""The figure and the claims of gaps over tokens and width are those of their records."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_gaps_are_drawn_and_told_from_their_records(module, tmp_path, monkeypatch):
    names = ("pages.records.scaling", "pages.figures.gaps", "pages.claims.scaling", "scaling")
    records, figure, claims, study = map(importlib.import_module, names)
    rows = [
        {"map": name, "seed": seed, "lr": 0.014, "steps": steps, "width": width}
        | {"test": 50 * (1 + (gap + 0.2 * seed) / 100)}
        for steps, width, gap_of_low_rank in ((375, 768, 4), (750, 768, 5), (1500, 384, 6))
        for seed in (0, 1)
        for name, gap in (("full", 0.0), ("deflated-sixth", 0.5), ("low-rank", gap_of_low_rank))
    ]
    rows += [row | {"width": 768} for row in rows if row["width"] == 384]
    for row in rows:
        if row["map"] == "full":
            row["test"] = 50.0
    path = tmp_path / records.RUNS
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(study, "FRONTIER", tmp_path / "none.jsonl")
    for each in (records, module):
        monkeypatch.setattr(each, "ROOT", tmp_path)
    drawn = figure.draw()
    # Six pairs of runs over tokens and four over width, of each of two maps.
    assert drawn.count("<circle") == 2 * (6 + 4)
    assert drawn.count('class="bar') == 4
    over_tokens, over_width = claims.gap_over_tokens(), claims.gap_over_width()
    assert "the map of `auto` to full space does not change clearly, +0.00" in over_tokens.replace(
        "−", "+"
    )
    assert "that of `LowRank` grows by this fit, +1.00" in over_tokens
    assert (
        "n = 6 pairs of runs at 3 lengths, 6.1M to 24.6M tokens; +1.00 to +1.00 with any"
        in over_tokens
    )
    assert "n = 4 pairs of runs at 2 widths, width 384 to 768, 24.6M tokens)" in over_width
    assert "one seed" not in over_tokens
    kept = [row for row in rows if (row["seed"], row["steps"]) != (1, 375)]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert "6.1M to 24.6M tokens; 1 of 3 lengths has one seed;" in claims.gap_over_tokens()
    page = "<!-- over-width: results/scaling/runs.jsonl -->\n\n| old |\n\nmore\n"
    text = module.filled(page, "docs/which.md").replace("\N{NO-BREAK SPACE}", " ")
    assert "| 384 | +0.6% ± 1.3 (n = 2) | +6.1% ± 1.3 (n = 2) |" in text
