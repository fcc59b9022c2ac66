"""Products with sixteen columns, which take as long as reading the matrix does.

Estimates of norms need them: of XXᵀ and of T (:mod:`polarstep.kernels.flat_step_norms`), and of the
rest of a sketch (:mod:`polarstep.kernels.rest_norm`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polarstep.products.start_vectors import SIGNS

__all__ = ["hashed", "rows_times_few", "strides_of", "tiles_of", "times_few"]

# Programs mostly wait for memory. They read blocks of 32 lines of 128 bytes by two warps, with five
# blocks on their way at a time.
_LINES, _LINE, _WARPS, _STAGES = 32, 128, 2, 5


@triton.jit
def hashed(at):
    """Murmur3's finalizer, as in :mod:`polarstep.products.start_vectors`: 32 bits without a pattern."""
    h = at.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def rows_times_few(
    A, V, r, rows, K, few,
    A_row, A_col, V_row, V_col,
    SPLIT: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows ``r`` of AV in float32, for A (rows, K) and V (K, few).

    Rows past the end wrap around; the caller must not store them. Factors are multiplied in V's
    precision. With SPLIT they are multiplied in A's precision, and each entry of V is the sum of two
    such numbers, so that V keeps twice as many bits.
    """
    k = tl.arange(0, BK)
    c = tl.arange(0, FEW)
    a = A + (r % rows)[:, None] * A_row + k[None, :] * A_col
    v = V + k[:, None] * V_row + c[None, :] * V_col
    acc = tl.zeros((BM, FEW), dtype=tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a, mask=k[None, :] < K - start, other=0.0)
        y = tl.load(v, mask=(k[:, None] < K - start) & (c[None, :] < few), other=0.0)
        if SPLIT:
            high = y.to(x.dtype)
            low = (y - high.to(tl.float32)).to(x.dtype)
            acc = tl.dot(x, high, acc)
            acc = tl.dot(x, low, acc)
        else:
            acc = tl.dot(x.to(y.dtype), y, acc, input_precision="ieee")
        a += BK * A_col
        v += BK * V_row
    return acc


@triton.jit
def _times_few_kernel(
    A, V, out,
    rows, K, few,
    A_batch, A_row, A_col,
    V_batch, V_row, V_col,
    FEW: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    acc = rows_times_few(
        A + batch * A_batch, V + batch * V_batch, r, rows, K, few,
        A_row, A_col, V_row, V_col, False, FEW, BM, BK,
    )  # fmt: skip
    at = out + batch * rows * FEW + r[:, None] * FEW + tl.arange(0, FEW)[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=r[:, None] < rows)


def times_few(A: Tensor, V: Tensor, out: Tensor) -> Tensor:
    """``AV`` for A (batch, rows, K) and V (batch, K, ≤ 16), written to ``out`` (batch, rows, 16).

    Factors are multiplied in the precision of V, which may have a batch of one for all matrices.
    """
    batch, rows, K = A.shape
    tiles = tiles_of(A, _LINES, _LINE)
    _times_few_kernel[(triton.cdiv(rows, tiles["BM"]), batch)](
        A, V, out,
        rows, K, V.shape[-1],
        *A.stride(), *strides_of(V),
        FEW=SIGNS, **tiles, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out


def strides_of(V: Tensor) -> tuple[int, int, int]:
    """The strides of ``V``, with a batch stride of zero where one V serves all matrices."""
    batch, row, column = V.stride()
    return (0 if len(V) == 1 else batch), row, column


def tiles_of(A: Tensor, lines: int, line: int) -> dict[str, int]:
    """The sides BM×BK of the blocks in which ``A`` (batch, rows, K) is read.

    A block has ``lines`` lines of ``line`` bytes, which run along rows or columns as ``A`` does in
    memory.
    """
    length = line // A.element_size()
    if A.stride(-1) != 1 and A.stride(-2) == 1:
        return {"BM": length, "BK": lines}
    return {"BM": lines, "BK": length}
