"""A CPU: float32, half of a symmetric product, and values that can be read without waiting.

Most CPUs emulate bfloat16 products, hundreds of times slower than float32. On CPUs with matrix tiles for
bfloat16 three things use them: maps in full space, sketches, and a single step on the rest of a deflated
map. All else keeps the digits of float32.

**A polynomial step in tiles** (:func:`polynomial_in_tiles`). A deflated step
(:mod:`polarstep.maps.deflated`) is T = s·P(s²G)·X₀ with G = X₀X₀ᵀ. Tiles multiply bfloat16 numbers five
to eight times as fast as a CPU multiplies float32, and add up in float32. X₀ itself is made in float32:
M/δ − Q(B/δ) cancels the leading directions, which may be a hundred times as long as the rest. Then X₀,
G, the squares S of G, and P are rounded.

**What rounding does.** The X₀ that G is made of is also the one that P is multiplied with, so T is a
polynomial of a matrix near X₀. Rounding G, S and P by at most 2⁻⁹ an entry is a random error in P(s²G).
The diagonals need more care. P is 374·S² + … for an S near zero, and 0.137 on the diagonal of S is a sum
that mostly cancels. torch would round the sum before it adds the identity. So diagonals are computed
apart, from the lengths of rows in float32, and rounded once.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from polarstep.context import constant
from polarstep.numerics import (
    SIGNS,
    Polynomial,
    Squaring,
    norm_products,
    plain_product,
    signs,
    squarings,
    start_vectors,
)
from polarstep.ops.base import Products
from polarstep.ops.lazy import Head, RowProduct

__all__ = ["Cpu", "has_tiles", "polynomial_in_tiles"]


# With narrower strips the matrix routine loses more speed than the saved half is worth.
STRIP = 192
# For a sketch and a single step on the rest of smaller matrices bfloat16 tiles gain nothing, as casting
# to bfloat16 takes time too.
TILES_FROM = 512
# Five steps in full space have more products for each cast. In bfloat16 matrices of up to four times as
# many columns are faster from 96 rows on. Longer ones have the Gram form in float32, and those of 64
# times as many columns are as fast in bfloat16 from 192 rows on.
FULL_TILES_FROM = 192
# On ARM, oneDNN prepares a transposed right factor for longer than a small product takes: ABᵀ of two
# 40×40 matrices takes 190 µs, and 54 µs with a copy of Bᵀ, with the same result bit for bit. Beyond this
# many entries the copy takes longer.
LARGEST_COPIED = 128 * 128


class Cpu(Products):
    """The operations of a CPU."""

    host_reads_are_free = True
    orthonormalization = "cholesky"

    def full_dtype(self, m: int, n: int, dtype: torch.dtype) -> torch.dtype:
        """bfloat16 for float32 where a CPU has matrix tiles (AMX), as a GPU has in full space."""
        dtype = self.dtype(dtype)
        suits = _suits_tiles(min(m, n), dtype, FULL_TILES_FROM)
        return torch.bfloat16 if suits else dtype

    def sketch_dtype(self, m: int, n: int, dtype: torch.dtype) -> torch.dtype:
        """bfloat16 for float32 where a CPU has matrix tiles (AMX), which are several times as fast.

        Rounding Y leaves its basis as good, as long as the basis is then made orthonormal in
        float32.
        """
        return torch.bfloat16 if _suits_tiles(min(m, n), dtype, TILES_FROM) else dtype

    def step_dtype(self, m: int, n: int, dtype: torch.dtype) -> torch.dtype:
        """bfloat16 for float32 where a CPU has matrix tiles (:mod:`polarstep.ops.cpu`)."""
        return torch.bfloat16 if _suits_tiles(min(m, n), dtype, TILES_FROM) else dtype

    def times(self, factor: Tensor, S: Tensor, width: int | None = None) -> Tensor:
        """``factor·S``; in bfloat16 not by transposed factors, which torch would copy first."""
        if factor.dtype == torch.bfloat16 and factor.is_contiguous():
            return factor @ S.contiguous()
        return super().times(factor, S, width)

    def symmetric(
        self,
        A: Tensor,
        B: Tensor,
        *,
        plus: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        identity: float = 0.0,
    ) -> Tensor:
        """Computed in strips on and below the diagonal; the entries above are copied.

        Tiles compute the whole product sooner than the strips.
        """
        if self._halves(A.shape[-2], A.dtype):
            return _halved(A, B.mT, plus, alpha, beta, identity)
        if _copies_transposed() and B.shape[-2] * B.shape[-1] <= LARGEST_COPIED:
            B = B.mT.contiguous().mT
        return super().symmetric(A, B, plus=plus, alpha=alpha, beta=beta, identity=identity)

    def _halves(self, m: int, dtype: torch.dtype) -> bool:
        """Whether symmetric products of m rows are computed in strips."""
        return m >= self.symmetric_from and not (dtype == torch.bfloat16 and has_tiles())

    def commuting(
        self,
        A: Tensor,
        B: Tensor,
        *,
        plus: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        identity: float = 0.0,
    ) -> Tensor:
        """:meth:`symmetric` of A and Bᵀ: AB then has no transposed factor, which is slow on ARM."""
        return self.symmetric(A, B.mT, plus=plus, alpha=alpha, beta=beta, identity=identity)

    def flat_step(
        self,
        A: Tensor,
        head: Head,
        inverse: Tensor,
        polynomial: Polynomial,
        margin: float,
        *,
        most: float,
        float8: bool,
    ) -> tuple[Tensor | RowProduct, Callable[[], Tensor]]:
        """One matrix after the other: memory holds X₀, G and the polynomial of a single matrix.

        Reading a number is free, so δ and s are factors of the products instead of passes over memory.
        In bfloat16 if ``float8`` allows it and the CPU has tiles.
        """
        chain = squarings(polynomial)
        if chain is None or A.dtype.itemsize < 4 or not _may_write(A, head.Q, head.X):
            return super().flat_step(A, head, inverse, polynomial, margin, most=most, float8=float8)
        flat = self.head_plus_rest(A, self.dual(head), inverse)
        transposed = A.mT.is_contiguous() and not A.is_contiguous()
        T = torch.empty_like(A.mT).mT if transposed else torch.empty_like(A)
        m, n = A.shape[-2:]
        dtype = self.step_dtype(m, n, A.dtype) if float8 else A.dtype
        start = start_vectors(m, A.device).to(dtype)[0]
        for i, out in enumerate(T):
            # In bfloat16 a rounded copy of X₀ is made, and X₀ itself may lie where T will.
            X = torch.empty_like(out) if dtype == A.dtype else out
            _write_sum(X, flat.A[i], float(flat.inverse[i]), flat.L[i], flat.R[i])
            if dtype != A.dtype:
                _write_in_tiles(out, X.to(dtype), chain, start, margin)
                continue
            G = self.symmetric(X[None], X[None])
            squared = self.commuting(G, G)
            s = _scale_to_one(G[0], (squared[0],) * (norm_products(m) // 2), start, margin)
            P = self._scaled(G, squared, chain, s)
            _write_symmetric_times(out, P[0], X)
        return T, partial(_squared_norm, T)

    def _scaled(self, G: Tensor, squared: Tensor, chain: tuple[Squaring, ...], s: float) -> Tensor:
        """``s·P(s²G)`` for the P of ``chain``, in the memory of ``squared`` = G²; s = 0 keeps NaN."""
        if s == 0:
            return 0 * G
        first, *others = chain
        S = [G, squared.mul_(first.square * s**4).add_(G, alpha=first.plus * s**2)]
        S[1].diagonal(dim1=-2, dim2=-1).add_(first.identity)
        for each in others:
            scale = s if each is others[-1] else 1.0
            S.append(
                self.commuting(
                    S[-1],
                    S[-1],
                    plus=S[each.earlier],
                    alpha=scale * each.square,
                    beta=scale * each.plus * (s**2 if each.earlier == 0 else 1.0),
                    identity=scale * each.identity,
                )
            )
        return S[-1] if others else S[-1].mul_(s)

    def symmetric_flops(self, m: int, k: int, dtype: torch.dtype) -> int:
        """FLOPs of the strips."""
        if not self._halves(m, dtype):
            return super().symmetric_flops(m, k, dtype)
        return sum(2 * end * (end - first) * k for first, end in _strips(m))


def _halved(
    A: Tensor, R: Tensor, plus: Tensor | None, alpha: float, beta: float, identity: float
) -> Tensor:
    """``alpha·AR + beta·plus + identity·I``, which must be symmetric."""
    m = A.shape[-2]
    C = A.new_empty(A.shape[0], m, m)
    in_place = R.stride(-1) == 1 and _may_write(A, R, plus)
    for first, end in _strips(m):
        rows, columns, strip = A[:, first:end], R[..., :end], C[:, first:end, :end]
        left = None if plus is None else plus[:, first:end, :end]
        if in_place:
            _write_product(strip, rows, columns, left, alpha, beta)
        else:  # with a transposed factor, torch is faster if it allocates the product itself
            strip.copy_(plain_product(rows, columns, left, alpha, beta))
        C[:, :first, first:end] = strip[..., :first].mT
    if identity:
        C.diagonal(dim1=-2, dim2=-1).add_(identity)
    return C


def _may_write(*factors: Tensor | None) -> bool:
    """Whether torch may write a product to given memory: not for autograd, nor under torch.compile."""
    if torch.compiler.is_compiling():
        return False
    return not torch.is_grad_enabled() or not any(
        factor is not None and factor.requires_grad for factor in factors
    )


def _write_product(
    C: Tensor, A: Tensor, B: Tensor, plus: Tensor | None, alpha: float, beta: float
) -> None:
    """``C ← alpha·AB + beta·plus``, matrix by matrix, as torch's own batches are computed."""
    for i, out in enumerate(C):
        if plus is None:
            torch.addmm(out, A[i], B[i], beta=0, alpha=alpha, out=out)
        else:
            torch.addmm(plus[i], A[i], B[i], beta=beta, alpha=alpha, out=out)


def _write_sum(out: Tensor, A: Tensor, beta: float, L: Tensor, R: Tensor) -> None:
    """``out ← beta·A + LR``, computed as transposes where ``out`` is a tall matrix, transposed."""
    if out.is_contiguous():
        torch.addmm(A, L, R, beta=beta, out=out)
    else:
        torch.addmm(A.mT, R.mT, L.mT, beta=beta, out=out.mT)


def _write_symmetric_times(out: Tensor, P: Tensor, X: Tensor) -> None:
    """``out ← PX`` for a symmetric P and X in the memory layout of ``out``."""
    if out.is_contiguous():
        torch.mm(P, X, out=out)
    else:
        torch.mm(X.mT, P, out=out.mT)


def _squared_norm(T: Tensor) -> Tensor:
    """The estimate of :func:`polarstep.ops.base.squared_norm`, whose vᵀPGPv is ‖Tᵀv‖²."""
    V = signs(T.shape[-2], T.device).to(T.dtype)
    return (T.mT @ V).square().sum((-2, -1)) / SIGNS


def _write_in_tiles(
    out: Tensor, X: Tensor, chain: tuple[Squaring, ...], start: Tensor, margin: float
) -> None:
    """``out ← s·P(s²G)X`` for G = XXᵀ and X in bfloat16, in the memory layout of ``out``."""
    G = X @ X.mT
    s = _scale_to_one(G, (G,) * (norm_products(len(G)) - 1), start, margin)
    T = torch.empty_like(X)
    _write_symmetric_times(T, polynomial_in_tiles(G, chain, s), X)
    out.copy_(T).mul_(s)


def _scale_to_one(G: Tensor, powers: tuple[Tensor, ...], V: Tensor, margin: float) -> float:
    """The s of :meth:`polarstep.ops.Products.scale_to_one` for one G, from start vectors V.

    ``powers`` are powers of G whose product is Gᵖ⁻¹, with the p of :func:`norm_products`. Norms are
    added up in float32 at least.
    """
    dtype = torch.promote_types(G.dtype, torch.float32)
    tiny = torch.finfo(dtype).tiny
    for power in powers:
        V = power @ V
        V = V / torch.linalg.vector_norm(V, dtype=dtype).clamp_min(tiny)
    lengths = torch.linalg.vector_norm(V, dim=0, dtype=dtype).clamp_min(tiny)
    largest = float((torch.linalg.vector_norm(G @ V, dim=0, dtype=dtype) / lengths).amax())
    return 1 / (margin * math.sqrt(largest)) if 0 < largest < math.inf else 0.0


def _strips(m: int) -> Iterator[tuple[int, int]]:
    count = round(m / STRIP)
    return pairwise(m * i // count for i in range(count + 1))


def _suits_tiles(m: int, dtype: torch.dtype, fewest: int) -> bool:
    """Whether m rows in ``dtype`` are worth rounding to bfloat16, which pays from ``fewest`` rows on."""
    return dtype == torch.float32 and m >= fewest and has_tiles()


@constant
def has_tiles() -> bool:
    """Whether this CPU has tiles for bfloat16 products, and oneDNN, which uses them, is on."""
    # torch has no public function that tells whether the CPU has tiles.
    supported = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    mkldnn = torch.backends.mkldnn
    available = mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and mkldnn.enabled and supported())


@constant
def _copies_transposed() -> bool:
    """Whether a product with a small transposed factor is faster with a copy of the factor."""
    return platform.machine() in ("aarch64", "arm64")


def polynomial_in_tiles(G: Tensor, chain: tuple[Squaring, ...], s: float) -> Tensor:
    """``P(s²G)`` for a symmetric G in bfloat16 and the P of ``chain``; zero or NaN for s = 0."""
    if s == 0:
        return 0 * G
    # As factors of the first product the powers of s would not round G again. But oneDNN compiles a
    # kernel for every new β of αAB + βC, which takes five times as long as a product of 768 rows.
    S = [G * s**2]
    for each in chain:
        last, earlier = S[-1], S[each.earlier]
        P = torch.addmm(earlier, last, last, beta=each.plus, alpha=each.square)
        squared = torch.linalg.vector_norm(last, dim=-1, dtype=torch.float32).square()
        diagonal = each.square * squared + each.plus * earlier.diagonal().float()
        P.diagonal().copy_(diagonal + each.identity)
        S.append(P)
    return S[-1]
