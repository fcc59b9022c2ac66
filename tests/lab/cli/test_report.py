"""``polarstep report`` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.lab.experiments.synthetic import write_run
from typer.testing import CliRunner

from polarstep_lab.cli import app


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_it_ends_with_the_path_of_the_page(invoke, tmp_path):
    write_run(tmp_path / "runs" / "a")
    result = invoke("runs", "--out", "page")
    assert result.exit_code == 0
    assert result.stdout.strip() == "Report: page/index.html"
    assert (tmp_path / "page" / "index.html").read_text().startswith("<!DOCTYPE html>")


def test_several_directories_make_one_report(invoke, tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b" / "deep" / "inside", seed=1)
    assert invoke("a", "b").exit_code == 0
    assert (
        "| AdamW | 30.00 ± 0.00 | ± 0.00 | 2 |" in (tmp_path / "report" / "summary.md").read_text()
    )


@pytest.mark.parametrize("value", ["x", 7, -1.5, None, [], {}, True], ids=str)
def test_one_bad_run_does_not_cost_the_report_of_the_others(invoke, tmp_path, value):
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"good-{seed}", seed=seed)
    fields = {}
    for file in ("config.json", "result.json", "environment.json"):
        for key in json.loads((tmp_path / "runs" / "good-0" / file).read_text()):
            directory = write_run(tmp_path / "runs" / f"{file}-{key}", seed=2 + len(fields))
            content = json.loads((directory / file).read_text())
            (directory / file).write_text(json.dumps(content | {key: value}))
            fields[directory.name] = key
    assert {"metric", "benchmark", "started"} <= set(fields.values())
    result = invoke("runs", "--out", "page")
    assert result.exit_code == 0, result.stderr
    table = (tmp_path / "page" / "runs.csv").read_text()
    assert "runs/good-0," in table
    assert "runs/good-1," in table
    notices = (tmp_path / "page" / "summary.md").read_text()
    assert "metric is" in notices
    assert "result.json-metric is left out" in notices


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "no run directories in runs"),
        (lambda path: None, "runs does not exist"),
        (lambda path: write_run(path / "a", status="diverged"), "none of the 1 runs has finished"),
    ],
)
def test_nothing_to_report_is_an_error(invoke, tmp_path, make, message):
    make(tmp_path / "runs")
    result = invoke("runs", "--out", "page")
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "page").exists()


def test_a_folder_that_is_not_a_report_is_not_overwritten(invoke, tmp_path):
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("mine")
    result = invoke("runs", "--out", "page")
    assert result.exit_code == 1
    assert "choose another --out" in result.stderr
    assert (tmp_path / "page" / "index.html").read_text() == "mine"


def test_the_name_of_a_page_is_no_folder(invoke, tmp_path):
    write_run(tmp_path / "runs" / "a")
    result = invoke("runs", "--out", "today/page.html")
    assert result.exit_code == 1
    assert "has the name of a page" in result.stderr
    assert "--out today/page, in which the page is index.html" in result.stderr
    assert not (tmp_path / "today").exists()


@pytest.mark.parametrize("package", ["pandas", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(invoke, monkeypatch, package):
    for name in [*sys.modules]:
        if name.startswith("polarstep_lab.report") or name.split(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = invoke("runs")
    assert result.exit_code == 1
    assert f"a report needs '{package}', which is not installed" in result.stderr
    assert "pip install 'polarstep[experiments]'" in result.stderr


def test_the_command_line_imports_neither_pandas_nor_matplotlib():
    code = "import sys, polarstep_lab.cli; print({'pandas', 'matplotlib'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


@pytest.mark.parametrize("out", ["file", "file/below", "file/far/below"])
@pytest.mark.parametrize("command", ["report", "pack"])
def test_an_out_at_or_below_a_file_is_refused(command, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "file").write_text("text")
    result = CliRunner().invoke(app, [command, "runs", "--out", out])
    assert result.exit_code == 1
    assert "file is a file" in result.stderr
    assert "--out" in result.stderr
    assert "Errno" not in result.stderr
    assert (tmp_path / "file").read_text() == "text"
