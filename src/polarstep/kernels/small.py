"""Several products of small matrices in one launch.

A product of small matrices takes less than a microsecond, but a launch of its own takes several, and the
result between two launches goes through memory.

**(αAB + βD + κI)·Y for matrices of at most 256 rows** (:func:`product_times`). A Newton–Schulz step is
X ← P(G)X with P(G) = cG² + bG + aI; a step of the Gram form is G ← PGP. Both multiply small square
matrices and then multiply the result once more. A program computes BM rows of the polynomial, rounds
them, keeps them in registers and multiplies them with all of Y. It needs whole rows only, so nothing is
computed twice.

**The Gram form of several steps, for at most 128 rows** (:func:`accumulated`). φ_q∘…∘φ₁(X) = WX, where W
is found from G = XXᵀ alone: a step is P = P_t(G), W ← P·W and G ← P·G·P. Three steps are ten products or
so. Here one program computes all products for one matrix. G, P and W stay in registers and shared
memory; only the first G is read and only the last W is written.

Results are rounded where separate launches would round them, and factors have the same order, P·W and
(P·G)·P. Exact G, P and W commute, but rounded ones do not. W·P would save a copy of W to shared memory,
but W is large in the directions in which X is small, and multiplies P's rounding errors there: for
singular values down to 0.01 the error of WX doubles.

**A warm sketch's next start**, S ← X + ε·Nᵀ, in the same launch as the product X
(:func:`product_and_blend`). X is a batch of matrices; N is one matrix of random numbers that the batch
shares.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels import interpreted
from polarstep.kernels.product import describable, describe, squared_norm, takes_large_tiles
from polarstep.numerics import Polynomial, squarings

__all__ = [
    "MOST_GRAM_ROWS",
    "TILES",
    "accumulated",
    "product_and_blend",
    "product_times",
    "suits_accumulated",
]

TILES = {"BM": 64, "BK": 32, "BN": 64, "num_warps": 4, "num_stages": 3}


@triton.jit
def _product_times_kernel(
    A, B, D, Y, P, out,
    L, N,
    alpha, beta, kappa,
    HAS_D: tl.constexpr,
    BY_TRACE: tl.constexpr,
    KEEP: tl.constexpr,
    BY_DESCRIPTORS: tl.constexpr,
    BL: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    # A, B, D, P are (batch, L, L), Y and out (batch, L, N). A descriptor reads zeros past the end
    # of B and Y.
    batch = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    l = tl.arange(0, BL)  # noqa: E741
    A += batch * L * L
    trace, exact, known = 1.0, 1.0, True
    if BY_TRACE:
        diagonal = tl.load(A + l * (L + 1), mask=l < L, other=0.0)
        trace, exact, known = squared_norm(diagonal)  # an unknown trace makes the result zero
    acc = tl.zeros((BM, BL), dtype=tl.float32)
    for i in range(0, L, BK):
        x = tl.load(
            A + (r % L)[:, None] * L + (i + k)[None, :], mask=(i + k)[None, :] < L, other=0.0
        )
        if BY_TRACE:
            x = (x.to(tl.float32) * exact).to(A.dtype.element_ty)
        if BY_DESCRIPTORS:
            y = B.load([tl.program_id(1), i, 0]).reshape(BK, BL)
        else:
            read = ((i + k)[:, None] < L) & (l[None, :] < L)
            y = tl.load(B + batch * L * L + (i + k)[:, None] * L + l[None, :], mask=read, other=0.0)
        acc = tl.dot(x, y, acc)
    acc *= alpha / (exact * trace)
    inside = (r[:, None] < L) & (l[None, :] < L)
    at = batch * L * L + r[:, None] * L + l[None, :]
    if HAS_D:
        acc += beta * tl.load(D + at, mask=inside, other=0.0).to(tl.float32)
    if BY_TRACE:
        acc /= trace
    acc += tl.where(r[:, None] == l[None, :], kappa, 0.0)
    if BY_TRACE:
        acc = tl.where(known, acc / tl.sqrt(trace), 0.0)
    p = acc.to(A.dtype.element_ty)
    if KEEP:
        tl.store(P + at, p, mask=inside)
    n = tl.arange(0, BN)
    for j in range(0, N, BN):
        if BY_DESCRIPTORS:
            y = Y.load([tl.program_id(1), 0, j]).reshape(BL, BN)
        else:
            read = (l[:, None] < L) & ((j + n)[None, :] < N)
            y = tl.load(Y + batch * L * N + l[:, None] * N + (j + n)[None, :], mask=read, other=0.0)
        value = tl.dot(p, y).to(out.dtype.element_ty)
        own = (r[:, None] < L) & ((j + n)[None, :] < N)
        tl.store(out + batch * L * N + r[:, None] * N + (j + n)[None, :], value, mask=own)


def product_times(
    A: Tensor,
    B: Tensor,
    Y: Tensor,
    *,
    alpha: float = 1.0,
    D: Tensor | None = None,
    beta: float = 1.0,
    identity: float = 0.0,
    by_trace: bool = False,
    P: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``PY`` with ``P = alpha·A@B + beta·D + identity·I``; P is also written to ``P``, if given.

    A, B and D are (batch, ℓ, ℓ) and Y is (batch, ℓ, n), contiguous and all of the same 16-bit
    dtype. The result has that dtype too, unless ``out_dtype`` is given.
    ``by_trace`` is for A = B = D = YYᵀ: then P is ``(alpha·A²/t² + beta·A/t + identity·I)/√t`` with
    t = tr A = ‖Y‖_F², and zero where t leaves [1e-36, 1e36].
    """
    batch, L, N = Y.shape
    out = torch.empty_like(Y, dtype=out_dtype)
    BL = max(16, triton.next_power_of_2(L))
    b, y = B, Y
    by_descriptors = describable(B, Y)
    if by_descriptors:
        b, y = describe(B, [1, TILES["BK"], BL]), describe(Y, [1, BL, TILES["BN"]])
    _product_times_kernel[(triton.cdiv(L, TILES["BM"]), batch)](
        A, b, A if D is None else D, y, A if P is None else P, out,
        L, N,
        alpha, beta, identity,
        HAS_D=D is not None,
        BY_TRACE=by_trace,
        KEEP=P is not None,
        BY_DESCRIPTORS=by_descriptors,
        BL=BL,
        **TILES,
    )  # fmt: skip
    return out


# One launch instead of seven to ten for three steps. Three 128×128 matrices of 16 bits, which are in
# use at the same time, take 96 KiB of shared memory; three of 256×256 would not fit.
MOST_GRAM_ROWS = 128

Round = tuple[float, float, float]


@triton.jit
def _product(A, B):
    """AB in float32."""
    return tl.dot(A, B, input_precision="ieee")


@triton.jit
def _accumulated_kernel(
    G, W, V, finite,
    polynomials,
    L,
    SQUARED: tl.constexpr,
    HAS_V: tl.constexpr,
    SKIP: tl.constexpr,
    BL: tl.constexpr,
):  # fmt: skip
    # G, W and V are (batch, L, L). Each polynomial is a tuple of rounds (α, β, κ): see _rounds.
    batch = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BL)[:, None]
    c = tl.arange(0, BL)[None, :]
    at = batch * L * L + r * L + c
    inside = (r < L) & (c < L)
    diagonal = (r == c) & inside  # rows and columns past the end stay zero
    g = tl.load(G + at, mask=inside, other=0.0)
    w = g
    for t in tl.static_range(len(polynomials)):
        p = g
        for k in tl.static_range(len(polynomials[t])):
            alpha, beta, kappa = polynomials[t][k]
            acc = _product(p, p) if SQUARED[t] else _product(p, g)
            acc = alpha * acc + beta * g.to(tl.float32) + tl.where(diagonal, kappa, 0.0)
            p = acc.to(g.dtype)
        w = p if t == 0 else _product(p, w).to(g.dtype)
        if t + 1 < len(polynomials):
            g = _product(_product(p, g).to(g.dtype), p).to(g.dtype)
    tl.store(W + at, w, mask=inside)
    if HAS_V:
        if SKIP:
            inside &= tl.load(finite + batch) != 0
        tl.store(V + at, _product(w, w).to(V.dtype.element_ty), mask=inside)


def suits_accumulated(G: Tensor, polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether :func:`accumulated` can take ``G`` and the polynomials, on a GPU that it is made for.

    Always false while torch.compile traces, because the kernel's arguments include a tuple. In
    float32 a GPU would round factors to tf32, so only the interpreter takes float32. A GPU that copies
    both factors of a product to registers has too few of them for a 128×128 matrix.
    """
    return (
        not torch.compiler.is_compiling()
        and (G.dtype.itemsize == 2 or (G.dtype == torch.float32 and interpreted()))
        and G.shape[-1] <= MOST_GRAM_ROWS
        and G.is_contiguous()
        and all(_rounds(polynomial) is not None for polynomial in polynomials)
        and takes_large_tiles(G.device)
    )


def accumulated(
    G: Tensor,
    polynomials: tuple[Polynomial, ...],
    V: Tensor | None = None,
    finite: Tensor | None = None,
) -> Tensor:
    """W with φ_q∘…∘φ₁(X) = WX, from contiguous ``G`` = XXᵀ of shape (batch, ℓ, ℓ), ℓ ≤ 128, and q ≥ 1.

    W has the dtype of G, and so has every result in between. Sums are float32.
    W² is written to ``V``, if given: a contiguous tensor of G's shape and of any dtype. A matrix whose
    ``finite`` is zero keeps its old V.
    """
    batch, L, _ = G.shape
    W = torch.empty_like(G)
    rounds, squared = zip(*map(_rounds, polynomials), strict=True)
    BL = max(16, triton.next_power_of_2(L))
    _accumulated_kernel[(batch,)](
        G, W, W if V is None else V, W if finite is None else finite,
        rounds,
        L,
        SQUARED=squared,
        HAS_V=V is not None,
        SKIP=finite is not None,
        BL=BL,
        num_warps=8 if BL > 64 else 4,  # an accumulator takes at most 64 registers of a thread
        num_stages=1,
    )  # fmt: skip
    return W


@lru_cache(maxsize=64)
def _rounds(polynomial: Polynomial) -> tuple[tuple[Round, ...], bool] | None:
    """The rounds (α, β, κ) that make P(G), and whether each round squares H.

    H is G at first and P(G) at last. A round is H ← αHG + βG + κI, Horner's rule, or
    H ← αH² + βG + κI where that takes fewer rounds. ``None`` for a polynomial without such rounds.
    """
    if len(polynomial) < 3:
        return None
    chain = squarings(polynomial)
    if chain is not None:
        if any(each.earlier for each in chain):
            return None
        return tuple((each.square, each.plus, each.identity) for each in chain), True
    *coefficients, last = map(float, polynomial)
    alphas = (last, *(1.0 for _ in coefficients[2:]))
    betas = coefficients[:0:-1]
    kappas = (*(0.0 for _ in coefficients[2:]), coefficients[0])
    return tuple(zip(alphas, betas, kappas, strict=True)), False


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
