"""The cheap certificate where a map scales M first, as it does on a GPU."""

from __future__ import annotations

import pytest
import torch

import polarstep as ps
from polarstep import rng
from polarstep.certificate import certified, certify
from polarstep.ops import ops_of


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_it_bounds_the_exact_one_whatever_the_scale_of_m(
    device: torch.device, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(ops_of(device)), "host_reads_are_free", False)  # as on a GPU
    M = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(0))
    M = M * torch.arange(1, 65) ** -1.0 * scale
    polar = ps.LowRank(12, 4, always_sketch=True)
    T, bound = certified(polar, M.to(device), generator=rng.generator("c", device=device))
    gamma = certify(M, T.cpu()).gamma
    assert (bound.gamma.cpu() >= gamma).all()
    assert (bound.gamma.cpu() <= gamma + 0.4).all()
