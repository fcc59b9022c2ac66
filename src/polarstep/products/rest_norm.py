"""The rest R = A − DB of a sketch and its size, in plain torch.

What they are for is in :mod:`polarstep.polar.rest_norm`. All matrices are wide: (batch, m, n) with
m ≤ n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep.products.head import Head
from polarstep.products.sizes import frobenius_norm

__all__ = ["MOST_ENERGY", "RestOperations"]

# B = QᵀM has at most the energy of M. With this much more, columns of Q are too long by a tenth, and
# M − DB holds so much of the leading directions that no bound on X₀ is true.
MOST_ENERGY = 1.25


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
        whole = frobenius_norm(A).square() if squares is None else squares.sum(1)[:, None, None]
        head = frobenius_norm(B).square()
        size = factor * (torch.maximum(whole - head, floor * whole) / left).sqrt()
        most = torch.finfo(torch.promote_types(A.dtype, torch.float32)).max
        has_rest = (size > 0) & (head <= MOST_ENERGY * whole)
        return torch.where(has_rest, 1 / torch.where(size > 0, size, 1), 0).clamp_max(most)
