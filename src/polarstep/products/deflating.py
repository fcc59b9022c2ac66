"""The operations of a deflated step, in plain torch: δ, X₀, and the scale that brings ‖X₀‖_op to one.

What they are for, and how far off their estimates can be, is in :mod:`polarstep.polar.deflation`. All
matrices are wide: (batch, m, n) with m ≤ n.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from polarstep.float64 import widest
from polarstep.products.flat_product import FlatProduct
from polarstep.products.row_product import RowProduct
from polarstep.products.sizes import frobenius_norm
from polarstep.products.squarings import Polynomial

__all__ = [
    "MOST_ENERGY",
    "SHIFT",
    "SIGNS",
    "Deflating",
    "Head",
    "RestNorm",
    "RestRules",
    "first_vectors",
    "signs",
    "squared_norm",
    "start_vectors",
]

# The columns of signs() and start_vectors(), and of the vectors that estimate ‖R‖_op: the least that a
# GPU multiplies at full rate.
SIGNS = 16
# Directions of Y that are shorter than 2⁻¹⁰·‖Y‖_F are not lifted to unit length: rounding made them.
SHIFT = 2.0**-20
# B = QᵀM has at most the energy of M. With this much more, columns of Q are too long by a tenth, and
# M − DB holds so much of the leading directions that no bound on X₀ is true.
MOST_ENERGY = 1.25


@dataclass(frozen=True)
class Head:
    """The factors of a low-rank map of wide matrices A: T = QZ with Z = WX."""

    Q: Tensor  # (batch, m, ℓ)
    B: Tensor  # (batch, ℓ, n): QᵀA
    X: Tensor  # (batch, ℓ, n)
    W: Tensor | None = None  # (batch, ℓ, ℓ); without it Z = X


@dataclass(frozen=True)
class RestRules:
    """The constants of :func:`polarstep.polar.deflation.rest_norm`."""

    margin: float  # δ over the norm that the vectors see
    fresh: float  # how much of first_vectors is added to the vectors that are carried on
    room: float  # rounding may make ‖A‖²_F − ‖B‖²_F too small by this part of ‖A‖²_F
    least: float  # a rest with ‖R‖_op below least·‖A‖_F is taken for rounding errors


@dataclass(frozen=True)
class RestNorm:
    """An estimate of ‖R‖_op, and the vectors from which the next step continues."""

    inverse: Tensor
    """(batch, 1, 1): 1/δ, and zero where R is nothing but rounding or A is not finite."""
    unheld: Tensor
    """(batch,): (‖A‖²_F − ‖B‖²_F)/δ², which is ‖R‖²_F/δ² for an orthonormal Q, up to rounding."""
    seen: Tensor
    """(batch,): ‖W‖²_F/δ² for W = RᵀU, the part of ‖R‖²_F/δ² that lies in the span of b vectors U."""
    vectors: Tensor
    """(batch, b, n): for the next step's estimate."""


class Deflating(ABC):
    """The part of :class:`polarstep.products.Products` that only deflated steps need."""

    @abstractmethod
    def symmetric(self, A: Tensor, B: Tensor) -> Tensor:
        """``ABᵀ``, a symmetric result."""

    @abstractmethod
    def polynomial(self, G: Tensor, polynomial: Polynomial) -> Tensor:
        """``P(G)``."""

    @abstractmethod
    def apply(self, W: Tensor, X: Tensor, dtype: torch.dtype) -> Tensor:
        """``WX`` in ``dtype`` and in the memory layout of ``X``."""

    # The rest R = A − DB.

    def dual(self, head: Head) -> Head:
        """The same T = QZ, written as D·Z' with D = Q(2I − QᵀQ) and Z' = QᵀQ·Z.

        D is one Newton step from Q towards Q(QᵀQ)⁻¹, with which A − DB is the part of A that is
        orthogonal to Q. A − QB is not: A's leading singular values may be a hundred times those of the
        rest, and in 16 bits QᵀQ = I − E is not I to the digits that this takes. A − QB leaves EB of the
        leading directions, A − DB leaves E²B.
        """
        dtype = torch.promote_types(head.B.dtype, torch.float32)
        Q, X = head.Q.to(dtype), head.X.to(dtype)
        G = Q.mT @ Q
        W = G if head.W is None else G @ head.W.to(dtype)
        return Head(2 * Q - Q @ G, head.B, X, W)

    def inverse_rest_size(
        self,
        A: Tensor,
        B: Tensor,
        left: int,
        factor: float,
        floor: float,
        squares: Tensor | None = None,
    ) -> Tensor:
        """1/δ of shape (batch, 1, 1), for the δ of :func:`polarstep.polar.deflation.rest_size`.

        δ² = factor²·max(‖A‖²_F − ‖B‖²_F, floor·‖A‖²_F)/left. A zero matrix has 1/δ = 0, and so has a
        matrix with ‖B‖²_F > 1.25‖A‖²_F, of which X₀ is the head alone. ``squares``, of shape (batch,
        parts), adds up to ‖A‖²_F, if it is known.
        """
        whole = _energy(A, squares)
        head = frobenius_norm(B).square()
        size = factor * (torch.maximum(whole - head, floor * whole) / left).sqrt()
        most = torch.finfo(torch.promote_types(A.dtype, torch.float32)).max
        has_rest = (size > 0) & (head <= MOST_ENERGY * whole)
        return torch.where(has_rest, 1 / torch.where(size > 0, size, 1), 0).clamp_max(most)

    def rest_norm(
        self,
        A: Tensor,
        D: Tensor,
        B: Tensor,
        rules: RestRules,
        *,
        squares: Tensor | None = None,
        vectors: Tensor | None = None,
        finite: Tensor | None = None,
    ) -> RestNorm:
        """δ for R = A − DB, as :func:`polarstep.polar.deflation.rest_norm` defines it; A is read twice.

        ``D`` is that of :meth:`dual`. ``squares`` (batch, parts) adds up to ‖A‖²_F, if it is known.
        ``vectors`` (batch, b, n) are those that the last step returned, if there was one. They may be
        overwritten, except for matrices whose ``finite`` is zero.
        """
        m, n = A.shape[-2:]
        dtype = torch.promote_types(A.dtype, torch.float32)
        first = first_vectors(m, n, A.device).to(dtype)
        V = (first if vectors is None else vectors.to(dtype)).mT
        exact, D, B = A.to(dtype), D.to(dtype), B.to(dtype)
        whole = _energy(A, squares)
        norm = torch.where(whole > 0, whole, 1).sqrt()
        scale = (1 / norm).to(dtype)

        Y = (exact @ V - D @ (B @ V)) * scale
        wide = widest(A.device)
        U = (Y.to(wide) @ _orthonormalizing(Y)).to(dtype)
        W = ((exact.mT @ U - B.mT @ (D.mT @ U)) * scale).to(wide)  # as if ‖A‖_F = 1
        seen = torch.linalg.matrix_norm(W, keepdim=True)
        # A zero matrix, or a matrix with a NaN, adds nothing to the vectors that are carried on.
        usable = (seen > 0) & torch.isfinite(seen)
        unit = torch.where(usable, W / torch.where(usable, seen, 1), 0)
        K = unit.mT @ unit
        largest = seen * _norm_from_moments(K).sqrt()
        longest = seen * K.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None].sqrt()

        unheld = 1 - frobenius_norm(B).square() / norm.square()
        part = (unheld + rules.room).clamp_min(0).sqrt()
        size = torch.minimum(rules.margin * largest, torch.maximum(part, longest))  # δ/‖A‖_F
        known = largest > rules.least
        size = torch.where(known, size, 1)
        most = 1 / torch.finfo(dtype).tiny
        inverse = torch.where(known, 1 / (size * norm), 0).clamp_max(most).to(dtype)
        unheld, seen = (
            torch.where(known, energy / size.square(), 0).flatten()
            for energy in (unheld, seen.square())
        )
        carried = (unit * math.sqrt(V.shape[-1])).mT.to(dtype) + rules.fresh * first
        return RestNorm(inverse, unheld, seen, carried)

    # X₀ = A/δ + D(Z' − B/δ).

    def flat_product(self, A: Tensor, dual: Head, inverse: Tensor) -> FlatProduct:
        """``X₀ = A/δ + D(Z' − B/δ)`` for ``inverse`` = 1/δ, not multiplied out.

        ``dual`` is what :meth:`dual` has made of a head.
        """
        assert dual.W is not None
        inverse = inverse.to(dual.X.dtype)
        R = dual.W @ dual.X - dual.B.to(dual.X.dtype) * inverse
        return FlatProduct(A, inverse.reshape(-1), dual.Q, R)

    def flattened(self, A: Tensor, head: Head, inverse: Tensor) -> Tensor:
        """X₀ in the memory layout of ``A``."""
        return self.flat_product(A, self.dual(head), inverse).multiplied_out()

    def scale_to_one(self, G: Tensor, margin: float) -> Tensor:
        """s = 1/(margin·√λ) for an estimate λ of ‖G‖_op, G = XXᵀ: ‖sX‖_op ≈ 1/margin, or a little more.

        λ is the largest ‖Gv‖/‖v‖ over 16 vectors v = G⁴v₀ for the v₀ of :func:`start_vectors`: five
        products with few columns. :mod:`polarstep.polar.deflation` says how far λ can be below ‖G‖_op.
        s = 0 where G is zero or not finite. The result has shape (batch, 1, 1).
        """
        V = start_vectors(G.shape[-1], G.device).to(torch.promote_types(G.dtype, torch.float32))
        G, tiny = G.to(V.dtype), torch.finfo(V.dtype).tiny
        size = torch.linalg.matrix_norm(G, keepdim=True)
        G = G / size.clamp_min(tiny)  # squares of G⁴v₀ would leave the range of float32
        V = V.expand(len(G), -1, -1)
        for _ in range(4):
            V = G @ V
            V = V / torch.linalg.matrix_norm(V, keepdim=True).clamp_min(tiny)
        lengths = torch.linalg.vector_norm(V, dim=-2).clamp_min(tiny)
        ratios = torch.linalg.vector_norm(G @ V, dim=-2) / lengths
        largest = ratios.amax(-1)[:, None, None] * size
        known = (largest > 0) & torch.isfinite(largest)
        return torch.where(known, 1 / (margin * torch.where(known, largest, 1).sqrt()), 0)

    def scaled_polynomial(self, G: Tensor, polynomial: Polynomial, scale: Tensor) -> Tensor:
        """``s·P(s²G)`` for ``scale`` = s of shape (batch, 1, 1), so that its product with X is φ(sX)."""
        s = scale.to(G.dtype)
        return s * self.polynomial(s * s * G, polynomial)

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
        """T = φ(s·X₀) for the X₀ of :meth:`flattened` and the s of :meth:`scale_to_one`; and ‖T‖²_F.

        ‖T‖²_F is a function to call, because few steps need it. ``float8`` allows products in eight bits
        on devices that have them. ``most`` is a bound on ‖X₀‖²_F.
        """
        X = self.flattened(A, head, inverse)
        G = self.symmetric(X, X)
        P = self.scaled_polynomial(G, polynomial, self.scale_to_one(G, margin))
        return self.apply(P, X, X.dtype), partial(self.lifted_norm, P, G)

    def lifted_norm(self, P: Tensor, G: Tensor) -> Tensor:
        """The estimate of :func:`squared_norm`: ‖PX‖²_F of shape (batch,), for G = XXᵀ."""
        return squared_norm(P, G)


def _energy(A: Tensor, squares: Tensor | None) -> Tensor:
    """‖A‖²_F of shape (batch, 1, 1), from its parts where they are known."""
    return frobenius_norm(A).square() if squares is None else squares.sum(1)[:, None, None]


def _orthonormalizing(Y: Tensor) -> Tensor:
    """N (batch, b, b) with which YN has orthonormal columns, from the Cholesky factor of YᵀY.

    N is in float64 where the device has it. Directions of Y below 2⁻¹⁰·‖Y‖_F are left shorter than one:
    NNᵀ = (YᵀY + 2⁻²⁰‖Y‖²_F·I)⁻¹.
    """
    Y = Y.to(widest(Y.device))
    S = Y.mT @ Y
    diagonal = S.diagonal(dim1=-2, dim2=-1)
    trace = diagonal.sum(-1, keepdim=True)
    diagonal.add_(torch.where(trace > 0, SHIFT * trace, 1))
    factor, _ = torch.linalg.cholesky_ex(S)
    identity = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device).expand_as(S)
    return torch.linalg.solve_triangular(factor, identity, upper=False).mT


def _norm_from_moments(K: Tensor) -> Tensor:
    """A bound on ‖K‖_op from above for symmetric b×b matrices K ≥ 0, from tr K² and tr K⁴.

    Of b numbers λᵢ² with mean μ and standard deviation τ none is above μ + τ√(b − 1): if one is d above
    the mean, the others together are d below it. The bound is exact where all λᵢ are equal, and never
    above the Schatten norm (Σλᵢ⁴)^¼.
    """
    b = K.shape[-1]
    squared = K @ K
    mean = squared.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    second = squared.square().sum((-2, -1), keepdim=True) / b
    deviation = (second - mean.square()).clamp_min(0).sqrt()
    return (mean + math.sqrt(b - 1) * deviation).sqrt()


def first_vectors(m: int, n: int, device: torch.device) -> Tensor:
    """(1, b, n) vectors to start an estimate of ‖R‖_op from, the same at every call; b = min(m, 16).

    Entries are without a pattern, between −√(3/n) and √(3/n), so that vectors have a length near one.
    They are added to the carried vectors at every step.
    """
    block = start_vectors(n, device) * math.sqrt(3 / n)
    return block[..., : min(m, SIGNS)].mT


def start_vectors(rows: int, device: torch.device) -> Tensor:
    """(1, rows, 16) entries between −1 and 1 without a pattern, the same at every call.

    Entries of ±1 would not do. Among 768 rows of 16 signs some are equal, and some opposite. The columns
    are then orthogonal to the difference of the two rows, or to their sum, which may well be what a
    gradient moves: two neurons that are copies of one another move in this way.
    """
    bits = _hashed(rows * SIGNS, device) >> 8
    return (bits.to(torch.float32) * 2.0**-23 - 1).view(1, rows, SIGNS)


def signs(rows: int, device: torch.device) -> Tensor:
    """(1, rows, 16) entries of ±1 without a pattern, the same at every call."""
    return ((_hashed(rows * SIGNS, device) & 1) * 2 - 1).view(1, rows, SIGNS)


def _hashed(count: int, device: torch.device) -> Tensor:
    """Murmur3's finalizer of 0, 1, 2, …, which has 32 bits; a kernel computes it as well."""
    x = torch.arange(count, device=device)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x


def squared_norm(P: Tensor, G: Tensor) -> Tensor:
    """An estimate of ‖PX‖²_F = tr(PGP) for G = XXᵀ, of shape (batch,), by two products with 16 columns.

    It is the mean of vᵀPGPv over 16 vectors v with entries of ±1, of which only the off-diagonal
    part of PGP has a variance. For T near the polar factor PGP is near the identity.
    """
    V = signs(G.shape[-1], G.device).to(P.dtype)
    W = (P @ V).to(G.dtype)
    dtype = torch.promote_types(G.dtype, torch.float32)
    return (W.to(dtype) * (G @ W).to(dtype)).sum((-2, -1)) / V.shape[-1]
