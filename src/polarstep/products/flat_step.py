"""X₀ = A/δ + D(Z' − B/δ) and one polynomial step on it, in plain torch.

The factors D and Z' are those of :meth:`polarstep.products.Products.dual`. The step begins with the
scale s that brings ‖s·X₀‖_op to one; how far off its estimate can be is in
:mod:`polarstep.polar.flat_step_scale`. All matrices are wide: (batch, m, n) with m ≤ n.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from polarstep.products.head import Head
from polarstep.products.head_plus_rest import HeadPlusRest
from polarstep.products.rest_norm import RestOperations
from polarstep.products.row_product import RowProduct
from polarstep.products.squarings import Polynomial
from polarstep.products.start_vectors import norm_products, signs, start_vectors

__all__ = ["FlatOperations", "squared_norm"]


class FlatOperations(RestOperations, ABC):
    """The part of :class:`polarstep.products.Products` that makes X₀ and lifts it."""

    @abstractmethod
    def symmetric(self, A: Tensor, B: Tensor) -> Tensor:
        """``ABᵀ``, a symmetric result."""

    @abstractmethod
    def polynomial(self, G: Tensor, polynomial: Polynomial) -> Tensor:
        """``P(G)``."""

    @abstractmethod
    def apply(self, W: Tensor, X: Tensor, dtype: torch.dtype) -> Tensor:
        """``WX`` in ``dtype`` and in the memory layout of ``X``."""

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
        :mod:`polarstep.polar.flat_step_scale`. s = 0 where G is zero or not finite. The result has shape
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


def squared_norm(P: Tensor, G: Tensor) -> Tensor:
    """An estimate of ‖PX‖²_F = tr(PGP) for G = XXᵀ, of shape (batch,), by two products with 16 columns.

    It is the mean of vᵀPGPv over 16 vectors v with entries of ±1, of which only the off-diagonal
    part of PGP has a variance. For T near the polar factor PGP is near the identity.
    """
    V = signs(G.shape[-1], G.device).to(P.dtype)
    W = (P @ V).to(G.dtype)
    dtype = torch.promote_types(G.dtype, torch.float32)
    return (W.to(dtype) * (G @ W).to(dtype)).sum((-2, -1)) / V.shape[-1]
