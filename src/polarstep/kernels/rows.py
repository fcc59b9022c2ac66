"""The lengths of the rows of T, and the numbers that normalized rows are multiplied by.

:class:`polarstep.NormalizedRows` divides each row by the root of its second moment v and restores ‖T‖_F.
One launch finds the squared lengths of rows, in parts; where T is a product in eight bits, the launch
that multiplies it out finds them too (:func:`polarstep.kernels.float8.product_and_squares`), and T is
written once and read once. A second launch makes v and the numbers, and the update multiplies by them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["row_numbers", "row_squares"]

_ROWS, _COLUMNS = 8, 512  # of a block of T
_BLOCK = 1024  # parts that are added at once


@triton.jit
def _squares_kernel(T, squares, M, N, BM: tl.constexpr, BN: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, N, BN):
        inside = (r[:, None] < M) & (start + c[None, :] < N)
        at = T + batch * M * N + r[:, None] * N + start + c[None, :]
        t = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        total += t * t
    tl.store(squares + batch * M + r, tl.sum(total, axis=1), mask=r < M)


@triton.jit
def _numbers_kernel(
    squares, known, moments, factors, sizes,
    M, N, PARTS,
    beta2,
    BR: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    # One program for a matrix. v and 1/√v of its rows are stored at once, ‖T‖_F/‖T/√v‖_F at the end.
    batch = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BP)
    before = tl.zeros((BR,), dtype=tl.float32)
    after = tl.zeros((BR,), dtype=tl.float32)
    for start in range(0, M, BR):
        r = start + tl.arange(0, BR)
        at = squares + (batch * M + r[:, None]) * PARTS + p[None, :]
        inside = (r[:, None] < M) & (p[None, :] < PARTS)
        square = tl.sum(tl.load(at, mask=inside, other=0.0), axis=1)
        last = tl.load(known + batch * M + r, mask=r < M, other=0.0).to(tl.float32)
        v = (1 - beta2) * square / N + beta2 * last
        factor = tl.where(v > 0, tl.rsqrt(tl.where(v > 0, v, 1.0)), 0.0)
        tl.store(moments + batch * M + r, v.to(moments.dtype.element_ty), mask=r < M)
        tl.store(factors + batch * M + r, factor, mask=r < M)
        before += square
        after += square * factor * factor
    old = tl.sum(before, axis=0)
    new = tl.sum(after, axis=0)
    size = tl.where(new > 0, tl.sqrt(old / tl.where(new > 0, new, 1.0)), 0.0)
    tl.store(sizes + batch, size)


def row_squares(T: Tensor) -> Tensor:
    """(batch, m, 1): the squared length of each row of ``T`` (batch, m, n), in float32."""
    T = T.contiguous()
    batch, M, N = T.shape
    squares = torch.empty(batch, M, 1, dtype=torch.float32, device=T.device)
    grid = (triton.cdiv(M, _ROWS), batch)
    _squares_kernel[grid](T, squares, M, N, BM=_ROWS, BN=_COLUMNS, num_warps=4)
    return squares


def row_numbers(
    squares: Tensor, columns: int, beta2: float, known: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """v (batch, m) in ``dtype``, 1/√v (batch, m) and ‖T‖_F/‖T/√v‖_F (batch,) in float32.

    ``squares`` (batch, m, parts) add up to the squared lengths of rows of n = ``columns`` entries, and
    ``known`` is the v of the last step. The numbers of a row of zeros are zero.
    """
    batch, M, parts = squares.shape
    moments = torch.empty(batch, M, dtype=dtype, device=squares.device)
    factors = torch.empty(batch, M, dtype=torch.float32, device=squares.device)
    sizes = torch.empty(batch, dtype=torch.float32, device=squares.device)
    if known is None:
        known = torch.zeros(batch, M, dtype=dtype, device=squares.device)
    BP = triton.next_power_of_2(parts)
    _numbers_kernel[(batch,)](
        squares, known.contiguous(), moments, factors, sizes,
        M, columns, parts,
        beta2,
        BR=max(_BLOCK // BP, 16), BP=BP,
        num_warps=8,
    )  # fmt: skip
    return moments, factors, sizes
