"""A rate that is measured is the same number with every layout, and as in one process."""

from __future__ import annotations

import pytest
import torch
from tests.ranks import one_rate
from tests.ranks.launch import launched, needs_gloo

RANKS = 4


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank ended with."""
    return launched(one_rate.__name__, RANKS, tmp_path_factory.mktemp("rates"))


@needs_gloo
@pytest.mark.parametrize("way", one_rate.WAYS)
def test_rates_are_those_of_one_process(way, found):
    factors, params = one_rate.stepped(one_rate.model())
    assert len({factors["embedding"], factors["embedding-2"], factors["head"], 0.15, 1.0}) == 5
    for there in found:
        its_factors, its_params = there[way]
        assert its_factors == factors
        for name, p in params.items():
            torch.testing.assert_close(its_params[name], p, atol=1e-9, rtol=0)
