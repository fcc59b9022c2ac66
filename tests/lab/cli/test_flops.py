"""``polarstep flops``: its table, its JSON and its errors."""

import json

import pytest
from typer.testing import CliRunner

from polarstep_lab import flops
from polarstep_lab.cli import app

WORKLOADS = {"nanogpt": flops.NANOGPT, "cifar10": flops.CIFAR10}


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, ["flops", *arguments])


@pytest.mark.parametrize("name", WORKLOADS)
def test_json_is_one_object_of_unrounded_gflops_by_the_names_of_the_table(name):
    result = run(name, "--json")
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert printed == flops.gflops(WORKLOADS[name]) | flops.gflops(WORKLOADS[name], flops.OURS)
    assert list(printed) == [
        "AdamW",
        "SGD (Nesterov)",
        "Muon (Polyak)",
        "Rand Muon (Polyak)",
        "Muon (Nesterov)",
        "Rand Muon (Nes.-Gaussian)",
        "Rand Muon (Nes.-Kaczmarz)",
        "Deflated Muon (one flat step)",
        "Auto Muon, on a GPU",
    ]


@pytest.mark.parametrize("name", WORKLOADS)
def test_table_shows_our_figure_the_papers_and_the_difference(name):
    result = run(name)
    assert result.exit_code == 0
    for method, ours in flops.gflops(WORKLOADS[name]).items():
        (line,) = (row for row in result.stdout.splitlines() if row[1:].strip().startswith(method))
        assert f"{ours:.4f}" in line
        assert f"{flops.TABLE_2[name][method]:.4f}" in line
        assert line.rstrip(" │|").endswith("%")
    for method, ours in flops.gflops(WORKLOADS[name], flops.OURS).items():
        (line,) = (row for row in result.stdout.splitlines() if method in row)
        assert f"{ours:.4f}" in line
        assert "%" not in line
    assert "power iteration" not in result.stdout


def test_verbose_adds_the_items():
    result = run("cifar10", "--verbose")
    assert result.exit_code == 0
    for method in ("Rand Muon (Polyak)", *flops.OURS):
        for item in flops.ledger(flops.CIFAR10, method):
            assert item in result.stdout


def test_an_unknown_workload_is_named_with_the_known_ones():
    result = run("mnist")
    assert result.exit_code != 0
    message = " ".join(result.output.replace("│", " ").split())
    assert "workload 'mnist': expected one of nanogpt, cifar10" in message
    assert "Traceback" not in result.output
