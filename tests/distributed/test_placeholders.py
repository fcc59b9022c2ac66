"""Entries that stand for a state that does not exist yet are like those that training leaves."""

from __future__ import annotations

import pytest
import torch
from tests.spectra import gaussian

import polarstep as ps
from polarstep.distributed.unstarted import placeholders

STEPS = 65  # the peak of a momentum is first taken at step 64


@pytest.mark.parametrize("kept", [None, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (3, 64, 128)], ids=str)
def test_placeholders_are_like_the_state_after_training(kept, given, shape):
    p = torch.nn.Parameter(gaussian(*shape).to(given))
    optimizer = ps.Muon([p], polar=ps.NewtonSchulz(1), momentum_dtype=kept)
    (group,) = optimizer.param_groups
    expected = placeholders(group, p, {})
    p.grad = torch.ones_like(p)
    for _ in range(STEPS):
        optimizer.step()
    state = {name: X for name, X in optimizer.state[p].items() if isinstance(X, torch.Tensor)}
    assert {name: (X.dtype, X.shape) for name, X in state.items()} == {
        name: (X.dtype, X.shape) for name, X in expected.items() if isinstance(X, torch.Tensor)
    }
