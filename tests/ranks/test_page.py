"""The code of docs/distributed.md runs, and ranks agree."""

from __future__ import annotations

import torch
from tests.ranks import page
from tests.ranks.launch import needs_gloo


@needs_gloo
def test_the_code_runs_and_ranks_agree(ranks_of, tmp_path) -> None:
    first, second = ranks_of(2).main(page.__name__, tmp_path)
    ddp, fsdp, hsdp, tp, resumed = first["routes"]
    assert "on 2 ranks" in ddp
    assert "LowRank" in fsdp
    assert "owner on 2 ranks" in fsdp
    assert "on 2 ranks" in hsdp
    assert "owner on 2 ranks" in tp
    assert "Warm" in resumed
    for here, there in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(here, there)
    assert {"Muon", "ZeroRedundancyOptimizer"} <= set(first["lines"])
    torch.testing.assert_close(first["resumed"], first["went on"], atol=1e-6, rtol=0)
