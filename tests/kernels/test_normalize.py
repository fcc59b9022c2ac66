"""Matrices divided by their norm whose entries differ by many orders of magnitude."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("largest", [2.0**101, 2.0**60, 1.0], ids="largest {:.0e}".format)
def test_small_entries_keep_their_ratio_to_the_norm(device: torch.device, largest: float) -> None:
    """As far as bfloat16 has numbers so small: from 2⁻¹²⁶ on."""
    from polarstep.kernels.norms import normalized

    Y = torch.zeros(1, 8, 16, device=device)
    ratios = torch.tensor([1.0, 1.5 * 2.0**-60, 1.75 * 2.0**-125], device=device)
    Y[0, 0, :3] = largest * ratios
    assert torch.equal(normalized(Y)[0, 0, :3].float(), ratios)
