"""Devices for which torch has no fused AdamW and SGD, and a default device that parameters are not on.

The meta device stands for both.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tests.own_parts import sketched
from tests.routing.sample_models import mlp
from tests.spectra import gaussian
from torch import Tensor

import polarstep as ps
from polarstep import SGD, AdamW, muon_for
from polarstep import others as rules
from polarstep.certificate import Monitor


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
    monkeypatch.setattr(rules, "_has_fused", lambda p: False)
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model, others=others, nonfinite="skip")
    model(torch.ones(2, 8)).square().mean().backward()
    model[0].bias.grad[0] = torch.nan
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(before) - {"0.bias"}


@pytest.mark.parametrize(
    "polar",
    [
        ps.NewtonSchulz(3, "quintic"),
        ps.Exact(),
        sketched(ps.Gaussian()),
        sketched(ps.Kaczmarz()),
        sketched(ps.Warm()),
        ps.Deflated(sketched(ps.Gaussian())),
        ps.Deflated(sketched(ps.Gaussian()), ps.NewtonSchulz(1, "flat")),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"transform": ps.NormalizedRows(), "nonfinite": "skip"}])
def test_the_default_device_is_not_asked(polar: ps.PolarMap, options: dict[str, object]) -> None:
    """``torch.set_default_device("cuda")``: what a step makes for itself is where it needs it."""

    def end(*, elsewhere: bool) -> list[Tensor]:
        params = [torch.nn.Parameter(gaussian(*s, seed=1).float()) for s in ((16, 24), (24, 16))]
        gain = torch.nn.Parameter(torch.ones(64))
        groups = [{"params": params, "polar": polar}, {"params": [gain], "algorithm": "adamw"}]
        given = [[gaussian(*p.shape, seed=k).float() for p in (*params, gain)] for k in range(3)]
        with torch.device("meta") if elsewhere else nullcontext():
            optimizer = ps.Muon(groups, lr=0.1, **options)
            Monitor(optimizer, every=1, exact=False)
            for gradients in given:
                for p, G in zip((*params, gain), gradients, strict=True):
                    p.grad = G
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
        return [p.detach() for p in (*params, gain)]

    assert all(map(torch.equal, end(elsewhere=True), end(elsewhere=False)))
