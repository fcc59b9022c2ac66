"""The momentum kernel where the buffer is rounded: M is computed from the C that is stored."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("nesterov", [True, False])
def test_m_is_made_of_the_rounded_buffer(device: torch.device, nesterov: bool) -> None:
    """``C ← βC + G`` in bfloat16, then ``M = βC + G`` or ``M = C`` in float32, bit for bit."""
    from polarstep.kernels.momentum import momentum

    g = torch.Generator().manual_seed(0)
    G, C = (torch.randn(20, 40, generator=g).to(device, torch.bfloat16) for _ in range(2))
    beta = torch.tensor([0.5], device=device)  # a power of two: βC has no rounding of its own
    unrounded = 0.5 * C.float() + G.float()
    tables = (torch.tensor([X.data_ptr()], device=device) for X in (G, C))
    M = torch.empty(1, 20, 40, device=device)
    momentum(*tables, beta, M, element=torch.bfloat16, nesterov=nesterov)
    stored = C.float()
    # Triton's interpreter rounds to bfloat16 in its own way, so the last bit is not compared.
    torch.testing.assert_close(stored, unrounded, rtol=2**-7, atol=0)
    assert not torch.equal(stored, unrounded)
    assert torch.equal(M[0], 0.5 * stored + G.float() if nesterov else stored)
