"""The two kernels of a deflated step in eight bits that are not symmetric products.

:mod:`polarstep.ops.triton` says what the step is. In eight bits the GPU multiplies only matrices
whose entries lie one after the other along the sum, so the first kernel stores its result twice, once
transposed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels.product import (
    EIGHT_BIT_TILES,
    FLOAT8,
    before_rounding,
    clamps,
    describable,
    describe,
    in_bands,
    rounded,
)

__all__ = ["flattened", "product_and_squares", "product_of_rows", "tile_of_rows"]

_TILES = EIGHT_BIT_TILES | {"GROUP": 8}
_FLATTEN, _FLATTEN_WARPS = (64, 128), 4


@triton.jit
def _flatten_kernel(
    A, Q, H, inverse, X, Xt,
    M, N, K,
    A_batch, A_row, A_col,
    Q_batch, Q_row, Q_col,
    H_batch, H_row, H_col,
    UNIT: tl.constexpr,
    CLAMP: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    # EVEN: all tiles are full, and Q and H are descriptors of (batch·M, K) and (batch·K, N) memory.
    batch = tl.program_id(1).to(tl.int64)
    cols = tl.cdiv(N, BN)
    top = (tl.program_id(0) // cols) * BM
    side = (tl.program_id(0) % cols) * BN
    r = top + tl.arange(0, BM)
    c = side + tl.arange(0, BN)
    inside = (r[:, None] < M) & (c[None, :] < N)
    a = A + batch * A_batch + r[:, None] * A_row + c[None, :] * A_col
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if EVEN:
        for start in range(0, K, BK):
            left = Q.load([tl.program_id(1) * M + top, start])
            right = H.load([tl.program_id(1) * K + start, side])
            acc = tl.dot(left, right, acc)
    else:
        k = tl.arange(0, BK)
        q = Q + batch * Q_batch + r[:, None] * Q_row + k[None, :] * Q_col
        h = H + batch * H_batch + k[:, None] * H_row + c[None, :] * H_col
        for start in range(0, K, BK):
            left = tl.load(q, mask=(r[:, None] < M) & (k[None, :] < K - start), other=0.0)
            right = tl.load(h, mask=(k[:, None] < K - start) & (c[None, :] < N), other=0.0)
            acc = tl.dot(left, right, acc)
            q += BK * Q_col
            h += BK * H_row
    if EVEN:  # noqa: SIM108 (the kernel language has no such expression)
        given = tl.load(a)
    else:
        given = tl.load(a, mask=inside, other=0.0)
    acc += tl.load(inverse + batch) * given.to(tl.float32)
    element: tl.constexpr = X.dtype.element_ty
    value = before_rounding(UNIT * acc, element)
    here = X + batch * M * N + r[:, None] * N + c[None, :]
    there = Xt + batch * M * N + c[:, None] * M + r[None, :]
    if EVEN:
        tl.store(here, rounded(value, element, CLAMP))
        tl.store(there, rounded(tl.trans(value), element, CLAMP))
    else:
        tl.store(here, rounded(value, element, CLAMP), mask=inside)
        across = (c[:, None] < N) & (r[None, :] < M)
        tl.store(there, rounded(tl.trans(value), element, CLAMP), mask=across)


def flattened(
    A: Tensor, Q: Tensor, H: Tensor, inverse: Tensor, unit: float
) -> tuple[Tensor, Tensor]:
    """``unit·(A/δ + QH)`` in eight bits, of shape (batch, m, n), and its transposed matrices.

    ``inverse`` holds 1/δ for each matrix.
    """
    batch, M, N = A.shape
    X = torch.empty(batch, M, N, dtype=FLOAT8, device=A.device)
    Xt = torch.empty(batch, N, M, dtype=FLOAT8, device=A.device)
    (BM, BN), K = _FLATTEN, Q.shape[-1]
    BK = 64 if K % 64 == 0 else 32
    even = M % BM == 0 and N % BN == 0 and K % BK == 0
    even = even and all(F.is_contiguous() and describable(F) for F in (Q, H))
    q = describe(Q.view(-1, K), [BM, BK]) if even else Q
    h = describe(H.view(-1, N), [BK, BN]) if even else H
    _flatten_kernel[(triton.cdiv(M, BM) * triton.cdiv(N, BN), batch)](
        A, q, h, inverse, X, Xt,
        M, N, K,
        *A.stride(), *Q.stride(), *H.stride(),
        UNIT=unit, CLAMP=clamps(), EVEN=even, BM=BM, BN=BN, BK=BK,
        num_warps=_FLATTEN_WARPS, num_stages=2 if even else 3,
    )  # fmt: skip
    return X, Xt


@triton.jit
def tile_of_rows(
    A, B, batch, top, side, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """The tile of ABᵀ whose first row is ``top`` and whose first column is ``side``.

    A and B are descriptors of (batch·rows, K) memory. Past the end of its matrix a tile reads the next
    matrix; those entries only reach rows and columns of the result that are not stored.
    """
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        x = A.load([batch * M + top, k])
        y = tl.trans(B.load([batch * N + side, k]))
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def _product_of_rows_kernel(
    A, B, out, scale, squares,
    M, N, K,
    alpha,
    SQUARES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1)
    top, side = in_bands(tl.program_id(0), M, N, BM, BN, GROUP)
    acc = tile_of_rows(A, B, batch, top, side, M, N, K, BM, BN, BK)
    acc *= alpha * tl.load(scale + batch)
    r = top + tl.arange(0, BM)
    c = side + tl.arange(0, BN)
    o = out + batch.to(tl.int64) * M * N + r[:, None] * N + c[None, :]
    tl.store(o, acc.to(out.dtype.element_ty), mask=(r[:, None] < M) & (c[None, :] < N))
    if SQUARES:
        acc = tl.where(c[None, :] < N, acc, 0.0)  # a tile reads past the end of B
        at = squares + (batch.to(tl.int64) * M + r) * tl.cdiv(N, BN) + side // BN
        tl.store(at, tl.sum(acc * acc, axis=1), mask=r < M)


def product_of_rows(
    A: Tensor, B: Tensor, scale: Tensor, alpha: float, dtype: torch.dtype
) -> Tensor:
    """``alpha·s·ABᵀ`` in ``dtype`` for matrices (batch, M, K) and (batch, N, K) in eight bits.

    ``scale`` holds s for each matrix.
    """
    return _product_of_rows(A, B, scale, alpha, dtype, None)


def product_and_squares(
    A: Tensor, B: Tensor, scale: Tensor, alpha: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """:func:`product_of_rows`, and (batch, M, parts) that add up to the squared lengths of its rows."""
    parts = triton.cdiv(B.shape[1], _TILES["BN"])
    squares = torch.empty(*A.shape[:2], parts, dtype=torch.float32, device=A.device)
    return _product_of_rows(A, B, scale, alpha, dtype, squares), squares


def _product_of_rows(
    A: Tensor,
    B: Tensor,
    scale: Tensor,
    alpha: float,
    dtype: torch.dtype,
    squares: Tensor | None,
) -> Tensor:
    batch, M, K = A.shape
    N = B.shape[1]
    out = torch.empty(batch, M, N, dtype=dtype, device=A.device)
    BM, BN, BK = _TILES["BM"], _TILES["BN"], _TILES["BK"]
    _product_of_rows_kernel[(triton.cdiv(M, BM) * triton.cdiv(N, BN), batch)](
        describe(A.view(-1, K), [BM, BK]), describe(B.view(-1, K), [BN, BK]), out, scale,
        scale if squares is None else squares,
        M, N, K,
        alpha,
        SQUARES=squares is not None,
        **_TILES,
    )  # fmt: skip
    return out
