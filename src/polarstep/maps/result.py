"""What a step of a polar map returns: T, before it is multiplied out.

A step returns a :class:`Polar`. Its T is a tensor or a product that has not been formed. A sketched map
returns the :class:`Factors` that Algorithm 1 computes, for a wide M and ℓ = s + p::

    B = QᵀM             Q: m×ℓ,  B: ℓ×n
    Z = WX ≈ polar(B)   W: ℓ×ℓ,  X: ℓ×n         a Lift; W = I where the inner map returns Z itself
    T = QZ = LR         L = QW,  R = X

Each reader forms only what it needs:

* the update adds LR to the weights;
* ``shape_scale="rms"`` divides by ‖T‖_F, and ‖T‖²_F = ‖Z‖²_F = tr(W·XXᵀ·Wᵀ) needs no Z;
* a certificate reads B, which tells how much of M the basis Q captured. A deflated map starts from a QZ
  but returns a T that is more than QZ; it leaves Q, B and Z for the certificate as :class:`Captured`.

The checks at the end name a slip in a map or a transform of a user's own. A shape that broadcasts, or a
carry under a name that is not in ``carries``, would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from polarstep.numerics import product_like
from polarstep.ops import ops_of
from polarstep.ops.lazy import Head, RowProduct, ScaledRows

if TYPE_CHECKING:
    from polarstep.maps.base import PolarMap

__all__ = [
    "Captured",
    "Factors",
    "Lift",
    "Polar",
    "SquaredNorm",
    "check_matrices",
    "checked_polar",
    "counted_norm",
    "pair_of",
]


SquaredNorm = Callable[[], Tensor]  # returns ‖T‖²_F, of shape (batch,)

# Where the length of a step depends on ‖T‖_F, ‖T‖²_F is taken to be at least this share of ℓ. Momentum
# of rank one has ‖T‖_F = 1. T/‖T‖_F then has length 1 in a single direction, where a T with ‖T‖²_F = ℓ
# has 1/√ℓ in each. With a ninth of ℓ the length is 3/√ℓ at most.
LEAST_SHARE = 1 / 9


def counted_norm(squared: Tensor, width: int) -> Tensor:
    """max(‖T‖²_F, ℓ/9) from ``squared`` = ‖T‖²_F and ℓ = ``width``; a NaN stays NaN.

    ``shape_scale="rms"`` divides by its root.
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
        restarts (:mod:`polarstep.maps.gram`) keep them below 2e-2.
        """
        wide_enough = torch.promote_types(self.X.dtype, torch.float32)
        if self.W is None:
            return torch.linalg.vector_norm(self.X, dim=(-2, -1), dtype=wide_enough).square()
        G = ops_of(self.X.device).gram(self.X) if self.G is None else self.G
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
            X = ops_of(X.device).apply(W, X, self.projected.dtype)
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


Found = TypeVar("Found")


def check_matrices(T: object, M: Tensor, method: str) -> None:
    """Raise if ``T``, which ``method`` returned, is not one matrix for each matrix of ``M``."""
    if not isinstance(T, Tensor):
        raise TypeError(
            f"{method} returned a {type(T).__name__}: expected T, a tensor (batch, m, n)"
        )
    if T.shape != M.shape:
        raise ValueError(
            f"{method} returned a T of shape {tuple(T.shape)} for matrices of shape "
            f"{tuple(M.shape)}: expected the same shape"
        )


def pair_of(found: Found, M: Tensor, carries: Sequence[str], method: str) -> Found:
    """``found``, if it is T of ``M`` and a carry under ``carries``: what a transform's step returns."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
        told = f"a {type(found).__name__}"
        if isinstance(found, tuple):
            told = f"({', '.join(type(each).__name__ for each in found)})"
        raise TypeError(
            f"{method} returned {told}: expected a pair, T and a MapState; MapState() is empty"
        )
    T, left = found
    if not isinstance(T, ScaledRows):
        check_matrices(T, M, method)
    _check_carry(left.items(), len(M), carries, method)
    return found


def checked_polar(found: Found, M: Tensor, carries: Sequence[str], method: str) -> Found:
    """``found``, if it is a :class:`Polar` of ``M`` and a carry: what a polar map's step returns."""
    match found:
        case tuple((Polar() as polar, dict() as left)):
            _check_polar(polar, M, method)
            _check_carry(left.items(), len(M), carries, method)
            return found
        case tuple((T, dict())):
            check_matrices(T, M, method)
            raise TypeError(
                f"{method} returned T as a {type(T).__name__}: expected polarstep.maps.Polar(M, T)"
            )
    return pair_of(found, M, carries, method)  # raises


def _check_polar(polar: Polar, M: Tensor, method: str) -> None:
    """Raise if ``polar`` is not of ``M``, or has no T."""
    if not isinstance(polar.M, Tensor) or polar.M.shape != M.shape:
        raise ValueError(
            f"{method} returned a Polar whose M is {_shape(polar.M)} for matrices of shape "
            f"{tuple(M.shape)}: expected Polar(M, T) with the M that it got"
        )
    if polar.squared_norm is not None and not callable(polar.squared_norm):
        raise TypeError(
            f"{method} returned a Polar whose squared_norm is {_shape(polar.squared_norm)}: expected a "
            "function without arguments that returns ‖T‖²_F, of shape (batch,), or None"
        )
    if polar.factors is not None:
        _check_factors(polar.factors, M, method)
    elif polar.T is None:
        raise ValueError(
            f"{method} returned a Polar without T and without factors: expected Polar(M, T), with T of "
            f"the shape of M, {tuple(M.shape)}"
        )
    elif not isinstance(polar.T, RowProduct | ScaledRows):  # these know their shape
        check_matrices(polar.T, M, method)


def _check_factors(factors: object, M: Tensor, method: str) -> None:
    """Raise if ``factors`` do not fit ``M``, or its transpose where it is tall."""
    if not isinstance(factors, Factors) or not isinstance(factors.lift, Lift):
        what = f"{type(factors).__name__}"
        if isinstance(factors, Factors):
            what = f"Factors whose lift is a {type(factors.lift).__name__}"
        raise TypeError(
            f"{method} returned factors as a {what}: expected polarstep.maps.result.Factors, with a "
            "Lift; Polar(M, T) needs no factors"
        )
    batch, short, long = len(M), min(M.shape[-2:]), max(M.shape[-2:])
    X, W, width = factors.lift.X, factors.lift.W, factors.width
    for name, tensor, rows, columns in (
        ("columns", factors.columns, short, None),
        ("projected", factors.projected, None, long),
        ("lift.X", X, None, long),
    ):
        form = f"({batch}, {rows or f'≥ {width}'}, {columns or f'≥ {width}'})"
        if (
            not isinstance(tensor, Tensor)
            or tensor.ndim != 3
            or len(tensor) != batch
            or (tensor.shape[1] < width if rows is None else tensor.shape[1] != rows)
            or (tensor.shape[2] < width if columns is None else tensor.shape[2] != columns)
        ):
            raise ValueError(
                f"{method} returned factors whose {name} is {_shape(tensor)} for matrices of shape "
                f"{tuple(M.shape)} and a width of {width}: expected {form}"
                + "; factors of tall matrices are of their transposes"
                * (M.shape[-2] > M.shape[-1])
            )
    inner = (batch, factors.columns.shape[2], X.shape[1])
    if (
        W is not None
        and factors.lift.left is None
        and (not isinstance(W, Tensor) or tuple(W.shape) != inner)
    ):
        raise ValueError(
            f"{method} returned factors whose lift.W is {_shape(W)}: expected {inner} between columns "
            f"{tuple(factors.columns.shape)} and lift.X {tuple(X.shape)}"
        )


def _shape(found: object) -> str:
    """The shape of a tensor, or what is in its place."""
    if isinstance(found, Tensor):
        return f"of shape {tuple(found.shape)}"
    return "None" if found is None else f"a {type(found).__name__}"


def _check_carry(
    left: Iterable[tuple[str, Any]], batch: int, carries: Sequence[str], method: str
) -> None:
    for name, tensor in left:
        if isinstance(carries, str) or name not in carries:
            raise ValueError(
                f"{method} left {name!r} in its carry, and carries={carries!r}: expected a tuple with "
                f"this name, as carries = ({name!r},), since the next step would not find it"
            )
        if not isinstance(tensor, Tensor) or tensor.shape[:1] != (batch,):
            what = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor)
            raise ValueError(
                f"{method} left {name!r} of {what} in its carry: expected a tensor whose first "
                f"dimension is the batch, {batch} here"
            )
