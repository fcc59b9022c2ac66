"""``Y/‖Y‖_F`` for a batch in 16 bits, whatever the scale of Y.

Squares are added in float64, because the squares of 1e-30 or 1e30 leave float32's range. The order
of the additions does not depend on scheduling, so a step can be repeated bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["normalized", "sum_of_parts", "sums_of_squares"]

_BLOCK = 4096
# Partial sums of all matrices together: enough programs to fill a GPU, yet few numbers to add up.
_SUMS = 1024


@triton.jit
def _sum_squares_kernel(Y, sums, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(part * BLOCK, size, PARTS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        y = tl.load(Y + batch * size + at, mask=at < size, other=0.0).to(tl.float64)
        total += y * y
    tl.store(sums + batch * PARTS + part, tl.sum(total, axis=0))


@triton.jit
def _divide_kernel(
    Y, sums, out, size, SHRINK: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    square = tl.sum(tl.load(sums + batch * PARTS + tl.arange(0, PARTS)), axis=0)
    # 1/‖Y‖_F leaves the range of float32 for Y near the ends of that range, so there Y is first
    # multiplied by a power of two.
    exact = tl.sqrt(square)
    lift = tl.where(exact > 2.0**100, 2.0**-64, tl.where(exact < 2.0**-90, 2.0**64, 1.0))
    norm = (exact * lift).to(tl.float32)
    inverse = tl.where(norm > 0, SHRINK / tl.maximum(norm, 1e-38), 0.0)  # a zero matrix stays zero
    y = tl.load(Y + batch * size + at, mask=inside, other=0.0).to(tl.float32)
    y *= lift.to(tl.float32)
    tl.store(out + batch * size + at, (y * inverse).to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_of_parts(sums, parts, BLOCK: tl.constexpr):
    """The sum of ``parts`` float64 numbers at ``sums``, always in the same order."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(sums + at, mask=at < parts, other=0.0)
    return tl.sum(total, axis=0)


def normalized(Y: Tensor, shrink: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Each matrix of ``Y`` (batch, m, n) times ``shrink``/‖Y‖_F; a zero matrix stays zero.

    The result has the memory layout of ``Y``, also where ``Y`` is a transposed view.
    """
    if Y.mT.is_contiguous() and not Y.is_contiguous():
        return normalized(Y.mT, shrink, dtype).mT
    Y = Y.contiguous()
    batch, size = Y.shape[0], Y.shape[1] * Y.shape[2]
    sums = sums_of_squares(Y)
    out = torch.empty_like(Y, dtype=dtype)
    common = {"PARTS": sums.shape[1], "BLOCK": _BLOCK, "num_warps": 8}
    grid = (triton.cdiv(size, _BLOCK), batch)
    _divide_kernel[grid](Y, sums, out, size, SHRINK=shrink, **common)
    return out


def sums_of_squares(Y: Tensor) -> Tensor:
    """(batch, parts) float64 numbers whose sum over the parts is ‖Y‖_F² of each matrix."""
    if Y.mT.is_contiguous():
        Y = Y.mT
    Y = Y.contiguous()
    batch, size = Y.shape[0], Y.shape[1] * Y.shape[2]
    blocks = triton.next_power_of_2(triton.cdiv(size, _BLOCK))  # more parts would add nothing
    parts = min(blocks, triton.next_power_of_2(max(8, min(512, triton.cdiv(_SUMS, batch)))))
    sums = torch.empty(batch, parts, device=Y.device, dtype=torch.float64)
    _sum_squares_kernel[(parts, batch)](Y, sums, size, PARTS=parts, BLOCK=_BLOCK, num_warps=8)
    return sums
