"""The code of docs/distributed.md runs, and its tables say what the ledger says."""

from __future__ import annotations

import re

import pytest
import torch
from tests.distributed import page
from tests.distributed.launch import launched, needs_gloo

from polarstep import LowRank, NewtonSchulz
from polarstep.distributed.ledger import bytes_received


@needs_gloo
def test_the_code_runs_and_ranks_agree(tmp_path) -> None:
    first, second = launched(page.__name__, 2, tmp_path)
    ddp, fsdp, tp, resumed = first["routes"]
    assert "on 2 ranks" in ddp
    assert "LowRank" in fsdp
    assert re.search(r"(sharded|owner) on 2 ranks", fsdp)
    assert "owner on 2 ranks" in tp
    assert "Warm" in resumed
    for here, there in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(here, there)
    torch.testing.assert_close(first["resumed"], first["went on"], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("row", "polar"),
    [
        ("full space", NewtonSchulz(5, "polar-express")),
        ("LowRank(64, 8, power=0)", LowRank(64, 8, power=0)),
    ],
)
def test_the_table_of_megabytes(row, polar) -> None:
    """The cheapest plan of each shape, as test_ledger counts it."""
    text = page.PAGE.read_text(encoding="utf-8")
    found = re.search(rf"\| {re.escape(row)} \|(.*)\|\n", text)
    assert found is not None
    told = [float(value) for value in re.findall(r"([\d.]+) MB", found.group(1))]
    shapes = ((8, 512, 512), (4, 2048, 512), (4, 512, 2048))
    plans = ["owner"] if row == "full space" else ["owner", "sharded"]
    # A CPU makes sums and bases in float32, so a basis on shards does not travel in bfloat16.
    costs = [
        min(
            bytes_received(plan, m, n, count, 4, polar, itemsize=2 if plan == "owner" else 4)
            for plan in plans
        )
        for count, m, n in shapes
    ]
    assert told == [pytest.approx(cost / 2**20, abs=0.006) for cost in costs]
