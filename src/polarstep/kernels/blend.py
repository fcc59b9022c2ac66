"""A warm sketch's next start, ``S ← X + ε·Nᵀ``, in the same launch as the product X.

X is a batch of matrices; N is one matrix of random numbers that the batch shares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["product_and_blend"]


@triton.jit
def _leave(X, start, numbers, r, c, value, N, rows, kept, scale, NOISE: tl.constexpr):
    at = r[:, None] * N + c[None, :]
    inside = c[None, :] < N
    tl.store(X + at, value.to(X.dtype.element_ty), mask=inside & (r[:, None] < rows))
    inside &= r[:, None] < kept
    if NOISE:
        value += scale * tl.load(numbers + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(start + at, value.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _product_and_blend_kernel(
    H, B, numbers, X, start, finite,
    L, N, width, scale,
    NOISE: tl.constexpr,
    SKIP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    # H is (batch, L, L), B and X (batch, L, N), start (batch, width, N), numbers (width, N).
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.cdiv(L, BM)
    row = tl.program_id(0) % rows  # programs that run together share columns of B
    side = (tl.program_id(0) // rows) * BN
    r = row * BM + tl.arange(0, BM)
    c = side + tl.arange(0, BN)
    k = tl.arange(0, BK)
    h = H + batch * L * L + (r % L)[:, None] * L + k[None, :]
    b = B + batch * L * N + k[:, None] * N + (c % N)[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for i in range(0, L, BK):
        x = tl.load(h, mask=k[None, :] < L - i, other=0.0)
        y = tl.load(b, mask=k[:, None] < L - i, other=0.0)
        acc = tl.dot(x, y, acc)
        h += BK
        b += BK * N
    kept = width
    if SKIP:
        kept = tl.where(tl.load(finite + batch) != 0, width, 0)  # kept = 0 stores nothing
    X += batch * L * N
    start += batch * width * N
    # In halves: a whole tile of numbers and a tile of the product do not fit in registers together.
    one, two = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
    half = side + tl.arange(0, BN // 2)
    _leave(X, start, numbers, r, half, one, N, L, kept, scale, NOISE)
    _leave(X, start, numbers, r, half + BN // 2, two, N, L, kept, scale, NOISE)


def product_and_blend(
    H: Tensor,
    B: Tensor,
    start: Tensor,
    out_dtype: torch.dtype,
    *,
    numbers: Tensor | None = None,
    scale: float = 0.0,
    finite: Tensor | None = None,
) -> Tensor:
    """Return ``X = HB`` in ``out_dtype``; write ``start ← X + scale·numbersᵀ``, from X unrounded.

    Without numbers ``start`` is X in another precision. H is (batch, ℓ, ℓ) and B is (batch, ℓ, n),
    contiguous. ``start`` and ``numbersᵀ`` may have fewer rows than X; the last rows of X are then
    left out of ``start``. A matrix whose ``finite`` is zero keeps its old start.
    """
    batch, L, N = B.shape
    if numbers is not None:
        numbers = numbers.mT.contiguous()
    X = torch.empty(B.shape, dtype=out_dtype, device=B.device)
    # Measured on an H200 for 208 rows.
    wide = N >= 2048
    BM, BN, warps, stages = (64, 256, 8, 4) if wide else (64, 128, 4, 3)
    _product_and_blend_kernel[(triton.cdiv(L, BM) * triton.cdiv(N, BN), batch)](
        H, B, start if numbers is None else numbers, X, start, start if finite is None else finite,
        L, N, start.shape[-2], scale,
        NOISE=numbers is not None,
        SKIP=finite is not None,
        BM=BM,
        BN=BN,
        BK=64 // B.element_size(),
        num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return X
