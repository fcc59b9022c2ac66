"""The operations in plain torch, for every device; subclasses override what a device does better.

Matrices come as batches ``(batch, m, n)``. A polynomial ``(a, b, c, …)`` stands for the odd function
φ(x) = ax + bx³ + cx⁵ + …, which is x·P(x²) with P(y) = a + by + cy² + ….

Deflated steps (:mod:`polarstep.maps.deflated`) have operations of their own, on wide matrices: the rest
R = A − DB of a sketch and its size, X₀ = A/δ + D(Z' − B/δ), and a polynomial step on it. The factors D
and Z' are those of :meth:`Products.dual`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from polarstep.numerics import (
    MOST_ENERGY,
    Polynomial,
    frobenius_norm,
    has_float64,
    leaves_range,
    norm_products,
    plain_product,
    product_like,
    shrink_of,
    signs,
    squarings,
    start_vectors,
    unit_scaled,
)
from polarstep.ops.lazy import Head, HeadPlusRest, RowProduct, ScaledRows

__all__ = ["Products", "squared_norm"]


class Products:
    """The operations of a device. An instance has no state."""

    # Whether a value can be read without waiting for the device, so that rare cases are handled only
    # when they occur.
    host_reads_are_free = False
    # Whether the m×m work of a Gram form may run in float16, at the rate of bfloat16 products.
    gram_in_halves = False
    # The number of rows from which a symmetric product computes only half of its result. A GPU does so
    # where there are enough matrices to fill it.
    symmetric_from = 512
    # The most columns of a warm sketch whose state is two factors, on devices that whiten.
    most_factored = 0
    # How a basis of float32 columns is made (polarstep.maps.subspace).
    orthonormalization = "products"
    # The fewest rows at which a LowRank map that a user gives is worth its launches. Auto has its own.
    sketched_from = 0

    # Precision and alignment.

    def dtype(self, given: torch.dtype) -> torch.dtype:
        """The fastest precision that this device has hardware for, given matrices in ``given``.

        It suits products of any size and use; on a CPU :meth:`full_dtype` may be faster. float64 stays
        float64, because whoever uses it wants its digits.
        """
        return torch.float64 if given == torch.float64 else torch.float32

    def workable(self, X: Tensor) -> Tensor:
        """``X`` in float32 at least, or in bfloat16 where the device multiplies in bfloat16."""
        if X.dtype.itemsize >= 4 or (
            X.dtype == torch.bfloat16 and self.dtype(X.dtype) == torch.bfloat16
        ):
            return X
        return X.float()

    def full_dtype(self, m: int, n: int, dtype: torch.dtype) -> torch.dtype:
        """The precision of products with a whole m×n matrix in ``dtype``, as in full space."""
        return self.dtype(dtype)

    def sketch_dtype(self, m: int, n: int, dtype: torch.dtype) -> torch.dtype:
        """The precision for sketching an m×n matrix, where directions matter and digits do not."""
        return dtype

    def step_dtype(self, m: int, n: int, dtype: torch.dtype) -> torch.dtype:
        """The precision of a single step on the rest of an m×n matrix, where ``float8`` is allowed.

        A GPU that takes eight bits decides it for each batch (:mod:`polarstep.ops.triton`).
        """
        return dtype

    def padded(self, width: int, dtype: torch.dtype) -> int:
        """The number of rows, ``width`` or a few more, with which products in ``dtype`` run best."""
        return width

    # Products.

    def times(self, factor: Tensor, S: Tensor, width: int | None = None) -> Tensor:
        """``factor·S`` for the columns of a sketch S, with zero columns up to ``width``.

        Computed as (Sᵀ·factorᵀ)ᵀ, so that each column is contiguous, as factorizations need it.
        A product with contiguous rows takes a CPU a tenth longer.
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
        """``alpha·AB + beta·plus + identity·I`` for symmetric (batch, m, m) matrices with AB = BA."""
        return self.symmetric(A, B, plus=plus, alpha=alpha, beta=beta, identity=identity)

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
        float32; a device without float64 scales X first. Rounding to 16 bits could lift the norm above
        one, where the polynomials applied next are steepest, so a 16-bit result is made a little
        smaller.
        """
        if torch.compiler.is_compiling() or not has_float64(X.device):
            X, _ = unit_scaled(X)  # torch.compile fuses it with the division
        norm = frobenius_norm(X)
        if X.dtype == torch.float64 or self.host_reads_are_free:
            X, norm = self._in_range(X, norm)
            small = torch.promote_types(X.dtype, torch.float32)
            norm = norm.to(small).clamp_min(torch.finfo(small).tiny)
            return (X.to(small) / (norm / shrink_of(dtype))).to(dtype)
        # One pass over memory. The factor is in float64, unless X was scaled: 1/‖X‖_F may leave the
        # range of float32.
        inverse = shrink_of(dtype) / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        return torch.mul(X, inverse, out=torch.empty_like(X, dtype=dtype))

    def _in_range(self, X: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """``X`` and ‖X‖_F, both scaled where division by ‖X‖_F would lose digits."""
        if torch.compiler.is_compiling():
            return X, norm
        if self.host_reads_are_free:
            outside = leaves_range(norm, X.dtype)
            if X.dtype == torch.float64:
                outside |= norm == 0  # or squares that are too small for float64
            if not bool(outside.any()):
                return X, norm
        X, _ = unit_scaled(X)
        return X, frobenius_norm(X)

    def normalized_rows(
        self,
        T: Tensor | RowProduct,
        beta2: float,
        known: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor | ScaledRows, Tensor]:
        """T with rows divided by √v and ‖T‖_F restored, and v (batch, m) in ``dtype``.

        v = β₂·known + (1 − β₂)·mean_j T²_ij. T is read twice and written once: the new norm follows from
        the lengths of the rows alone. A row of zeros stays zero.
        """
        T = T if isinstance(T, Tensor) else T.multiplied_out()
        wide = torch.promote_types(T.dtype, torch.float32)
        length = torch.linalg.vector_norm(T, dim=-1, dtype=wide)
        v = (1 - beta2) * length.square() / T.shape[-1]
        if known is not None:
            v = v + beta2 * known.to(wide)
        scale = _inverse_root(v)
        before, after = (each.square().sum(-1, keepdim=True) for each in (length, length * scale))
        factor = scale * (before.sqrt() * _inverse_root(after))
        return torch.mul(T, factor[..., None], out=torch.empty_like(T)), v.to(dtype)

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
                    self.commuting(
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
        return self.commuting(H, G, plus=G, alpha=scale, beta=b, identity=a)

    def but_for_the_last_product(self, G: Tensor, polynomial: Polynomial) -> tuple[Tensor, float]:
        """H and s with ``P(G) = s·HG + bG + aI``, for a polynomial of degree five or more."""
        H, scale = G, polynomial[-1]
        for coefficient in polynomial[-2:1:-1]:  # H is symmetric in every round
            H, scale = self.commuting(H, G, plus=G, alpha=scale, beta=coefficient), 1.0
        return H, scale

    def accumulated(self, G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
        """W with φ_q∘…∘φ₁(X) = WX, from the Gram matrix ``G`` = XXᵀ; q ≥ 1.

        W_t = P_t(G_{t−1})W_{t−1} and G_t = P_t(G_{t−1})·G_{t−1}·P_t(G_{t−1}).
        """
        return self.accumulated_by(self.commuting, G, polynomials)

    def accumulated_by(
        self,
        multiply: Callable[[Tensor, Tensor], Tensor],
        G: Tensor,
        polynomials: tuple[Polynomial, ...],
    ) -> Tensor:
        """The W of :meth:`accumulated`, step by step, with the products of ``multiply``."""
        W: Tensor | None = None
        for t, polynomial in enumerate(polynomials):
            P = self.polynomial(G, polynomial)
            W = P if W is None else multiply(P, W)
            if t + 1 < len(polynomials):
                G = multiply(multiply(P, G), P)
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

    def fuses_first_step(self, rows: int, dtype: torch.dtype, first: Polynomial) -> bool:
        """Whether :meth:`first_step` saves a pass over memory for matrices of ``rows`` rows."""
        return False

    def whitens(self, dtype: torch.dtype) -> bool:
        """Whether the device has :meth:`whitened_basis` and :meth:`lift_and_leave` in ``dtype``."""
        return False

    def whitened_basis(
        self, Y: Tensor, runs: tuple[tuple[Polynomial, ...], ...]
    ) -> tuple[Tensor, Tensor]:
        """Orthonormal rows Q that span ``Y``'s (batch, ℓ, m), in Y's precision and in float16.

        ``runs`` of polynomials, the first of one alone, lift all singular values of Y/‖Y‖_F that are not
        negligible to one. The Gram matrix is formed before each run.
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

    # The operations of deflated steps: the rest of a head, X₀, and a step on it.

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
        """1/δ of shape (batch, 1, 1), for the δ of :func:`polarstep.maps.deflated.rest_size`.

        δ² = factor²·max(‖A‖²_F − ‖B‖²_F, floor·‖A‖²_F)/left. A zero matrix has 1/δ = 0, and so has a
        matrix with ‖B‖²_F > 1.25‖A‖²_F, of which X₀ is the head alone. ``squares``, of shape (batch,
        parts), adds up to ‖A‖²_F, if it is known.
        """
        whole = frobenius_norm(A).square() if squares is None else squares.sum(1)[:, None, None]
        head = frobenius_norm(B).square()
        size = factor * (torch.maximum(whole - head, floor * whole) / left).sqrt()
        most = torch.finfo(torch.promote_types(A.dtype, torch.float32)).max
        has_rest = (size > 0) & (head <= MOST_ENERGY * whole)
        return torch.where(has_rest, 1 / torch.where(size > 0, size, 1), 0).clamp_max(most)

    def head_plus_rest(self, A: Tensor, dual: Head, inverse: Tensor) -> HeadPlusRest:
        """``X₀ = A/δ + D(Z' − B/δ)`` for ``inverse`` = 1/δ, not multiplied out.

        ``dual`` is what :meth:`dual` has made of a head.
        """
        assert dual.W is not None
        inverse = inverse.to(dual.X.dtype)
        R = dual.W @ dual.X - dual.B.to(dual.X.dtype) * inverse
        return HeadPlusRest(A, inverse.reshape(-1), dual.Q, R)

    def flattened(self, A: Tensor, head: Head, inverse: Tensor) -> Tensor:
        """X₀ in the memory layout of ``A``."""
        return self.head_plus_rest(A, self.dual(head), inverse).multiplied_out()

    def scale_to_one(self, G: Tensor, margin: float) -> Tensor:
        """s = 1/(margin·√λ) for an estimate λ of ‖G‖_op, G = XXᵀ: ‖sX‖_op ≈ 1/margin, or a little more.

        λ is the largest ‖Gv‖/‖v‖ over 16 vectors v = Gᵖ⁻¹v₀ for the v₀ of :func:`start_vectors`, with
        the p of :func:`norm_products`. How far λ can be below ‖G‖_op is in
        :mod:`polarstep.maps.deflated`. s = 0 where G is zero or not finite. The result has shape
        (batch, 1, 1).
        """
        V = start_vectors(G.shape[-1], G.device).to(torch.promote_types(G.dtype, torch.float32))
        G, tiny = G.to(V.dtype), torch.finfo(V.dtype).tiny
        size = torch.linalg.matrix_norm(G, keepdim=True)
        G = G / size.clamp_min(tiny)  # squares of Gᵖv₀ would leave the range of float32
        V = V.expand(len(G), -1, -1)
        for _ in range(norm_products(G.shape[-1]) - 1):
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


def _inverse_root(x: Tensor) -> Tensor:
    """``x^{-½}``, and zero for zero."""
    return torch.where(x > 0, x, torch.inf).rsqrt()


def squared_norm(P: Tensor, G: Tensor) -> Tensor:
    """An estimate of ‖PX‖²_F = tr(PGP) for G = XXᵀ, of shape (batch,), by two products with 16 columns.

    It is the mean of vᵀPGPv over 16 vectors v with entries of ±1, of which only the off-diagonal
    part of PGP has a variance. For T near the polar factor PGP is near the identity.
    """
    V = signs(G.shape[-1], G.device).to(P.dtype)
    W = (P @ V).to(G.dtype)
    dtype = torch.promote_types(G.dtype, torch.float32)
    return (W.to(dtype) * (G @ W).to(dtype)).sum((-2, -1)) / V.shape[-1]
