"""Runs on different data are not compared, whatever their configs say of files."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.lab.experiments.small import (
    TINY_CNN,
    TINY_GPT,
    ablation_runs,
    comparison_runs,
    fake_cifar10,
)
from tests.lab.experiments.synthetic import markdown, write_planned

from polarstep_lab.data.shards import write_shard
from polarstep_lab.jobs.job import plan_run
from polarstep_lab.methods import find_methods
from polarstep_lab.records.pack import pack
from polarstep_lab.records.record import RunRecord
from polarstep_lab.report import report_files
from polarstep_lab.report.grouping import sections_of
from polarstep_lab.report.runs import collect_runs
from polarstep_lab.storage import read_json, write_json
from polarstep_lab.train.run import train

A = {"data": "a_train_1.bin: 9,000 tokens", "data_digest": "a" * 32}
A |= {"held_out": "a_val_0.bin: 900 tokens", "held_out_digest": "c" * 32}
SWAPPED = A | {"data_digest": "b" * 32}
OTHER_TEST = A | {"held_out_digest": "d" * 32}
OLD = {"data": "a_train_1.bin: 9,000 tokens"}
OTHER_OLD = {"data": "b_train_1.bin: 9,000 tokens"}
UNKNOWN = {}


def record_data(directory, data, **more):
    """Note what a run read, as its environment has it."""
    path = directory / "environment.json"
    write_json(path, read_json(path) | data | more)


def section(root):
    (found,), notices = sections_of(collect_runs([root]))
    assert not notices
    return found, markdown((found,), ())


@pytest.fixture
def compared(tmp_path):
    """The section of full space and of a sketch, three seeds of each, on the given data."""

    def made(full, *sketched, recipe="nanogpt-toy"):
        for number, data in enumerate((full, *sketched)):
            method = "muon" if number == 0 else "rand-muon"
            plan = comparison_runs(
                recipe, find_methods(method), [0, 1, 2], {}, tmp_path / str(number)
            )
            for run in plan:
                write_planned(run, 30.0 + number + 0.1 * run.identity.seed**2)
                record_data(run.directory, data)
        return section(tmp_path)

    return made


TRAINING, HELD_OUT = "the training data read", "the held-out data read"


@pytest.mark.parametrize(
    ("full", "sketched", "differs"),
    [
        (A, SWAPPED, [TRAINING]),
        (A, OTHER_TEST, [HELD_OUT]),
        (OLD, OTHER_OLD, [TRAINING]),
        (A, OTHER_OLD, [TRAINING]),
        (A, SWAPPED | OTHER_TEST | {"data_digest": "b" * 32}, [HELD_OUT, TRAINING]),
    ],
    ids=["swapped", "other test", "other names", "other names, one digest", "both"],
)
def test_methods_on_different_texts_have_no_best_and_no_difference(
    compared, full, sketched, differs
):
    found, text = compared(full, sketched)
    assert found.apart == differs
    assert f"The rows differ in {' and '.join(differs)}, so that no best of them is named." in text
    assert "Randomized next to full space" not in text
    assert "lowest mean" not in text
    assert "**" not in "".join(re.findall(r"^\| .*", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("full", "sketched"),
    [
        (A, A),
        (A, A | {"data": "renamed_train_1.bin: 9,000 tokens"}),
        (OLD, OLD),
        (UNKNOWN, UNKNOWN),
        (OLD, A),
        (UNKNOWN, A),
        (UNKNOWN, OLD),
    ],
    ids=["same", "renamed", "old", "unknown", "old and new", "unknown and new", "unknown and old"],
)
def test_methods_on_one_text_are_compared_and_an_unknown_text_is_no_other(compared, full, sketched):
    found, text = compared(full, sketched)
    assert found.apart == []
    assert "Randomized next to full space" in text
    assert "lowest mean" in text
    assert ("say less of their data" in text) == (set(full) != set(sketched))


IMAGES = {"data": "CIFAR-10: 45,000 images, 5,000 held out, 10,000 for the test"}
OF_IMAGES = IMAGES | {"data_digest": "a" * 32, "held_out_digest": "c" * 32}
OF_IMAGES |= {"held_out": "CIFAR-10: 5,000 held out, 10,000 for the test"}


@pytest.mark.parametrize(
    ("full", "sketched", "differs"),
    [
        (OF_IMAGES, OF_IMAGES, []),
        (OF_IMAGES, OF_IMAGES | {"data_digest": "b" * 32}, [TRAINING]),
        (OF_IMAGES, OF_IMAGES | {"held_out_digest": "d" * 32}, [HELD_OUT]),
        (IMAGES, IMAGES, []),
        (IMAGES, OF_IMAGES, []),
        (UNKNOWN, OF_IMAGES, []),
        (IMAGES, {"data": "CIFAR-10: 200 images, 40 held out, 40 for the test"}, [TRAINING]),
    ],
    ids=["same", "other", "other test", "old", "old and new", "unknown and new", "other numbers"],
)
def test_images_are_compared_by_their_content_where_it_is_recorded(
    compared, full, sketched, differs
):
    found, text = compared(full, sketched, recipe="cifar10")
    assert found.apart == differs
    assert ("so that no best of them is named" in text) == bool(differs)


def test_a_text_that_is_not_known_is_not_taken_for_one_of_two(compared):
    """Nothing says which of the two it was."""
    found, text = compared(UNKNOWN, A, OTHER_OLD)
    assert found.apart == [TRAINING]
    assert "Randomized next to full space" not in text
    assert {row.label for row in found.rows if row.method != "Muon (Nesterov)"} == {
        "Rand Muon (Nes.-Gaussian), trained on a_train_1.bin: 9,000 tokens (digest aaaaaaaa)",
        "Rand Muon (Nes.-Gaussian), trained on b_train_1.bin: 9,000 tokens",
    }


def test_seeds_on_two_texts_are_two_rows_that_say_so(tmp_path):
    runs = comparison_runs("nanogpt-toy", find_methods("muon"), [0, 1, 2, 3], {}, tmp_path)
    for run in runs:
        write_planned(run, 30.0 + 10 * (run.identity.seed % 2))
        record_data(run.directory, SWAPPED if run.identity.seed % 2 else A)
    found, text = section(tmp_path)
    assert sorted((row.metric.mean, row.metric.n) for row in found.rows) == [(30.0, 2), (40.0, 2)]
    for digest in ("aaaaaaaa", "bbbbbbbb"):
        assert f"trained on a\\_train\\_1.bin: 9,000 tokens (digest {digest})" in text or (
            f"trained on a_train_1.bin: 9,000 tokens (digest {digest})" in text
        )


def test_a_seed_on_another_text_is_no_repetition(tmp_path):
    for name, data in (("a", A), ("b", SWAPPED)):
        (run,) = comparison_runs("nanogpt-toy", find_methods("muon"), [0], {}, tmp_path / name)
        write_planned(run, 30.0)
        record_data(run.directory, data)
    found, _ = section(tmp_path)
    assert len(found.rows) == 2


def test_a_run_that_went_on_with_another_text_is_on_neither(tmp_path, compared):
    found, _ = compared(A, A | {"resumed": [{"started": "later"} | SWAPPED]})
    assert found.apart == [TRAINING]


def test_a_run_that_went_on_with_its_text_is_compared(compared):
    found, _ = compared(A, A | {"resumed": [{"started": "later"} | A]})
    assert found.apart == []


def test_no_difference_is_shown_from_a_base_on_another_text(tmp_path):
    (sketched,) = find_methods("rand-muon")
    base = comparison_runs("nanogpt-toy", [sketched], [0, 1, 2], {}, tmp_path / "base")
    varied = ablation_runs(
        "nanogpt-toy", sketched, "rank", [8, 16, 64], [0, 1, 2], {}, tmp_path / "rank"
    )
    for run in (*base, *varied):
        write_planned(run, 30.0 + run.identity.seed)
        swapped = run.identity.ablation is not None and run.identity.ablation.value == 8
        record_data(run.directory, SWAPPED if swapped else A)
    found, text = section(tmp_path)
    (ablation,) = found.ablations
    assert {row.value: list(paths) for row, paths in ablation.strays.items()} == {8: [TRAINING]}
    assert (
        f"No difference is shown for rank = 8: the recipe's own row differs in {TRAINING} too."
        in text
    )


def test_an_ablation_has_no_base_on_another_text(tmp_path):
    (sketched,) = find_methods("rand-muon")
    base = comparison_runs("nanogpt-toy", [sketched], [0, 1], {}, tmp_path / "base")
    varied = ablation_runs("nanogpt-toy", sketched, "rank", [8, 64], [0, 1], {}, tmp_path / "rank")
    for run in (*base, *varied):
        write_planned(run, 30.0 + run.identity.seed)
        record_data(run.directory, SWAPPED if run.identity.ablation else A)
    found, _ = section(tmp_path)
    (ablation,) = found.ablations
    assert ablation.base is None
    assert not ablation.differences


@pytest.fixture
def swapped(tmp_path, monkeypatch):
    """Runs of two methods; between them another text takes the name of the first."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    settings = TINY_GPT | {"model.vocab_size": 64, "data.train": "s/*_train_*.bin"}
    settings |= {"data.val": "s/*_val_*.bin"}

    def write(part):
        write_shard(tmp_path / f"s/x_{part}_1.bin", rng.integers(0, 64, 3000))

    (tmp_path / "s").mkdir()
    write("train")
    write("val")

    def made(between):
        for method in ("muon", "rand-muon"):
            run = plan_run("nanogpt-toy", method, 0, settings, tmp_path / "runs" / method)
            train(run.config, run.directory, identity=run.identity)
            if between:
                write(between)
        pack([tmp_path / "runs"], tmp_path / "packed")
        return report_files([tmp_path / "packed"])["summary.md"].decode()

    return made


@pytest.mark.parametrize(
    ("name", "differs"), [("data_batch_2", TRAINING), ("test_batch", HELD_OUT)]
)
def test_swapped_images_of_the_same_number_are_noticed(tmp_path, name, differs):
    root = fake_cifar10(tmp_path / "data")
    settings = TINY_CNN | {"data.root": str(root), "data.epochs": 0.5}
    for method in ("muon", "adamw"):
        run = plan_run("cifar10-tiny", method, 0, settings, tmp_path / "runs" / method)
        train(run.config, run.directory, identity=run.identity)
        path = root / "cifar-10-batches-bin" / f"{name}.bin"
        raw = path.read_bytes()
        path.write_bytes(raw[:1] + bytes(3072) + raw[3073:])  # the first image black
    found, _ = section(tmp_path / "runs")
    assert found.apart == [differs]


@pytest.mark.parametrize(("between", "word"), [("train", TRAINING), ("val", HELD_OUT)])
def test_a_swapped_file_of_the_same_name_and_length_is_noticed(swapped, between, word):
    text = swapped(between)
    assert f"The rows differ in {word}, so that no best of them is named." in text


def test_files_that_stay_are_one_text(swapped, tmp_path):
    text = swapped(None)
    assert "The rows differ" not in text
    found = RunRecord.load(tmp_path / "runs/muon").environment
    assert found["data"] == "x_train_1.bin: 3,000 tokens"
    assert found["held_out"] == "x_val_1.bin: 3,000 tokens"
    assert re.fullmatch("[0-9a-f]{32}", found["data_digest"])
    assert re.fullmatch("[0-9a-f]{32}", found["held_out_digest"])
    assert found["data_digest"] != found["held_out_digest"]
