"""The norms that a polynomial step needs: of X₀, for the scale s, and of T = s·P(s²G)·X₀.

Each is a few launches for a whole batch, and nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels.few_columns import hashed, times_few
from polarstep.numerics import SIGNS, norm_products

__all__ = ["lifted_norm", "scale_to_one"]


@triton.jit
def _start_kernel(
    out, UNIT: tl.constexpr, OF_SIGNS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if OF_SIGNS:
        value = (hashed(at) & 1).to(tl.float32) * 2 - 1
    else:
        value = (hashed(at) >> 8).to(tl.float32) * 2.0**-23 - 1
    value *= UNIT
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < SIZE)


def _start(like: Tensor, *, of_signs: bool, unit: float = 1.0) -> Tensor:
    """``signs`` or ``start_vectors`` of :mod:`polarstep.numerics` for (batch, m, m).

    All entries are multiplied by ``unit``.

    For matrices of 16 or 8 bits they are in bfloat16, whose range holds all products with them.
    """
    dtype = torch.bfloat16 if like.dtype.itemsize <= 2 else torch.float32
    V = torch.empty(1, like.shape[-1], SIGNS, dtype=dtype, device=like.device)
    _start_kernel[(triton.cdiv(V.numel(), 1024),)](V, unit, of_signs, SIZE=V.numel(), BLOCK=1024)
    return V


def _times(G: Tensor, V: Tensor) -> Tensor:
    """GV (batch, m, 16) in the precision of V."""
    return times_few(G, V, torch.empty(*G.shape[:2], SIGNS, dtype=V.dtype, device=G.device))


@triton.jit
def _with_squares(sums, most, x):
    """Sums over rows of (y/most)² with the rows of ``x`` added, and the new most, the largest |y|.

    The squares of Gᵖv itself leave float32 where ‖G‖_op is a few thousand.
    """
    larger = tl.maximum(most, tl.max(tl.max(tl.abs(x), axis=1), axis=0))
    unit = tl.where(larger > 0, larger, 1.0)
    was, y = most / unit, x / unit
    return sums * (was * was) + tl.sum(y * y, axis=0), larger


@triton.jit
def _scale_kernel(
    V, U, G, scale, M, otherwise,
    MARGIN: tl.constexpr, FULL_AT: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, FEW)
    before = tl.zeros((FEW,), dtype=tl.float32)
    after = tl.zeros((FEW,), dtype=tl.float32)
    most_v = tl.max(before, axis=0)
    most_u = tl.max(after, axis=0)
    diagonal = tl.zeros((BM,), dtype=tl.float32)
    for start in range(0, M, BM):
        r = start + tl.arange(0, BM)
        if FULL_AT > 0:
            on = tl.load(G + batch * M * M + r.to(tl.int64) * (M + 1), mask=r < M, other=0.0)
            diagonal = tl.maximum(diagonal, on.to(tl.float32))
        at = batch * M * FEW + r[:, None] * FEW + c[None, :]
        v = tl.load(V + at, mask=r[:, None] < M, other=0.0).to(tl.float32)
        u = tl.load(U + at, mask=r[:, None] < M, other=0.0).to(tl.float32)
        before, most_v = _with_squares(before, most_v, v)
        after, most_u = _with_squares(after, most_u, u)
    ratio = tl.max(tl.where(before > 0, after / tl.where(before > 0, before, 1.0), 0.0), axis=0)
    grown = most_u / tl.where(most_v > 0, most_v, 1.0)
    ratio *= grown * grown
    # ratio = λ² and s = 1/(margin·√λ). A matrix that is zero or not finite gets s = 0.
    known = (ratio > 0) & (ratio < 1e38)
    s = 1 / (MARGIN * tl.sqrt(tl.sqrt(tl.where(known, ratio, 1.0))))
    s = tl.where(known, s, 0.0)
    if FULL_AT > 0:
        s = tl.where(tl.max(diagonal, axis=0) >= FULL_AT, tl.minimum(s, otherwise), s)
    tl.store(scale + batch, s)


def scale_to_one(
    G: Tensor, margin: float, *, full_at: float = 0.0, otherwise: float = 0.0
) -> Tensor:
    """s of each matrix with ‖sX‖_op ≈ 1/margin, or a little more, for G = XXᵀ; s = 0 where G is zero.

    Where a diagonal entry is ``full_at`` or more, entries of G may have been cut off there, and s is at
    most ``otherwise``. ``full_at`` = 0 means that G has no such limit.
    """
    batch, M, _ = G.shape
    p = norm_products(M)
    # G⁷v leaves the range of float32 beyond ‖G‖_op = 3e5, and with this unit beyond 1e7, as G⁵v does.
    U = _start(G, of_signs=False, unit=1.0 if p <= 5 else 2.0**-40)
    for _ in range(p):
        V, U = U, _times(G, U)
    scale = torch.empty(batch, dtype=torch.float32, device=G.device)
    _scale_kernel[(batch,)](
        V, U, G, scale, M, otherwise,
        MARGIN=margin, FULL_AT=full_at, FEW=SIGNS, BM=256, num_warps=4,
    )  # fmt: skip
    return scale


@triton.jit
def _lifted_norm_kernel(
    V, U, scale, out, M, factor, HAS_SCALE: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr
):
    batch = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, FEW)
    total = tl.zeros((BM, FEW), dtype=tl.float32)
    for start in range(0, M, BM):
        r = start + tl.arange(0, BM)
        at = batch * M * FEW + r[:, None] * FEW + c[None, :]
        v = tl.load(V + at, mask=r[:, None] < M, other=0.0).to(tl.float32)
        u = tl.load(U + at, mask=r[:, None] < M, other=0.0).to(tl.float32)
        total += v * u
    size = factor
    if HAS_SCALE:
        size *= tl.load(scale + batch)
    tl.store(out + batch, tl.sum(tl.sum(total, axis=1), axis=0) / FEW * size * size)


def lifted_norm(P: Tensor, G: Tensor, scale: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """:func:`polarstep.ops.base.squared_norm` of s·factor·P by four launches, in float32.

    ``scale`` has the s of each matrix; ``None`` means s = 1. The products read P and G as they are
    stored. An estimate that first converted both to 16 bits, and had some thirty small launches more,
    made a step on nanoGPT's matrices longer by 28% on an H200.
    """
    W = _times(P, _start(P, of_signs=True))
    U = _times(G, W)
    out = torch.empty(len(G), dtype=torch.float32, device=G.device)
    _lifted_norm_kernel[(len(G),)](
        W, U, out if scale is None else scale, out, G.shape[-1], factor,
        HAS_SCALE=scale is not None, FEW=SIGNS, BM=128, num_warps=4,
    )  # fmt: skip
    return out
