"""Randomized rows next to full space: what is compared, what is not, and what is said of it."""

from __future__ import annotations

import itertools

import pytest
from tests.lab.experiments.synthetic import markdown, write_run

from polarstep_lab.jobs.job import plan_run
from polarstep_lab.records.record import Ablation
from polarstep_lab.report import report_files
from polarstep_lab.report.grouping import sections_of
from polarstep_lab.report.pages import brief_lines
from polarstep_lab.report.randomized import pairs_of, randomized_table, verdict
from polarstep_lab.report.runs import collect_runs
from polarstep_lab.storage import read_json, write_json
from polarstep_lab.wording import in_digits

FULL, POLYAK = "Muon (Nesterov)", "Muon (Polyak)"
GAUSSIAN, KACZMARZ = "Rand Muon (Nes.-Gaussian)", "Rand Muon (Nes.-Kaczmarz)"
TITLE = "### Randomized next to full space"


@pytest.fixture
def add(tmp_path):
    """Add the seeds of a row, one run after the other; ``at`` is the minute of all of them instead."""
    minutes = itertools.count()

    def add(method, finals, *, at=None, environment=None, runtime=None, **options):
        for seed, final in enumerate(finals):
            minute = next(minutes)
            if runtime is not None:
                options["overrides"] = {"runtime": runtime}
            folder = write_run(
                tmp_path / str(minute), method=method, seed=seed, final=final, **options
            )
            found = read_json(folder / "environment.json")
            started = f"2026-11-15T01:{minute if at is None else at:02}:00Z"
            write_json(
                folder / "environment.json", found | {"started": started} | (environment or {})
            )

    return add


def section(root):
    (found,), _ = sections_of(collect_runs([root]))
    return found


def test_it_is_said_which_randomized_rows_are_faster_and_what_the_best_gives_up(add, tmp_path):
    add(FULL, [30.0, 31.0, 32.0], optimizer_ms=2.0, gflops=10.0)
    add(GAUSSIAN, [31.0, 32.0, 33.5], optimizer_ms=15.0, gflops=4.0)
    warm = Ablation("sketch", "warm")
    add(GAUSSIAN, [30.5, 31.5, 32.7], optimizer_ms=4.0, gflops=2.0, ablation=warm)
    found = section(tmp_path)
    t = 4.302653  # of two degrees of freedom, at 95%
    text = (
        "A whole step takes 1.04 to 1.25 times as long as in full space. What a step does outside the "
        "optimizer is the same in all rows and its time varied by 0.0 ms between runs. A row is called "
        "faster or slower where the 95% t-interval of the difference to full space lies beyond that. "
        f"Slower: {GAUSSIAN} and {GAUSSIAN}, sketch = warm. The least "
        f"optimizer time is that of {GAUSSIAN}, sketch = warm, 4.000 ms where {FULL} takes 2.000, with "
        f"20.00% of the FLOPs; its validation perplexity is 0.567 ± {t / 15:.3f} higher (95% "
        "t-interval, 3 common seeds)."
    )
    assert verdict(found) == text
    assert randomized_table(found).rows == [
        [GAUSSIAN, FULL, f"+1.167 ± {t / 6:.3f}", "3", "40.00%", "7.50×", "1.25×"],
        [
            f"{GAUSSIAN}, sketch = warm",
            FULL,
            f"+0.567 ± {t / 15:.3f}",
            "3",
            "20.00%",
            "2.00×",
            "1.04×",
        ],
    ]
    page = report_files([tmp_path])["index.html"].decode()
    texts = (markdown((found,), ()), "\n".join(brief_lines(found)), page.replace("&#39;", "'"))
    for shown in texts:
        assert shown.count(text) == 1
    assert TITLE in markdown((found,), ())


@pytest.mark.parametrize(
    ("times", "span", "which"),
    [
        ({GAUSSIAN: 1.0, KACZMARZ: 0.0}, "0.96 to 0.98", f"Faster: {GAUSSIAN} and {KACZMARZ}."),
        (
            {GAUSSIAN: 0.0, KACZMARZ: 9.0},
            "0.96 to 1.13",
            f"Faster: {GAUSSIAN}. Slower: {KACZMARZ}.",
        ),
        ({GAUSSIAN: 2.0}, "1.00", f"Neither: {GAUSSIAN}."),
        ({GAUSSIAN: 8.0, KACZMARZ: 9.0}, "1.12 to 1.13", f"Slower: {GAUSSIAN} and {KACZMARZ}."),
    ],
)
def test_what_is_said_depends_on_the_times(add, tmp_path, times, span, which):
    add(FULL, [30.0, 31.0], optimizer_ms=2.0)
    for method, time in times.items():
        add(method, [31.0, 32.0], optimizer_ms=time)
    text = verdict(section(tmp_path))
    assert f"takes {span} times as long as in full space. " in text
    assert f"lies beyond that. {which} The least" in text
    assert "its validation perplexity is 1.000 ± 0.000 higher (95% t-interval, 2 common" in text


@pytest.mark.parametrize(
    ("rests", "which"),
    [
        # The optimizer takes 1 ms less, the rest of a step what is listed.
        ([50.0], "Neither"),  # one run of each row
        ([50.0, 50.0, 50.0], "Faster"),
        ([50.0, 50.0, 50.5], "Neither"),  # 0.83 ± 0.72, less than the 0.5
        ([50.0, 50.0, 50.02], "Faster"),
        ([50.8, 50.8, 50.8], "Neither"),  # 0.2 ± 0, where the rest varies by 0.8
        ([51.0, 52.0, 49.0], "Neither"),
    ],
)
def test_a_step_is_called_faster_where_the_interval_lies_beyond_the_noise(
    add, tmp_path, rests, which
):
    add(FULL, [30.0] * len(rests), optimizer_ms=3.0)
    add(KACZMARZ, [31.0] * len(rests), optimizer_ms=2.0)
    results = {path: read_json(path) for path in sorted(tmp_path.glob("*/result.json"))}
    ours = [path for path, result in results.items() if result["optimizer_ms_per_step"] == 2.0]
    for path, rest in zip(ours, rests, strict=True):
        write_json(path, results[path] | {"step_ms": 2.0 + rest})
    text = verdict(section(tmp_path))
    assert f"varied by {in_digits(max(50, *rests) - min(50, *rests), 2)} ms between runs." in text
    assert f"lies beyond that. {which}: {KACZMARZ}. The least" in text
    assert "2.000 ms where Muon (Nesterov) takes 3.000" in text


def test_rows_that_sketch_nothing_are_said_to(add, tmp_path):
    for method in ("muon", "rand-muon"):
        plan = plan_run(
            "cifar10", method, 0, {"optimizer.polar.rank": 512} if "rand" in method else {}
        )
        add(plan.identity.method, [0.93], benchmark="cifar10", settings=dict(plan.identity.config))
    assert f"No matrix has more rows than ℓ: {GAUSSIAN} ran in full space." in verdict(
        section(tmp_path)
    )


@pytest.mark.parametrize(
    "other",
    [
        {"environment": {"git_commit": "b" * 40}},
        {"environment": {"git_commit": "a" * 40, "device_name": "Another CPU"}},
        {"runtime": {"compile": False}},
        {"at": 59},
    ],
    ids=["commit", "device", "settings", "shared"],
)
def test_times_under_other_circumstances_do_not_compare(add, tmp_path, other):
    same = {"environment": {"git_commit": "a" * 40}, "runtime": {"compile": True}}
    add(FULL, [30.0, 31.0, 32.0], **same)
    add(GAUSSIAN, [30.0, 31.0, 32.5], **(same | other))
    found = section(tmp_path)
    ((*_, flops, optimizer, step),) = randomized_table(found).rows
    assert (flops, optimizer, step) == ("100.00%", "—", "—")
    assert verdict(found) == ""
    assert TITLE in markdown((found,), ())


def test_times_that_both_rows_shared_do_not_compare(add, tmp_path):
    add(FULL, [30.0, 31.0, 32.0], at=10)
    add(GAUSSIAN, [30.0, 31.0, 32.0], at=20)
    (pair,) = pairs_of(section(tmp_path))
    assert pair.row.times.notna().all()
    assert pair.times.isna().all()


def test_rows_stand_next_to_full_space_with_their_own_momentum(add, tmp_path):
    add(POLYAK, [30.0])
    add(GAUSSIAN, [30.0])
    assert randomized_table(section(tmp_path)).rows == []
    assert TITLE not in markdown((section(tmp_path),), ())
    add("Rand Muon (Polyak)", [31.0])
    ((row, full, *_),) = randomized_table(section(tmp_path)).rows
    assert (row, full) == ("Rand Muon (Polyak)", POLYAK)


def test_what_did_not_finish_and_other_axes_are_no_rows(add, tmp_path):
    add(FULL, [30.0])
    add(GAUSSIAN, [31.0])
    add(GAUSSIAN, [31.0], ablation=Ablation("sketch", "warm"), status="diverged")
    add(GAUSSIAN, [31.0], ablation=Ablation("rank", 8))
    add(KACZMARZ, [31.0], status=None)
    assert [pair.label for pair in pairs_of(section(tmp_path))] == [GAUSSIAN]


def test_labels_name_the_sketch_that_ran(add, tmp_path):
    warm = {"optimizer": {"polar": {"rank": 8, "sketch": "warm"}}}
    add(FULL, [30.0])
    add(GAUSSIAN, [31.0])
    add(GAUSSIAN, [31.0], ablation=Ablation("sketch", "warm-fast"), settings=warm)
    labels = [pair.label for pair in pairs_of(section(tmp_path))]
    assert labels == [GAUSSIAN, "Rand Muon (Nes.-Warm), sketch = warm-fast"]
    add("Rand Muon (Polyak)", [32.0], settings=warm)
    assert "Rand Muon (Polyak), Warm" in [row.label for row in section(tmp_path).rows]


def test_a_planned_run_is_called_by_the_sketch_that_will_run():
    def label(**overrides):
        return plan_run("nanogpt-toy", "rand-muon", 3, overrides).label

    assert label() == f"{GAUSSIAN}, seed 3"
    assert label(**{"optimizer.polar.sketch": "warm"}) == "Rand Muon (Nes.-Warm), seed 3"


def test_runs_that_were_watched_are_not_compared(add, tmp_path):
    add(FULL, [30.0], gamma=True)
    add(GAUSSIAN, [31.0], gamma=True)
    assert pairs_of(section(tmp_path)) == []


def test_shared_times_do_not_stand_beside_those_of_runs_alone(add, tmp_path):
    add(GAUSSIAN, [30.0, 31.0], optimizer_ms=2.5)
    add(GAUSSIAN, [32.0, 33.0], optimizer_ms=7.5, ablation=Ablation("rank", 8), at=59)
    text = markdown((section(tmp_path),), ())
    page = report_files([tmp_path])["index.html"].decode()
    for shown, cell in ((text, "| {} |"), (page, '<td class="num">{}</td>')):
        assert cell.format("2.500") in shown
        assert "7.500" not in shown


def test_where_all_times_were_shared_the_caption_says_so(add, tmp_path):
    add(GAUSSIAN, [30.0, 31.0], optimizer_ms=2.5, at=10)
    add(GAUSSIAN, [32.0, 33.0], optimizer_ms=7.5, ablation=Ablation("rank", 8), at=20)
    text = markdown((section(tmp_path),), ())
    assert text.count("with up to 2 runs at a time: these are not the times of a run alone") == 2
    assert "| 2.500 |" in text
    assert "| 7.500 |" in text


def test_rows_of_one_axis_and_two_methods_are_told_apart(add, tmp_path):
    solver = Ablation("solver", "cubic")
    add(FULL, [30.0])
    add(FULL, [31.0], ablation=solver)
    add(GAUSSIAN, [32.0], ablation=solver)
    text = markdown((section(tmp_path),), ())
    for method in (FULL, GAUSSIAN):
        assert f"\nsolver = cubic with {method}:\n" in text


def test_rows_of_other_lengths_are_not_compared(add, tmp_path):
    """More seeds of a longer full-space run: it is by its length that such a run is better."""
    short, long = ({"data": {"stages": [{"steps": steps}]}} for steps in (100, 900))
    add(FULL, [20.0, 21.0, 22.0], settings=long)
    add(GAUSSIAN, [31.0, 32.0], settings=short)
    assert pairs_of(section(tmp_path)) == []
    add(FULL, [30.0, 31.0], settings=short)
    (pair,) = pairs_of(section(tmp_path))
    assert (pair.row.method, pair.full.method) == (GAUSSIAN, FULL)
    assert pair.difference.value == 1.0


def test_methods_of_other_lengths_have_a_table_and_no_best(add, tmp_path):
    for method, steps, values in ((FULL, 100, [31.0, 32.0]), (GAUSSIAN, 900, [20.0, 21.0])):
        add(method, values, settings={"data": {"stages": [{"steps": steps}]}})
    text = markdown((section(tmp_path),), ())
    assert "The rows differ in data.stages, so that no best of them is named." in text
    assert "lowest mean" not in text
    assert "**20.5" not in text
    add(FULL, [30.0], settings={"data": {"stages": [{"steps": 900}]}})
    assert section(tmp_path).apart == ["data.stages"]


def test_of_several_rows_of_a_method_that_of_the_common_task_is_compared(add, tmp_path):
    short, long = ({"data": {"stages": [{"steps": steps}]}} for steps in (100, 900))
    add(FULL, [20.0, 21.0, 22.0], settings=long)
    for method in (FULL, GAUSSIAN, KACZMARZ):
        add(method, [31.0, 32.0], settings=short)
    assert {len(row.finished) for row in section(tmp_path).by_method.values()} == {2}
