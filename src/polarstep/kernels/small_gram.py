"""The Gram form of several steps, for matrices of at most 128 rows, in one launch.

φ_q∘…∘φ₁(X) = WX, where W is found from G = XXᵀ alone: a step is P = P_t(G), W ← P·W and G ← P·G·P. Three
steps are ten products or so. A product of small matrices takes less than a microsecond, but a launch
of its own takes several. Here one program computes all products for one matrix. G, P and W stay in
registers and shared memory; only the first G is read and only the last W is written.

Results are rounded where separate launches would round them, and factors have the same order, P·W and
(P·G)·P. Exact G, P and W commute, but rounded ones do not. W·P would save a copy of W to shared memory,
but W is large in the directions in which X is small, and multiplies P's rounding errors there: for
singular values down to 0.01 the error of WX doubles.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels import interpreted
from polarstep.kernels.descriptors import takes_large_tiles
from polarstep.numerics import Polynomial, squarings

__all__ = ["MOST_ROWS", "accumulated", "suits"]

# One launch instead of seven to ten for three steps. Three 128×128 matrices of 16 bits, which are in
# use at the same time, take 96 KiB of shared memory; three of 256×256 would not fit.
MOST_ROWS = 128

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


def suits(G: Tensor, polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether :func:`accumulated` can take ``G`` and the polynomials, on a GPU that it is made for.

    Always false while torch.compile traces, because the kernel's arguments include a tuple. In
    float32 a GPU would round factors to tf32, so only the interpreter takes float32. A GPU that copies
    both factors of a product to registers has too few of them for a 128×128 matrix.
    """
    return (
        not torch.compiler.is_compiling()
        and (G.dtype.itemsize == 2 or (G.dtype == torch.float32 and interpreted()))
        and G.shape[-1] <= MOST_ROWS
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
