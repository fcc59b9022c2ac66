"""The head of a deflated step: the factors of its low-rank map."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Head"]


@dataclass(frozen=True)
class Head:
    """The factors of a low-rank map of wide matrices A: T = QZ with Z = WX."""

    Q: Tensor  # (batch, m, ℓ)
    B: Tensor  # (batch, ℓ, n): QᵀA
    X: Tensor  # (batch, ℓ, n)
    W: Tensor | None = None  # (batch, ℓ, ℓ); without it Z = X
