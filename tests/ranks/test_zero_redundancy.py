"""ZeroRedundancyOptimizer over muon_for's groups: its steps, and what it puts into a state itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist
from tests.ranks.launch import needs_gloo
from tests.ranks.twins import WARM, given
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import polarstep as ps

pytestmark = needs_gloo
LAYERS = 4  # the last is AdamW's
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "warm": {"polar": WARM, "nonfinite": "skip"},
    "rows": {"transform": ps.NormalizedRows()},
}


def started(options: dict[str, Any], *, alone: bool = False) -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(LAYERS))).double()
    for i, p in enumerate(model.parameters()):
        p.data = given("network", tuple(p.shape), i) / 3
    its = ps.muon_for(model, weight_decay=0.0, **options)
    if alone:
        return model, its
    return model, ZeroRedundancyOptimizer(its.param_groups, optimizer_class=ps.Muon, lr=0.02)


def go(model: nn.Module, optimizer: Any, steps: range, late: float | None = 1.0) -> None:
    """The last two layers are late: their gradient is missing, or zero where Muon has the layer."""
    for step in steps:
        for i, p in enumerate(model.parameters()):
            G = given(f"gradient {i}", (12, 12), step)
            p.grad = G if i < 2 or late else None
            if i == 2 and late == 0:
                p.grad = 0 * G
        optimizer.step()


def off(model: nn.Module, other: nn.Module) -> float:
    assert not any(p.isnan().any() for p in model.parameters())
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def beside_one_process(name: str) -> float:
    one, ours = started(OPTIONS[name], alone=True), started(OPTIONS[name])
    for each in (one, ours):
        go(*each, range(3))
    return off(ours[0], one[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_the_steps_of_one_process(name, two) -> None:
    assert max(two(beside_one_process, name)) < 1e-12


def resumed(name: str) -> float:
    """How far a run ends from one that was not saved and loaded."""
    known, first = started(OPTIONS[name]), started(OPTIONS[name])
    go(*known, range(2), late=0.0)
    go(*first, range(2), late=None)
    first[1].consolidate_state_dict(0)
    saved = [copy.deepcopy(first[1].state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    ours = started(OPTIONS[name])
    ours[0].load_state_dict(first[0].state_dict())
    ours[1].load_state_dict(saved[0])
    for each in (known, ours):
        go(*each, range(2, 5))
    return off(ours[0], known[0])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["warm", "rows"])
def test_layers_that_had_no_gradient_go_on_as_those_with_a_gradient_of_zero(
    ranks, name, ranks_of
) -> None:
    """Carries that stood for nothing made layers NaN, or stopped them."""
    assert ranks_of(ranks)(resumed, name) == [0.0] * ranks
