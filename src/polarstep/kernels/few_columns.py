"""Products with sixteen columns, which take as long as reading the matrix does.

Estimates of norms need them: of XXᵀ and of T (:mod:`polarstep.kernels.flat_step_norms`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polarstep.numerics import SIGNS

__all__ = ["hashed", "times_few"]

# Programs mostly wait for memory. They read blocks of 32 lines of 128 bytes by two warps, with five
# blocks on their way at a time.
_LINES, _LINE, _WARPS, _STAGES = 32, 128, 2, 5


@triton.jit
def hashed(at):
    """Murmur3's finalizer, as in :mod:`polarstep.numerics`: 32 bits without a pattern."""
    h = at.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


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
    k = tl.arange(0, BK)
    c = tl.arange(0, FEW)
    # Rows past the end wrap around, and are not stored.
    a = A + batch * A_batch + (r % rows)[:, None] * A_row + k[None, :] * A_col
    v = V + batch * V_batch + k[:, None] * V_row + c[None, :] * V_col
    acc = tl.zeros((BM, FEW), dtype=tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a, mask=k[None, :] < K - start, other=0.0)
        y = tl.load(v, mask=(k[:, None] < K - start) & (c[None, :] < few), other=0.0)
        acc = tl.dot(x.to(y.dtype), y, acc, input_precision="ieee")
        a += BK * A_col
        v += BK * V_row
    at = out + batch * rows * FEW + r[:, None] * FEW + c[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=r[:, None] < rows)


def times_few(A: Tensor, V: Tensor, out: Tensor) -> Tensor:
    """``AV`` for A (batch, rows, K) and V (batch, K, ≤ 16), written to ``out`` (batch, rows, 16).

    Factors are multiplied in the precision of V, which may have a batch of one for all matrices.
    """
    batch, rows, K = A.shape
    tiles = _tiles_of(A)
    _times_few_kernel[(triton.cdiv(rows, tiles["BM"]), batch)](
        A, V, out,
        rows, K, V.shape[-1],
        *A.stride(), *_strides_of(V),
        FEW=SIGNS, **tiles, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out


def _strides_of(V: Tensor) -> tuple[int, int, int]:
    """The strides of ``V``, with a batch stride of zero where one V serves all matrices."""
    batch, row, column = V.stride()
    return (0 if len(V) == 1 else batch), row, column


def _tiles_of(A: Tensor) -> dict[str, int]:
    """The sides BM×BK of the blocks in which ``A`` (batch, rows, K) is read.

    A block has 32 lines of 128 bytes, which run along rows or columns as ``A`` does in memory.
    """
    length = _LINE // A.element_size()
    if A.stride(-1) != 1 and A.stride(-2) == 1:
        return {"BM": length, "BK": _LINES}
    return {"BM": _LINES, "BK": length}
