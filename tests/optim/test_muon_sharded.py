"""Sharded parameters (DTensor, FSDP2) take the trajectory of whole ones; maps refuse them."""

from __future__ import annotations

import pytest
import torch
from tests.optim import sharded_worker as worker
from tests.ranks.launch import launched, needs_gloo

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What each rank ended with, case by case."""
    return launched(worker.__name__, worker.RANKS, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("name", worker.CASES)
def test_shards_take_the_trajectory_of_the_whole(name, sharded):
    ranks = [there[name] for there in sharded]
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
    for there in sharded:
        assert all("fused" not in there[name]["routes"] for name in worker.CASES)


def test_a_polar_map_refuses_shards(sharded):
    """Some of its operations would be lost on them without a word."""
    assert len(sharded[0]["refusals"]) == 5
    for message in sharded[0]["refusals"]:
        assert message.startswith("expected a whole matrix, got a DTensor; call M.full_tensor()")
