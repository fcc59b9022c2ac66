"""One batched matrix product, ``α·AB + β·D + κ·I``, that knows when its result is symmetric.

A Newton–Schulz step is three of these: G = XᵀX, H = cG² + bG + aI, X ← XH. The first two are
symmetric, so only the tiles on and under the diagonal are computed and each is stored twice; and
adding D and the identity on the way out saves a pass over memory each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["product"]


@triton.jit
def _product_kernel(
    A, B, D, out,
    M, N, K,
    alpha, beta, kappa,
    A_batch, A_row, A_col,
    B_batch, B_row, B_col,
    D_batch, D_row, D_col,
    O_batch, O_row, O_col,
    SYMMETRIC: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_IDENTITY: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    if SYMMETRIC:
        # Tiles of the lower triangle, row by row: row i holds i + 1 of them.
        row = ((tl.sqrt((8 * tile + 1).to(tl.float32)) - 1) / 2).to(tl.int32)
        row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
        row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
        col = tile - row * (row + 1) // 2
    else:
        # Tiles in bands of GROUP rows, so that those in flight together share operands in cache.
        rows, cols = tl.cdiv(M, BM), tl.cdiv(N, BN)
        band = tile // (GROUP * cols)
        first = band * GROUP
        height = tl.minimum(rows - first, GROUP)
        row = first + (tile % (GROUP * cols)) % height
        col = (tile % (GROUP * cols)) // height
    r = row * BM + tl.arange(0, BM)
    c = col * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows past the end wrap around: their results are not stored, and no mask is needed.
    a = A + batch * A_batch + (r % M)[:, None] * A_row + k[None, :] * A_col
    b = B + batch * B_batch + k[:, None] * B_row + (c % N)[None, :] * B_col
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        if EVEN_K:
            x = tl.load(a)
            y = tl.load(b)
        else:
            x = tl.load(a, mask=k[None, :] < K - start, other=0.0)
            y = tl.load(b, mask=k[:, None] < K - start, other=0.0)
        acc = tl.dot(x, y, acc)
        a += BK * A_col
        b += BK * B_row
    acc *= alpha
    inside = (r[:, None] < M) & (c[None, :] < N)
    if HAS_D:
        d = D + batch * D_batch + r[:, None] * D_row + c[None, :] * D_col
        acc += beta * tl.load(d, mask=inside, other=0.0).to(tl.float32)
    if HAS_IDENTITY:
        acc += tl.where(r[:, None] == c[None, :], kappa, 0.0)
    value = acc.to(out.dtype.element_ty)
    o = out + batch * O_batch
    tl.store(o + r[:, None] * O_row + c[None, :] * O_col, value, mask=inside)
    if SYMMETRIC and row != col:
        mirrored = (c[:, None] < N) & (r[None, :] < M)
        tl.store(o + c[:, None] * O_row + r[None, :] * O_col, tl.trans(value), mask=mirrored)


def product(
    A: Tensor,
    B: Tensor,
    *,
    alpha: float = 1.0,
    D: Tensor | None = None,
    beta: float = 1.0,
    identity: float = 0.0,
    symmetric: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``alpha·A@B + beta·D + identity·I`` for batches (b, M, K) and (b, K, N).

    ``symmetric`` promises that the result is: only half of it is then computed.
    """
    batch, M, K = A.shape
    N = B.shape[-1]
    out = torch.empty(batch, M, N, device=A.device, dtype=out_dtype or A.dtype)
    tiles = _tiles(M, N, A.element_size(), symmetric)
    rows, cols = triton.cdiv(M, tiles["BM"]), triton.cdiv(N, tiles["BN"])
    count = rows * (rows + 1) // 2 if symmetric else rows * cols
    d = out if D is None else D
    _product_kernel[(count, batch)](
        A, B, d, out,
        M, N, K,
        alpha, beta, identity,
        *A.stride(), *B.stride(), *d.stride(), *out.stride(),
        SYMMETRIC=symmetric,
        HAS_D=D is not None,
        HAS_IDENTITY=identity != 0.0,
        EVEN_K=K % tiles["BK"] == 0,
        GROUP=8,
        **tiles,
    )  # fmt: skip
    return out


def _tiles(M: int, N: int, element_size: int, symmetric: bool) -> dict[str, Any]:
    """Tile sizes that suit a Hopper GPU, from the size of the result.

    Chosen for bfloat16; wider elements get as much of the shared memory by a shorter BK.
    """
    if max(M, N) <= 64:
        return {"BM": 64, "BN": 64, "BK": 64 // element_size, "num_warps": 4, "num_stages": 3}
    tiles = {"BM": 128, "BK": 128 // element_size, "num_warps": 8}
    if symmetric:
        return tiles | {"BN": 128, "num_stages": 3}
    return tiles | {"BN": 256, "num_stages": 3}
