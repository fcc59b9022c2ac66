"""The norm of the rest R = A − DB of a sketch, from sixteen vectors, in five launches.

    AV and BV               each as a sum of parts, and ‖A‖²_F from its parts
    Y = AV − D(BV)          with YᵀY
    AᵀY and DᵀY             each as a sum of parts, and N with which YN has orthonormal columns
    W = AᵀY − Bᵀ(DᵀY)       with WᵀW and ‖B‖²_F
    1/δ and the next V      from WᵀW, N and W

δ is defined in :mod:`polarstep.polar.rest_norm`, and the plain twin is
:meth:`polarstep.products.Products.rest_norm`. A is read twice, in 16 bits. All vectors are float32, and
are multiplied as sums of two 16-bit numbers: A's leading directions may be hundreds of times as long as
R, and Y must be free of them. Each product is divided by ‖A‖_F, so that no number leaves the range of
float32, whatever the scale of A.

**How the work is cut.** A program that walks along a whole row of A waits for memory most of the time,
and a few hundred such programs do not fill a GPU. So a product with A is cut along both sides of A. Its
parts along the longer side are stored, and the launch that reads the product adds them up, always in
the same order. The launches that read A also do the small work, which would take as long in launches of
its own: the products with B and Dᵀ, which have few rows, the sum ‖A‖²_F, and the 16×16 algebra of N.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels.few_columns import hashed, rows_times_few, strides_of, tiles_of
from polarstep.kernels.normalize import sum_of_parts, sums_of_squares
from polarstep.products.rest_norm import SHIFT, RestNorm, RestRules
from polarstep.products.start_vectors import SIGNS, first_vectors

__all__ = ["rest_norm"]

# Y and W are multiplied by this number. Entries of Y are then far above float16's smallest numbers.
_UNIT = tl.constexpr(64.0)
# Products with A: blocks of 64 lines of 128 bytes, the fewest rows that four warps multiply from shared
# memory, and two blocks on their way while the third is multiplied.
_LINES, _LINE, _WARPS, _STAGES = 64, 128, 4, 3
# A product with A is cut into about so many programs, two for each of an H200's multiprocessors, but
# into no more than 16 parts of at least four blocks.
_PROGRAMS, _MOST_PARTS, _LEAST_BLOCKS = 264, 16, 4
# Products with B and Dᵀ, which have few rows: lines of a block, and blocks that a program takes. With as
# many lines as A has, Triton would merge the code of both products, and give them memory side by side.
_SMALL_LINES, _SMALL_BLOCKS = 32, 32
# Y and W: rows and columns of the blocks of D and Bᵀ. More rows make fewer blocks, whose 16×16 matrices
# all programs of the last launch add up.
_ROWS, _COLUMNS, _REST_WARPS, _REST_STAGES = 128, 64, 4, 3
# The last launch: rows of W that a program takes, in steps.
_LAST_ROWS, _LAST_STEP, _LAST_WARPS = 256, 128, 4


@triton.jit
def _over_norm(square):
    """64/‖A‖_F for ``square`` = ‖A‖²_F; zero for a zero matrix."""
    norm = tl.sqrt(tl.where(square > 0, square, 1.0))
    return tl.where(square > 0, tl.minimum(_UNIT / norm, 1e38), 0.0).to(tl.float32)


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
def _part_of_product(
    A, V, out, program, blocks, at_once,
    rows, K, few,
    A_row, A_col, V_row, V_col,
    SPLIT: tl.constexpr, COLUMNS: tl.constexpr, FEW: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store one part of AV for one block of rows: the sum over ``at_once`` blocks of A along K.

    ``out`` has shape (parts, rows, FEW). A V with twice as many columns stands for the sum of its first
    half and its second.
    """
    part, r = program // blocks, (program % blocks) * BM + tl.arange(0, BM)
    first = part * at_once * BK
    acc = rows_times_few(
        A + first.to(tl.int64) * A_col, V + first.to(tl.int64) * V_row,
        r, rows, tl.minimum(at_once * BK, K - first), few,
        A_row, A_col, V_row, V_col, SPLIT, COLUMNS, BM, BK,
    )  # fmt: skip
    if COLUMNS > FEW:
        acc = tl.sum(tl.reshape(acc, (BM, COLUMNS // FEW, FEW)), axis=1)
    at = out + (part * rows + r)[:, None] * FEW + tl.arange(0, FEW)[None, :]
    tl.store(at, acc, mask=(r < rows)[:, None])


@triton.jit
def _products_kernel(
    A, V, AV, L, U, LU, numbers, result,
    rows, rows_L, K, few, few_L,
    blocks, blocks_L, at_once, at_once_L, programs_L, count,
    A_batch, A_row, A_col,
    V_batch, V_row, V_col,
    L_batch, L_row, L_col,
    U_batch, U_row, U_col,
    FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEW: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BM_L: tl.constexpr,
    BK_L: tl.constexpr,
):  # fmt: skip
    """Parts of AV and LU. The first program computes ‖A‖²_F in the first launch, N in the second.

    Programs of L come before programs of A, so that none of them is the last to run.
    """
    batch = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    if program == 0:
        if FIRST:
            tl.store(result + batch, sum_of_parts(numbers + batch * count, count, PARTS))
        else:
            c = tl.arange(0, FEW)
            S = _sum_of_moments(numbers + batch * count * FEW * FEW, count, FEW, 8)
            at = result + batch * FEW * FEW + c[:, None] * FEW + c[None, :]
            tl.store(at, _inverse_factor(S, SHIFT, FEW))
    elif program <= programs_L:
        parts = programs_L // blocks_L
        _part_of_product(
            L + batch * L_batch, U + batch * U_batch, LU + batch * parts * rows_L * FEW,
            program - 1, blocks_L, at_once_L,
            rows_L, K, few_L,
            L_row, L_col, U_row, U_col, SPLIT, FEW, FEW, BM_L, BK_L,
        )  # fmt: skip
    else:
        parts = (tl.num_programs(0) - 1 - programs_L) // blocks
        _part_of_product(
            A + batch * A_batch, V + batch * V_batch, AV + batch * parts * rows * FEW,
            program - 1 - programs_L, blocks, at_once,
            rows, K, few,
            A_row, A_col, V_row, V_col, False, COLUMNS, FEW, BM, BK,
        )  # fmt: skip


@triton.jit
def _rest_kernel(
    AV, L, P, whole, out, pairs, moments, of_L,
    rows, K,
    L_batch, L_row, L_col,
    FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    PAIRS: tl.constexpr,
    FEW: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_P: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Rows of (AV − LP)·64/‖A‖_F, and the 16×16 matrix of their columns' products with each other.

    AV and P are sums of parts. FIRST: L is D. Otherwise L is Bᵀ, P has the factor 64/‖A‖_F already, and
    ‖L‖²_F/‖A‖²_F is added up. PAIRS: each number is also stored as the sum of two numbers of 16 bits.
    """
    batch = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    r, k, c = block * BM + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, FEW)
    inside = (r < rows)[:, None]
    scale = _over_norm(tl.load(whole + batch))

    y = tl.zeros((BM, FEW), dtype=tl.float32)
    of_y = r[:, None] * FEW + c[None, :]
    for part in tl.static_range(PARTS):
        y += tl.load(AV + (batch * PARTS + part) * rows * FEW + of_y, mask=inside, other=0.0)

    of_x = L + batch * L_batch + r[:, None] * L_row + k[None, :] * L_col
    of_p = k[:, None] * FEW + c[None, :]
    second = tl.zeros((BM, FEW), dtype=tl.float32)
    squares = tl.zeros((BM,), dtype=tl.float32)
    for start in range(0, K, BK):
        x = tl.load(of_x, mask=inside & (k < K - start)[None, :], other=0.0)
        p = tl.zeros((BK, FEW), dtype=tl.float32)
        for part in tl.static_range(PARTS_P):
            of_part = P + ((batch * PARTS_P + part) * K + start) * FEW
            p += tl.load(of_part + of_p, mask=(k < K - start)[:, None], other=0.0)
        if FIRST:
            p *= scale
        else:
            of_norm = x.to(tl.float32) * (scale / _UNIT)
            squares += tl.sum(of_norm * of_norm, axis=1)
        if SPLIT:
            high = p.to(x.dtype)
            low = (p - high.to(tl.float32)).to(x.dtype)
            second = tl.dot(x, high, second)
            second = tl.dot(x, low, second)
        else:
            second = tl.dot(x, p, second, input_precision="ieee")
        of_x += BK * L_col

    y = y * scale - (second if FIRST else second * scale)
    y = tl.where(inside, y, 0.0)
    tl.store(out + batch * rows * FEW + of_y, y, mask=inside)
    if PAIRS:
        high = y.to(pairs.dtype.element_ty)
        at = pairs + batch * rows * 2 * FEW + r[:, None] * (2 * FEW) + c[None, :]
        tl.store(at, high, mask=inside)
        tl.store(at + FEW, (y - high.to(tl.float32)).to(pairs.dtype.element_ty), mask=inside)
    if not FIRST:
        total = tl.sum(squares, axis=0).to(tl.float64)
        tl.store(of_L + batch * tl.num_programs(0) + block, total)
    at = moments + (batch * tl.num_programs(0) + block) * FEW * FEW
    tl.store(at + c[:, None] * FEW + c[None, :], tl.dot(tl.trans(y), y, input_precision="ieee"))


@triton.jit
def _norm_kernel(
    factor, of_W, of_B, whole, W, finite, inverse, unheld, seen, vectors,
    rows, parts,
    MARGIN: tl.constexpr,
    FRESH: tl.constexpr,
    ROOM: tl.constexpr,
    LEAST: tl.constexpr,
    LENGTH: tl.constexpr,
    SKIP: tl.constexpr,
    COUNT: tl.constexpr,
    ROOT: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The numbers of a RestNorm and the rows of the next V.

    Every program computes δ, and the first stores it.
    """
    batch = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, FEW)
    N = tl.load(factor + batch * FEW * FEW + c[:, None] * FEW + c[None, :])
    K = _sum_of_moments(of_W + batch * parts * FEW * FEW, parts, FEW, AT_ONCE)
    # W has the factor 64/‖A‖_F twice, from Y and of its own. N, made of YᵀY, takes Y's factor out.
    K = tl.dot(tl.dot(N, K, input_precision="ieee"), tl.trans(N), input_precision="ieee")
    lengths = _on_diagonal(K, FEW)
    energy = tl.sum(lengths, axis=0)  # ‖W‖²_F
    usable = (energy > 0) & (energy < float("inf"))
    over = tl.where(usable, 1 / tl.where(usable, energy, 1.0), 0.0)
    K = tl.where(usable, K * over, 0.0)

    # A bound on ‖K‖ from the traces of K² and K⁴ (polarstep.products.rest_norm).
    squared = tl.dot(K, K, input_precision="ieee")
    mean = tl.sum(_on_diagonal(squared, FEW), axis=0) / COUNT
    second = tl.sum(tl.sum(squared * squared, axis=1), axis=0) / COUNT
    deviation = tl.sqrt(tl.maximum(second - mean * mean, 0.0))
    bound = tl.sqrt(mean + ROOT * deviation)
    largest = tl.sqrt(energy * bound) / _UNIT
    longest = tl.sqrt(tl.max(lengths, axis=0)) / _UNIT

    square = tl.load(whole + batch)
    safe = tl.where(square > 0, square, 1.0)
    head = sum_of_parts(of_B + batch * parts, parts, 256)  # ‖B‖²_F/‖A‖²_F
    part = tl.sqrt(tl.maximum(1 + ROOM - head, 0.0)).to(tl.float32)
    left = (1 - head).to(tl.float32)
    energy /= _UNIT * _UNIT
    size = tl.minimum(MARGIN * largest, tl.maximum(part, longest))  # δ/‖A‖_F
    known = usable & (largest > LEAST)
    size = tl.where(known, size, 1.0)
    if tl.program_id(0) == 0:
        value = tl.where(known, 1 / (size.to(tl.float64) * tl.sqrt(safe)), 0.0)
        tl.store(inverse + batch, tl.minimum(value, 1e38).to(tl.float32))
        tl.store(unheld + batch, tl.where(known, left / size / size, 0.0))
        tl.store(seen + batch, tl.where(known, energy / size / size, 0.0))

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


def _products(
    A: Tensor, V: Tensor, L: Tensor, U: Tensor, numbers: Tensor, result: Tensor, *, first: bool
) -> tuple[Tensor, Tensor]:
    """AV and LU, each of shape (batch, parts, rows, 16), whose sums over the parts are the products.

    With ``first``, ``numbers`` are parts of ‖A‖²_F, and ``result`` gets ‖A‖²_F. Otherwise they are parts
    of YᵀY, and ``result`` gets N.
    """
    batch, rows, K = A.shape
    tiles, of_L = tiles_of(A, _LINES, _LINE), tiles_of(L, _SMALL_LINES, _LINE)
    blocks, blocks_L = triton.cdiv(rows, tiles["BM"]), triton.cdiv(L.shape[1], of_L["BM"])
    wanted = min(_MOST_PARTS, triton.cdiv(_PROGRAMS, batch * blocks))
    at_once, parts = _cut(triton.cdiv(K, tiles["BK"]), wanted, _LEAST_BLOCKS)
    at_once_L, parts_L = _cut(triton.cdiv(K, of_L["BK"]), _MOST_PARTS, _SMALL_BLOCKS)
    AV, LU = (
        torch.empty(batch, *shape, SIGNS, dtype=torch.float32, device=A.device)
        for shape in ((parts, rows), (parts_L, L.shape[1]))
    )
    programs_L = parts_L * blocks_L
    _products_kernel[(1 + programs_L + parts * blocks, batch)](
        A, V, AV, L, U, LU, numbers, result,
        rows, L.shape[1], K, V.shape[-1], U.shape[-1],
        blocks, blocks_L, at_once, at_once_L, programs_L, numbers.shape[1],
        *A.stride(), *strides_of(V), *L.stride(), *strides_of(U),
        FIRST=first, SHIFT=SHIFT,
        SPLIT=L.dtype.itemsize == 2 and U.dtype == torch.float32,
        COLUMNS=max(SIGNS, V.shape[-1]), FEW=SIGNS, PARTS=2048,
        **tiles, BM_L=of_L["BM"], BK_L=of_L["BK"],
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return AV, LU


def _cut(blocks: int, parts: int, least: int) -> tuple[int, int]:
    """How many blocks a part has and how many parts there are, to cut ``blocks`` into ``parts`` at most.

    Every part but the last has ``least`` blocks or more.
    """
    at_once = max(least, triton.cdiv(blocks, parts))
    return at_once, triton.cdiv(blocks, at_once)


def _rest(
    AV: Tensor, L: Tensor, P: Tensor, whole: Tensor, pairs: Tensor | None, *, first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """X = (AV − LP)·64/‖A‖_F, and parts of XᵀX and ‖L‖²_F/‖A‖²_F (the latter not with ``first``).

    AV and P are what :func:`_products` returns. ``pairs`` (batch, rows, 32) gets X once more: each entry
    is the sum of two 16-bit numbers, 16 columns apart.
    """
    batch, parts, rows, _ = AV.shape
    blocks = triton.cdiv(rows, _ROWS)
    X, moments = AV.new_empty(batch, rows, SIGNS), AV.new_empty(batch, blocks, SIGNS, SIGNS)
    of_L = moments if first else AV.new_empty(batch, blocks, dtype=torch.float64)
    _rest_kernel[(blocks, batch)](
        AV, L, P, whole, X, X if pairs is None else pairs, moments, of_L,
        rows, L.shape[-1],
        *L.stride(),
        FIRST=first, SPLIT=L.dtype.itemsize == 2, PAIRS=pairs is not None, FEW=SIGNS,
        PARTS=parts, PARTS_P=P.shape[1],
        BM=_ROWS, BK=_COLUMNS, num_warps=_REST_WARPS, num_stages=_REST_STAGES,
    )  # fmt: skip
    return X, moments, of_L


def rest_norm(
    A: Tensor,
    D: Tensor,
    B: Tensor,
    rules: RestRules,
    squares: Tensor | None,
    vectors: Tensor | None,
    finite: Tensor | None,
) -> RestNorm:
    """:meth:`polarstep.products.rest_norm.RestOperations.rest_norm` for matrices of 16 bits or float32.

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

    whole, factor = room(dtype=torch.float64), room(SIGNS, SIGNS)
    AV, BV = _products(A, V, B, V, squares, whole, first=True)
    pairs = room(m, 2 * SIGNS, dtype=A.dtype) if A.dtype.itemsize == 2 else None
    Y, of_Y, _ = _rest(AV, D, BV, whole, pairs, first=True)
    AY, DY = _products(A.mT, Y if pairs is None else pairs, D.mT, Y, of_Y, factor, first=False)
    W, of_W, of_B = _rest(AY, B.mT, DY, whole, None, first=False)

    inverse, unheld, seen = room(), room(), room()
    if first:
        vectors = room(few, n, dtype=A.dtype)
    _norm_kernel[(triton.cdiv(n, _LAST_ROWS), batch)](
        factor, of_W, of_B, whole, W, whole if finite is None else finite,
        inverse, unheld, seen, vectors,
        n, of_W.shape[1],
        MARGIN=rules.margin, FRESH=rules.fresh, ROOM=rules.room, LEAST=rules.least,
        LENGTH=math.sqrt(3 / n), SKIP=finite is not None and not first,
        COUNT=few, ROOT=math.sqrt(few - 1), FEW=SIGNS,
        ROWS=_LAST_ROWS, STEP=_LAST_STEP, AT_ONCE=32, num_warps=_LAST_WARPS,
    )  # fmt: skip
    return RestNorm(inverse[:, None, None], unheld, seen, vectors)
