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


def test_a_finite_m_stays_finite_in_bfloat16(device: torch.device) -> None:
    """bfloat16 ends at 3.39e38, float32 at 3.40e38."""
    from polarstep.kernels.momentum import momentum

    largest = torch.finfo(torch.float32).max
    G = torch.full((4, 8), largest, device=device)
    G[1], G[2, 0], G[3, 0] = -largest, torch.inf, torch.nan
    C = torch.zeros_like(G)
    tables = (torch.tensor([X.data_ptr()], device=device) for X in (G, C))
    M = torch.empty(1, 4, 8, device=device, dtype=torch.bfloat16)
    momentum(*tables, torch.zeros(1, device=device), M, element=torch.float32, nesterov=False)
    end = torch.finfo(torch.bfloat16).max
    assert torch.equal(M[0, :2].cpu(), torch.tensor([[end], [-end]]).expand(2, 8).bfloat16())
    assert M[0, 2, 0].isinf()
    assert M[0, 3, 0].isnan()
