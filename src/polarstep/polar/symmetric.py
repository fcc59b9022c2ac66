"""Products that are known to be symmetric, at little more than half the price.

XXᵀ is symmetric, and so is every product of polynomials in it, as they commute. A CPU is given the
part on and below the diagonal, in strips wide enough for its matrix routines, and the rest is
copied. A GPU does this by tiles, in 16 bits (:mod:`polarstep.kernels.product`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from polarstep import kernels

__all__ = ["WORTH_FROM", "symmetric_flops", "symmetric_product"]

# Narrower strips and smaller matrices lose in the routine what they save in work.
STRIP = 192
WORTH_FROM = 512


def symmetric_product(
    A: Tensor,
    B: Tensor,
    *,
    plus: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    identity: float = 0.0,
) -> Tensor:
    """``alpha·ABᵀ + beta·plus + identity·I`` for (batch, m, k) matrices, which must be symmetric."""
    m = A.shape[-2]
    extras = plus is not None or identity != 0.0
    if A.dtype.itemsize == 2 and kernels.available(A.device) and (extras or m >= WORTH_FROM):
        from polarstep.kernels.product import product

        return product(A, B.mT, alpha=alpha, D=plus, beta=beta, identity=identity, symmetric=True)
    C = (
        _half_of(A, B, plus, alpha, beta)
        if _has_strips(A)
        else _product(A, B.mT, plus, alpha, beta)
    )
    if identity:
        C.diagonal(dim1=-2, dim2=-1).add_(identity)
    return C


def _has_strips(A: Tensor) -> bool:
    return A.device.type == "cpu" and A.shape[-2] >= WORTH_FROM


def _half_of(A: Tensor, B: Tensor, plus: Tensor | None, alpha: float, beta: float) -> Tensor:
    m = A.shape[-2]
    C = A.new_empty(A.shape[0], m, m)
    for first, end in _strips(m):
        below = None if plus is None else plus[:, first:, first:end]
        C[:, first:, first:end] = _product(A[:, first:], B[:, first:end].mT, below, alpha, beta)
        C[:, first:end, end:] = C[:, end:, first:end].mT
    return C


def symmetric_flops(m: int, k: int, dtype: torch.dtype = torch.float32) -> int:
    """FLOPs of one such product of m×k matrices, two per multiply-add; a 16-bit one is a GPU's."""
    if m < WORTH_FROM:
        return 2 * m * m * k
    if dtype.itemsize == 2:
        return m * m * k  # and the tiles on the diagonal
    return sum(2 * (m - first) * (end - first) * k for first, end in _strips(m))


def _strips(m: int) -> Iterator[tuple[int, int]]:
    count = round(m / STRIP)
    return pairwise(m * i // count for i in range(count + 1))


def _product(A: Tensor, B: Tensor, plus: Tensor | None, alpha: float, beta: float) -> Tensor:
    if plus is None:
        C = torch.bmm(A, B)  # as A @ B ends up, without the views on the way
        return C if alpha == 1 else alpha * C
    return torch.baddbmm(plus, A, B, beta=beta, alpha=alpha)
