"""The limits beyond which M is brought to unit size."""

from __future__ import annotations

import torch

from polarstep.kernels.momentum import LEAST, MOST


def test_float32_has_the_squares_of_norms_within_the_limits() -> None:
    """The norm of a sketch is between a hundredth of the largest entry of M and 1e8 times the entry."""
    float32 = torch.finfo(torch.float32)
    smallest, largest = (LEAST / 100) ** 2, (1e8 * MOST) ** 2
    assert smallest > float32.tiny
    assert largest < float32.max
    # Gradients of usual size are within the limits: M need not be scaled.
    assert LEAST < 1e-11
    assert MOST > 1e8
