"""``shape_scale="rms"`` in the fused step; tests/kernels/test_rounding.py has its length."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.spectra import gaussian, with_singular_values

import polarstep as ps
from polarstep.maps import base, deflated

INNER = ps.NewtonSchulz(4, "polar-express-sketch")
HEAD = ps.LowRank(8, 8, inner=INNER, always_sketch=True)
LOW_RANK = {
    "gaussian": HEAD,
    "warm, without Z": replace(HEAD, sketch=ps.Warm()),
    "warm, with Z": replace(HEAD, sketch=ps.Warm(), inner=ps.NewtonSchulz(7, "quintic")),
    "rest lifted": ps.Deflated(HEAD, ps.NewtonSchulz(1, "flat")),
}


@pytest.mark.parametrize("spectrum", ["rank one", "two of 1000"])
@pytest.mark.parametrize("polar", LOW_RANK.values(), ids=LOW_RANK.keys())
def test_fused_steps_are_bounded_where_few_directions_are_there(
    device: torch.device, polar: ps.PolarMap, spectrum: str
) -> None:
    """0.2·√(mn)·T/max(‖T‖_F, √ℓ/3) with ℓ = 16; T is the fused step without a scale."""
    sigma = (torch.arange(48) == 0).double()
    if spectrum == "two of 1000":
        sigma = torch.where(torch.arange(48) < 2, 1000.0, 1.0).double()
    gradients = [with_singular_values(sigma, 48, 64, seed=i).float() for i in range(2)]
    found = {}
    for scale in ("rms", "none"):
        params = [torch.nn.Parameter(torch.zeros(48, 64, device=device)) for _ in gradients]
        optimizer = ps.Muon(params, lr=1.0, polar=polar, shape_scale=scale, fused=True)
        before: list[torch.Tensor] = []
        for _ in range(3):
            before = [p.detach().clone() for p in params]
            for p, G in zip(params, gradients, strict=True):
                p.grad = G.to(device)
            optimizer.step()
        changes = zip(params, before, strict=True)
        found[scale] = [float((p.detach() - old).double().norm()) for p, old in changes]
    assert optimizer._replayed.buckets
    for step, norm in zip(found["rms"], found["none"], strict=True):
        most = 0.6 * math.sqrt(48 * 64 / 16)
        assert step / norm <= most * (1 + 1e-3)
        if isinstance(polar, ps.LowRank):
            assert step == pytest.approx(min(0.2 * math.sqrt(48 * 64), most * norm), rel=1e-2)


@pytest.mark.parametrize("polar", [HEAD, LOW_RANK["rest lifted"]])
def test_other_scales_ask_for_no_norm(
    device: torch.device, polar: ps.PolarMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(base.Lift, "squared_norm", refuse)
    for module in (base, deflated):
        monkeypatch.setattr(module, "counted_norm", refuse)
    p = torch.nn.Parameter(torch.zeros(48, 64, device=device))
    p.grad = gaussian(48, 64).float().to(device)
    ps.Muon([p], polar=polar, shape_scale="spectral", fused=True).step()
    with pytest.raises(AssertionError, match="asked"):
        ps.Muon([p], polar=polar, shape_scale="rms", fused=True).step()
