"""The polar factor from a singular value decomposition: the reference for everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep import flops
from polarstep.checked_values import check_fraction
from polarstep.float64 import fitting, in_float64
from polarstep.polar.base import PolarMap
from polarstep.polar.result import Lift
from polarstep.products.sizes import unit_scaled

__all__ = ["Exact"]


@dataclass(frozen=True)
class Exact(PolarMap):
    """``U Vᵀ`` over the nonzero singular values of ``M = U Σ Vᵀ``, computed in float64.

    It attains ``max ⟨M, O⟩`` over ``‖O‖_op ≤ 1``, which is ``‖M‖_*``: γ = ν = 0 in the paper's
    Assumption on inexact polar maps.

    Args:
        rtol: singular values up to ``rtol · σ₁`` count as zero. The default, ``max(m, n)`` times
            float64's epsilon, keeps every direction of the given matrix, even the rounding errors
            of a float32 matrix. As the inner map of a low-rank map it is ``max(m, n)`` times the
            epsilon of B = QᵀM instead: B is the result of a product, so that directions below that
            are the product's rounding errors.
    """

    rtol: float | None = None

    def __post_init__(self) -> None:
        if self.rtol is not None:
            check_fraction("rtol", self.rtol, "None is the default")

    def _polar(self, X: Tensor, numbers: Tensor | None) -> Tensor:
        return self._sign(X, torch.finfo(torch.float64).eps)

    def lift(self, B: Tensor) -> Lift:
        """T of a matrix B that is a product, rounded to the precision of ``B``."""
        return Lift(self._sign(B, torch.finfo(B.dtype).eps))

    def _sign(self, X: Tensor, epsilon: float) -> Tensor:
        """U Vᵀ without singular values up to ``rtol · σ₁``; rtol is max(m, n)·ε unless it is given."""
        # LAPACK refuses a whole batch for one NaN; here only the matrix with the NaN is lost.
        finite = X.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        X, _ = unit_scaled(in_float64(torch.where(finite, X, 0)))
        U, S, Vh = torch.linalg.svd(X, full_matrices=False)
        rtol = max(X.shape[-2:]) * epsilon if self.rtol is None else self.rtol
        nonzero = rtol * S[..., :1] < S
        T = fitting((U * nonzero.unsqueeze(-2)) @ Vh, finite.device)
        return torch.where(finite, T, torch.nan)

    def largest_value(self, norm: Tensor) -> Tensor:
        """Always one."""
        return torch.ones_like(norm)

    def alignment_loss(self, rows: int, norm: Tensor) -> Tensor:
        """Always zero."""
        return torch.zeros_like(norm)

    def flops(self, m: int, n: int) -> int:
        """6d₁d₀² + 20d₀³ for a thin SVD with both factors, and the product U Vᵀ.

        The SVD is counted as the R-SVD of Golub and Van Loan, *Matrix Computations*, 8.6.
        """
        d0, d1 = min(m, n), max(m, n)
        return 6 * d1 * d0**2 + 20 * d0**3 + flops.matmul(d0, d0, d1)
