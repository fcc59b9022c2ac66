"""What is random in a fused step: by seed, and in the measure that the formula says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.own_parts import SHAPES, Run, sketched
from torch import Tensor

import polarstep as ps
from polarstep.maps import Draw, MapState

# ℓ = 16 of 48 rows and four steps on B: Z is never made.
WITHOUT_Z = ps.LowRank(
    12,
    4,
    sketch=ps.Warm(),
    inner=ps.NewtonSchulz(4, "polar-express-sketch"),
    always_sketch=True,
)


@pytest.mark.parametrize("sketch", [ps.Gaussian(), ps.Kaczmarz(), ps.Warm()], ids=str)
def test_another_seed_is_another_run(device: torch.device, sketch: ps.Sketch | ps.Warm) -> None:
    first, again, other = (
        Run.of(sketched(sketch), device, seed=seed).go(range(2)) for seed in (0, 0, 1)
    )
    assert first.optimizer._replayed.buckets
    for i in range(len(SHAPES)):
        assert torch.equal(first.params[i], again.params[i])
        assert not torch.equal(first.params[i], other.params[i])


def test_a_warm_step_without_z_leaves_scaled_noise(device: torch.device) -> None:
    """S = X + noise·Nᵀ/√n: what two sizes of noise leave differs by their difference times Nᵀ/√n."""
    g = torch.Generator().manual_seed(0)
    M, numbers = torch.randn(2, 48, 96, generator=g), torch.randn(96, 16, generator=g)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    M, numbers = M.to(device, dtype), numbers.to(device)
    left: list[Tensor] = []
    for noise in (0.1, 0.05):
        polar = replace(WITHOUT_Z, sketch=ps.Warm(noise))
        _, carry = polar.step(M, MapState(), Draw(numbers))
        assert "whitening" in carry
        left.append(carry["basis"].float())
    want = ((0.1 - 0.05) * numbers.mT / math.sqrt(96)).expand(2, -1, -1)
    # On a GPU S is rounded to bfloat16, which moves entries of X by a part of the noise.
    tolerance = 0.5 if device.type == "cuda" else 1e-4
    assert (left[0] - left[1] - want).norm() <= tolerance * want.norm()
