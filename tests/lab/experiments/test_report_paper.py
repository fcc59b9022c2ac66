"""Next to the paper: what is compared, what is said to differ, and what ablations are measured from."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics

import pytest
from tests.lab.experiments.small import comparison_runs
from tests.lab.experiments.synthetic import (
    markdown,
    write_ablation,
    write_planned,
    write_run,
    write_table_2,
)

from polarstep_lab.estimates import Estimate
from polarstep_lab.paper import ABLATIONS, METHODS, TABLE_2
from polarstep_lab.records.record import Ablation
from polarstep_lab.report import report_files
from polarstep_lab.report.grouping import sections_of
from polarstep_lab.report.paper_comparison import beside_the_paper
from polarstep_lab.report.runs import at_a_time, collect_runs
from polarstep_lab.report.tables import summary_csv
from polarstep_lab.storage import read_json, write_json


def section(*paths):
    (found,), _ = sections_of(collect_runs(paths))
    return found


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    root = tmp_path_factory.mktemp("records") / "cifar10"
    write_table_2(root / "table2", "cifar10", seeds=6, shift=-0.004)
    for axis, values in {"rank": [16, 128], "steps": [1, 7], "batch": [500, 1000]}.items():
        write_ablation(root / axis, "cifar10", axis, values, seeds=5)
    return section(root), root


def test_digits_are_compared_where_the_setting_is_the_papers(cifar):
    found, _ = cifar
    beside = beside_the_paper(found)
    assert beside.comparable
    for row in beside.lines["row"]:
        paper, ours = TABLE_2["cifar10"].rows[row.method], row.metric
        assert row.off_the_paper.value == pytest.approx(ours.mean - paper.mean)
        expected = math.sqrt(ours.std**2 / ours.n + paper.std**2 / 50)
        assert row.off_the_paper.error == pytest.approx(expected)
        t = row.off_the_paper.interval / expected  # a few degrees of freedom: more than two
        assert 2 < t < 3
        assert row.differs == (abs(row.off_the_paper.value) > t * expected)
    # The rows were moved by two to three deviations.
    assert any(row.differs for row in beside.lines["row"])
    assert (
        "agree with the paper: the 95% interval of the difference contains zero" in beside.summary
    )
    assert "worse" in beside.summary


def test_another_model_and_other_text_are_not_compared_in_digits(tmp_path):
    write_table_2(tmp_path, "nanogpt-small", seeds=3, shift=30.0)
    found = section(tmp_path)
    beside = beside_the_paper(found)
    assert not beside.comparable
    assert beside.summary.startswith("Not comparable in digits")
    assert all(row.off_the_paper is None for row in beside.lines["row"])
    assert beside.lines["paper_place"]["Muon (Polyak)"] == 1
    reference = beside.lines.loc["Muon (Nesterov)"]
    assert reference["cost"] == reference["paper_cost"] == 1
    page = report_files([tmp_path])["index.html"].decode()
    assert "Not comparable in digits" in page
    assert "The GPT here is a plain one." in page
    for published in TABLE_2["nanogpt"].rows.values():
        assert f"{published.mean:.4f}" not in page


def test_the_order_of_methods_is_judged_by_what_can_be_told_apart(tmp_path):
    means = {"adamw": 0.90, "sgd": 0.95, "muon": 0.951, "muon-polyak": 0.9375}
    runs = comparison_runs(
        "cifar10", [m for m in METHODS if m.slug in means], range(3), {}, tmp_path
    )
    spread = {"sgd": 0.004, "muon": 0.004}
    for run in runs:
        slug = run.config.rule.slug
        step = run.spec.seed - 1
        write_planned(run, means[slug] + spread.get(slug, 0.0002) * step)
    # The paper has adamw < sgd < muon < muon-polyak; muon and muon-polyak 1.7 errors apart.
    order = beside_the_paper(section(tmp_path)).order
    assert order.startswith("Of 5 pairs of methods that the paper tells apart")
    assert "3 come in the same order here, 1 is not told apart by these seeds" in order
    assert "1 the other way round (SGD (Nesterov) before Muon (Polyak))" in order


def test_shards_of_other_text_take_the_digits_away(tmp_path):
    plan = comparison_runs("nanogpt", METHODS[:3], range(2), {"data.train": ["w.bin"]}, tmp_path)
    for run in plan:
        write_planned(run, 30.0 + run.spec.seed)
    found = section(tmp_path)
    assert all(row.paper is None for row in found.rows)
    assert not beside_the_paper(found).comparable


def test_other_recipes_are_not_held_against_the_paper(tmp_path):
    write_run(tmp_path / "a", recipe="gpt-small")
    assert beside_the_paper(section(tmp_path)) is None


def test_the_base_of_an_ablation_is_where_the_axes_meet(cifar):
    found, _ = cifar
    assert [ablation.axis for ablation in found.ablations] == ["rank", "steps", "batch"]
    bases = {a.axis: a.base.value for a in found.ablations}
    assert bases == {"rank": 128, "steps": 7, "batch": 500}
    rank = found.ablations[0]
    low, base = rank.rows
    difference = rank.difference(low)
    by_seed = [low.by_seed[seed] - base.by_seed[seed] for seed in range(5)]
    assert difference.value == pytest.approx(statistics.fmean(by_seed))
    assert difference.error == pytest.approx(statistics.stdev(by_seed) / math.sqrt(5))
    assert difference.pairs == 5
    assert rank.difference(base) is None
    assert low.paper == ABLATIONS["rank"][16]
    lines = csv.DictReader(io.StringIO(summary_csv((found,))))
    line = next(row for row in lines if row["label"] == "rank = 16")
    assert float(line["difference_to_base"]) == difference.value
    assert float(line["difference_error"]) == difference.error
    assert line["difference_pairs"] == "5"


def test_an_axis_without_the_recipes_value_is_measured_from_the_comparison(tmp_path):
    write_table_2(tmp_path / "table2", "cifar10", seeds=2)
    write_ablation(tmp_path / "rank", "cifar10", "rank", [16, 32], seeds=2)
    found = section(tmp_path)
    (ablation,) = found.ablations
    assert ablation.base is next(r for r in found.rows if r.method == ablation.method)
    text = markdown((found,), ())
    assert "| recipe | **0.93" in text
    # The authors' default has a figure of its own on each axis of their file.
    published = ABLATIONS["rank"][128]
    assert ablation.published(ablation.base) == published != ablation.base.paper
    assert f"{published.mean:.4f} ± {published.std:.4f}" in text


def test_one_axis_alone_is_measured_from_the_recipes_own_value(tmp_path):
    write_ablation(tmp_path / "rank", "cifar10", "rank", [16, 128], seeds=2)
    (ablation,) = section(tmp_path).ablations
    assert ablation.base.value == 128
    assert "Difference" in markdown((section(tmp_path),), ())


def test_an_override_takes_the_authors_ablation_away(tmp_path):
    write_run(
        tmp_path / "a",
        recipe="cifar10",
        benchmark="cifar10",
        method="Rand Muon (Nes.-Gaussian)",
        ablation=Ablation("rank", 16),
        overrides={"optimizer.lr": 0.1},
    )
    assert section(tmp_path).ablations[0].rows[0].paper is None


@pytest.mark.parametrize(("moved", "marked"), [(0.0, False), (0.02, True)])
def test_a_mark_stands_at_the_authors_figures_that_ours_are_off(tmp_path, moved, marked):
    published = ABLATIONS["rank"][16]
    for seed, spread in enumerate((-0.001, 0.0, 0.001)):
        write_run(
            tmp_path / str(seed),
            recipe="cifar10",
            benchmark="cifar10",
            method="Rand Muon (Nes.-Gaussian)",
            ablation=Ablation("rank", 16),
            seed=seed,
            final=published.mean + moved + spread,
        )
    found = section(tmp_path)
    text = markdown((found,), ())
    figure = f"{published.mean:.4f} ± {published.std:.4f}"
    assert (f"{figure}‡" in text) == marked
    assert "‡ marks those that ours differ from" in text
    assert figure in text


RECIPE = {0: 150.0, 1: 140.0, 2: 148.0}
GAUSSIAN = "Rand Muon (Nes.-Gaussian)"


def ablated(root, values, recipe=RECIPE, lost=()):
    """A recipe's row, and one value of an axis, by seed; the seeds ``lost`` diverged."""
    for name, finals, ablation in (
        ("recipe", recipe, None),
        ("varied", values, Ablation("rank", 8)),
    ):
        for seed, final in finals.items():
            write_run(
                root / f"{name}-{seed}",
                method=GAUSSIAN,
                seed=seed,
                final=final,
                ablation=ablation,
                status="diverged" if (name, seed) in lost else "finished",
            )
    found = section(root)
    (ablation,) = found.ablations
    return found, ablation, ablation.difference(ablation.rows[0])


def test_a_difference_is_taken_on_the_seeds_that_both_have(tmp_path):
    """A seed that is worth ten moves both sides: it must not move their difference."""
    found, _, difference = ablated(tmp_path, {0: 151.0, 1: 143.0, 7: 100.0})
    assert difference.value == pytest.approx(2.0)  # of +1 and +3
    assert difference.error == pytest.approx(1.0)
    assert difference.pairs == 2
    assert difference.clear is False
    text = markdown((found,), ())
    assert "| +2.00 ± 12.71 | 2 |" in text  # t of one degree of freedom
    assert "on the seeds that both have" in text


@pytest.mark.parametrize(("varied", "best"), [(147.0, "recipe"), (145.0, "8")])
def test_the_recipes_own_row_takes_part_in_the_choice_of_the_best(tmp_path, varied, best):
    found, ablation, _ = ablated(tmp_path, {0: varied})
    assert ablation.base is not None  # 146 on average
    assert ablation.base not in ablation.rows
    lines = markdown((found,), ()).split("#### rank, ")[1].splitlines()
    bold = [line.split(" | ")[0] for line in lines if "**" in line]
    assert bold == [f"| {best}"]
    page = report_files([tmp_path])["index.html"].decode().split('aria-label="Ablation of rank"')[1]
    rows = re.findall(r'<th scope="row">.*?</span>(.*?)</th>\s*<td class="num( best)?">', page)
    assert [name for name, mark in rows[:2] if mark] == [best]
    assert {name for name, _ in rows[:2]} == {"recipe", "8"}


def test_one_row_alone_is_not_the_best(tmp_path):
    found, _, _ = ablated(tmp_path, {0: 151.0, 1: 143.0}, lost={("varied", 0), ("varied", 1)})
    assert "**" not in markdown((found,), ())


def test_one_pair_has_a_difference_and_no_error(tmp_path):
    found, _, difference = ablated(tmp_path, {1: 141.5})
    assert (difference.value, difference.error, difference.pairs) == (1.5, None, 1)
    assert "| 8 | **141.50** | — | 1 | +1.50 | 1 |" in markdown((found,), ())


def test_without_a_common_seed_the_means_are_compared(tmp_path):
    found, _, difference = ablated(tmp_path, {5: 150.0, 6: 152.0})
    recipe, varied = Estimate.of(RECIPE.values()), Estimate.of([150.0, 152.0])
    assert difference == varied.minus(recipe)
    assert difference.pairs is None
    assert "where no seed is common, the difference of the means" in markdown((found,), ())
    lines = csv.DictReader(io.StringIO(summary_csv((found,))))
    assert [line["difference_pairs"] for line in lines] == ["", ""]


@pytest.mark.parametrize("side", ["recipe", "varied"])
def test_a_run_that_diverged_is_in_no_pair(tmp_path, side):
    _, _, difference = ablated(tmp_path, {0: 151.0, 1: 143.0}, lost={(side, 1)})
    assert (difference.value, difference.error, difference.pairs) == (1.0, None, 1)


def test_no_difference_where_nothing_finished(tmp_path):
    found, _, difference = ablated(
        tmp_path, {0: 151.0, 1: 143.0}, lost={("varied", 0), ("varied", 1)}
    )
    assert difference is None
    assert "| 8 | — | — | 0 of 2 (2 diverged) | — |" in markdown((found,), ())


def test_no_times_are_shown_of_runs_that_did_not_finish(tmp_path):
    write_run(tmp_path / "good", optimizer_ms=2.0, steps=400)
    for seed in range(2):
        write_run(
            tmp_path / str(seed), method=GAUSSIAN, seed=seed, status="diverged",
            optimizer_ms=61.24, gflops=7.0,
        )  # fmt: skip
    found = section(tmp_path)
    lost = next(row for row in found.rows if row.method == GAUSSIAN)
    assert lost.times.isna().all()
    assert lost.gflops == 7.0
    text = markdown((found,), ())
    assert "| 0 of 2 (2 diverged) | 7.000 | — | — | — |" in text
    assert "61.24" not in text
    assert "61.24" not in report_files([tmp_path])["index.html"].decode()
    (tmp_path / "good" / "result.json").unlink()
    assert "Times measured" not in markdown((section(tmp_path),), ())


def test_there_is_nothing_next_to_the_paper_where_nothing_can_be_compared(tmp_path):
    write_planned(comparison_runs("nanogpt-small", METHODS[2:3], [0], {}, tmp_path / "a")[0], 30.0)
    assert beside_the_paper(section(tmp_path / "a")) is None
    assert "paper" not in markdown((section(tmp_path / "a"),), ()).lower()
    write_planned(comparison_runs("cifar10", METHODS[2:3], [0], {}, tmp_path / "b")[0], 0.93)
    assert "One seed has no spread" in beside_the_paper(section(tmp_path / "b")).summary
    write_planned(comparison_runs("cifar10", METHODS[2:3], [1], {}, tmp_path / "b")[0], 0.94)
    assert "of 1 method agree" in beside_the_paper(section(tmp_path / "b")).summary


def started_at(root, seconds):
    """Runs of 10 seconds each, begun at these moments, in order of seed."""
    for seed, second in enumerate(seconds):
        folder = write_run(root / str(seed), seed=seed, optimizer_ms=float(seed))
        environment = read_json(folder / "environment.json")
        started = None if second is None else f"2026-11-15T01:{second // 60:02}:{second % 60:02}Z"
        write_json(folder / "environment.json", environment | {"started": started})
    return collect_runs([root]).frame


@pytest.mark.parametrize(
    ("moments", "most"),
    [
        ((0, 10, 20), 1),
        ((0, 9, 18), 1),  # a start at 9.9 is recorded as 9
        ((0, 4, 8), 3),
        ((0, 5, 30), 2),
        ((None, None), 1),
    ],
)
def test_runs_that_shared_a_device_are_noticed(tmp_path, moments, most):
    assert at_a_time(started_at(tmp_path, moments)) == most
    said = "one run at a time" if most == 1 else f"with up to {most} runs at a time"
    assert said in markdown((section(tmp_path),), ())


def test_a_method_that_never_finished_stands_next_to_the_paper_without_figures(tmp_path):
    write_run(
        tmp_path / "a", recipe="cifar10", benchmark="cifar10", method="AdamW", status="diverged"
    )
    for seed in range(2):
        write_run(
            tmp_path / f"b{seed}",
            recipe="cifar10",
            benchmark="cifar10",
            method="Muon (Nesterov)",
            seed=seed,
            final=0.937 + 0.001 * seed,
        )
    beside = beside_the_paper(section(tmp_path))
    assert beside.lines["place"]["Muon (Nesterov)"] == 1
    assert math.isnan(beside.lines["place"]["AdamW"])
    assert beside.lines["row"]["AdamW"].off_the_paper is None
    assert beside.order == ""
    assert "Next to the paper" in report_files([tmp_path])["index.html"].decode()


def test_seconds_of_a_run_are_in_the_tables(cifar):
    found, root = cifar
    seconds = [run.seconds for run in found.rows[0].runs["record"]]
    assert found.rows[0].times["run_seconds"] == statistics.median(seconds)
    assert "| Run s |" in markdown((found,), ())
    lines = list(csv.DictReader(io.StringIO(report_files([root])["runs.csv"].decode())))
    assert all(2 < float(line["run_seconds"]) < 4 for line in lines)


def test_many_seeds_are_one_command(cifar):
    found, _ = cifar
    command = found.rows[0].commands
    assert command == (
        "for seed in $(seq 0 5); do polarstep run cifar10 --method adamw --seed $seed; done"
    )
    command = found.ablations[0].rows[0].commands
    assert command.startswith("for seed in $(seq 0 4); do polarstep run cifar10 --method rand-muon")
    assert command.endswith("--seed $seed --vary rank=16; done")


def test_the_report_begins_with_the_best_method_against_adamw(tmp_path):
    """Or with what a study compares with; rows are named as the study names them."""
    for method, finals in (("AdamW", (40.0, 42.0)), ("Muon (Nesterov)", (36.0, 39.0))):
        for seed, final in enumerate(finals):
            write_run(tmp_path / method / str(seed), method=method, seed=seed, final=final)
    text = markdown((section(tmp_path),), ())
    said = "Muon (Nesterov) has test perplexity 37.50 ± 2.12, AdamW 41.00 ± 1.41: 3.50"
    said = said.replace("test perplexity", section(tmp_path).metric.name.lower())
    assert said in text
    assert "lower (95% t-interval, 2 common seeds, zero within it)" in text
    for path in tmp_path.glob("*/*/config.json"):
        config = read_json(path)
        variant = {"AdamW": "base", "Muon (Nesterov)": "my idea"}[config["method"]]
        study = {"name": "s", "variant": variant, "against": "base", "rate": ""}
        write_json(path, config | {"study": study})
    found = section(tmp_path)
    assert [row.label for row in found.rows] == ["base", "my idea"]
    assert "my idea has " in markdown((found,), ())
    chooses = read_json(path) | {"seed": 3, "study": {**study, "rate": "chooses"}}
    write_run(tmp_path / "rates", method="AdamW", seed=3, final=10.0)
    write_json(tmp_path / "rates/config.json", chooses)
    assert {len(row.runs) for row in section(tmp_path).rows} == {2}
