"""What a step of a polar map returns: T, before it is multiplied out.

A step returns a :class:`Polar`. Its T is a tensor or a product that has not been formed. A sketched map
returns the :class:`Factors` that Algorithm 1 computes, for a wide M and ℓ = s + p::

    B = QᵀM             Q: m×ℓ,  B: ℓ×n
    Z = WX ≈ polar(B)   W: ℓ×ℓ,  X: ℓ×n         a Lift; W = I where the inner map returns Z itself
    T = QZ = LR         L = QW,  R = X

Each reader forms only what it needs:

* the update adds LR to the weights;
* ``lr_scale="rms"`` divides by ‖T‖_F, and ‖T‖²_F = ‖Z‖²_F = tr(W·XXᵀ·Wᵀ) needs no Z;
* a certificate reads B, which tells how much of M the basis Q captured. A deflated map starts from a QZ
  but returns a T that is more than QZ; it leaves Q, B and Z for the certificate as :class:`Captured`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polarstep import products
from polarstep.products.head import Head
from polarstep.products.plain import product_like
from polarstep.products.row_product import RowProduct
from polarstep.products.scaled_rows import ScaledRows

if TYPE_CHECKING:
    from polarstep.polar.base import PolarMap

__all__ = ["Captured", "Factors", "Lift", "Polar", "SquaredNorm", "counted_norm"]

SquaredNorm = Callable[[], Tensor]  # returns ‖T‖²_F, of shape (batch,)

# Where the length of a step depends on ‖T‖_F, ‖T‖²_F is taken to be at least this share of ℓ. Momentum
# of rank one has ‖T‖_F = 1. T/‖T‖_F then has length 1 in a single direction, where a T with ‖T‖²_F = ℓ
# has 1/√ℓ in each. With a ninth of ℓ the length is 3/√ℓ at most.
LEAST_SHARE = 1 / 9


def counted_norm(squared: Tensor, width: int) -> Tensor:
    """max(‖T‖²_F, ℓ/9) from ``squared`` = ‖T‖²_F and ℓ = ``width``; a NaN stays NaN.

    ``lr_scale="rms"`` divides by its root.
    """
    return squared.clamp_min(LEAST_SHARE * width)


@dataclass(frozen=True)
class Lift:
    """Z = WX, the polar factor of a small matrix, before it is multiplied out; no W means W = I."""

    X: Tensor  # (batch, ℓ, n)
    W: Tensor | None = None  # (batch, ℓ, ℓ)
    # Returns QW (batch, m, ℓ), where the finder has more precise factors of it than Q and W.
    # A deflated map never calls it.
    left: Callable[[], Tensor] | None = None
    G: Tensor | None = None  # (batch, ℓ, ℓ): XXᵀ, where the inner map has formed it

    def squared_norm(self) -> Tensor:
        """‖Z‖²_F = tr(W·XXᵀ·Wᵀ), of shape (batch,), without forming Z.

        Rounding errors of ε·tr XXᵀ in XXᵀ are multiplied by ‖W‖²_op, as they are in the inner map, whose
        restarts (:mod:`polarstep.polar.gram`) keep them below 2e-2.
        """
        wide_enough = torch.promote_types(self.X.dtype, torch.float32)
        if self.W is None:
            return torch.linalg.vector_norm(self.X, dim=(-2, -1), dtype=wide_enough).square()
        G = products.of(self.X.device).gram(self.X) if self.G is None else self.G
        W = self.W.to(wide_enough)
        return ((W @ G.to(wide_enough)) * W).sum((-2, -1))

    def times(self, factor: Tensor) -> Lift:
        """c·Z for a ``factor`` c of shape (batch, 1, 1), which multiplies W; there must be a W."""
        assert self.W is not None
        left = self.left
        return Lift(
            self.X,
            _scaled(self.W, factor),
            None if left is None else lambda: _scaled(left(), factor),
            self.G,
        )


@dataclass(frozen=True)
class Factors:
    """T = Q·Z = Q·W·X of a sketched map, for wide matrices M (tall ones are transposed first).

    B = QᵀM, which the map needs anyway, tells how much of M the basis captured. Tensors may be
    padded with zeros beyond ℓ = ``width`` rows or columns.
    """

    columns: Tensor  # (batch, m, ≥ ℓ): Q with padding
    projected: Tensor  # (batch, ≥ ℓ, n): B with padding
    lift: Lift  # Z, in the precision the inner map ended in
    width: int
    orthonormal: bool  # whether QᵀQ = I up to rounding; if not, some columns may be short or zero

    @property
    def Q(self) -> Tensor:
        """(batch, m, ℓ), ‖Q‖_op ≤ 1, in the precision of Z."""
        return self.columns[..., : self.width].to(self.Z.dtype)

    @property
    def B(self) -> Tensor:
        """(batch, ℓ, n), QᵀM on M's own scale."""
        return self.projected[:, : self.width]

    @cached_property
    def Z(self) -> Tensor:
        """(batch, ℓ, n), the polar factor of B."""
        X, W = self.lift.X, self.lift.W
        if W is not None:
            X = products.of(X.device).apply(W, X, self.projected.dtype)
        return X[:, : self.width]

    @property
    def as_computed(self) -> Head:
        """Q, B, X and W with their padding, each in its own precision."""
        return Head(self.columns, self.projected, self.lift.X, self.lift.W)

    @cached_property
    def two(self) -> tuple[Tensor, Tensor]:
        """L = QW and R = X with T = LR, so that Z = WX, which has the long side, is not formed."""
        if self.lift.left is not None:
            return self.lift.left(), self.lift.X
        if self.lift.W is not None:
            return torch.bmm(self.columns, self.lift.W), self.lift.X
        return self.Q, self.Z

    def counted_norm(self) -> Tensor:
        """max(‖Z‖²_F, ℓ/9), of shape (batch,), as :func:`counted_norm` says."""
        return counted_norm(self.lift.squared_norm(), self.width)

    def times(self, factor: Tensor) -> Factors:
        """Factors of c·T for a ``factor`` c of shape (batch,), which multiplies W, or Q without a W."""
        c = factor[:, None, None]
        if self.lift.W is None:
            return replace(self, columns=_scaled(self.columns, c), orthonormal=False)
        return replace(self, lift=self.lift.times(c))


@dataclass(frozen=True)
class Captured:
    """The head QZ of a deflated step, whose T is more than QZ; a certificate bounds ‖M‖_* from it."""

    M: Tensor  # (batch, m, n): the step's M, perhaps transposed, each matrix perhaps scaled
    factors: Factors  # of QZ
    inner: PolarMap  # the map with Z = inner(B)


@dataclass(frozen=True)
class Polar:
    """T of a batch of matrices M: dense, or before it is multiplied out.

    A sketched map has ``factors``, and every other map has ``T``.
    """

    M: Tensor  # (batch, m, n), tall or wide
    # (batch, m, n), in the precision the map ended in
    T: Tensor | RowProduct | ScaledRows | None = None
    factors: Factors | None = None  # of wide M, or of Mᵀ where M is tall
    # Returns max(‖T‖²_F, ℓ/9) (counted_norm), where the map can compute it cheaply and effective_rank
    # may be far from ‖T‖²_F.
    squared_norm: SquaredNorm | None = None
    captured: Captured | None = None  # of a deflated step with Draw.shown

    @property
    def two_factors(self) -> tuple[Tensor, Tensor] | None:
        """L and R with T = LR, oriented as M is; ``None`` where T is dense."""
        if self.factors is None:
            return None
        L, R = self.factors.two
        return (L, R) if self.M.shape[-2] <= self.M.shape[-1] else (R.mT, L.mT)

    def multiplied_out(self) -> Tensor:
        """T in the precision the map ended in, in the memory layout of M."""
        if self.factors is None:
            assert self.T is not None
            return self.T if isinstance(self.T, Tensor) else self.T.multiplied_out()
        two = self.two_factors
        assert two is not None
        return product_like(self.M, *two)

    @cached_property
    def dense(self) -> Tensor:
        """:meth:`multiplied_out`, computed once."""
        return self.multiplied_out()


def _scaled(X: Tensor, factor: Tensor) -> Tensor:
    """``factor``·X, rounded once to the precision of X."""
    return (factor * X).to(X.dtype)
