"""Products of two matrices, or of batches of them, in torch's own operations."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["plain_product", "product_like"]


def product_like(X: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """``AB`` in the memory layout of ``X``, which has the same shape.

    Tall matrices come as transposed views, and results made from them should be transposed views, too.
    Adding a result to its parameter takes a CPU ten times as long if their memory layouts differ.
    """
    return (B.mT @ A.mT).mT if X.mT.is_contiguous() else A @ B


def plain_product(A: Tensor, B: Tensor, plus: Tensor | None, alpha: float, beta: float) -> Tensor:
    """``alpha·AB + beta·plus``, without use of symmetry."""
    if plus is None:
        C = torch.bmm(A, B)  # what A @ B calls, without its views
        return C if alpha == 1 else alpha * C
    return torch.baddbmm(plus, A, B, beta=beta, alpha=alpha)
