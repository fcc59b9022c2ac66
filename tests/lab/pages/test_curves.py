"""Perplexity over the time of a run: figure and claims."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from polarstep_lab.storage import read_lines

ROOT = Path(__file__).resolve().parents[3]
CURVES = ROOT / "results/frontier/curves.jsonl"


def test_a_line_is_cut_where_it_crosses_the_top(module):
    curves = importlib.import_module("pages.records.curves")
    line = [(0.0, 90.0), (10.0, 70.0), (20.0, 50.0)]
    assert curves.under(line, 60.0) == [(15.0, 60.0), (20.0, 50.0)]
    assert curves.under(line, 100.0) == line
    assert curves.under(line, 40.0) == []


SECONDS_A_STEP = {
    ("full", 0.014): 0.0235,
    ("full+fans", 0.02): 0.0235,
    ("lift-120-warm", 0.014): 0.0222,
    ("lift-120-warm+rows+fans", 0.02): 0.0224,
    ("low-rank", 0.014): 0.0220,
    ("adamw+warmup", 0.001): 0.0212,
    ("peer:dion-normuon", 0.014): 0.0275,
    ("peer:torch-muon", 0.02): 0.0380,
    ("peer:soap+warmup", 0.002): 0.0750,
}
"""Made up, for runs of the table."""


def made_up_curves():
    """Runs of the table with curves that fall to its perplexities, and the time of a step."""
    table = [
        run
        for run in read_lines(ROOT / "results/frontier/runs.jsonl")
        if (run["map"], run["lr"]) in SECONDS_A_STEP and run["seed"] == 0
    ]
    assert len(table) == len(SECONDS_A_STEP)
    for run in table:
        curve = [[step, run["validation"] * (1500 / step) ** 0.5] for step in range(100, 1501, 100)]
        yield run | {"step_ms": 1000 * SECONDS_A_STEP[run["map"], run["lr"]], "curve": curve}


@pytest.fixture
def over_time(module, tmp_path, monkeypatch):
    """``curves`` of the records, and a function that writes those that it reads."""
    found = importlib.import_module("pages.records.curves")
    path = tmp_path / found.CURVES
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(found, "ROOT", tmp_path)

    def write(rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(made_up_curves())
    return found, write


def test_curves_are_whole_runs_of_a_gpu(over_time):
    found, _ = over_time
    for run in (*found.recorded(), *read_lines(CURVES)):
        assert [step for step, _ in run["curve"]] == [*range(100, 1501, 100)], run["map"]
        assert run["curve"][-1][1] == pytest.approx(run["validation"], rel=1e-4)
        assert (run["steps"], run["width"], run["device"]) == (1500, 768, "NVIDIA H200")
        assert run["step_ms"] > 0


def test_the_figure_of_the_curves_is_on_its_page(module):
    figure = "assets/frontier-over-time.svg"
    page = (ROOT / "docs/frontier.md").read_text()
    assert f"docs/{figure}" in module.FIGURES
    assert f"]({figure})" in page
    assert "time-of-a-run -->" in page


def test_curves_have_a_line_for_each_run_over_its_own_time(over_time):
    found, write = over_time
    draw = importlib.import_module("pages.figures.over_time").frontier
    lines = found.curves()
    assert lines.keys() == {name for name, _ in SECONDS_A_STEP}
    soap, full = lines["peer:soap+warmup"], lines["full"]
    assert (soap.name, soap.kind) == ("SOAP", found.LIBRARY)
    assert (full.name, full.kind) == ("full space", found.FULL)
    assert lines["low-rank"].kind == lines["lift-120-warm"].kind == found.SKETCHED
    assert lines["full+fans"].kind == lines["adamw+warmup"].kind == found.OTHER
    assert soap.points[0][0] == pytest.approx(100 * 0.075)
    assert soap.seconds == pytest.approx(1500 * 0.075)
    drawn = draw()
    assert drawn.count('class="line') == len(lines)
    assert drawn.count('class="line full"') == 1
    assert drawn.count("stroke-dasharray") == 3
    assert drawn.count('class="line"') == 3
    assert lines["adamw+warmup"].end == pytest.approx(71.5, abs=0.05)  # the worst of its seeds
    assert "AdamW, fused, 68.2 to 71.5" in drawn
    assert "SOAP, 58.7 to 59.3" in drawn
    assert "24.6M tokens. Each line is of seed 0; the numbers are the ends of all 3 seeds" in drawn
    assert "Dashed: other libraries, without a CUDA graph." in drawn
    assert "Above the figure" not in drawn
    named = re.findall(r'<text x="[\d.]+" y="([\d.]+)"[^>]*>(\S.*), [\d.]+ to [\d.]+</text>', drawn)
    told = [name for _, name in sorted(named, key=lambda each: float(each[0]))]
    assert told == [each.name for each in sorted(lines.values(), key=lambda each: -each.end)]
    high = [
        run | {"curve": [[step, 2 * value] for step, value in run["curve"]]}
        if run["map"] == "adamw+warmup"
        else run
        for run in made_up_curves()
    ]
    write(high)
    drawn = draw()
    assert drawn.count('class="line') == len(lines) - 1
    assert "Above the figure: AdamW, fused (68.2 to 71.5)." in drawn  # of the table's runs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.02}, "rate 0.02, seed 0: expected one run of each map"),
        ({"seed": 3}, "seed 3: expected a run that the tables"),
        ({"steps": 750}, "seed 0: expected a run that the tables"),
        ({"map": "full+rows+fans"}, "full\\+rows\\+fans, rate 0.014, seed 0: expected a run"),
        ({"seed": 1}, "seed 1: expected one run of each map"),
    ],
)
def test_a_curve_that_is_no_run_of_the_table_is_refused(over_time, change, words):
    found, write = over_time
    rows = [*made_up_curves()]
    (full,) = (row for row in rows if row["map"] == "full")
    write([*rows, full | change])
    with pytest.raises(ValueError, match=words):
        found.curves()


def test_a_line_reaches_a_perplexity_where_it_stays_below(over_time):
    found, _ = over_time
    line = found.Line("a", [(10.0, 80.0), (20.0, 60.0), (30.0, 70.0), (40.0, 50.0)], found.OTHER)
    assert line.reaches(65.0) == pytest.approx(32.5)
    assert line.reaches(90.0) == 10.0
    assert line.reaches(49.0) is None
    assert line.reaches(50.0) == 40.0


def test_claims_over_time_are_in_order_and_say_that_it_is_one_seed(over_time, module):
    names = (
        "time-of-a-run",
        "time-to-full-space",
        "time-to-a-perplexity",
        "curves-beside-the-table",
    )
    run, full, level, again = told = [module.made(name) for name in names]
    for text in told:
        assert re.search(r"n = 1|one seed", text), text
        assert "24.6M tokens" in text, text
    assert "AdamW, fused 31.8 s (21.2 ms a step); Deflated 1/6 33.3 s (22.2 ms a step)" in run
    assert run.endswith("SOAP 112.5 s (75.0 ms a step)")
    whole = module.made("whole-step")
    assert whole.startswith(
        "22.2 ms a step with the map of `auto`, 23.5 in full space and 21.2 with AdamW"
    )
    # A curve falls as 1/√step, between evaluations along a straight line.
    assert "Full space ends at 57.6 after 35.2 s" in full
    order = ["1/6 + rows + fan-ratio", "Deflated 1/6", "full space + fan-ratio", "NorMuon"]
    assert re.findall(r" s by ([^;.]*)", full) == order
    assert full.endswith(
        "These end above it: AdamW, fused; LowRank, h = 0, rate 0.014; torch; SOAP"
    )
    # Eight of nine runs end below 65, and seven below 60, which is less than four fifths.
    assert "Most runs reach 65 (one seed" in level
    assert level.endswith("These end above it: AdamW, fused")
    assert "these 9 runs ended 0.0% from" in again
    assert "1.6 of 5.6 ms with Muon of dion, 1.7 of 6.8 ms with NorMuon" in module.made(
        "graph-of-dion"
    )
