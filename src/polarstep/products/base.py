"""The operations in plain torch, for every device; subclasses override what a device does better.

Matrices come as batches ``(batch, m, n)``. A polynomial ``(a, b, c, …)`` stands for the odd function
φ(x) = ax + bx³ + cx⁵ + …, which is x·P(x²) with P(y) = a + by + cy² + ….
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from polarstep.products.row_product import RowProduct
from polarstep.products.squarings import squarings

__all__ = [
    "SIGNS",
    "Head",
    "Polynomial",
    "Products",
    "frobenius_norm",
    "largest_entry",
    "leaves_range",
    "plain_product",
    "product_like",
    "shrink_of",
    "signs",
    "squared_norm",
    "unit_scale",
    "unit_scaled",
]

Polynomial = tuple[float, ...]


@dataclass(frozen=True)
class Head:
    """The factors of a low-rank map of wide matrices A: T = QZ with Z = WX."""

    Q: Tensor  # (batch, m, ℓ)
    B: Tensor  # (batch, ℓ, n): QᵀA
    X: Tensor  # (batch, ℓ, n)
    W: Tensor | None = None  # (batch, ℓ, ℓ); without it Z = X


# The columns of signs(): the least that a GPU multiplies at full rate.
SIGNS = 16


class Products:
    """The operations of a device. An instance has no state."""

    # Whether reading a value is free of waiting, so that rare cases can be handled when they occur.
    looks_for_free = False
    # Whether the m×m work of a Gram form may run in float16, at the rate of bfloat16 products.
    gram_in_halves = False
    # The number of rows from which a symmetric product computes only half of its result.
    symmetric_from = 512
    # How a basis of float32 columns is made (polarstep.polar.orthonormal).
    orthonormalization = "products"
    # The fewest rows of a matrix for which a sketch is worth its launches.
    sketched_from = 0

    # Precision and alignment.

    def dtype(self, given: torch.dtype) -> torch.dtype:
        """The fastest precision that this device has hardware for, given matrices in ``given``.

        float64 stays float64, because whoever uses it wants its digits.
        """
        return torch.float64 if given == torch.float64 else torch.float32

    def workable(self, X: Tensor) -> Tensor:
        """``X`` in float32 at least, or in bfloat16 where the device multiplies in bfloat16."""
        if X.dtype.itemsize >= 4 or (
            X.dtype == torch.bfloat16 and self.dtype(X.dtype) == torch.bfloat16
        ):
            return X
        return X.float()

    def sketch_dtype(self, m: int, n: int, dtype: torch.dtype) -> torch.dtype:
        """The precision for sketching an m×n matrix, where directions matter and digits do not."""
        return dtype

    def padded(self, width: int, dtype: torch.dtype) -> int:
        """The number of rows, ``width`` or a few more, with which products in ``dtype`` run best."""
        return width

    # Products.

    def times(self, factor: Tensor, S: Tensor, width: int | None = None) -> Tensor:
        """``factor·S`` for the columns of a sketch S, with zero columns up to ``width``.

        Computed as (Sᵀ·factorᵀ)ᵀ, so that each column is contiguous, as factorizations need it.
        With contiguous rows a CPU takes a tenth longer.
        """
        rows = S.mT
        if width is None or width == rows.shape[-2]:
            return (rows @ factor.mT).mT
        Y = rows.new_zeros(len(factor), width, factor.shape[-2])
        torch.bmm(rows, factor.mT, out=Y[:, : rows.shape[-2]])
        return Y.mT

    def sketched(self, factor: Tensor, Omega: Tensor, width: int) -> Tensor:
        """``factor·Ω`` with one Ω (n, ℓ) for all matrices, and zero columns up to ``width``."""
        return self.times(factor, Omega.expand(len(factor), -1, -1), width)

    def apply(self, W: Tensor, X: Tensor, dtype: torch.dtype) -> Tensor:
        """``WX`` in ``dtype`` and in the memory layout of ``X``."""
        return product_like(X, W, X).to(dtype)

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
        """``alpha·ABᵀ + beta·plus + identity·I`` for (batch, m, k) matrices, a symmetric result."""
        C = plain_product(A, B.mT, plus, alpha, beta)
        if identity:
            C.diagonal(dim1=-2, dim2=-1).add_(identity)
        return C

    def symmetric_flops(self, m: int, k: int, dtype: torch.dtype) -> int:
        """FLOPs of :meth:`symmetric` on one pair of m×k matrices, two for a multiply-add."""
        return 2 * m * m * k

    def gram(self, X: Tensor) -> Tensor:
        """``XXᵀ``, accumulated and returned in float32 where ``X`` is of lower precision."""
        if X.dtype.itemsize >= 4:
            return self.symmetric(X, X)
        X = X.float()
        return X @ X.mT

    def normalized(self, X: Tensor, dtype: torch.dtype) -> Tensor:
        """``X/‖X‖_F`` for each matrix, in ``dtype``, of norm at most one; a zero matrix stays zero.

        The norm is accumulated in float64, because the squares of 1e-30 or 1e30 leave the range of
        float32. Rounding to 16 bits could lift the norm above one, where the polynomials applied
        next are steepest, so a 16-bit result is made a little smaller.
        """
        if torch.compiler.is_compiling():
            X, _ = unit_scaled(X)  # compiled with the division to one pass
        norm = frobenius_norm(X)
        if X.dtype == torch.float64 or self.looks_for_free:
            X, norm = self._in_range(X, norm)
            small = torch.promote_types(X.dtype, torch.float32)
            norm = norm.to(small).clamp_min(torch.finfo(small).tiny)
            return (X.to(small) / (norm / shrink_of(dtype))).to(dtype)
        # One pass over memory. The factor is in float64: 1/‖X‖_F may leave the range of float32.
        inverse = shrink_of(dtype) / norm.clamp_min(torch.finfo(torch.float64).tiny)
        return torch.mul(X, inverse, out=torch.empty_like(X, dtype=dtype))

    def _in_range(self, X: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """``X`` and ‖X‖_F, both scaled where division by ‖X‖_F would lose digits."""
        if torch.compiler.is_compiling():
            return X, norm
        if self.looks_for_free:
            outside = leaves_range(norm, X.dtype)
            if X.dtype == torch.float64:
                outside |= norm == 0  # or squares that are too small for float64
            if not bool(outside.any()):
                return X, norm
        X, _ = unit_scaled(X)
        return X, frobenius_norm(X)

    # Polynomials.

    def polynomial(self, G: Tensor, polynomial: Polynomial) -> Tensor:
        """``P(G) = aI + bG + cG² + …`` by squarings, or by Horner's rule for degrees without them."""
        a, b, *rest = polynomial
        chain = squarings(polynomial) if len(rest) > 1 else None
        if chain is not None:
            S = [G]
            for each in chain:
                D, last = S[each.earlier], S[-1]
                S.append(
                    self.symmetric(
                        last,
                        last,
                        plus=D,
                        alpha=each.square,
                        beta=each.plus,
                        identity=each.identity,
                    )
                )
            return S[-1]
        if not rest:
            H = b * G
            if a:
                H.diagonal(dim1=-2, dim2=-1).add_(a)
            return H
        H, scale = self.but_for_the_last_product(G, polynomial)
        return self.symmetric(H, G, plus=G, alpha=scale, beta=b, identity=a)

    def but_for_the_last_product(self, G: Tensor, polynomial: Polynomial) -> tuple[Tensor, float]:
        """H and s with ``P(G) = s·HG + bG + aI``, for a polynomial of degree five or more."""
        H, scale = G, polynomial[-1]
        for coefficient in polynomial[-2:1:-1]:  # H is symmetric in every round
            H, scale = self.symmetric(H, G, plus=G, alpha=scale, beta=coefficient), 1.0
        return H, scale

    def accumulated(self, G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
        """W with φ_q∘…∘φ₁(X) = WX, from the Gram matrix ``G`` = XXᵀ; q ≥ 1.

        W_t = P_t(G_{t−1})W_{t−1} and G_t = P_t(G_{t−1})·G_{t−1}·P_t(G_{t−1}).
        """
        W: Tensor | None = None
        for t, polynomial in enumerate(polynomials):
            P = self.polynomial(G, polynomial)
            W = P if W is None else self.symmetric(P, W)
            if t + 1 < len(polynomials):
                G = self.symmetric(self.symmetric(P, G), P)
        assert W is not None
        return W

    def iterate(self, X: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
        """φ_q∘…∘φ₁ on the singular values of ``X`` (m ≤ n), each step on X itself: X ← P(XXᵀ)X."""
        for polynomial in polynomials:
            a, *rest = polynomial
            H = self.polynomial(self.symmetric(X, X), (0.0, *rest))
            # Like ``product_like``, but the same call also adds a·X.
            if X.mT.is_contiguous():
                X = torch.baddbmm(X.mT, X.mT, H, beta=a).mT
            else:
                X = torch.baddbmm(X, H, X, beta=a)
        return X

    # Matrices whose leading directions were found by a sketch (polarstep.polar.deflation).

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

        δ² = factor²·max(‖A‖²_F − ‖B‖²_F, floor·‖A‖²_F)/left. A zero matrix has 1/δ = 0. ``squares``, of
        shape (batch, parts), adds up to ‖A‖²_F, if it is known.
        """
        whole = frobenius_norm(A).square() if squares is None else squares.sum(1)[:, None, None]
        head = frobenius_norm(B).square()
        size = factor * (torch.maximum(whole - head, floor * whole) / left).sqrt()
        most = torch.finfo(torch.promote_types(A.dtype, torch.float32)).max
        return torch.where(size > 0, 1 / torch.where(size > 0, size, 1), 0).clamp_max(most)

    def flattened(self, A: Tensor, head: Head, inverse: Tensor) -> Tensor:
        """``X₀ = A/δ + Q(Z − B/δ)`` for ``inverse`` = 1/δ, in the memory layout of ``A``.

        A − QB cancels A's leading directions, whose singular values may be a hundred δ. In 16 bits QᵀQ
        is not I to the digits that this takes. So B is replaced by (2I − QᵀQ)B, one Newton step
        towards (QᵀQ)⁻¹B: QᵀQ = I − E leaves E²B of the leading directions instead of EB.
        """
        dtype = torch.promote_types(A.dtype, torch.float32)
        Q, B, inverse = head.Q.to(dtype), head.B.to(dtype), inverse.to(dtype)
        Z = (head.X if head.W is None else head.W.to(head.X.dtype) @ head.X).to(dtype)
        factor = Z - (2 * B - (Q.mT @ Q) @ B) * inverse
        return (A.to(dtype) * inverse + product_like(A, Q, factor)).to(A.dtype)

    def scale_to_one(self, G: Tensor, margin: float) -> Tensor:
        """s = 1/(margin·√λ) for an estimate λ of ‖G‖_op, G = XXᵀ: ‖sX‖_op ≈ 1/margin, or a little more.

        λ is the largest ‖Gv‖/‖v‖ over 16 vectors v = G⁴v₀ with fixed entries of ±1 in v₀: five products
        with few columns. :mod:`polarstep.polar.deflation` says how far λ can be below ‖G‖_op. s = 0
        where G is zero or not finite. The result has shape (batch, 1, 1).
        """
        V = signs(G.shape[-1], G.device).to(torch.promote_types(G.dtype, torch.float32))
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
        return product_like(X, P, X), partial(squared_norm, P, G)

    def fuses_first_step(self, rows: int, dtype: torch.dtype, first: Polynomial) -> bool:
        """Whether :meth:`first_step` saves a pass over memory for matrices of ``rows`` rows."""
        return False

    def whitens(self, dtype: torch.dtype) -> bool:
        """Whether the device has :meth:`whitened_basis` and :meth:`lift_and_leave` in ``dtype``."""
        return False

    def whitened_basis(
        self, Y: Tensor, polynomials: tuple[Polynomial, ...]
    ) -> tuple[Tensor, Tensor]:
        """Orthonormal rows Q that span ``Y``'s (batch, ℓ, m), in Y's precision and in float16.

        ``polynomials`` lift all singular values of Y/‖Y‖_F that are not negligible to one.
        """
        raise AssertionError("whitens() says that this device has no such operation")

    def lift_and_leave(
        self,
        B: Tensor,
        polynomials: tuple[Polynomial, ...],
        numbers: Tensor,
        scale: float,
        S: Tensor,
        V: Tensor,
        finite: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """W and X with φ_q∘…∘φ₁(B/‖B‖_F) = WX: X is the first step, W all others.

        Also writes S ← X + scale·numbersᵀ and V ← W², except for matrices whose ``finite`` is zero.
        """
        raise AssertionError("whitens() says that this device has no such operation")

    def first_step(self, Y: Tensor, polynomial: Polynomial, dtype: torch.dtype) -> Tensor:
        """``φ(Y/‖Y‖_F)`` in ``dtype``, with ‖Y‖_F² read off the diagonal of YYᵀ.

        The result is zero where squares of Y's entries leave float32's range.
        """
        G = self.gram(Y)
        trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        known = (trace > 1e-36) & (trace < 1e36)
        trace = torch.where(known, trace, 1)
        W = self.polynomial(G / trace, polynomial) * torch.where(known, trace.rsqrt(), 0)
        return (W.to(Y.dtype) @ Y).to(dtype)


def signs(rows: int, device: torch.device) -> Tensor:
    """(1, rows, 16) entries of ±1 without a pattern, the same at every call.

    The last bits of murmur3's finalizer of 0, 1, 2, …, which a kernel computes as well.
    """
    x = torch.arange(rows * SIGNS, device=device)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return ((x & 1) * 2 - 1).view(1, rows, SIGNS)


def squared_norm(P: Tensor, G: Tensor) -> Tensor:
    """An estimate of ‖PX‖²_F = tr(PGP) for G = XXᵀ, of shape (batch,), by two products with 16 columns.

    It is the mean of vᵀPGPv over 16 vectors v with entries of ±1, of which only the off-diagonal
    part of PGP has a variance. For T near the polar factor PGP is near the identity.
    """
    V = signs(G.shape[-1], G.device).to(P.dtype)
    W = (P @ V).to(G.dtype)
    dtype = torch.promote_types(G.dtype, torch.float32)
    return (W.to(dtype) * (G @ W).to(dtype)).sum((-2, -1)) / V.shape[-1]


def shrink_of(dtype: torch.dtype) -> float:
    """The factor on a norm of one that keeps it at most one when it is rounded to ``dtype``."""
    return 1 - torch.finfo(dtype).eps / 2 if dtype.itemsize < 4 else 1.0


def product_like(X: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """``AB`` in the memory layout of ``X``, which has the same shape.

    Tall matrices come as transposed views, and so should results made from them. Adding a result to
    its parameter takes a CPU ten times as long if their memory layouts differ.
    """
    return (B.mT @ A.mT).mT if X.mT.is_contiguous() else A @ B


# Sizes of matrices, by precision, that can be squared, summed and multiplied without loss.
_SAFE = {torch.float64: (2.0**-480, 2.0**480)}
_SAFE_IN_FLOAT32 = (2.0**-90, 2.0**110)


def leaves_range(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether matrices in ``dtype`` must be scaled before products; ``size`` is a norm of theirs.

    False for a size of zero and for NaN.
    """
    least, most = _SAFE.get(dtype, _SAFE_IN_FLOAT32)
    return ((size < least) & (size > 0)) | (size > most)


def largest_entry(X: Tensor) -> Tensor:
    """max |X_ij| of shape (batch, 1, 1)."""
    # torch's norm of order inf takes twenty times as long on a CPU.
    return torch.maximum(X.amax((-2, -1), keepdim=True), -X.amin((-2, -1), keepdim=True))


def frobenius_norm(X: Tensor) -> Tensor:
    """‖X‖_F of shape (batch, 1, 1), in float64: squares of 1e-30 or 1e30 leave the range of float32."""
    return torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=torch.float64)


def unit_scaled(X: Tensor) -> tuple[Tensor, Tensor]:
    """``(sX, s)`` with a power of two ``s`` per matrix that puts its largest entry in [½, 1).

    Without it, norms and Gram matrices of entries like 1e-30 or 1e30 leave the range of float32.
    Scaling by a power of two is exact, so T(cM) = T(M) is kept. A zero matrix has s = 1.
    """
    s = unit_scale(X)
    return X * s, s


def unit_scale(X: Tensor) -> Tensor:
    """The ``s`` of :func:`unit_scaled`, for ``X`` of shape (..., m, n)."""
    largest = largest_entry(X)
    _, exponent = torch.frexp(largest)
    limit = math.frexp(torch.finfo(X.dtype).max)[1] - 2  # keeps s itself finite
    return torch.ldexp(torch.ones_like(largest), -exponent.clamp(-limit, limit))


def plain_product(A: Tensor, B: Tensor, plus: Tensor | None, alpha: float, beta: float) -> Tensor:
    """``alpha·AB + beta·plus``, without use of symmetry."""
    if plus is None:
        C = torch.bmm(A, B)  # what A @ B calls, without its views
        return C if alpha == 1 else alpha * C
    return torch.baddbmm(plus, A, B, beta=beta, alpha=alpha)
