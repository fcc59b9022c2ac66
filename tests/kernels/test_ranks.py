"""Ranks that share matrices end where one process ends, by the kernels; ``local`` is fused."""

from __future__ import annotations

import pytest
import torch
from tests.kernels import ranks
from tests.ranks.launch import launched, needs_gloo

pytestmark = needs_gloo
RANKS = 2
# On a GPU M is rounded to bfloat16, which moves a sketch.
CLOSE = 0.05 if torch.cuda.is_available() else 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank ended with."""
    return launched(ranks.__name__, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ranks.MAPS)
@pytest.mark.parametrize("plan", [plan for _, plan in ranks.PLANS])
def test_the_trajectory_of_one_process(plan, name, found) -> None:
    assert max(there[plan, name]["off"] for there in found) < CLOSE


@pytest.mark.parametrize("name", ranks.MAPS)
@pytest.mark.parametrize("plan", [plan for _, plan in ranks.PLANS])
def test_routes_say_what_is_fused(plan, name, found) -> None:
    for there in found:
        fused = there[plan, name]["fused"]
        assert fused == (len(ranks.SHAPES) if plan == "local" else 0)
        assert all(("fused" in route) == (fused > 0) for route in there[plan, name]["routes"])
        assert all(f"; {plan} on {RANKS} ranks" in route for route in there[plan, name]["routes"])
