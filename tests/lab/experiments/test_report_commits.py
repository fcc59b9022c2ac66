"""A row that averages runs of several commits says which."""

from __future__ import annotations

import pytest
from tests.lab.experiments.small import ablation_runs, comparison_runs
from tests.lab.experiments.synthetic import markdown, write_planned

from polarstep_lab.methods import find_methods
from polarstep_lab.report.grouping import sections_of
from polarstep_lab.report.runs import collect_runs
from polarstep_lab.storage import read_json, write_json


def at_commits(runs, commits):
    """Write runs that began one after the other, at these commits; those of ``None`` have none."""
    for minute, (run, commit) in enumerate(zip(runs, commits, strict=True)):
        write_planned(run, 30.0 + run.identity.seed)
        path = run.directory / "environment.json"
        named = {"git_commit": commit and commit[0] * 40 + commit[1:]}
        started = {"started": f"2026-11-15T01:{minute:02}:00+00:00"}
        write_json(path, read_json(path) | named | started)


@pytest.fixture
def page(tmp_path):
    """The page of one method, with a seed for each of these commits, in order of time."""

    def made(*commits):
        seeds = range(len(commits))
        at_commits(
            comparison_runs("nanogpt-toy", find_methods("muon"), seeds, {}, tmp_path), commits
        )
        (found,), _ = sections_of(collect_runs([tmp_path]))
        return markdown((found,), ())

    return made


@pytest.mark.parametrize(
    ("commits", "told"),
    [
        (("a", "b"), "aaaaaaa and bbbbbbb"),
        (("b+", "a", "b+"), "bbbbbbb+ and aaaaaaa"),
        (("a", "a+"), "aaaaaaa and aaaaaaa+"),
        (("a", None), "aaaaaaa and one that is not recorded"),
        (("a", "b", "c"), "aaaaaaa, bbbbbbb and ccccccc"),
        (("d", "b+", "c", "a", "d"), "4 commits, the first ddddddd and the last aaaaaaa"),
        (("d", "b", None, "c", "a+"), "5 commits, the first ddddddd and the last aaaaaaa+"),
    ],
    ids=str,
)
def test_the_commits_of_a_row_are_named(page, commits, told):
    text = page(*commits)
    assert f"Rows of runs of several commits, in order of time: Muon (Nesterov) ({told})." in text


@pytest.mark.parametrize("commits", [("a", "a"), ("a+", "a+"), (None, None)], ids=str)
def test_nothing_is_said_of_a_row_of_one_commit(page, commits):
    assert "several commits" not in page(*commits)


def test_rows_of_the_same_commits_are_named_together_and_ablations_apart(tmp_path):
    (sketched,) = find_methods("rand-muon")
    runs = comparison_runs(
        "nanogpt-toy", find_methods("muon,rand-muon,adamw"), [0, 1], {}, tmp_path
    )
    varied = ablation_runs("nanogpt-toy", sketched, "rank", [8, 64], [0, 1], {}, tmp_path / "rank")
    by_seed = [("a", "b")[run.identity.seed] for run in runs]
    commits = [
        "a" if run.identity.method == "AdamW" else commit
        for run, commit in zip(runs, by_seed, strict=True)
    ]
    of_ranks = [
        "c" if run.identity.ablation.value == 8 else "cd"[run.identity.seed] for run in varied
    ]
    at_commits([*runs, *varied], [*commits, *of_ranks])
    (found,), _ = sections_of(collect_runs([tmp_path]))
    text = markdown((found,), ())
    assert (
        "in order of time: Muon (Nesterov) and Rand Muon (Nes.-Gaussian) (aaaaaaa and bbbbbbb)."
        in text
    )
    assert "in order of time: rank = 64 (ccccccc and ddddddd)." in text


def test_runs_that_did_not_finish_have_no_part_in_it(tmp_path):
    runs = comparison_runs("nanogpt-toy", find_methods("muon"), [0, 1, 2], {}, tmp_path)
    at_commits(runs, ["a", "a", "b"])
    (runs[2].directory / "result.json").unlink()
    (found,), _ = sections_of(collect_runs([tmp_path]))
    assert "several commits" not in markdown((found,), ())


def test_a_run_that_went_on_at_another_commit_is_of_both(tmp_path):
    (run,) = comparison_runs("nanogpt-toy", find_methods("muon"), [0], {}, tmp_path)
    at_commits([run], ["a"])
    path = run.directory / "environment.json"
    write_json(path, read_json(path) | {"resumed": [{"git_commit": "b" * 40 + "+"}]})
    (found,), _ = sections_of(collect_runs([tmp_path]))
    assert "(aaaaaaa and bbbbbbb+)" in markdown((found,), ())
