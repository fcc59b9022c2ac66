"""``X ← (1 − ηλ)X − η·scale·T`` for a whole bucket, T dense or as a product of two factors.

T = LR is computed tile by tile and each tile is subtracted at once. So T is never written to
memory, and the update costs one read and one write of X.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels import interpreted
from polarstep.kernels.elements import ELEMENTS

__all__ = ["update", "update_from_factors"]

_BLOCK = 2048


@triton.jit
def _update_kernel(
    weights, T, decays, steps, finite, strides, size, columns,
    ELEMENT: tl.constexpr, SKIP: tl.constexpr, STRIDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    # Put the hint on the pointer: Triton drops a hint on the integer, and 16-byte accesses with it.
    X = tl.multiple_of(tl.load(weights + matrix).to(tl.pointer_type(ELEMENT)), 16)
    decay = tl.load(decays + matrix)
    if SKIP:
        decay = tl.where(tl.load(finite + matrix) != 0, decay, 1.0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    here = at
    if STRIDED:
        here = (at // columns) * tl.load(strides + matrix) + at % columns
    x = tl.load(X + here, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(T + matrix * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(X + here, (x * decay - tl.load(steps + matrix) * t).to(ELEMENT), mask=inside)


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
    X = tl.multiple_of(tl.load(weights + matrix).to(tl.pointer_type(ELEMENT)), 16)
    decay = tl.load(decays + matrix)
    if SKIP:
        decay = tl.where(tl.load(finite + matrix) != 0, decay, 1.0)
    step = tl.load(steps + matrix)
    stride = N
    if STRIDED:
        stride = tl.load(strides + matrix).to(tl.int32)
    # Tiles in bands of GROUP rows, so that tiles computed together share factors in cache.
    tile = tl.program_id(0)
    rows, cols = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (GROUP * cols) * GROUP
    height = tl.minimum(rows - first, GROUP)
    r = (first + (tile % (GROUP * cols)) % height) * BM + tl.arange(0, BM)
    side = ((tile % (GROUP * cols)) // height) * BN
    c = side + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if AHEAD:  # load X while the product is computed
        lines = side + LINE * tl.arange(0, BN // LINE)
        _ask_for(X + (r % M)[:, None] * stride + (lines % N)[None, :])
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
    # In two halves: registers for all of X beside T would leave room for half as many programs.
    half = side + tl.arange(0, BN // 2)
    T1, T2 = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
    _apply(X, r, half, T1, decay, step, M, N, stride, ELEMENT, EVEN)
    _apply(X, r, half + BN // 2, T2, decay, step, M, N, stride, ELEMENT, EVEN)


def update(
    weights: Tensor,
    T: Tensor,
    decays: Tensor,
    steps: Tensor,
    *,
    element: torch.dtype,
    finite: Tensor | None = None,
    strides: Tensor | None = None,
) -> None:
    """``X ← decay·X − step·T`` for the matrices at the addresses ``weights``; T is (B, m, n).

    ``strides`` has the distance between rows of each X, where some X are parts of wider matrices.
    """
    T = T.contiguous()
    size = T.shape[1] * T.shape[2]
    _update_kernel[(triton.cdiv(size, _BLOCK), T.shape[0])](
        weights, T, decays, steps, decays if finite is None else finite,
        weights if strides is None else strides, size, T.shape[2],
        ELEMENT=ELEMENTS[element], SKIP=finite is not None, STRIDED=strides is not None,
        BLOCK=_BLOCK, num_warps=8,
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
    """``X ← decay·X − step·LR`` with L (B, m, ℓ) and R (B, ℓ, n) of the same precision."""
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
        ELEMENT=ELEMENTS[element],
        SKIP=finite is not None,
        STRIDED=strides is not None,
        EVEN=M % BM == 0 and N % BN == 0,
        AHEAD=torch.version.hip is None and not interpreted(),  # prefetching is NVIDIA assembly
        LINE=128 // element.itemsize,
        BM=BM, BN=BN, BK=BK, GROUP=8,
        num_warps=4, num_stages=4,
    )  # fmt: skip
