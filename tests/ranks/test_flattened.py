"""FSDP1 leaves no matrix whole: it is refused, unless it cuts nothing."""

from __future__ import annotations

import pytest
import torch
from tests.ranks import flattened as worker
from tests.ranks.launch import needs_gloo

import polarstep as ps

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def ranks(ranks_of, tmp_path_factory):
    return ranks_of(worker.RANKS).main(worker.__name__, tmp_path_factory.mktemp("flattened"))


@pytest.mark.parametrize(
    ("case", "start"),
    [
        ("some cut", "model is a FullyShardedDataParallel (FSDP1)"),
        ("inside", "model has at '0' a FullyShardedDataParallel (FSDP1)"),
        ("one vector", "model is a FullyShardedDataParallel (FSDP1)"),
        ("parameters", "parameter 0 has shape ("),
        ("wrapped later", ""),
    ],
)
def test_fsdp1_is_refused_by_name_with_the_remedy(case, start, ranks):
    """It had one matrix left for Muon and sent all others to AdamW, as vectors, without a word."""
    for there in ranks:
        assert there[case].startswith(start)
        assert "(FSDP1)" in there[case]
        assert "expected FSDP2, torch.distributed.fsdp.fully_shard(model)" in there[case]
        assert "NO_SHARD" in there[case]


def test_fsdp1_that_cuts_nothing_takes_the_trajectory_of_the_plain_model(ranks):
    plain = worker.network()
    worker.train(plain, ps.muon_for(plain))
    for there in ranks:
        for p, start, q in zip(
            plain.parameters(), worker.network().parameters(), there["whole"], strict=True
        ):
            assert (p - start).abs().max() > 1e-4
            torch.testing.assert_close(q, p.detach(), atol=1e-6, rtol=0)
