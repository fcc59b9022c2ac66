"""The vectors from which norms are estimated: sixteen, without a pattern, the same at every call.

And how many products with them an estimate takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SIGNS", "norm_products", "signs", "start_vectors"]

# The columns of signs() and start_vectors(): the least that a GPU multiplies at full rate.
SIGNS = 16


def start_vectors(rows: int, device: torch.device) -> Tensor:
    """(1, rows, 16) entries between −1 and 1 without a pattern, the same at every call.

    Entries of ±1 would not do. Among 768 rows of 16 signs some are equal, and some opposite. The columns
    are then orthogonal to the difference of the two rows, or to their sum, which may well be what a
    gradient moves: two neurons that are copies of one another move in this way.
    """
    bits = _hashed(rows * SIGNS, device) >> 8
    return (bits.to(torch.float32) * 2.0**-23 - 1).view(1, rows, SIGNS)


def norm_products(rows: int) -> int:
    """How many products with G = XXᵀ of so many rows the estimate of ‖G‖_op takes: 5, or 7 for many.

    A start vector holds about 1/rows of a leading direction that it knows nothing of, and every product
    raises this part. :mod:`polarstep.polar.flat_step_scale` has the bound.
    """
    return 5 if rows <= 1024 else 7


def signs(rows: int, device: torch.device) -> Tensor:
    """(1, rows, 16) entries of ±1 without a pattern, the same at every call."""
    return ((_hashed(rows * SIGNS, device) & 1) * 2 - 1).view(1, rows, SIGNS)


def _hashed(count: int, device: torch.device) -> Tensor:
    """Murmur3's finalizer of 0, 1, 2, …, which has 32 bits; a kernel computes it as well."""
    x = torch.arange(count, device=device)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x
