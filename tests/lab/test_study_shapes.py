"""Tables of studies compare runs of one length, one width and one text, and count a run once."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

from polarstep_lab.storage import JsonLines, read_lines

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study():
    """A function that imports a study by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module


def called(module, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
    module.main()


def written(path, rows):
    log = JsonLines(path, 0)
    for row in rows:
        log.write(row)
    log.close()
    return path


def of_gpt(name, seed, perplexity, lr=0.014, **shape):
    row = {"map": name, "seed": seed, "perplexity": perplexity, "test": perplexity, "lr": lr}
    return row | {"steps": 1500, "width": 768} | shape


OTHER = [{"steps": 100}, {"width": 256}, {"steps": 100, "width": 256}, {"width": 4096}]
"""Shapes of runs that an afternoon may leave in the file of a study."""


def test_a_table_of_runs_of_another_shape_alone_is_shown(study, capsys):
    frontier = study("frontier")
    wide = [of_gpt(name, 0, p, width=4096) for name, p in (("full", 50.0), ("low-rank", 51.0))]
    text = "\n".join(frontier.table(wide)).replace("\N{NO-BREAK SPACE}", " ")
    assert "| 51.00 | +2.0% (one seed) |" in text
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="1500 steps and width 4096, 1500 steps and width 2048"):
        list(frontier.table([*wide, of_gpt("full", 0, 50.0, width=2048)]))


def test_a_run_that_is_recorded_twice_is_refused(study):
    twice = [of_gpt("full", 0, 50.0), of_gpt("full", 0, 51.0)]
    with pytest.raises(ValueError, match=r"recorded twice: full, seed 0, rate 0\.014, 1500 steps"):
        list(study("frontier").table(twice))
    with pytest.raises(ValueError, match="recorded twice: full, seed 0"):
        study("scaling").gaps(twice)
    row = {"variant": "float32", "seed": 0, "steps": 250, "loss": 1.0, "bytes": 4, "device": "cpu"}
    with pytest.raises(ValueError, match="recorded twice: float32, seed 0"):
        list(study("low_precision").table([row, row]))


A = {"data_digest": "a" * 32, "held_out_digest": "c" * 32}
TEXTS = {
    "training": (A, A | {"data_digest": "b" * 32}),
    "held-out": (A, A | {"held_out_digest": "d" * 32}),
}


def tables_of(study, first, second):
    """Functions that make the table of each study from two runs on these texts."""
    runs = [of_gpt("full", 0, 50.0) | first, of_gpt("low-rank", 0, 51.0) | second]
    row = {"seed": 0, "steps": 250, "loss": 1.0, "bytes": 4, "device": "cpu"}
    precise = [row | {"variant": "float32"} | first, row | {"variant": "nearest"} | second]
    return {
        "frontier": lambda: list(study("frontier").table(runs)),
        "scaling": lambda: list(study("scaling").table(runs, "tokens")),
        "low_precision": lambda: list(study("low_precision").table(precise)),
    }


STUDIES = ("frontier", "scaling", "low_precision")


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", STUDIES)
def test_runs_on_different_texts_are_in_no_table(study, name, kind):
    with pytest.raises(ValueError, match=rf"runs on 2 {kind} texts: .*, seed 0 .*, seed 0 .*file"):
        tables_of(study, *TEXTS[kind])[name]()


@pytest.mark.parametrize("name", STUDIES)
def test_a_record_that_names_no_text_is_compared_as_before(study, name):
    assert tables_of(study, A, {})[name]() == tables_of(study, {}, {})[name]()
    assert tables_of(study, A, A)[name]() == tables_of(study, {}, {})[name]()


def test_a_rate_is_chosen_among_runs_on_one_text(study):
    frontier, (first, second) = study("frontier"), TEXTS["held-out"]
    rows = [of_gpt("full", 3, 57.0, lr=0.01) | first, of_gpt("full", 3, 56.0, lr=0.02)]
    assert frontier.best_rate(rows, "full") == 0.02
    with pytest.raises(
        ValueError, match=r"runs on 2 held-out texts: full, seed 3 \(held_out_digest c"
    ):
        frontier.best_rate([*rows, of_gpt("full", 3, 55.0, lr=0.014) | second], "full")


@pytest.mark.parametrize("shape", OTHER, ids=str)
def test_a_rate_is_chosen_for_a_shape_by_runs_of_that_shape(study, shape):
    frontier = study("frontier")
    rows = [of_gpt("full", 3, 57.0, lr=0.01), of_gpt("full", 3, 56.0, lr=0.02)]
    rows += [of_gpt("full", 3, 30.0, lr=0.01, **shape)]
    asked = (shape.get("steps", 1500), shape.get("width", 768))
    assert frontier.best_rate(rows, "full") == 0.02
    assert frontier.best_rate(rows, "full", *asked) == 0.01
    assert frontier.best_rate(rows, "full", 9, 9) is None


def test_the_best_rate_that_is_run_is_that_of_its_width(study, tmp_path):
    frontier = study("frontier")
    rows = [of_gpt("full", 3, 57.0, lr=0.01), of_gpt("full", 3, 30.0, lr=0.02, width=256)]
    out = written(tmp_path / "runs.jsonl", rows)
    for width, rate in ((768, 0.01), (256, 0.02)):
        asked = argparse.Namespace(lr="best", out=out, steps=1500, width=width)
        assert frontier.rates_of("full", asked) == [rate]


def test_a_run_of_a_precision_is_made_once(study, tmp_path, monkeypatch, capsys):
    precision, out = study("low_precision"), tmp_path / "runs.jsonl"
    asked = ("run", "--variants", "float32,nearest", "--seeds", 0, "--out", out)
    for steps, count in ((1, 2), (1, 2), (2, 4)):
        called(precision, monkeypatch, *asked, "--steps", steps)
        assert len(read_lines(out)) == count
    (digests,) = {(row["data_digest"], row["held_out_digest"]) for row in read_lines(out)}
    assert len(set(digests)) == 2
    assert {(row["steps"], row["width"], row["lr"]) for row in read_lines(out)} == {
        (steps, 48, 0.003) for steps in (1, 2)
    }
    assert "float32, seed 0: in " in capsys.readouterr().out
