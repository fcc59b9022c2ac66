"""Norms of a batch of matrices, and what is divided by them.

* :func:`normalized`: Y/‖Y‖_F in 16 bits, whatever the scale of Y. Squares are added in float64, as the
  squares of 1e-30 or 1e30 leave float32's range. The order of the additions does not depend on
  scheduling, so a step can be repeated bit for bit.
* :func:`inverse_rest_size`: 1/δ of a deflated step, from ‖M‖²_F and ‖B‖²_F.
* :func:`scale_to_one` and :func:`lifted_norm`: the scale s of X₀ and the norm of T = s·P(s²G)·X₀, from
  products with sixteen columns, which take as long as reading the matrix does.

Each is a few launches for a whole batch, and nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.numerics import MOST_ENERGY, SIGNS, norm_products

__all__ = [
    "inverse_rest_size",
    "lifted_norm",
    "normalized",
    "scale_to_one",
    "times_few",
]

_BLOCK = 4096
# Partial sums of all matrices together: enough programs to fill a GPU, yet few numbers to add up.
_SUMS = 1024


@triton.jit
def _sum_squares_kernel(Y, sums, size, parts, BLOCK: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(part * BLOCK, size, parts * BLOCK):
        at = start + tl.arange(0, BLOCK)
        y = tl.load(Y + batch * size + at, mask=at < size, other=0.0).to(tl.float64)
        total += y * y
    tl.store(sums + batch * parts + part, tl.sum(total, axis=0))


@triton.jit
def _divide_kernel(
    Y, sums, out, size, SHRINK: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    square = tl.sum(tl.load(sums + batch * PARTS + tl.arange(0, PARTS)), axis=0)
    # 1/‖Y‖_F leaves the range of float32 for Y near the ends of that range, so there Y is first
    # multiplied by a power of two.
    exact = tl.sqrt(square)
    lift = tl.where(exact > 2.0**100, 2.0**-64, tl.where(exact < 2.0**-90, 2.0**64, 1.0))
    norm = (exact * lift).to(tl.float32)
    inverse = tl.where(norm > 0, SHRINK / tl.maximum(norm, 1e-38), 0.0)  # a zero matrix stays zero
    y = tl.load(Y + batch * size + at, mask=inside, other=0.0).to(tl.float32)
    y *= lift.to(tl.float32)
    tl.store(out + batch * size + at, (y * inverse).to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_of_parts(sums, parts, BLOCK: tl.constexpr):
    """The sum of ``parts`` float64 numbers at ``sums``, always in the same order."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(sums + at, mask=at < parts, other=0.0)
    return tl.sum(total, axis=0)


def normalized(Y: Tensor, shrink: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Each matrix of ``Y`` (batch, m, n) times ``shrink``/‖Y‖_F; a zero matrix stays zero.

    The result has the memory layout of ``Y``, also where ``Y`` is a transposed view.
    """
    if Y.mT.is_contiguous() and not Y.is_contiguous():
        return normalized(Y.mT, shrink, dtype).mT
    Y = Y.contiguous()
    batch, size = Y.shape[0], Y.shape[1] * Y.shape[2]
    sums = sums_of_squares(Y)
    out = torch.empty_like(Y, dtype=dtype)
    common = {"PARTS": sums.shape[1], "BLOCK": _BLOCK, "num_warps": 8}
    grid = (triton.cdiv(size, _BLOCK), batch)
    _divide_kernel[grid](Y, sums, out, size, SHRINK=shrink, **common)
    return out


def sums_of_squares(Y: Tensor) -> Tensor:
    """(batch, parts) float64 numbers whose sum over the parts is ‖Y‖_F² of each matrix."""
    if Y.mT.is_contiguous():
        Y = Y.mT
    Y = Y.contiguous()
    batch, size = Y.shape[0], Y.shape[1] * Y.shape[2]
    blocks = triton.next_power_of_2(triton.cdiv(size, _BLOCK))  # more parts would add nothing
    parts = min(blocks, triton.next_power_of_2(max(8, min(512, triton.cdiv(_SUMS, batch)))))
    sums = torch.empty(batch, parts, device=Y.device, dtype=torch.float64)
    _sum_squares_kernel[(parts, batch)](Y, sums, size, parts, BLOCK=_BLOCK, num_warps=8)
    return sums


@triton.jit
def _inverse_size_kernel(
    of_M, of_B, inverse, left, parts_M, parts_B,
    FACTOR: tl.constexpr, FLOOR: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    whole = sum_of_parts(of_M + batch * parts_M, parts_M, BLOCK)
    head = sum_of_parts(of_B + batch * parts_B, parts_B, BLOCK)
    size = FACTOR * tl.sqrt(tl.maximum(whole - head, FLOOR * whole) / left)
    # A zero matrix has no rest, nor has one whose basis is too long; 1/δ must be a number of float32.
    has_rest = (size > 0) & (head <= MOST * whole)
    value = tl.where(has_rest, 1 / tl.where(size > 0, size, 1.0), 0.0)
    tl.store(inverse + batch, tl.minimum(value, 1e38).to(tl.float32))


def inverse_rest_size(
    M: Tensor,
    B: Tensor,
    left: int,
    factor: float,
    floor: float,
    squares: Tensor | None = None,
) -> Tensor:
    """1/δ of each matrix, as :func:`polarstep.maps.deflated.rest_size` defines δ, in float32.

    ``squares`` (batch, parts) adds up to ‖M‖²_F in float64, where the momentum kernel has computed it.
    """
    of_M, of_B = sums_of_squares(M) if squares is None else squares, sums_of_squares(B)
    inverse = torch.empty(len(M), dtype=torch.float32, device=M.device)
    _inverse_size_kernel[(len(M),)](
        of_M, of_B, inverse, left, of_M.shape[1], of_B.shape[1],
        FACTOR=factor, FLOOR=floor, MOST=MOST_ENERGY, BLOCK=512,
    )  # fmt: skip
    return inverse


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
