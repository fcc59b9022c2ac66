"""One batched matrix product, ``α·AB + β·D + κ·I``, at half the work if the result is symmetric.

A Newton–Schulz step is three such products: G = XXᵀ, H = cG² + bG + aI, X ← HX. The first two are
symmetric, so only the tiles on and under the diagonal are computed, and each is stored twice.
Adding D and the identity before the result is stored saves a pass over memory each.

Large symmetric products have a kernel of their own, which reads its operands through tensor descriptors:
with a descriptor a Hopper GPU copies whole tiles; without, threads spend time on addresses. Only this
kernel takes matrices in eight bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton
    TensorDescriptor = None

from polarstep.kernels import capability, interpreted

__all__ = [
    "DESCRIPTORS_FROM",
    "EIGHT_BIT_TILES",
    "FLOAT8",
    "before_rounding",
    "clamps",
    "describable",
    "describe",
    "halving_pays",
    "in_bands",
    "product",
    "rounded",
    "squared_norm",
    "takes_large_tiles",
]


def describable(*tensors: Tensor) -> bool:
    """Whether contiguous ``tensors`` can be read through descriptors.

    The GPU must support descriptors, and rows must take a multiple of 16 bytes. Always false while
    torch.compile traces, because addresses are not known then.
    """
    if TensorDescriptor is None or torch.compiler.is_compiling():
        return False
    if not interpreted() and capability(tensors[0].device) < (9, 0):
        return False
    return all(X.data_ptr() % 16 == 0 and X.shape[-1] * X.element_size() % 16 == 0 for X in tensors)


def takes_large_tiles(device: torch.device) -> bool:
    """Whether a program may have some 200 KiB of shared memory, and multiplies what lies there.

    NVIDIA's Hopper and Blackwell GPUs for servers do: compute capability 9 and 10. Blackwell GPUs for
    desktops (12) have descriptors too, but 99 KiB, and copy both factors of a product to registers.
    """
    return interpreted() or capability(device)[0] in (9, 10)


def describe(X: Tensor, block: list[int]) -> Any:
    """A descriptor of contiguous ``X``, to be read in tiles of shape ``block``."""
    return TensorDescriptor.from_tensor(X, block)


@triton.jit
def in_bands(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """First row and first column of tile number ``tile`` of an M×N result.

    Tiles come in bands of GROUP rows, so that tiles computed together share operands in cache.
    """
    rows, cols = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (GROUP * cols) * GROUP
    height = tl.minimum(rows - first, GROUP)
    row = first + (tile % (GROUP * cols)) % height
    return row * BM, (tile % (GROUP * cols)) // height * BN


@triton.jit
def squared_norm(diagonal):
    """t = tr YYᵀ, a power of two near 1/t, and whether t is known; an unknown t is set to one.

    t is a little more than the trace, so that the rounded norm of Y/√t stays below one. The power
    of two scales YYᵀ without losing a bit.
    """
    t = tl.sum(diagonal.to(tl.float32), axis=0) * (1 + 2.0**-7)
    known = (t > 1e-36) & (t < 1e36)
    t = tl.where(known, t, 1.0)
    return t, tl.exp2(-tl.floor(tl.log2(t))), known


# With fewer rows there are too few of the large tiles that the kernel with descriptors needs.
DESCRIPTORS_FROM = 512
# With fewer tiles in all matrices half of an H200 or more is idle, and computing half of the result
# takes as long as computing all of it. Two 4096×4096 and three 14336×4096 matrices, sketched with 512
# columns and lifted by one step, spent 1.6 of 6.9 ms in 52 products with 12 to 18 of these tiles.
FEWEST_TILES = 64
# Measured on an H200 for 4096×4096 results: 6% to 10% less time than the kernel for all shapes. These
# tiles take 144 KiB of shared memory.
DESCRIPTOR_TILES = {"BM": 256, "BN": 128, "BK": 64, "GROUP": 4, "num_warps": 8, "num_stages": 4}
# The fastest of four in eight bits: 2.1 times as fast as 16 bits for 4096×4096 results.
EIGHT_BIT_TILES = {"BM": 128, "BN": 128, "BK": 128, "GROUP": 4, "num_warps": 4, "num_stages": 3}
FLOAT8 = torch.float8_e4m3fn
# The largest number of this format. Larger numbers are stored as this one.
LARGEST = tl.constexpr(torch.finfo(FLOAT8).max)
# Triton's interpreter rounds 127 to 64: it drops the carry from the mantissa to the exponent.
ROUNDS_BY_HAND = tl.constexpr(interpreted())


@triton.jit
def rounded(x, dtype: tl.constexpr, CLAMP: tl.constexpr):
    """``x`` in ``dtype``; for eight bits, numbers beyond LARGEST become LARGEST, and NaN stays.

    CLAMP is false where the conversion itself cuts off.
    """
    if CLAMP and dtype.primitive_bitwidth == 8:
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        if ROUNDS_BY_HAND:  # to three bits of mantissa, half way to even
            bits = x.to(tl.float32).to(tl.int32, bitcast=True)
            bits += 0x7FFFF + ((bits >> 20) & 1)
            x = (bits & -0x100000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def before_rounding(x, dtype: tl.constexpr):
    """``x`` in the precision in which a tile that is to become ``dtype`` is transposed.

    Sixteen bits for eight: Triton 3.6 transposes some tiles of eight bits wrongly.
    """
    return x.to(tl.float16) if dtype.primitive_bitwidth == 8 else x.to(dtype)


@triton.jit
def _to_the(x, N: tl.constexpr):
    """x to the power of N."""
    power = 1.0
    for _ in tl.static_range(N):
        power *= x
    return power


@triton.jit
def _product_kernel(
    A, B, D, out, scale,
    M, N, K,
    alpha, beta, kappa,
    A_batch, A_row, A_col,
    B_batch, B_row, B_col,
    D_batch, D_row, D_col,
    O_batch, O_row, O_col,
    SYMMETRIC: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_IDENTITY: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    OF_ALPHA: tl.constexpr,
    OF_BETA: tl.constexpr,
    OF_KAPPA: tl.constexpr,
    BY_TRACE: tl.constexpr,
    DIAGONAL: tl.constexpr,
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
        top = row * BM
        side = (tile - row * (row + 1) // 2) * BN
    else:
        top, side = in_bands(tile, M, N, BM, BN, GROUP)
    r = top + tl.arange(0, BM)
    c = side + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows past the end wrap around: their results are not stored, and no mask is needed.
    a = A + batch * A_batch + (r % M)[:, None] * A_row + k[None, :] * A_col
    b = B + batch * B_batch + k[:, None] * B_row + (c % N)[None, :] * B_col
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    trace, exact, known = 1.0, 1.0, True
    if BY_TRACE:
        i = tl.arange(0, DIAGONAL)
        diagonal = tl.load(A + batch * A_batch + i * (A_row + A_col), mask=i < K, other=0.0)
        trace, exact, known = squared_norm(diagonal)  # an unknown trace makes the result zero
    for start in range(0, K, BK):
        if EVEN_K:
            x = tl.load(a)
            y = tl.load(b)
        else:
            x = tl.load(a, mask=k[None, :] < K - start, other=0.0)
            y = tl.load(b, mask=k[:, None] < K - start, other=0.0)
        if BY_TRACE:
            x = x.to(tl.float32) * exact
        acc = tl.dot(x.to(y.dtype), y, acc)
        a += BK * A_col
        b += BK * B_row
    if HAS_SCALE:
        s = tl.load(scale + batch)
        alpha *= _to_the(s, OF_ALPHA)
        beta *= _to_the(s, OF_BETA)
        kappa *= _to_the(s, OF_KAPPA)
    acc *= alpha / (exact * trace)
    inside = (r[:, None] < M) & (c[None, :] < N)
    if HAS_D:
        d = D + batch * D_batch + r[:, None] * D_row + c[None, :] * D_col
        acc += beta * tl.load(d, mask=inside, other=0.0).to(tl.float32)
    if BY_TRACE:
        acc /= trace
    if HAS_IDENTITY:
        acc += tl.where(r[:, None] == c[None, :], kappa, 0.0)
    if BY_TRACE:
        acc = tl.where(known, acc / tl.sqrt(trace), 0.0)
    value = acc.to(out.dtype.element_ty)
    o = out + batch * O_batch
    tl.store(o + r[:, None] * O_row + c[None, :] * O_col, value, mask=inside)
    if SYMMETRIC and top != side:
        across = (c[:, None] < N) & (r[None, :] < M)
        tl.store(o + c[:, None] * O_row + r[None, :] * O_col, tl.trans(value), mask=across)


@triton.jit
def _symmetric_kernel(
    A, B, D, out, scale,
    M, K,
    alpha, beta, kappa,
    D_batch, D_row, D_col,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_IDENTITY: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    OF_ALPHA: tl.constexpr,
    OF_BETA: tl.constexpr,
    OF_KAPPA: tl.constexpr,
    CLAMP: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    # A and B are descriptors of (batch·rows, cols) memory. Past the end of its matrix a tile reads
    # the next matrix; those entries only reach rows and columns of the result that are not stored.
    # EVEN: all tiles are square and full. Then nothing is masked, only tiles on the diagonal get the
    # identity, and only others are mirrored.
    batch = tl.program_id(1)
    # Tiles in bands of GROUP rows, column by column, so that tiles computed together share operands
    # in cache. A band is as wide as its last row; its tiles above the diagonal do nothing.
    rows = tl.cdiv(M, BM)
    left = tl.program_id(0)
    first = 0
    height = tl.minimum(rows, GROUP)
    width = tl.cdiv(height * BM, BN)
    while left >= height * width:
        left -= height * width
        first += GROUP
        height = tl.minimum(rows - first, GROUP)
        width = tl.cdiv((first + height) * BM, BN)
    top = (first + left % height) * BM
    side = (left // height) * BN
    if side < top + BM:
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            if A_TRANSPOSED:  # noqa: SIM108 (the kernel language has no such expression)
                x = tl.trans(A.load([batch * K + k, top]))
            else:
                x = A.load([batch * M + top, k])
            if B_TRANSPOSED:
                y = tl.trans(B.load([batch * M + side, k]))
            else:
                y = B.load([batch * K + k, side])
            acc = tl.dot(x, y, acc)
        if HAS_SCALE:
            s = tl.load(scale + batch)
            alpha *= _to_the(s, OF_ALPHA)
            beta *= _to_the(s, OF_BETA)
            kappa *= _to_the(s, OF_KAPPA)
        acc *= alpha
        r = top + tl.arange(0, BM)
        c = side + tl.arange(0, BN)
        # Entries above the diagonal are written by the mirrored tile below it. So each entry is
        # written by one program, and a step can be repeated bit for bit.
        own = (r[:, None] < M) & (c[None, :] < tl.minimum(M, top + BM))
        if HAS_D:
            d = D + batch.to(tl.int64) * D_batch + r[:, None] * D_row + c[None, :] * D_col
            if EVEN:  # noqa: SIM108 (the kernel language has no such expression)
                more = tl.load(d)
            else:
                more = tl.load(d, mask=own, other=0.0)
            acc += beta * more.to(tl.float32)
        element: tl.constexpr = out.dtype.element_ty
        o = out + batch.to(tl.int64) * M * M
        here = o + r[:, None] * M + c[None, :]
        there = o + c[:, None] * M + r[None, :]
        if EVEN:
            if side == top:  # the only tiles with the diagonal in them, and without a mirror image
                if HAS_IDENTITY:
                    acc += tl.where(r[:, None] == c[None, :], kappa, 0.0)
                tl.store(here, rounded(before_rounding(acc, element), element, CLAMP))
            else:
                value = before_rounding(acc, element)
                tl.store(here, rounded(value, element, CLAMP))
                tl.store(there, rounded(tl.trans(value), element, CLAMP))
        else:
            if HAS_IDENTITY:
                acc += tl.where(r[:, None] == c[None, :], kappa, 0.0)
            value = before_rounding(acc, element)
            tl.store(here, rounded(value, element, CLAMP), mask=own)
            across = (c[:, None] < top) & (r[None, :] < M)
            tl.store(there, rounded(tl.trans(value), element, CLAMP), mask=across)


def product(
    A: Tensor,
    B: Tensor,
    *,
    alpha: float = 1.0,
    D: Tensor | None = None,
    beta: float = 1.0,
    identity: float = 0.0,
    symmetric: bool = False,
    by_trace: bool = False,
    scale: Tensor | None = None,
    powers: tuple[int, int, int] = (0, 0, 0),
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``alpha·A@B + beta·D + identity·I`` for batches (b, M, K) and (b, K, N).

    ``scale`` holds a number s for each matrix. alpha, beta and identity are then multiplied by s to the
    ``powers``.

    ``symmetric`` promises a symmetric result, of which only half is then computed. A is rounded to
    B's precision. The result is written to ``out``, or returned in ``out_dtype`` (default: A's).

    ``by_trace`` is for A = B = D = YYᵀ: with t = tr A = ‖Y‖_F² it gives
    ``(alpha·A²/t² + beta·A/t + identity·I)/√t``, and zero where t leaves [1e-36, 1e36].
    """
    batch, M, K = A.shape
    N = B.shape[-1]
    if out is None:
        out = torch.empty(batch, M, N, device=A.device, dtype=out_dtype or A.dtype)
    if symmetric and not by_trace and out.is_contiguous() and _suits_descriptors(A, B):
        return _by_descriptors(A, B, D, out, alpha, beta, identity, scale, powers)
    tiles = _tiles(M, N, A.element_size(), symmetric)
    rows, cols = triton.cdiv(M, tiles["BM"]), triton.cdiv(N, tiles["BN"])
    count = rows * (rows + 1) // 2 if symmetric else rows * cols
    d = out if D is None else D
    _product_kernel[(count, batch)](
        A, B, d, out, out if scale is None else scale,
        M, N, K,
        alpha, beta, identity,
        *A.stride(), *B.stride(), *d.stride(), *out.stride(),
        SYMMETRIC=symmetric,
        HAS_D=D is not None,
        HAS_IDENTITY=identity != 0.0,
        **_scaled(scale, powers),
        BY_TRACE=by_trace,
        DIAGONAL=triton.next_power_of_2(K) if by_trace else 1,
        EVEN_K=K % tiles["BK"] == 0,
        GROUP=8,
        **tiles,
    )  # fmt: skip
    return out


def halving_pays(batch: int, M: int) -> bool:
    """Whether ``batch`` symmetric M×M products in 16 bits take less time if half of them is computed.

    They do if the large tiles on and below their diagonals fill a GPU.
    """
    BM, BN = DESCRIPTOR_TILES["BM"], DESCRIPTOR_TILES["BN"]
    tiles = sum(triton.cdiv(min(top + BM, M), BN) for top in range(0, M, BM))
    return M >= DESCRIPTORS_FROM and batch * tiles >= FEWEST_TILES


def _suits_descriptors(A: Tensor, B: Tensor) -> bool:
    """Whether a symmetric product is one for the kernel that reads through tensor descriptors."""
    batch, M, K = A.shape
    if M < DESCRIPTORS_FROM or A.dtype.itemsize > 2:
        return False
    if A.dtype.itemsize == 2 and not halving_pays(batch, M):
        return False
    for X in (A, B.mT):  # both are (batch, M, K)
        if not (X.is_contiguous() or X.mT.is_contiguous()):
            return False
        if not describable(X if X.is_contiguous() else X.mT):
            return False
        # In a transposed X, a tile that ends past K reads the next matrix into the sum.
        if not X.is_contiguous() and batch > 1 and K % _descriptor_tiles(X)["BK"]:
            return False
    return A.dtype.itemsize == 1 or takes_large_tiles(A.device)


def _scaled(scale: Tensor | None, powers: tuple[int, int, int]) -> dict[str, Any]:
    a, b, c = powers
    return {"HAS_SCALE": scale is not None, "OF_ALPHA": a, "OF_BETA": b, "OF_KAPPA": c}


def _by_descriptors(
    A: Tensor,
    B: Tensor,
    D: Tensor | None,
    out: Tensor,
    alpha: float,
    beta: float,
    identity: float,
    scale: Tensor | None,
    powers: tuple[int, int, int],
) -> Tensor:
    tiles = _descriptor_tiles(A)
    batch, M, K = A.shape
    BM, BN, GROUP = tiles["BM"], tiles["BN"], tiles["GROUP"]
    rows = triton.cdiv(M, BM)
    heights = [(first, min(rows - first, GROUP)) for first in range(0, rows, GROUP)]
    count = sum(height * triton.cdiv((first + height) * BM, BN) for first, height in heights)
    if D is None and out.dtype == FLOAT8:
        # Triton 3.6 loses parts of an 8-bit tile that it transposes as a product leaves it. Adding
        # anything from memory rearranges the tile first. Zero times a tile of A is loaded faster than
        # zeros of one address, and a NaN in a row of A is in this row of the result anyway.
        enough = K >= M and A.is_contiguous()
        D, beta = (A[..., :M], 0.0) if enough else (out.new_zeros(()).expand_as(out), beta)
    d = out if D is None else D
    _symmetric_kernel[(count, batch)](
        _descriptor(A, BM), _descriptor(B.mT, BN), d, out, out if scale is None else scale,
        M, K,
        alpha, beta, identity,
        *d.stride(),
        A_TRANSPOSED=not A.is_contiguous(),
        B_TRANSPOSED=B.mT.is_contiguous(),
        HAS_D=D is not None,
        HAS_IDENTITY=identity != 0.0,
        **_scaled(scale, powers),
        CLAMP=clamps(),
        EVEN=BM == BN and M % BM == 0,
        **tiles,
    )  # fmt: skip
    return out


def clamps() -> bool:
    """Whether kernels must cut off numbers that are too large for eight bits.

    NVIDIA's conversion cuts them off by itself, and keeps NaN. Comparisons before it were a third of all
    instructions of a tile.
    """
    return interpreted()


def _descriptor_tiles(X: Tensor) -> dict[str, Any]:
    return EIGHT_BIT_TILES if X.dtype == FLOAT8 else DESCRIPTOR_TILES


def _descriptor(X: Tensor, rows: int) -> Any:
    """A descriptor of ``X`` (batch, M, K) in its memory layout, with tiles of ``rows``×BK."""
    block = [rows, _descriptor_tiles(X)["BK"]]
    if not X.is_contiguous():
        X, block = X.mT, block[::-1]
    return describe(X.reshape(-1, X.shape[-1]), block)


def _tiles(M: int, N: int, element_size: int, symmetric: bool) -> dict[str, Any]:
    """Tile sizes that suit a Hopper GPU, from the size of the result.

    Chosen for bfloat16. Wider elements get a shorter BK, so that tiles take as much shared memory.
    """
    if max(M, N) <= (256 if symmetric else 64):  # larger tiles would leave a GPU half empty
        return {"BM": 64, "BN": 64, "BK": 64 // element_size, "num_warps": 4, "num_stages": 4}
    if not symmetric:  # few rows wait for memory: two programs share a multiprocessor
        return {"BM": 128, "BN": 128, "BK": 64 // element_size, "num_warps": 4, "num_stages": 4}
    return {"BM": 128, "BN": 128, "BK": 128 // element_size, "num_warps": 8, "num_stages": 3}
