"""Sharded parameters (DTensor, FSDP2) take the trajectory of whole ones; maps refuse them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from tests.optim import sharded_worker as worker
from tests.processes import PATIENCE

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What each rank ended with, case by case."""
    folder = tmp_path_factory.mktemp("sharded")
    ranks = [
        subprocess.Popen(
            [sys.executable, worker.__file__, str(rank), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TRITON_INTERPRET": "1"},  # kernels would run if they were let
        )
        for rank in range(worker.RANKS)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=PATIENCE)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    cases = {
        name: [torch.load(folder / f"{number}.{rank}.pt") for rank in range(worker.RANKS)]
        for number, name in enumerate(worker.CASES)
    }
    return cases, torch.load(folder / "refusals.0.pt")


@pytest.mark.parametrize("name", worker.CASES)
def test_shards_take_the_trajectory_of_the_whole(name, sharded):
    ranks = sharded[0][name]
    model = worker.network()
    optimizer, rows = worker.train(model, name)
    bases = [v for s in optimizer.state.values() for k, v in s.items() if "basis" in k]
    for there in ranks:
        for p, start, q in zip(
            model.parameters(), worker.network().parameters(), there["params"], strict=True
        ):
            assert (p - start).abs().max() > 1e-4
            torch.testing.assert_close(q, p.detach(), atol=1e-5, rtol=0)
        for here, basis in zip(bases, there["bases"], strict=True):
            torch.testing.assert_close(basis, here, atol=1e-4, rtol=0)
        assert bool(rows) == (name == worker.WATCHED)
        for here, row in zip(rows, there["rows"], strict=True):
            assert row.keys() == here.keys()
            for column, value in here.items():
                if isinstance(value, float):
                    value = pytest.approx(value, rel=1e-3, abs=1e-4)
                assert row[column] == value, column
    first, second = (there["shards"] for there in ranks)
    assert [a + b for a, b in zip(first, second, strict=True)] == [
        p.shape[0] for p in model.parameters()
    ]
    assert all(a > 0 for a in (*first, *second))


def test_shards_are_not_given_to_the_kernels(sharded):
    for ranks in sharded[0].values():
        assert all("fused" not in there["routes"] for there in ranks)


def test_a_polar_map_refuses_shards(sharded):
    """Some of its operations would be lost on them without a word."""
    assert len(sharded[1]) == 5
    for message in sharded[1]:
        assert message.startswith("expected a whole matrix, got a DTensor; call M.full_tensor()")
