"""Devices for which torch has no fused AdamW and SGD: the meta device stands for them."""

from __future__ import annotations

import pytest
import torch
from tests.optim.sample_models import mlp

from polarstep import SGD, AdamW, muon_for
from polarstep.optim import elementwise


@pytest.mark.parametrize("others", [AdamW(), SGD()])
def test_a_step_on_the_meta_device(others):
    model = mlp(8, 8, 8, 2).to("meta")
    optimizer = muon_for(model, others=others)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8, device="meta")).square().mean().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    counters = [state["step"].device.type for state in optimizer.state.values() if "step" in state]
    assert counters == ["cpu"] * (4 if isinstance(others, AdamW) else 0)  # as torch has them


@pytest.mark.parametrize("others", [AdamW(), SGD()])
def test_skipping_without_a_fused_rule(others, monkeypatch):
    monkeypatch.setattr(elementwise, "_has_fused", lambda p: False)
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model, others=others, nonfinite="skip")
    model(torch.ones(2, 8)).square().mean().backward()
    model[0].bias.grad[0] = torch.nan
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(before) - {"0.bias"}
