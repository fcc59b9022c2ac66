"""The rest R = A − DB of a sketch and estimates of its size, in plain torch.

What they are for, and how far off they can be, is in :mod:`polarstep.polar.rest_norm`. All matrices are
wide: (batch, m, n) with m ≤ n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep.float64 import widest
from polarstep.products.head import Head
from polarstep.products.sizes import frobenius_norm
from polarstep.products.start_vectors import first_vectors

__all__ = ["MOST_ENERGY", "SHIFT", "RestNorm", "RestOperations", "RestRules"]

# Directions of Y that are shorter than 2⁻¹⁰·‖Y‖_F are not lifted to unit length: rounding made them.
SHIFT = 2.0**-20
# B = QᵀM has at most the energy of M. With this much more, columns of Q are too long by a tenth, and
# M − DB holds so much of the leading directions that no bound on X₀ is true.
MOST_ENERGY = 1.25


@dataclass(frozen=True)
class RestRules:
    """The constants of :func:`polarstep.polar.rest_norm.rest_norm`."""

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


class RestOperations:
    """The part of :class:`polarstep.products.Products` that finds the rest of a head, and its size."""

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
        """1/δ of shape (batch, 1, 1), for the δ of :func:`polarstep.polar.rest_norm.rest_size`.

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
        """δ for R = A − DB, as :func:`polarstep.polar.rest_norm.rest_norm` defines it; A is read twice.

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
