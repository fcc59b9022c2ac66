"""The two kernels of a deflated step in eight bits that are not symmetric products.

:mod:`polarstep.products.float8` says what the step is. The GPU multiplies matrices in eight bits only if
both are stored along the sum, so the first kernel stores its result twice, once transposed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels.descriptors import describe
from polarstep.kernels.product import EIGHT_BIT_TILES, FLOAT8, before_rounding, rounded
from polarstep.kernels.tiles import in_bands

__all__ = ["flattened", "product_of_rows", "tile_of_rows"]

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
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    cols = tl.cdiv(N, BN)
    r = (tl.program_id(0) // cols) * BM + tl.arange(0, BM)
    c = (tl.program_id(0) % cols) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    q = Q + batch * Q_batch + r[:, None] * Q_row + k[None, :] * Q_col
    h = H + batch * H_batch + k[:, None] * H_row + c[None, :] * H_col
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        left = tl.load(q, mask=(r[:, None] < M) & (k[None, :] < K - start), other=0.0)
        right = tl.load(h, mask=(k[:, None] < K - start) & (c[None, :] < N), other=0.0)
        acc = tl.dot(left, right, acc)
        q += BK * Q_col
        h += BK * H_row
    inside = (r[:, None] < M) & (c[None, :] < N)
    a = A + batch * A_batch + r[:, None] * A_row + c[None, :] * A_col
    acc += tl.load(inverse + batch) * tl.load(a, mask=inside, other=0.0).to(tl.float32)
    value = before_rounding(UNIT * acc, X.dtype.element_ty)
    at = batch * M * N
    tl.store(X + at + r[:, None] * N + c[None, :], rounded(value, X.dtype.element_ty), mask=inside)
    across = (c[:, None] < N) & (r[None, :] < M)
    tl.store(
        Xt + at + c[:, None] * M + r[None, :],
        rounded(tl.trans(value), X.dtype.element_ty),
        mask=across,
    )


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
    _flatten_kernel[(triton.cdiv(M, BM) * triton.cdiv(N, BN), batch)](
        A, Q, H, inverse, X, Xt,
        M, N, K,
        *A.stride(), *Q.stride(), *H.stride(),
        UNIT=unit, BM=BM, BN=BN, BK=64 if K % 64 == 0 else 32, num_warps=_FLATTEN_WARPS,
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
def _rows_kernel(
    A, B, out, scale,
    M, N, K,
    alpha,
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


def product_of_rows(
    A: Tensor, B: Tensor, scale: Tensor, alpha: float, dtype: torch.dtype
) -> Tensor:
    """``alpha·s·ABᵀ`` in ``dtype`` for matrices (batch, M, K) and (batch, N, K) in eight bits.

    ``scale`` holds s for each matrix.
    """
    batch, M, K = A.shape
    N = B.shape[1]
    out = torch.empty(batch, M, N, dtype=dtype, device=A.device)
    BM, BN, BK = _TILES["BM"], _TILES["BN"], _TILES["BK"]
    _rows_kernel[(triton.cdiv(M, BM) * triton.cdiv(N, BN), batch)](
        describe(A.view(-1, K), [BM, BK]), describe(B.view(-1, K), [BN, BK]), out, scale,
        M, N, K,
        alpha,
        **_TILES,
    )  # fmt: skip
    return out
