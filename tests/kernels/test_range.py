"""Fused steps over the range of gradients, as tests/optim/test_range.py has it for plain steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import polarstep as ps
from polarstep.kernels.normalize import normalized

MAPS = {
    "full space": ps.NewtonSchulz(5),
    "polar express": ps.NewtonSchulz(5, "polar-express"),
    "sketched": ps.LowRank(4, 4, always_sketch=True),
    "warm": ps.LowRank(4, 4, sketch=ps.Warm(), always_sketch=True),
}


def trained(
    device: torch.device, polar: ps.PolarMap, scale: float, dtype: torch.dtype, steps: int = 3
) -> tuple[Tensor, ps.Muon]:
    g = torch.Generator().manual_seed(3)
    X = nn.Parameter(torch.zeros(24, 32, device=device, dtype=dtype))
    optimizer = ps.Muon([X], lr=1e-3, polar=polar)
    common = torch.randn(24, 32, generator=g)
    for _ in range(steps):
        G = (common + 0.2 * torch.randn(24, 32, generator=g)).clamp(-3, 3) / 3
        X.grad = (scale * G).to(device, dtype)
        optimizer.step()
    return X.detach(), optimizer


@pytest.mark.parametrize("polar", MAPS.values(), ids=MAPS.keys())
@pytest.mark.parametrize("exponent", [-110, 122])
def test_steps_do_not_depend_on_the_scale_of_gradients(
    device: torch.device, polar: ps.PolarMap, exponent: int
) -> None:
    """On a GPU sketches and matrices of few rows have a range of 1e-18 to 1e18; beyond it T = 0."""
    X, optimizer = trained(device, polar, 1.0, torch.float32)
    assert optimizer._replayed.buckets  # fused
    scaled, _ = trained(device, polar, 2.0**exponent, torch.float32)
    assert scaled.isfinite().all()
    if device.type == "cpu":
        assert (X - scaled).norm() <= 1e-2 * X.norm()


@pytest.mark.parametrize("polar", MAPS.values(), ids=MAPS.keys())
@pytest.mark.parametrize("scale", [5e3])
def test_float16_gradients_of_any_size_leave_finite_weights(
    device: torch.device, polar: ps.PolarMap, scale: float
) -> None:
    X, optimizer = trained(device, polar, scale, torch.float16, steps=18)
    assert not optimizer._replayed.buckets  # the kernels have no float16
    assert X.isfinite().all()
    assert X.any()
    assert (
        optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"].isfinite().all()
    )


def test_normalized_to_the_ends_of_the_range(device: torch.device) -> None:
    exponents = torch.tensor([-149, -140, -126, -95, 0, 95, 120, 127], dtype=torch.float64)
    signs = torch.randn(8, 20, 40, generator=torch.Generator().manual_seed(0)).sign()
    Y = (signs.double() * 2.0 ** exponents[:, None, None]).float().to(device)
    assert (Y.isfinite() & (Y != 0)).all()
    norms = normalized(Y, 1.0, torch.float16).double().norm(dim=(1, 2)).cpu()
    torch.testing.assert_close(norms, torch.ones(8).double(), atol=2e-3, rtol=0)
