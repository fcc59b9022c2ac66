"""Archives: nothing is lost, nothing of the machine stays, and nobody can tell them from directories."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil

import pytest
from tests.lab.experiments.synthetic import write_comparison, write_run
from typer.testing import CliRunner

from polarstep_lab.cli import app
from polarstep_lab.records import flat, read
from polarstep_lab.records.archive import ARCHIVE, write_archive
from polarstep_lab.records.pack import _stripped, pack
from polarstep_lab.records.record import Ablation, RunRecord, find_runs, read_files
from polarstep_lab.report import report_files
from polarstep_lab.storage import StorageError, read_json, write_json


@pytest.fixture
def runs(tmp_path):
    """Runs that ended in every way, monitored ones and an ablation among them."""
    root = tmp_path / "runs" / "suite"
    write_run(root / "a" / "seed-0", gamma=True)
    write_run(root / "a" / "seed-1", seed=1, final=31.7)
    write_run(root / "b" / "seed-0", method="Muon (Nesterov)", status="diverged")
    write_run(root / "b" / "seed-1", method="Muon (Nesterov)", seed=1, status=None)
    write_run(root / "c" / "seed-0", method="SGD (Nesterov)", status="failed")
    write_run(root / "rank-16", ablation=Ablation("rank", 16))
    return root


def contents(paths, root):
    return {
        path.relative_to(root).as_posix(): dict(sorted(read_files(path).items())) for path in paths
    }


def test_every_file_of_every_run_is_read_back_as_it_was(runs, tmp_path):
    (runs / "a" / "seed-0" / "noise.jsonl").write_text(
        '{"step": 1, "alpha": 1.5, "where": ["a", {"b": null}]}\n'
        '{"step": 2}\n{"alpha": 0.1, "step": 3}\n'
    )
    before = contents(find_runs([runs]), runs)
    archive = pack([runs], tmp_path / "suite").archive
    found = find_runs([tmp_path / "suite"])
    assert contents(found, archive) == before
    # Dictionaries compare equal in any order; files do not, and a page shows what it reads.
    assert json.dumps(contents(found, archive)) == json.dumps(before)
    assert RunRecord.load(archive / "a/seed-0").logs["noise"][1] == {"step": 2}
    for path in found:
        directory = runs / path.relative_to(archive)
        loaded, original = RunRecord.load(path), RunRecord.load(directory)
        assert (loaded.spec, loaded.environment, loaded.logs, loaded.status) == (
            original.spec,
            original.environment,
            original.logs,
            original.status,
        )


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity"])
def test_a_number_that_is_not_finite_is_packed_as_nothing(number, runs, tmp_path):
    with (runs / "a" / "seed-0" / "metrics.jsonl").open("a") as file:
        file.write(
            f'{{"step": 200, "kind": "train", "loss": {number}, "lr": 0.1, "seconds": 9.0}}\n'
        )
    archive = pack([runs], tmp_path / "suite").archive
    last = RunRecord.load(archive / "a/seed-0").metrics[-1]
    assert (last.step, last.kind) == (200, "train")
    assert math.isnan(last.loss)


@pytest.mark.rendered
def test_the_report_is_that_of_the_directories_bit_for_bit(runs, tmp_path):
    pack([runs], tmp_path / "suite")
    files = report_files([runs])
    assert report_files([tmp_path / "suite"]) == files
    assert report_files([tmp_path / "suite" / ARCHIVE]) == files


@pytest.mark.parametrize(
    "values",
    [
        [1 / 3, 0.1, 2.0, -0.0, 1e300, 5e-324],
        [None, 3, True, {"a": [1]}, [1.0], "x\u2028y"],
    ],
)
def test_no_digit_and_no_type_is_lost(values, tmp_path):
    rows = [{"value": value} for value in values]
    write_archive(tmp_path / ARCHIVE, {"r": {"log.jsonl": rows}})
    ((path,),) = [find_runs([tmp_path])]
    back = read_files(path)["log.jsonl"]
    assert repr(back) == repr(rows)


def test_the_file_depends_on_the_runs_alone(runs, tmp_path):
    at_once = pack([runs], tmp_path / "once" / "suite").archive
    for folder in ("rank-16", "c", "a", "b"):  # another order, in parts, and twice
        target = tmp_path / "part" / folder
        shutil.copytree(runs / folder, target)
        pack([tmp_path / "part"], tmp_path / "parts" / "suite")
        shutil.rmtree(tmp_path / "part")
    again = pack([runs], tmp_path / "parts" / "suite")
    assert again.archive.read_bytes() == at_once.read_bytes()
    assert (again.runs, again.added, again.replaced, again.kept) == (6, 0, 0, 0)
    through = pack(
        [tmp_path / "once" / "suite"], tmp_path / "copy" / "suite"
    ).archive  # archives can be packed, too
    assert through.read_bytes() == at_once.read_bytes()


def test_a_run_that_has_ended_is_not_replaced_by_one_that_has_not(runs, tmp_path):
    archive = pack([runs], tmp_path / "suite").archive
    before = archive.read_bytes()
    (runs / "a" / "seed-0" / "result.json").unlink()
    (runs / "b" / "seed-0" / "result.json").unlink()
    assert pack([runs], tmp_path / "suite").kept == 2
    assert archive.read_bytes() == before
    result = read_json(runs / "a" / "seed-1" / "result.json")
    for name in ("result.json", "metrics.jsonl"):  # unfinished until now
        shutil.copy(runs / "a" / "seed-1" / name, runs / "b" / "seed-1" / name)
    write_json(runs / "a" / "seed-1" / "result.json", result | {"value": 29.5})  # run again
    assert pack([runs], tmp_path / "suite", force=True).replaced == 2
    assert RunRecord.load(archive / "b/seed-1").status == "finished"
    assert RunRecord.load(archive / "a/seed-1").result.value == 29.5


def test_a_run_made_again_for_its_times_does_not_replace_a_metric(tmp_path):
    write_run(tmp_path / "first" / "a", final=30.0, optimizer_ms=2.0)
    write_run(tmp_path / "faster" / "a", final=30.0, optimizer_ms=1.0)
    write_run(tmp_path / "other" / "a", final=31.0, optimizer_ms=1.0)
    archive = pack([tmp_path / "first"], tmp_path / "out").archive
    assert pack([tmp_path / "faster"], tmp_path / "out").replaced == 1  # the same metric
    with pytest.raises(StorageError, match=r"with the metric 30\.0, this run has 31\.0.*--force"):
        pack([tmp_path / "other"], tmp_path / "out")
    assert RunRecord.load(archive / "a").result.value == 30.0
    pack([tmp_path / "other"], tmp_path / "out", force=True)
    assert RunRecord.load(archive / "a").result.value == 31.0


def test_other_settings_under_the_same_name_need_force(runs, tmp_path):
    archive = pack([runs], tmp_path / "suite").archive
    before = archive.read_bytes()
    shutil.rmtree(runs / "rank-16")
    write_run(runs / "rank-16", ablation=Ablation("rank", 17))
    with pytest.raises(StorageError, match=r"holds rank-16 with other settings.*--force"):
        pack([runs], tmp_path / "suite")
    assert archive.read_bytes() == before
    assert pack([runs], tmp_path / "suite", force=True).replaced == 1
    assert RunRecord.load(archive / "rank-16").spec.ablation == Ablation("rank", 17)


def test_two_folders_with_runs_of_one_name_are_refused(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "other")
    with pytest.raises(StorageError, match="would both be a/seed-0"):
        pack([runs, tmp_path / "other"], tmp_path / "suite")
    assert not (tmp_path / "suite").exists()
    assert pack([runs, runs], tmp_path / "suite").runs == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/tmp/data-3/wiki_train_*.bin", "wiki_train_*.bin"),
        ("/data", "data"),
        ("/a/b/", "b"),
        ("~/data/x", "x"),
        (r"C:\Users\me\data", "data"),
        ('--set \'data.train=["/tmp/d/a_[0-9]*.bin", "/tmp/d/b.bin"]\'',
         '--set \'data.train=["a_[0-9]*.bin", "b.bin"]\''),
        ("OSError: '/mnt/x/y.bin' is gone", "OSError: 'y.bin' is gone"),
        ("data/*_train_*.bin", "data/*_train_*.bin"),
        ("1/2 or 3 / 4, and/or", "1/2 or 3 / 4, and/or"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("../data", "../data"),
    ],
)  # fmt: skip
def test_absolute_paths_become_their_last_part(text, expected):
    assert _stripped(text) == expected


def test_nothing_of_the_machine_stays(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "secret-host")
    folder = runs / "a" / "seed-0"
    config = read_json(folder / "config.json")
    config["overrides"] = {"data.root": str(tmp_path / "cifar")}
    config["config"] |= {"data": {"root": str(tmp_path / "cifar")}}
    config["command"] += f" --set data.root={tmp_path / 'cifar'}"
    write_json(folder / "config.json", config)
    result = read_json(folder / "result.json")
    write_json(folder / "result.json", result | {"message": f"secret-host: {tmp_path}/x is full"})
    archive = pack([runs], tmp_path / "suite").archive
    text = gzip.decompress(archive.read_bytes()).decode()
    assert str(tmp_path) not in text
    assert "secret-host" not in text
    loaded = RunRecord.load(archive / "a/seed-0")
    assert loaded.spec.config["data"] == {"root": "cifar"}
    assert loaded.spec.command.endswith(" --set data.root=cifar")
    assert loaded.result.message == "host: x is full"


def test_damage_is_named(runs, tmp_path):
    archive = pack([runs], tmp_path / "suite").archive
    with pytest.raises(StorageError, match="holds no run 'a/seed-9'"):
        RunRecord.load(archive / "a/seed-9")
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StorageError, match="cannot be read as records"):
        find_runs([archive])
    archive.write_bytes(b"no archive")
    with pytest.raises(StorageError, match="cannot be read as records"):
        find_runs([archive])
    archive.write_bytes(gzip.compress(b'{"some": "thing"}\n'))
    with pytest.raises(StorageError, match="line 1, is no record: expected an object with kind"):
        find_runs([archive])
    archive.write_bytes(
        gzip.compress(gzip.decompress(whole).replace(b'"config":{"r', b'"other":{"r'))
    )
    with pytest.raises(StorageError, match=r"seed-0 has no config\.json"):
        RunRecord.load(archive / "a/seed-0")
    with pytest.raises(StorageError, match=r"config\.json is not the config of a run"):
        pack([runs], tmp_path / "suite")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="no runs in"):
        pack([tmp_path / "empty"], tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", '{"recipe": "nanogpt-toy"}', "is not the config of a run"),
        ("environment.json", "[1, 2]", r"holds \[1, 2\], expected a JSON object"),
        ("result.json", "[1, 2]", r"holds \[1, 2\], expected a JSON object"),
        ("metrics.jsonl", "", "ends without a step"),
    ],
)
def test_a_damaged_run_is_not_packed(name, content, message, runs, tmp_path):
    damaged = runs / "a" / "seed-1" / name
    damaged.write_text(content)
    with pytest.raises(StorageError, match=rf"{re.escape(str(damaged))} {message}"):
        pack([runs], tmp_path / "suite")
    assert not (tmp_path / "suite").exists()


def test_an_archive_is_read_once(tmp_path, monkeypatch):
    write_comparison(tmp_path / "runs", "cifar10", "cifar10", seeds=2)
    archive = pack([tmp_path / "runs"], tmp_path / "suite").archive
    opened = []
    monkeypatch.setattr(
        "polarstep_lab.records.archive.read", lambda path: opened.append(path) or read(path)
    )
    archive.touch()  # another time of change: whatever was read before does not count
    assert len([RunRecord.load(path) for path in find_runs([archive])]) == 14
    assert opened == [archive]


def test_other_lines_of_a_study_stay_where_runs_are_packed(runs, tmp_path):
    """Of a file that a machine appended to, each line once."""
    line = {"kind": "time", "study": "suite", "part": "h200", "variant": "auto"}
    line |= {"config": {"width": 768}, "environment": {}, "result": {"ms": 1.5}}
    told = tmp_path / "times.jsonl"
    told.write_text((json.dumps(line) + "\n") * 2)
    first = pack([told], tmp_path / "suite")
    assert (first.runs, first.added) == (1, 1)
    pack([runs], tmp_path / "suite")
    assert pack([told], tmp_path / "suite").added == 0
    lines = read(tmp_path / "suite")
    assert [each for each in lines if each["kind"] == "time"] == [line]
    assert len(lines) == 7
    assert flat(line) == {"variant": "auto", "width": 768, "ms": 1.5}
    assert len(find_runs([tmp_path / "suite"])) == 6


def test_a_part_of_an_archive_can_be_asked_for(runs, tmp_path):
    archive = pack([runs], tmp_path / "suite").archive
    assert find_runs([archive / "a"]) == [archive / "a/seed-0", archive / "a/seed-1"]
    assert find_runs([archive / "a/seed-1"]) == [archive / "a/seed-1"]


def test_the_commands_take_archives(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke = CliRunner().invoke
    done = invoke(app, ["pack", "runs/suite", "--out", "results/suite"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("results/suite/records.jsonl.gz: 6 runs, 0.0")
    assert "(6 new, 0 replaced)" in done.stdout
    listed = invoke(app, ["list", "results/suite"], env={"COLUMNS": "160"})
    assert "records.jsonl.gz/b/seed-0" in listed.stdout
    assert "diverged" in listed.stdout
    assert invoke(app, ["report", "results/suite", "--out", "page"]).exit_code == 0
    assert "30.85" in (tmp_path / "page" / "summary.md").read_text()
    missing = invoke(app, ["pack", "nowhere", "--out", "results/suite"])
    assert missing.exit_code == 1
    assert "nowhere does not exist" in missing.stderr


def test_an_archive_in_a_run_directory_is_no_log_of_the_run(tmp_path):
    """``polarstep pack RUN --out RUN``: packed again it would hold itself, and --force remove it."""
    run = write_run(tmp_path / "run")
    before = read_files(run)
    archive = pack([run], run).archive
    assert read_files(run) == before
    content = archive.read_bytes()
    pack([run], run)
    assert archive.read_bytes() == content


def test_runs_are_packed_again_into_the_folder_that_holds_them(tmp_path):
    write_run(tmp_path / "a")
    assert pack([tmp_path], tmp_path).runs == 1
    write_run(tmp_path / "b", seed=1)
    again = pack([tmp_path], tmp_path)
    assert (again.runs, again.added, again.replaced) == (2, 1, 0)
