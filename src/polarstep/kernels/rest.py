"""The norm of the rest R = A − DB of a sketch, from sixteen vectors, in five launches.

    P = BV                  with ‖B‖²_F, and ‖A‖²_F from its parts
    Y = AV − DP             with YᵀY
    G = DᵀY
    W = AᵀY − BᵀG           with WᵀW
    1/δ and the next V      from YᵀY, WᵀW and W

The definition of δ and its plain twin are :meth:`polarstep.products.deflating.Deflating.rest_norm`. A is
read twice, in 16 bits. All vectors are float32, and are multiplied as sums of two 16-bit numbers:
A's leading directions may be hundreds of times as long as R, and Y must be free of them. Each product
is divided by ‖A‖_F, so that no number leaves the range of float32, whatever the scale of A.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels.few_columns import (
    blocks_of,
    hashed,
    rows_times_few,
    strides_of,
    tiles_of,
    times_few,
)
from polarstep.kernels.normalize import sum_of_parts, sums_of_squares
from polarstep.products.deflating import SHIFT, SIGNS, RestNorm, RestRules, first_vectors

__all__ = ["rest_norm"]

# Y and W are multiplied by this number. Entries of Y are then far above float16's smallest numbers.
_UNIT = tl.constexpr(64.0)
# Numbers that a program adds up at a time, from those that others have left.
_PARTS = 2048
# Rows of W that a program of the last launch takes, in steps.
_LAST_ROWS, _LAST_STEP = 256, 64


@triton.jit
def _over_norm(square):
    """64/‖A‖_F for ``square`` = ‖A‖²_F; zero for a zero matrix."""
    norm = tl.sqrt(tl.where(square > 0, square, 1.0))
    return tl.where(square > 0, tl.minimum(_UNIT / norm, 1e38), 0.0).to(tl.float32)


@triton.jit
def _project_kernel(
    B, V, squares, P, whole, of_B,
    rows, K, few, parts,
    B_batch, B_row, B_col,
    V_batch, V_row, V_col,
    FEW: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    r = block * BM + tl.arange(0, BM)
    acc, total = rows_times_few(
        B + batch * B_batch, V + batch * V_batch, r, rows, K, few,
        B_row, B_col, V_row, V_col, False, True, FEW, BM, BK,
    )  # fmt: skip
    square = sum_of_parts(squares + batch * parts, parts, PARTS)
    at = P + batch * rows * FEW + r[:, None] * FEW + tl.arange(0, FEW)[None, :]
    tl.store(at, acc * _over_norm(square), mask=r[:, None] < rows)
    tl.store(of_B + batch * tl.num_programs(0) + block, total)
    if block == 0:
        tl.store(whole + batch, square)


@triton.jit
def _rest_kernel(
    A, V, L, P, whole, out, moments,
    rows, K, K2, few,
    A_batch, A_row, A_col,
    V_batch, V_row, V_col,
    L_batch, L_row, L_col,
    SPLIT: tl.constexpr,
    SPLIT_SECOND: tl.constexpr,
    IN_P: tl.constexpr,
    FEW: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BK2: tl.constexpr,
):  # fmt: skip
    """Rows of (AV − LP)·64/‖A‖_F, and the 16×16 matrix of their columns' products with each other.

    IN_P: P has the factor 64/‖A‖_F already.
    """
    batch = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    r = block * BM + tl.arange(0, BM)
    c = tl.arange(0, FEW)
    acc, _ = rows_times_few(
        A + batch * A_batch, V + batch * V_batch, r, rows, K, few,
        A_row, A_col, V_row, V_col, SPLIT, False, FEW, BM, BK,
    )  # fmt: skip
    second, _ = rows_times_few(
        L + batch * L_batch, P + batch * K2 * FEW, r, rows, K2, FEW,
        L_row, L_col, FEW, 1, SPLIT_SECOND, False, FEW, BM, BK2,
    )  # fmt: skip
    scale = _over_norm(tl.load(whole + batch))
    y = acc * scale - (second if IN_P else second * scale)
    y = tl.where((r < rows)[:, None], y, 0.0)
    tl.store(out + batch * rows * FEW + r[:, None] * FEW + c[None, :], y, mask=(r < rows)[:, None])
    at = moments + (batch * tl.num_programs(0) + block) * FEW * FEW
    tl.store(at + c[:, None] * FEW + c[None, :], tl.dot(tl.trans(y), y, input_precision="ieee"))


@triton.jit
def _sum_of_moments(moments, parts, FEW: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of ``parts`` matrices of size FEW×FEW."""
    entry = tl.arange(0, FEW * FEW)
    total = tl.zeros((FEW * FEW,), dtype=tl.float32)
    for start in range(0, parts, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        at = moments + part[:, None] * (FEW * FEW) + entry[None, :]
        total += tl.sum(tl.load(at, mask=(part < parts)[:, None], other=0.0), axis=0)
    return tl.reshape(total, (FEW, FEW))


@triton.jit
def _on_diagonal(X, FEW: tl.constexpr):
    """The diagonal of X."""
    i = tl.arange(0, FEW)
    return tl.sum(tl.where(i[:, None] == i[None, :], X, 0.0), axis=1)


@triton.jit
def _inverse_factor(S, SHIFT: tl.constexpr, FEW: tl.constexpr):
    """The inverse of the Cholesky factor of S + SHIFT·tr(S)·I, by elimination."""
    i = tl.arange(0, FEW)
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    trace = tl.sum(_on_diagonal(S, FEW), axis=0)
    least = tl.where(trace > 0, SHIFT * trace, 1.0)
    S += least * identity
    inverse = identity
    for j in range(FEW):
        here = (i == j)[:, None]
        row = tl.sum(tl.where(here, S, 0.0), axis=0)
        row_of_inverse = tl.sum(tl.where(here, inverse, 0.0), axis=0)
        # Rounding may bring a pivot below what was added to it.
        pivot = tl.maximum(tl.sum(tl.where(i == j, row, 0.0), axis=0), 0.5 * least)
        below = tl.sum(tl.where((i == j)[None, :], S, 0.0), axis=1) / pivot
        below = tl.where(i > j, below, 0.0)
        S -= below[:, None] * row[None, :]
        inverse -= below[:, None] * row_of_inverse[None, :]
    return inverse / tl.sqrt(tl.maximum(_on_diagonal(S, FEW), 0.5 * least))[:, None]


@triton.jit
def _norm_kernel(
    of_Y, of_W, of_B, whole, W, finite, inverse, energy, vectors,
    rows, parts_Y, parts_W, parts_B,
    MARGIN: tl.constexpr,
    FRESH: tl.constexpr,
    ROOM: tl.constexpr,
    LEAST: tl.constexpr,
    SHIFT: tl.constexpr,
    LENGTH: tl.constexpr,
    SKIP: tl.constexpr,
    COUNT: tl.constexpr,
    ROOT: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """1/δ, ‖R‖²_F/δ² and the rows of the next V; every program computes δ, and the first stores it."""
    batch = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, FEW)
    S = _sum_of_moments(of_Y + batch * parts_Y * FEW * FEW, parts_Y, FEW, 8)
    K = _sum_of_moments(of_W + batch * parts_W * FEW * FEW, parts_W, FEW, 8)
    # W has the factor 64/‖A‖_F of Y and one of its own; orthonormal columns have neither of Y's.
    N = _inverse_factor(S, SHIFT, FEW)
    K = tl.dot(tl.dot(N, K, input_precision="ieee"), tl.trans(N), input_precision="ieee")
    lengths = _on_diagonal(K, FEW)
    seen = tl.sum(lengths, axis=0)  # ‖W‖²_F
    usable = (seen > 0) & (seen < float("inf"))
    over = tl.where(usable, 1 / tl.where(usable, seen, 1.0), 0.0)
    K = tl.where(usable, K * over, 0.0)

    # A bound on ‖K‖ from the traces of K² and K⁴ (polarstep.products.deflating).
    squared = tl.dot(K, K, input_precision="ieee")
    mean = tl.sum(_on_diagonal(squared, FEW), axis=0) / COUNT
    second = tl.sum(tl.sum(squared * squared, axis=1), axis=0) / COUNT
    deviation = tl.sqrt(tl.maximum(second - mean * mean, 0.0))
    bound = tl.sqrt(mean + ROOT * deviation)
    largest = tl.sqrt(seen * bound) / _UNIT
    longest = tl.sqrt(tl.max(lengths, axis=0)) / _UNIT

    square = tl.load(whole + batch)
    head = sum_of_parts(of_B + batch * parts_B, parts_B, PARTS)
    safe = tl.where(square > 0, square, 1.0)
    part = tl.sqrt(tl.maximum(1 + ROOM - head / safe, 0.0)).to(tl.float32)
    size = tl.minimum(MARGIN * largest, tl.maximum(part, longest))  # δ/‖A‖_F
    known = usable & (largest > LEAST)
    size = tl.where(known, size, 1.0)
    if tl.program_id(0) == 0:
        value = tl.where(known, 1 / (size.to(tl.float64) * tl.sqrt(safe)), 0.0)
        tl.store(inverse + batch, tl.minimum(value, 1e38).to(tl.float32))
        tl.store(energy + batch, tl.where(known, (part / size) * (part / size), 0.0))

    # W/‖W‖_F times √b, and some of the first vectors.
    N = tl.trans(N) * tl.sqrt(COUNT * over)
    keeps = False
    if SKIP:
        keeps = tl.load(finite + batch) == 0
    for start in range(0, ROWS, STEP):
        r = tl.program_id(0) * ROWS + start + tl.arange(0, STEP)
        inside = (r < rows)[:, None] & (c < COUNT)[None, :]
        w = tl.load(W + batch * rows * FEW + r[:, None] * FEW + c[None, :], mask=inside, other=0.0)
        new = tl.where(usable, tl.dot(w, N, input_precision="ieee"), 0.0)
        bits = (hashed(r[:, None] * FEW + c[None, :]) >> 8).to(tl.float32)
        new += FRESH * LENGTH * (bits * 2.0**-23 - 1)
        at = vectors + batch * COUNT * rows + c[None, :] * rows + r[:, None]
        if SKIP:
            new = tl.where(keeps, tl.load(at, mask=inside, other=0.0).to(tl.float32), new)
        tl.store(at, new.to(vectors.dtype.element_ty), mask=inside)


def rest_norm(
    A: Tensor,
    D: Tensor,
    B: Tensor,
    rules: RestRules,
    squares: Tensor | None,
    vectors: Tensor | None,
    finite: Tensor | None,
) -> RestNorm:
    """:meth:`polarstep.products.deflating.Deflating.rest_norm` for matrices of 16 bits or float32.

    The next vectors are written over ``vectors``, if they have the precision of ``A``.
    """
    batch, m, n = A.shape
    squares = sums_of_squares(A) if squares is None else squares
    first = vectors is None
    if vectors is None:
        vectors = first_vectors(m, n, A.device)
    vectors = vectors.to(A.dtype).contiguous()
    V, few = vectors.mT, vectors.shape[1]

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=A.device)

    ell, halves = B.shape[-2], A.dtype.itemsize == 2
    P, whole = room(ell, SIGNS), room(dtype=torch.float64)
    of_B = room(blocks_of(B), dtype=torch.float64)
    _project_kernel[(blocks_of(B), batch)](
        B, V, squares, P, whole, of_B,
        ell, n, few, squares.shape[1],
        *B.stride(), *strides_of(V),
        FEW=SIGNS, PARTS=_PARTS, **tiles_of(B),
    )  # fmt: skip

    def of_rest(
        A: Tensor, V: Tensor, L: Tensor, P: Tensor, *, P_has_factor: bool
    ) -> tuple[Tensor, Tensor]:
        """(AV − LP)·64/‖A‖_F, and its columns' products with each other in parts."""
        rows = A.shape[-2]
        out, moments = room(rows, SIGNS), room(blocks_of(A), SIGNS, SIGNS)
        _rest_kernel[(blocks_of(A), batch)](
            A, V, L, P, whole, out, moments,
            rows, A.shape[-1], L.shape[-1], V.shape[-1],
            *A.stride(), *strides_of(V), *L.stride(),
            SPLIT=halves and V.dtype == torch.float32, SPLIT_SECOND=halves, IN_P=P_has_factor,
            FEW=SIGNS, BK2=tiles_of(L)["BK"], **tiles_of(A),
        )  # fmt: skip
        return out, moments

    Y, of_Y = of_rest(A, V, D, P, P_has_factor=True)
    G = times_few(D.mT, Y, room(ell, SIGNS), split=halves)
    W, of_W = of_rest(A.mT, Y, B.mT, G, P_has_factor=False)

    inverse, energy = room(), room()
    if first:
        vectors = room(few, n, dtype=A.dtype)
    _norm_kernel[(triton.cdiv(n, _LAST_ROWS), batch)](
        of_Y, of_W, of_B, whole, W, whole if finite is None else finite, inverse, energy, vectors,
        n, of_Y.shape[1], of_W.shape[1], of_B.shape[1],
        MARGIN=rules.margin, FRESH=rules.fresh, ROOM=rules.room, LEAST=rules.least, SHIFT=SHIFT,
        LENGTH=math.sqrt(3 / n), SKIP=finite is not None and not first,
        COUNT=few, ROOT=math.sqrt(few - 1), FEW=SIGNS,
        ROWS=_LAST_ROWS, STEP=_LAST_STEP, PARTS=_PARTS, num_warps=1,
    )  # fmt: skip
    return RestNorm(inverse[:, None, None], energy, vectors)
