"""``shape_scale="rms"`` in the fused step: it takes the steps of the plain one, with every map."""

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
MAPS = {
    "full space": ps.NewtonSchulz(5, "polar-express"),
    "low rank": HEAD,
    "one step": ps.Deflated(HEAD, ps.NewtonSchulz(1, "flat")),
    "auto": ps.Auto(),
}


@pytest.mark.parametrize("polar", MAPS.values(), ids=MAPS.keys())
def test_fused_updates_have_the_rms_of_adamw(device: torch.device, polar: ps.PolarMap) -> None:
    """Beside a parameter of the same shape whose group has no scale."""
    moved = []
    for fused in (True, False):
        params = [torch.nn.Parameter(torch.zeros(48, 64, device=device)) for _ in range(3)]
        groups = [{"params": params[:2], "shape_scale": "rms"}, {"params": params[2:]}]
        optimizer = ps.Muon(groups, lr=1.0, polar=polar, shape_scale="none", fused=fused)
        for step in range(4):
            before = [p.detach().clone() for p in params]
            for i, p in enumerate(params):
                p.grad = gaussian(48, 64, seed=3 * step + i).float().to(device)
            optimizer.step()
        assert bool(optimizer._replayed.buckets) == fused
        changes = [p.detach() - old for p, old in zip(params, before, strict=True)]
        moved.append([change.square().mean().sqrt().item() for change in changes])
    assert moved[0] == pytest.approx(moved[1], rel=0.02)
    assert moved[0][:2] == pytest.approx([0.2] * 2, rel=0.15)
    assert moved[0][2] < 0.15


LOW_RANK = {
    "gaussian": HEAD,
    "warm, without Z": replace(HEAD, sketch=ps.Warm()),
    "warm, with Z": replace(HEAD, sketch=ps.Warm(), inner=ps.NewtonSchulz(7, "quintic")),
    "rest lifted": ps.Deflated(HEAD, ps.NewtonSchulz(1, "flat")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("polar", LOW_RANK.values(), ids=LOW_RANK.keys())
def test_fused_updates_keep_it_where_few_directions_tower(
    device: torch.device, polar: ps.PolarMap, dtype: torch.dtype
) -> None:
    """Three times as the first, by graphs after that, of matrices with and without such directions."""
    shapes = [(48, 64), (64, 48), (48, 64), (3, 48, 96)]
    params = [torch.nn.Parameter(torch.zeros(s, device=device, dtype=dtype)) for s in shapes]
    optimizer = ps.Muon(params, lr=1.0, polar=polar, shape_scale="rms", fused=True)
    for step in range(5):
        before = [p.detach().clone() for p in params]
        for i, p in enumerate(params):
            sigma = torch.ones(48, dtype=torch.float64)
            sigma[: 2 * i] = 100
            gradient = with_singular_values(sigma, *p.shape[-2:], seed=step)
            p.grad = gradient.expand(p.shape).contiguous().to(p)
        optimizer.step()
        for i, (p, old) in enumerate(zip(params, before, strict=True)):
            rms = (p.detach() - old).double().square().mean((-2, -1)).sqrt()
            assert ((rms >= 0.19) & (rms <= 0.21)).all(), (step, i, rms)
    assert optimizer._replayed.buckets


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


@pytest.mark.parametrize("polar", [HEAD, MAPS["one step"]])
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


def test_a_scale_may_change_between_steps(device: torch.device) -> None:
    p = torch.nn.Parameter(torch.zeros(48, 64, device=device))
    optimizer = ps.Muon([p], lr=1.0, polar=MAPS["one step"])
    sizes = []
    for scale in ("none", "none", "none", "rms", "rms", "rms", "none"):
        optimizer.param_groups[0]["shape_scale"] = scale
        p.grad, before = gaussian(48, 64).float().to(device), p.detach().clone()
        optimizer.step()
        sizes.append((p.detach() - before).square().mean().sqrt().item())
    assert sizes[3:6] == pytest.approx([0.2] * 3, rel=0.15)
    assert max(sizes[:3] + sizes[6:]) < 0.15
