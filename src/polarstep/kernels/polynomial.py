"""``(αAB + βD + κI)·Y`` for matrices of at most 256 rows, in one launch.

A Newton–Schulz step is X ← P(G)X with P(G) = cG² + bG + aI; a step of the Gram form is G ← PGP.
Both multiply small square matrices and then multiply the result once more. As two launches of a few
microseconds each, the result between them would go through memory.

A program computes BM rows of the polynomial, rounds them, keeps them in registers and multiplies
them with all of Y. It needs whole rows only, so nothing is computed twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels.descriptors import describable, describe
from polarstep.kernels.trace import squared_norm

__all__ = ["is_few", "product_times", "suits"]

MOST_ROWS = 256
# For a wider Y two launches are faster: they have more programs than there are blocks of rows.
MOST_COLUMNS = 1024

_TILES = {"BM": 64, "BK": 32, "BN": 64, "num_warps": 4, "num_stages": 3}
# Fewer programs would leave most of a GPU idle. For three matrices of 144 rows a step of the Gram
# form takes an H200 13 µs this way, and 9 µs with a launch (and smaller tiles) for each product.
FEWEST_PROGRAMS = 32


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


def suits(Y: Tensor) -> bool:
    """Whether :func:`product_times` can take Y and is faster than a launch for each product."""
    return (
        Y.dtype.itemsize == 2
        and Y.shape[-2] <= MOST_ROWS
        and Y.shape[-1] <= MOST_COLUMNS
        and Y.is_contiguous()
        and not is_few(Y)
    )


def is_few(Y: Tensor) -> bool:
    """Whether there are so few matrices that a launch for each product is faster."""
    blocks = triton.cdiv(Y.shape[-2], _TILES["BM"])
    return blocks > 1 and Y.shape[0] * blocks < FEWEST_PROGRAMS


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
        b, y = describe(B, [1, _TILES["BK"], BL]), describe(Y, [1, BL, _TILES["BN"]])
    _product_times_kernel[(triton.cdiv(L, _TILES["BM"]), batch)](
        A, b, A if D is None else D, y, A if P is None else P, out,
        L, N,
        alpha, beta, identity,
        HAS_D=D is not None,
        BY_TRACE=by_trace,
        KEEP=P is not None,
        BY_DESCRIPTORS=by_descriptors,
        BL=BL,
        **_TILES,
    )  # fmt: skip
    return out
