"""Pooling against torch's own, forward and backward, to the last bit."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.test_kernels import randn


@pytest.mark.parametrize("size", [(6, 6), (7, 5), (3, 3)], ids=str)
def test_max_pool_equals_torchs(device: torch.device, size: tuple[int, int]) -> None:
    from polarstep_lab.models.pool_kernel import max_pool

    # Few different values: ties everywhere.
    x = randn(3, 8, *size, device=device).mul(2).round()
    x[0, 0, 0, 0] = float("nan")
    x = x.to(memory_format=torch.channels_last)
    ends = []
    for pool in (max_pool, lambda x: torch.nn.functional.max_pool2d(x, 2)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf)
        y.backward(randn(*y.shape, device=device, seed=1))
        ends.append((y.detach(), leaf.grad))
        assert y.is_contiguous(memory_format=torch.channels_last)
    for ours, torchs in zip(*ends, strict=True):
        assert torch.equal(ours.nan_to_num(99.0), torchs.nan_to_num(99.0))
