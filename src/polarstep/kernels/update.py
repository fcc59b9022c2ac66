"""``X ← (1 − ηλ)X − η·scale·T`` for a whole bucket, T dense or as a product of two factors.

T = LR is computed tile by tile and each tile is subtracted at once. So T is never written to
memory, and the update costs one read and one write of X. The factors have 16 bits and a short side, or
eight bits and no short side. Where rows of T are to be scaled, they are scaled on the way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels import interpreted
from polarstep.kernels.float8 import tile_of_rows
from polarstep.kernels.momentum import ELEMENTS
from polarstep.kernels.product import describe, in_bands

__all__ = ["update", "update_from_factors", "update_from_rows"]

_BLOCK = 2048
# Tiles for products of rows, the fastest of twelve on an H200: 252 µs for nanoGPT's matrices, where a
# product and an update apart take 369 µs. Sums of 2,048 numbers or more pay for larger tiles: 1.6 ms
# for an 8B layer, and 2.0 apart.
_ROW_TILES = {"BM": 64, "BN": 128, "BK": 128, "GROUP": 8, "num_warps": 4, "num_stages": 3}
_LONG_ROWS = 2048
_LONG_ROW_TILES = {"BM": 128, "BN": 128, "BK": 128, "GROUP": 4, "num_warps": 8, "num_stages": 3}


@triton.jit
def _ask_for(pointers):
    """Prefetch the memory at ``pointers`` into the cache, without waiting or taking registers."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _apply(X, r, c, T, decay, step, M, N, stride, ELEMENT: tl.constexpr, EVEN: tl.constexpr):
    """``X ← decay·X − step·T`` at rows ``r``, which are ``stride`` entries apart, and columns ``c``."""
    at = X + r[:, None] * stride + c[None, :]
    # X is used once, so the cache should hold the factors instead.
    if EVEN:
        old = tl.load(at, eviction_policy="evict_first")
        new = (old.to(tl.float32) * decay - step * T).to(ELEMENT)
        tl.store(at, new, eviction_policy="evict_first")
    else:
        inside = (r[:, None] < M) & (c[None, :] < N)
        old = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
        new = (old.to(tl.float32) * decay - step * T).to(ELEMENT)
        tl.store(at, new, mask=inside, eviction_policy="evict_first")


@triton.jit
def _apply_tile(
    X, top, side, T, decay, step, M, N, stride,
    ELEMENT: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """:func:`_apply` for a tile T, in two halves.

    Registers for all of X beside T would leave room for half as many programs.
    """
    r = top + tl.arange(0, BM)
    c = side + tl.arange(0, BN // 2)
    T1, T2 = tl.split(tl.permute(tl.reshape(T, (BM, 2, BN // 2)), (0, 2, 1)))
    _apply(X, r, c, T1, decay, step, M, N, stride, ELEMENT, EVEN)
    c += BN // 2
    _apply(X, r, c, T2, decay, step, M, N, stride, ELEMENT, EVEN)


@triton.jit
def _parameter(
    weights, decays, steps, finite, strides, matrix, N,
    ELEMENT: tl.constexpr, SKIP: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """The address of X, 1 − ηλ, η·scale, and the entries from row to row."""
    # Put the hint on the pointer: Triton drops a hint on the integer, and 16-byte accesses with it.
    X = tl.multiple_of(tl.load(weights + matrix).to(tl.pointer_type(ELEMENT)), 16)
    decay = tl.load(decays + matrix)
    if SKIP:
        decay = tl.where(tl.load(finite + matrix) != 0, decay, 1.0)
    stride = N
    if STRIDED:
        stride = tl.load(strides + matrix).to(tl.int32)
    return X, decay, tl.load(steps + matrix), stride


@triton.jit
def _update_kernel(
    weights, T, decays, steps, finite, strides, factors, sizes, size, columns,
    ELEMENT: tl.constexpr, SKIP: tl.constexpr, STRIDED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    X, decay, step, stride = _parameter(
        weights, decays, steps, finite, strides, matrix, columns, ELEMENT, SKIP, STRIDED
    )
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    here = at
    if STRIDED:
        here = (at // columns) * stride + at % columns
    x = tl.load(X + here, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(T + matrix * size + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        row = matrix * (size // columns) + at // columns
        t *= tl.load(factors + row, mask=inside, other=0.0)
        step *= tl.load(sizes + matrix)
    tl.store(X + here, (x * decay - step * t).to(ELEMENT), mask=inside)


@triton.jit
def _ask_for_tile(
    X, top, side, M, N, stride, LINE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Prefetch a tile of X, which is needed after its product is computed."""
    r = (top + tl.arange(0, BM)) % M
    lines = (side + LINE * tl.arange(0, BN // LINE)) % N
    _ask_for(X + r[:, None] * stride + lines[None, :])


@triton.jit
def _factors_kernel(
    weights, L, R, decays, steps, finite, strides,
    M, N, K,
    L_batch, L_row, L_col,
    R_batch, R_row, R_col,
    ELEMENT: tl.constexpr,
    SKIP: tl.constexpr,
    STRIDED: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    X, decay, step, stride = _parameter(
        weights, decays, steps, finite, strides, matrix, N, ELEMENT, SKIP, STRIDED
    )
    top, side = in_bands(tl.program_id(0), M, N, BM, BN, GROUP)
    r = top + tl.arange(0, BM)
    c = side + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if AHEAD:
        _ask_for_tile(X, top, side, M, N, stride, LINE, BM, BN)
    a = L + matrix * L_batch + (r % M)[:, None] * L_row + k[None, :] * L_col
    b = R + matrix * R_batch + k[:, None] * R_row + (c % N)[None, :] * R_col
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    # K must not be a compile-time constant: with three rounds or more known at compile time, Triton
    # 3.6 lost the whole sum on an H200.
    for i in range(tl.cdiv(K, BK)):
        left = K - i * BK
        x = tl.load(a, mask=k[None, :] < left, other=0.0)
        y = tl.load(b, mask=k[:, None] < left, other=0.0)
        acc = tl.dot(x, y, acc)
        a += BK * L_col
        b += BK * R_row
    _apply_tile(X, top, side, acc, decay, step, M, N, stride, ELEMENT, EVEN, BM, BN)


@triton.jit
def _update_from_rows_kernel(
    weights, A, B, scale, decays, steps, finite, strides,
    M, N, K,
    alpha,
    ELEMENT: tl.constexpr,
    SKIP: tl.constexpr,
    STRIDED: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1)
    X, decay, step, stride = _parameter(
        weights, decays, steps, finite, strides, matrix, N, ELEMENT, SKIP, STRIDED
    )
    top, side = in_bands(tl.program_id(0), M, N, BM, BN, GROUP)
    if AHEAD:
        _ask_for_tile(X, top, side, M, N, stride, LINE, BM, BN)
    T = tile_of_rows(A, B, matrix, top, side, M, N, K, BM, BN, BK)
    step *= alpha * tl.load(scale + matrix)
    _apply_tile(X, top, side, T, decay, step, M, N, stride, ELEMENT, EVEN, BM, BN)


def update(
    weights: Tensor,
    T: Tensor,
    decays: Tensor,
    steps: Tensor,
    *,
    element: torch.dtype,
    finite: Tensor | None = None,
    strides: Tensor | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
) -> None:
    """``X ← decay·X − step·T`` for the matrices at the addresses ``weights``; T is (B, m, n).

    ``strides`` has the distance between rows of each X, where some X are parts of wider matrices.
    ``rows`` are a number for each row of T (B, m) and one for each matrix (B,), to multiply it with.
    """
    factors, sizes = rows or (decays, decays)  # which are not read then
    T = T.contiguous()
    size = T.shape[1] * T.shape[2]
    _update_kernel[(triton.cdiv(size, _BLOCK), T.shape[0])](
        weights, T, decays, steps, decays if finite is None else finite,
        weights if strides is None else strides, factors, sizes, size, T.shape[2],
        ELEMENT=ELEMENTS[element], SKIP=finite is not None, STRIDED=strides is not None,
        SCALED=rows is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def update_from_factors(
    weights: Tensor,
    L: Tensor,
    R: Tensor,
    decays: Tensor,
    steps: Tensor,
    *,
    element: torch.dtype,
    finite: Tensor | None = None,
    strides: Tensor | None = None,
) -> None:
    """``X ← decay·X − step·T`` for T = LR with L (B, m, ℓ) and R (B, ℓ, n) of the same precision."""
    assert L.dtype == R.dtype
    batch, M, K = L.shape
    N = R.shape[-1]
    # Fastest of 57 settings on an H200, at ℓ = 208: 205 µs for nanoGPT's matrices. Tiles of 128×128
    # take 212 µs at best, and 254 µs unless X is updated in halves, as X and T overfill registers.
    BM, BN, BK = 64, 128, 32
    grid = (triton.cdiv(N, BN) * triton.cdiv(M, BM), batch)
    _factors_kernel[grid](
        weights, L, R, decays, steps, decays if finite is None else finite,
        weights if strides is None else strides,
        M, N, K,
        *L.stride(), *R.stride(),
        **_options(element, finite, strides),
        EVEN=M % BM == 0 and N % BN == 0,
        BM=BM, BN=BN, BK=BK, GROUP=8,
        num_warps=4, num_stages=4,
    )  # fmt: skip


def update_from_rows(
    weights: Tensor,
    A: Tensor,
    B: Tensor,
    scale: Tensor,
    alpha: float,
    decays: Tensor,
    steps: Tensor,
    *,
    element: torch.dtype,
    finite: Tensor | None = None,
    strides: Tensor | None = None,
) -> None:
    """``X ← decay·X − step·T`` for T = alpha·s·ABᵀ in eight bits, A (B, m, k) and B (B, n, k).

    ``scale`` has the s of each matrix.
    """
    batch, M, K = A.shape
    N = B.shape[1]
    tiles = _ROW_TILES if K < _LONG_ROWS else _LONG_ROW_TILES
    BM, BN, BK = tiles["BM"], tiles["BN"], tiles["BK"]
    _update_from_rows_kernel[(triton.cdiv(M, BM) * triton.cdiv(N, BN), batch)](
        weights, describe(A.view(-1, K), [BM, BK]), describe(B.view(-1, K), [BN, BK]), scale,
        decays, steps, decays if finite is None else finite, weights if strides is None else strides,
        M, N, K,
        alpha,
        **_options(element, finite, strides),
        EVEN=M % BM == 0 and N % BN == 0,
        **tiles,
    )  # fmt: skip


def _options(element: torch.dtype, finite: Tensor | None, strides: Tensor | None) -> dict[str, Any]:
    return {
        "ELEMENT": ELEMENTS[element],
        "SKIP": finite is not None,
        "STRIDED": strides is not None,
        "AHEAD": not interpreted(),  # prefetching is NVIDIA assembly
        "LINE": 128 // element.itemsize,
    }
