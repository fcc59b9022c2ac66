"""Products that are known to be symmetric, at little more than half the price.

XXᵀ is symmetric, and so is every product of polynomials in it, as they commute. A CPU is given the
part on and below the diagonal, in strips wide enough for its matrix routines, and the rest is
copied. (On a GPU, the kernels of :mod:`polarstep.kernels` do this by tiles.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["symmetric_flops", "symmetric_product"]

# Narrower strips and smaller matrices lose in the routine what they save in work.
STRIP = 192
WORTH_FROM = 512


def symmetric_product(
    A: Tensor, B: Tensor, *, plus: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """``alpha·ABᵀ + beta·plus`` for (batch, m, k) matrices whose product, as ``plus``, is symmetric."""
    m = A.shape[-2]
    if A.device.type != "cpu" or m < WORTH_FROM:
        return _product(A, B.mT, plus, alpha, beta)
    C = A.new_empty(A.shape[0], m, m)
    for first, end in _strips(m):
        below = None if plus is None else plus[:, first:, first:end]
        C[:, first:, first:end] = _product(A[:, first:], B[:, first:end].mT, below, alpha, beta)
        C[:, first:end, end:] = C[:, end:, first:end].mT
    return C


def symmetric_flops(m: int, k: int) -> int:
    """FLOPs of one such product of m×k matrices on a CPU, two per multiply-add."""
    if m < WORTH_FROM:
        return 2 * m * m * k
    return sum(2 * (m - first) * (end - first) * k for first, end in _strips(m))


def _strips(m: int) -> Iterator[tuple[int, int]]:
    count = round(m / STRIP)
    return pairwise(m * i // count for i in range(count + 1))


def _product(A: Tensor, B: Tensor, plus: Tensor | None, alpha: float, beta: float) -> Tensor:
    if plus is None:
        return A @ B if alpha == 1 else alpha * (A @ B)
    return torch.baddbmm(plus, A, B, beta=beta, alpha=alpha)
