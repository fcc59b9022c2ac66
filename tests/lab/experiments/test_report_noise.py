"""Figures of noise and of γ and ν along a run: what was recorded is drawn, whatever is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.lab.experiments.synthetic import markdown, write_run

from polarstep_lab.records.record import Ablation
from polarstep_lab.report import report_files
from polarstep_lab.report.gamma import gamma_figure, gamma_of, gamma_table
from polarstep_lab.report.gradient_noise import noise_figure, noise_table
from polarstep_lab.report.grouping import sections_of
from polarstep_lab.report.runs import collect_runs

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
    ((section,), _) = sections_of(collect_runs([path]))
    return section.rows[0]


@pytest.mark.rendered
def test_the_figure_has_every_panel_and_says_what_was_drawn(tmp_path):
    write_noise(write_run(tmp_path / "a", method="Muon (Nesterov)"), rows_of())
    figure = noise_figure(only_row(tmp_path), "noise")
    assert "512 of one sequence and 512 of one batch of 16 at each point" in figure.caption
    assert "grows by 30.0% at most" in figure.caption
    for words in ("Gaussian noise", "single matrices", "sums of 4 examples", "sums of 16 examples",
                  "one batch", "‖∇f‖", "no variance above"):  # fmt: skip
        assert words in figure.files[0], words
    for step in STEPS:
        assert f">{step}<" in figure.files[0]


@pytest.mark.rendered
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
    assert "nan" not in figure.files[0].lower().replace("dominant", "")


@pytest.mark.rendered
def test_an_unfinished_run_is_shown_with_what_it_has(tmp_path):
    planned = {"runtime": {"noise": {"points": 5}}}
    write_noise(write_run(tmp_path / "a", status=None, gamma=True, overrides=planned), rows_of())
    figure = noise_figure(only_row(tmp_path), "noise")
    assert "seed 0, unfinished, with 4 of 5 points: gradients" in figure.caption
    assert "(unfinished)" in gamma_figure({only_row(tmp_path): "AdamW"}, "gamma").files[0]
    ((section,), _) = sections_of(collect_runs([tmp_path]))
    text = markdown((section,), ())
    assert "| AdamW, unfinished | sequence | 4 of 5 |" in text
    assert "| AdamW | AdamW | 0 of 1 (1 unfinished) | 21, last 200 |" in text


def write_solver(root: Path, solver: str, gammas, nu: float = 0.0, rank=None, **changes) -> Path:
    polar = {"solver": solver, "steps": 7, "rank": rank, "sketch": "gaussian"}
    folder = write_run(
        root / f"{solver}-{rank}",
        method="Rand Muon (Nes.-Gaussian)" if rank else "Muon (Nesterov)",
        overrides={"optimizer": {"polar": polar}},
        **changes,
    )
    rows = [
        {"step": 10 * i, "parameter": "m", "gamma": gamma, "nu": nu, "stable_rank": 2.0}
        for i, gamma in enumerate(gammas)
    ]
    (folder / "gamma.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_section_of_watched_runs_leads_with_what_was_watched(tmp_path):
    write_noise(write_solver(tmp_path, "quintic", [0.1, 0.2, 0.4]), rows_of())
    write_solver(tmp_path, "cubic", [0.5], ablation=Ablation("solver", "cubic"))
    ((section,), _) = sections_of(collect_runs([tmp_path]))
    assert section.watched
    text = markdown((section,), ())
    order = [
        "### Noise of the gradient",
        "### How inexact each step was",
        "### The runs",
        "### Abl",
    ]
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)
    page = report_files([tmp_path])["index.html"].decode()
    order = ["<h3>Noise of the gr", "<h3>How inexact", "<h3>The runs</h3>", "<h3>Ablations</h3>"]
    assert [page.index(words) for words in order] == sorted(page.index(words) for words in order)
    write_run(tmp_path / "plain")  # a method that nobody watched: this is a comparison again
    ((section,), _) = sections_of(collect_runs([tmp_path]))
    assert not section.watched
    text = markdown((section,), ())
    assert text.index("| AdamW |") < text.index("### Noise of the gradient")
    assert "### The runs" not in text


def test_the_table_has_the_worst_of_each_map_and_what_is_proved_of_it(tmp_path):
    folder = write_solver(tmp_path, "quintic", [0.1, 0.2, 0.6], nu=0.004)
    with (folder / "gamma.jsonl").open("a") as log:  # behind a zero initialization: no polar factor
        log.write(
            '{"step": 0, "parameter": "z", "gamma": 0.0, "nu": 0.0, "stable_rank": 0.0}\n' * 9
        )
    write_solver(tmp_path, "empirical", [0.3], nu=0.13)
    write_solver(tmp_path, "cubic", [0.25], rank=32)
    lost = write_solver(tmp_path, "polar-express", [0.0], nu=1998.4756, status="diverged")
    warm = write_solver(tmp_path, "cubic", [0.25], rank=64)
    config = json.loads((warm / "config.json").read_text())
    config["config"]["optimizer"]["polar"]["sketch"] = "warm"
    (warm / "config.json").write_text(json.dumps(config))
    ((section,), _) = sections_of(collect_runs([tmp_path]))
    table = gamma_table(section.all_rows)
    by_map = {line[1]: line[2:] for line in table.rows}
    assert table.header[2:] == [
        "Runs",
        "Sampled steps",
        "γ, median",
        "γ, largest",
        "ν, largest",
        "ν, proved",
        "Largest γ in",
    ]
    assert by_map == {
        "quintic, 7 steps": ["1", "3, last 20", "0.2000", "0.6000", "0.0040", "0", "m, step 20"],
        "empirical, 7 steps": ["1", "step 0", "0.3000", "0.3000", "0.1300", "—", "m, step 0"],
        "polar-express, 7 steps": [
            "0 of 1 (1 diverged)",
            "step 0",
            "0.0000",
            "0.0000",
            "1998",
            "—",
            "m, step 0",
        ],
        "cubic, 7 steps, rank 32": ["1", "step 0", "0.2500", "0.2500", "0.0000", "0", "m, step 0"],
        "cubic, 7 steps, rank 64, warm": [
            "1",
            "step 0",
            "0.2500",
            "0.2500",
            "0.0000",
            "—",
            "m, step 0",
        ],
    }
    (lost / "gamma.jsonl").unlink()
    ((section,), _) = sections_of(collect_runs([tmp_path]))
    assert len(gamma_table(section.all_rows).rows) == 4


def test_the_table_names_the_map_that_ran(tmp_path):
    """Rows of an ablation differ, and what no proposition speaks of has no proved ν."""
    ran = {
        "Rand Muon (Nes.-Gaussian)": {"power": 0.5, "keep": 4},
        "Rand Muon (Nes.-Kaczmarz)": {"sketch": "kaczmarz", "power": 2.0},
        "Rand Muon (Nes.-Warm)": {"sketch": "warm", "power": 2.0},
        "Rand Muon (Nes.-Auto)": {"auto": "cheap"},
    }
    for rank, changes in enumerate(ran.values(), start=32):
        folder = write_solver(tmp_path, "quintic", [0.1], nu=0.1, rank=rank)
        config = json.loads((folder / "config.json").read_text())
        config["config"]["optimizer"]["polar"] |= changes
        (folder / "config.json").write_text(json.dumps(config))
    ((section,), _) = sections_of(collect_runs([tmp_path]))
    lines = {line[0]: (line[1], line[7]) for line in gamma_table(section.all_rows).rows}
    assert lines == {
        "Rand Muon (Nes.-Gaussian)": (
            "quintic, 7 steps, rank 32, h = 0.5, basis kept 4 steps",
            "0",
        ),
        "Rand Muon (Nes.-Kaczmarz)": ("quintic, 7 steps, rank 33, kaczmarz, h = 2", "—"),
        "Rand Muon (Nes.-Warm)": ("quintic, 7 steps, rank 34, warm", "—"),
        "Rand Muon (Nes.-Auto)": ("auto (cheap): a map for each shape", "—"),
    }


def test_the_noise_table_has_the_heaviest_point_of_each_unit(tmp_path):
    rows = rows_of()
    for row in rows:
        if row["step"] == 20 and row["unit"] == "example" and row["parameter"] == "hidden":
            row["tail"] |= {"alpha": 1.19, "low": 0.91, "high": None}
            row["growth"][1] |= {"alpha": 1.53, "low": 1.34, "high": 1.77}
            row["growth"][0] |= {"alpha": 1.1, "low": 1.0, "high": 1.2}  # shorter sums do not count
        if row["step"] == 3:
            row["tail"]["alpha"] = None
        if row["unit"] == "batch":
            row["tail"]["gaussian"] = [1.4e7, 1.8e7, None]
    write_noise(write_run(tmp_path / "a", method="Muon (Nesterov)"), rows)
    ((section,), _) = sections_of(collect_runs([tmp_path]))
    example, batch = noise_table(section.all_rows).rows
    assert example[1:] == ["sequence", "4", "1.19 (0.910 to ∞) at step 20", "20.0 to ∞",
                           "1.53 (1.34 to 1.77) at step 20"]  # fmt: skip
    assert batch[1] == "batch of 16"
    assert batch[4] == "∞"  # from infinity to infinity
    assert batch[3] == "4.00 (3.20 to 5.20) at step 0"


@pytest.mark.rendered
def test_a_run_that_blew_up_leaves_the_others_their_scale(tmp_path):
    write_solver(tmp_path, "quintic", [0.1, 0.2], nu=0.05)
    write_solver(tmp_path, "polar-express", [0.0], nu=1998.4756, status="diverged")
    ((section,), _) = sections_of(collect_runs([tmp_path]))
    lines = gamma_figure({row: row.label for row in section.rows}, "lines")
    assert "↑ 1998" in lines.files[0]
    assert "An arrow marks what lies above the axis." in lines.caption
    assert ">0.04<" in lines.files[0]
    assert ">500<" not in lines.files[0]
    assert lines.caption.startswith("Muon (Nesterov). ")
    assert "(diverged)" in lines.files[0]


@pytest.mark.rendered
def test_an_axis_stands_beside_the_recipes_own_value(tmp_path):
    write_solver(tmp_path, "quintic", [0.1, 0.2])
    write_solver(tmp_path, "cubic", [0.3, 0.4], ablation=Ablation("solver", "cubic"))
    files = report_files([tmp_path])
    lines = [name for name in files if "-gamma-" in name and name.endswith(".svg")]
    assert len(lines) == 1
    assert "solver = quintic" in files[lines[0]].decode()
    assert "(recipe)" in files[lines[0]].decode()
    assert "solver = cubic" in files[lines[0]].decode()


def test_what_has_nothing_finished_comes_last(tmp_path):
    write_run(tmp_path / "a", recipe="nanogpt-small", status=None)
    write_run(tmp_path / "b", recipe="cifar10", benchmark="cifar10", final=0.93)
    write_run(tmp_path / "c", recipe="nanogpt-toy")
    (sections, _) = sections_of(collect_runs([tmp_path]))
    assert [section.recipe for section in sections] == ["cifar10", "nanogpt-toy", "nanogpt-small"]


def test_the_page_shows_noise_where_there_is_some(tmp_path):
    write_run(tmp_path / "plain")
    page = report_files([tmp_path])["index.html"].decode()
    assert "Noise of the gradient" not in page
    write_noise(write_run(tmp_path / "seen", method="Muon (Nesterov)", gamma=True), rows_of())
    files = report_files([tmp_path])
    page = files["index.html"].decode()
    assert "<h3>Noise of the gradient</h3>" in page
    assert any("noise" in name and name.endswith(".png") for name in files)
    assert any("-gamma-" in name and name.endswith(".svg") for name in files)
    assert files == report_files([tmp_path])


@pytest.mark.parametrize("nu", [1e-7, 0.2])
@pytest.mark.rendered
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
    ((section,), _) = sections_of(collect_runs([tmp_path]))
    figure = gamma_figure({row: row.label for row in section.ablations[0].rows}, "lines")
    for solver in ("cubic", "empirical", "polar-express", "quintic"):
        assert f"solver = {solver}" in figure.files[0]
    assert ("1e−7" in figure.files[0] or "1e-7" in figure.files[0]) is False
    assert ("0.2" in figure.files[0]) is True


def test_a_zero_matrix_and_rounding_are_no_inexactness(tmp_path):
    folder = write_run(tmp_path / "a", method="Muon (Nesterov)")
    common = {"gamma": 0.25, "nu": -1e-9, "stable_rank": 2.0}
    rows = [
        {"step": 0, "parameter": "a.weight"} | common,
        {"step": 0, "parameter": "b", "block": 2} | common,
        {"step": 10, "parameter": "a.weight"} | common | {"gamma": None},
        {"step": 10, "parameter": "zero", "gamma": 1.0, "nu": 0.0, "stable_rank": 0.0},
    ]
    (folder / "gamma.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = gamma_of(only_row(tmp_path).runs["record"])
    assert list(log["matrix"]) == ["a", "b [2]", "a"]
    assert list(log["step"]) == [0, 0, 10]
    ((line,),) = [gamma_table([only_row(tmp_path)]).rows]
    assert line[3:] == ["2, last 10", "0.2500", "0.2500", "0.0000", "—", "a, step 0"]


def test_nothing_is_drawn_where_nothing_was_measured(tmp_path):
    write_run(tmp_path / "a")
    row = only_row(tmp_path)
    assert noise_figure(row, "noise") is None
    assert gamma_figure({row: row.label}, "lines") is None
