"""The ledger of communication: formulas written out by hand, meshes, the chosen plans, the command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from polarstep_lab.cli import app
from polarstep_lab.flops import CIFAR10, EIGHT_B, NANOGPT, communication
from polarstep_lab.flops.communication import MESHES, RankCost, costs, maps_of, mesh_of, shares
from polarstep_lab.flops.workload import Workload

FULL, LOW_RANK = maps_of(EIGHT_B).values()
NUMBERS = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)


@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_full_space_on_shards_costs_what_the_formulas_say(ranks: int) -> None:
    found = costs(EIGHT_B, FULL, mesh_of("fsdp", ranks))
    assert found.keys() == {"owner", "gather", "chosen"}
    assert found["gather"].nbytes == pytest.approx(4 * (ranks - 1) / ranks * NUMBERS)
    assert found["owner"].nbytes == pytest.approx(2 * 2 * (ranks - 1) / ranks**2 * NUMBERS)
    assert found["chosen"] == found["owner"]


def test_at_eight_ranks_gathering_all_of_8b_takes_24_gigabytes() -> None:
    found = costs(EIGHT_B, LOW_RANK, mesh_of("fsdp", 8))
    assert found["gather"].nbytes / 1e9 == pytest.approx(24.4, abs=0.05)
    assert found["chosen"].nbytes < 0.12 * found["gather"].nbytes
    assert found["chosen"].flops < 1.15 / 8 * found["gather"].flops


def test_matrices_in_parts_go_to_owners() -> None:
    for ranks in (2, 8, 64, 1024):
        found = shares(EIGHT_B, LOW_RANK, mesh_of("fsdp", ranks))
        assert {share.chosen for share in found} == {"owner"}


def test_the_copies_of_hsdp() -> None:
    for polar in (FULL, LOW_RANK):
        assert costs(EIGHT_B, polar, mesh_of("hsdp", 8)) == costs(
            EIGHT_B, polar, mesh_of("fsdp", 8)
        )
    mesh = mesh_of("hsdp", 32)
    assert (mesh.ranks, mesh.shards) == (32, 8)
    dense = costs(EIGHT_B, FULL, mesh)["owner"]
    there, back = 7 / 8 / 32, 31 / 32 / 8
    assert dense.nbytes == pytest.approx(2 * (there + back) * NUMBERS)
    assert mesh_of("hsdp", 12).shards == 6


def test_whole_copies_share_the_work_or_repeat_it() -> None:
    found = costs(EIGHT_B, FULL, mesh_of("ddp", 8))
    assert found.keys() == {"local", "replicated", "chosen"}
    assert found["local"] == RankCost(0.0, costs(EIGHT_B, FULL, mesh_of("ddp", 1))["local"].flops)
    assert found["replicated"].flops == pytest.approx(found["local"].flops / 8)
    assert found["replicated"].nbytes == pytest.approx(2 * 7 / 8 * NUMBERS)


@pytest.mark.parametrize("workload", [NANOGPT, CIFAR10, EIGHT_B], ids=lambda each: each.name)
def test_the_stored_matrices_are_those_of_the_workload(workload: Workload) -> None:
    stored = communication._STORED[workload.name]
    ours: dict[tuple[int, ...], int] = {}
    for its in stored:
        key = tuple(sorted((its.m, its.n)))
        ours[key] = ours.get(key, 0) + its.count
    theirs: dict[tuple[int, ...], int] = {}
    for shape, count in workload.matrices:
        key = tuple(sorted(shape))
        theirs[key] = theirs.get(key, 0) + count
    assert ours == theirs


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "140", "TERM": "dumb"}).invoke(app, ["flops", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("mesh", MESHES)
def test_the_command_prints_every_plan_of_both_maps(mesh: str) -> None:
    printed = run("8b", "--ranks", "8", "--mesh", mesh)
    for plan in ("local", "owner", "replicated", "gather", "chosen"):
        assert printed.count(plan) >= 2
    plain = json.loads(run("8b", "--ranks", "8", "--mesh", mesh, "--json"))
    for name, polar in maps_of(EIGHT_B).items():
        found = costs(EIGHT_B, polar, mesh_of(mesh, 8))
        assert plain[name] == {plan: vars(cost) for plan, cost in found.items()}
        assert f"{found['chosen'].nbytes / 1e6:,.2f}" in printed


def test_an_8b_model_has_no_column_in_table_2() -> None:
    assert "AdamW" in run("8b")
