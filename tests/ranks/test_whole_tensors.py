"""A rank takes its part of a carry that was made whole, as another plan had left it in other parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from polarstep.ranks import local_shard as local


@pytest.mark.parametrize("each", [1, 2])
def test_the_rows_of_its_own_matrices(each, monkeypatch) -> None:
    """Six matrices on three ranks, two each; the state has ``each`` rows for a matrix."""
    p = torch.zeros(6, 4, 8)
    whole = torch.arange(6 * each)
    parts = []
    for rank in range(3):
        boxes = [((2 * r, 2 * r + 2), (0, 4), (0, 8)) for r in range(3)]
        layout = SimpleNamespace(me=rank, boxes=boxes)
        monkeypatch.setattr(local.Layout, "of", lambda p, layout=layout: layout)
        parts.append(local._part_of(whole, p, batch=True))
    assert [len(part) for part in parts] == 3 * [2 * each]
    assert torch.equal(torch.cat(parts), whole)
    assert local._part_of(whole, p, batch=False) is whole
