"""A step inside torch.compile: the fused step, as it runs without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import polarstep as ps

FAST = ps.NewtonSchulz(4, "polar-express-sketch")
MAPS = {
    "full space": ps.NewtonSchulz(5, "polar-express"),
    "fresh": ps.LowRank(16, 8, power=0, inner=FAST, always_sketch=True),
    "as printed": ps.LowRank(16, 8, always_sketch=True),
    "warm": ps.LowRank(16, 8, sketch=ps.Warm(), inner=FAST, always_sketch=True),
}


def train(
    device: torch.device, polar: ps.PolarMap, compiled: Callable[..., Callable[[Tensor], None]]
) -> Tensor:
    """The weights after more steps than a graph of the optimizer's own waits for, on a GPU."""
    numbers = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 144), nn.Tanh(), nn.Linear(144, 96)).to(device)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=numbers))
    optimizer = ps.muon_for(net, lr=0.02, weight_decay=0.1, polar=polar)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()

    run = compiled(step)
    for _ in range(7 if device.type == "cuda" else 3):
        run(torch.randn(32, 96, generator=numbers).to(device))
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("polar", MAPS.values(), ids=MAPS.keys())
def test_a_compiled_training_step_takes_the_same_path(
    device: torch.device, polar: ps.PolarMap
) -> None:
    torch.compiler.reset()
    plain = train(device, polar, lambda step: step)
    # Forward and backward are left as they are too: compiled, they round otherwise.
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = train(device, polar, lambda step: torch.compile(step, backend="eager"))
    assert torch.equal(compiled, plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="inductor has a test without a GPU")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_by_inductor_and_with_its_graphs(device: torch.device, mode: str) -> None:
    torch.compiler.reset()
    plain = train(device, MAPS["warm"], lambda step: step)
    compiled = train(device, MAPS["warm"], lambda step: torch.compile(step, mode=mode))
    assert torch.allclose(compiled, plain, atol=2e-3)
    assert not torch.allclose(plain, torch.zeros_like(plain), atol=2e-2)
