"""Records and files: what is written is read back, and a fault is named."""

from __future__ import annotations

import copy
import json
import math
import re

import pytest

from polarstep_lab.recipes.resolve import resolve
from polarstep_lab.records.record import (
    Ablation,
    MetricRow,
    Result,
    RunRecord,
    RunSpec,
    find_runs,
)
from polarstep_lab.storage import JsonLines, StorageError


def spec(**changes):
    values = {
        "recipe": "nanogpt-toy",
        "benchmark": "nanogpt",
        "method": "AdamW",
        "seed": 4,
        "config": {"optimizer": {"lr": 0.1}},
        "command": "polarstep run nanogpt-toy --method adamw --seed 4",
    }
    return RunSpec(**values | changes)


def test_a_run_directory_is_read_back_as_written(tmp_path):
    written = spec(ablation=Ablation("rank", 64), study={"name": "ablate"})
    written.save(tmp_path)
    rows = [
        MetricRow(0, "val", 1 / 3, 0.1, 0.5, tokens=0, perplexity=math.exp(1 / 3)),
        MetricRow(1, "train", math.nan, 0.1, 0.7, 12.5, 3.25, tokens=64),
    ]
    log = JsonLines(tmp_path / "metrics.jsonl")
    for row in rows:
        log.write(row.to_dict())
    log.close()
    result = Result("val_perplexity", 1.1, "finished", 1, 3.5, 3.25, 12.5)
    result.save(tmp_path)
    loaded = RunRecord.load(tmp_path)
    assert loaded.spec == written
    assert loaded.result == result
    assert loaded.metrics[0].loss == 1 / 3
    assert math.isnan(loaded.metrics[1].loss)
    assert loaded.rows("train")[0].optimizer_ms == 3.25
    assert "step_ms" not in rows[0].to_dict()


def test_an_older_record_has_the_default_of_a_newer_setting(tmp_path):
    """It is the same run: it stands in one row with today's, and one may go on with it."""
    today = resolve("nanogpt-toy", "rand-muon").to_dict()
    older = copy.deepcopy(today)
    for setting in ("float8", "rest"):
        del older["optimizer"]["polar"][setting]
    spec(config=older).save(tmp_path)
    assert RunSpec.load(tmp_path).config == today


def test_a_config_that_is_not_understood_stays_as_it_is(tmp_path):
    config = resolve("nanogpt-toy", "rand-muon").to_dict() | {"of another version": 1}
    spec(config=config).save(tmp_path)
    assert RunSpec.load(tmp_path).config == config


def test_a_line_cut_short_is_left_out(tmp_path):
    spec().save(tmp_path)
    row = json.dumps(MetricRow(1, "train", 2.0, 0.1, 0.1).to_dict())
    (tmp_path / "metrics.jsonl").write_text(f'{row}\n{{"step": 2, "ki')
    loaded = RunRecord.load(tmp_path)
    assert [row.step for row in loaded.metrics] == [1]
    assert loaded.status == "unfinished"


def test_directories_that_are_no_runs(tmp_path):
    with pytest.raises(StorageError, match=r"not a run directory: it has no config\.json"):
        RunRecord.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(StorageError, match=r"config\.json holds \[1\], expected a JSON object"):
        RunRecord.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        StorageError, match=r"not the config of a run: .*; restore the file, or lea"
    ):
        RunRecord.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StorageError, match="is not valid JSON"):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_finished_run_whose_metrics_end_early_is_damaged(kept, tmp_path):
    spec().save(tmp_path)
    rows = [json.dumps(ROW | {"step": step}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows[:kept]))
    RunRecord.load(tmp_path)  # unfinished
    for status in ("stopped", "failed", "diverged"):
        (tmp_path / "result.json").write_text(json.dumps(RESULT | {"status": status}))
        assert RunRecord.load(tmp_path).status == status
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    if kept == 3:
        assert RunRecord.load(tmp_path).status == "finished"
        return
    where = f"ends {f'at step {kept}' if kept else 'without a step'}, but the run .* after step 3"
    with pytest.raises(StorageError, match=rf"metrics\.jsonl {where}: .*restore it, or leave"):
        RunRecord.load(tmp_path)


RESULT = {"metric": "test_accuracy", "value": 0.5, "status": "finished", "steps": 3, "step_ms": 1.0,
          "optimizer_gflops_per_step": 1.0, "optimizer_ms_per_step": 1.0}  # fmt: skip
ROW = {"step": 3, "kind": "train", "loss": 2.0, "lr": 0.1, "seconds": 1.0}


@pytest.mark.parametrize(
    ("file", "field", "value", "expected"),
    [
        ("result.json", "value", "", "a number"),
        ("result.json", "value", True, "a number"),
        ("result.json", "steps", None, "a number"),
        ("result.json", "status", 0, "one of finished, diverged, stopped, failed"),
        ("result.json", "metric", [[]], "one of val_perplexity, test_perplexity, test_accuracy"),
        ("metrics.jsonl", "step", {}, "a number"),
        ("metrics.jsonl", "loss", "x", "a number"),
        ("metrics.jsonl", "kind", None, "text"),
    ],
)
def test_a_value_of_another_type_is_named(file, field, value, expected, tmp_path):
    spec().save(tmp_path)
    whole = RESULT if file == "result.json" else ROW
    for name, content in (("metrics.jsonl", ROW), (file, whole)):
        (tmp_path / name).write_text(json.dumps(content) + "\n")
    RunRecord.load(tmp_path)
    (tmp_path / file).write_text(json.dumps(whole | {field: value}) + "\n")
    told = re.escape(f"{field} is {json.dumps(value)}, expected {expected}")
    with pytest.raises(StorageError, match=rf"{re.escape(file)}.*{told}"):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("environment.json", "null", r"environment\.json holds null, expected a JSON object"),
        ("environment.json", "[1]", r"environment\.json holds \[1\], expected a JSON object"),
        ("result.json", "null", r"result\.json holds null, expected a JSON object"),
        ("result.json", "{}", r"result\.json is not the result of a run"),
        ("metrics.jsonl", "7\n", r"metrics\.jsonl, line 1, is 7, expected a JSON object"),
        ("metrics.jsonl", "{}\n", r"metrics\.jsonl, line 1, is not a row of metrics"),
        ("noise.jsonl", '{}\n"é\n', r"noise\.jsonl, line 2, is not valid JSON"),
        ("noise.jsonl", "[" * 100_000 + "\n", r"noise\.jsonl, line 1, is not valid JSON"),
    ],
)
def test_files_of_another_form_are_named(name, text, message, tmp_path):
    spec().save(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(StorageError, match=message):
        RunRecord.load(tmp_path)


def test_runs_are_found_below_a_folder_once(tmp_path):
    for name in ("b/seed-0", "a/seed-1", "a/seed-0"):
        spec().save(tmp_path / name)
    found = find_runs([tmp_path, tmp_path / "a"])
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "a/seed-0",
        "a/seed-1",
        "b/seed-0",
    ]
    with pytest.raises(StorageError, match="does not exist"):
        find_runs([tmp_path / "c"])
