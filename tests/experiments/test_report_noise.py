"""Figures of noise and of γ and ν along a run: what was recorded is drawn, whatever is missing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.experiments.synthetic import write_run

from polarstep.experiments.records.record import Ablation
from polarstep.experiments.report import report_files
from polarstep.experiments.report.grouping import collect, sections_of
from polarstep.experiments.report.noise import gamma_lines, noise_figure

STEPS = (0, 3, 20, 200)


def noise_row(step, unit, parameter, alpha=4.0, **changes):
    interval = {"alpha": alpha, "low": 0.8 * alpha, "high": None if alpha > 9 else 1.3 * alpha}
    row = {
        "step": step,
        "unit": unit,
        "examples": 1 if unit == "example" else 16,
        "draws": 512,
        "reference": 1024,
        "parameter": parameter,
        "gradient": 2 / (1 + step),
        "noise": 1.0,
        "moments": {"1.25": 1.0, "1.5": 1.1, "1.75": 1.2, "2": 1.3},
        "dimension": 60.0,
        "tail": interval | {"used": 200, "gaussian": [20.0, 50.0, None]},
        "growth": [
            {"examples": n, "noise": 0.5, "alpha": a, "low": 0.9 * a, "high": 1.1 * a, "used": 32}
            for n, a in ((4, 1.7), (16, 1.9))
        ],
        "survival": [[0.9, 0.5], [0.5, 0.9], [0.1, 1.8], [0.01, 4.0]],
        "largest": 8.0,
    }
    return row | changes


def write_noise(folder: Path, rows) -> Path:
    (folder / "noise.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows_of(units=("batch", "example"), **changes):
    names = ("all", "hidden", "blocks.0.mlp.up", "blocks.1.mlp.up")
    return [noise_row(s, u, n, **changes) for s in STEPS for u in units for n in names]


def only_row(path: Path):
    ((section,), _) = sections_of(collect([path]))
    return section.rows[0]


def test_the_figure_has_every_panel_and_says_what_was_drawn(tmp_path):
    write_noise(write_run(tmp_path / "a", method="Muon (Nesterov)"), rows_of())
    figure = noise_figure(only_row(tmp_path), "noise")
    assert "512 of one sequence and 512 of one batch of 16 at each point" in figure.caption
    assert "grows by 30.0% at most" in figure.caption
    for words in ("Gaussian noise", "single matrices", "sums of 4 examples", "sums of 16 examples",
                  "step 200", "one batch", "‖∇f‖", "t⁻², no variance"):  # fmt: skip
        assert words in figure.svg, words
    for step in STEPS:
        assert f">{step}<" in figure.svg


def test_infinite_indices_silent_points_and_runs_without_examples_are_drawn(tmp_path):
    rows = rows_of(units=("batch",), alpha=12.0)
    for row in rows:
        if row["step"] == 0:  # no noise at all, as of matrices behind a zero initialization
            for key in ("tail", "growth", "survival", "largest", "dimension"):
                del row[key]
            row["moments"] = dict.fromkeys(row["moments"], 0.0)
            row["gradient"] = 0.0
        elif row["step"] == 3:
            row["tail"]["alpha"] = None
            del row["tail"]["gaussian"]
    write_noise(write_run(tmp_path / "a"), rows)
    figure = noise_figure(only_row(tmp_path), "noise")
    assert "held still, 512 of one batch of 16 at each point" in figure.caption
    assert "nan" not in figure.svg.lower().replace("dominant", "")


def test_the_page_shows_noise_where_there_is_some(tmp_path):
    write_run(tmp_path / "plain")
    page = report_files([tmp_path])["index.html"].decode()
    assert "Noise of the gradient" not in page
    write_noise(write_run(tmp_path / "seen", method="Muon (Nesterov)", gamma=True), rows_of())
    files = report_files([tmp_path])
    page = files["index.html"].decode()
    assert "<h3>Noise of the gradient</h3>" in page
    assert any("noise" in name and name.endswith(".png") for name in files)
    assert any("gamma-lines" in name and name.endswith(".svg") for name in files)
    assert files == report_files([tmp_path])


@pytest.mark.parametrize("nu", [1e-7, 0.2])
def test_every_solver_has_its_panel_and_rounding_stays_invisible(tmp_path, nu):
    for index, solver in enumerate(("cubic", "empirical", "polar-express", "quintic")):
        folder = write_run(
            tmp_path / solver,
            method="Muon (Nesterov)",
            ablation=Ablation("solver", solver),
            overrides={"optimizer.polar.solver": solver},
        )
        gamma = [
            {"step": step, "parameter": f"m{i}", "gamma": 0.1 * index + 0.01 * i, "nu": nu}
            for step in (0, 50, 100)
            for i in range(5)
        ]
        gamma.append({"step": 150, "parameter": "m0", "gamma": None, "nu": None})
        (folder / "gamma.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gamma))
    ((section,), _) = sections_of(collect([tmp_path]))
    figure = gamma_lines(section.ablations[0].rows, "lines")
    for solver in ("cubic", "empirical", "polar-express", "quintic"):
        assert f"solver = {solver}" in figure.svg
    assert ("1e−7" in figure.svg or "1e-7" in figure.svg) is False
    assert ("0.2" in figure.svg) is True


def test_nothing_is_drawn_where_nothing_was_measured(tmp_path):
    write_run(tmp_path / "a")
    row = only_row(tmp_path)
    assert noise_figure(row, "noise") is None
    assert gamma_lines([row], "lines") is None


def test_the_gaussian_survival_is_that_of_a_gaussian():
    import torch

    from polarstep.experiments.report.noise import _chi_quantile

    g = torch.Generator().manual_seed(0)
    norms = torch.randn(40_000, 30, generator=g).norm(dim=1) / math.sqrt(30)
    for p in (0.1, 0.5, 0.9, 0.99):
        assert _chi_quantile(p, 30) == pytest.approx(float(norms.quantile(p)), rel=5e-3)
