"""γ and ν of the paper's inexactness assumption, computed exactly from singular values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep.diagnostics.measures import (
    alignment_lost,
    check_step,
    excess_of_norm,
    singular_values,
)
from polarstep.float64 import in_float64

__all__ = ["Certificate", "certify"]


@dataclass(frozen=True)
class Certificate:
    """γ and ν with ⟨M, T⟩ ≥ (1 − γ)‖M‖_* and ‖T‖_op ≤ 1 + ν, one of each per matrix."""

    gamma: Tensor
    nu: Tensor

    @property
    def worst(self) -> tuple[float, float]:
        """The largest γ and the largest ν: the γ̄ and ν̄ that the theorems take; 0 without matrices."""
        if self.gamma.numel() == 0:
            return 0.0, 0.0
        return float(self.gamma.max()), float(self.nu.max())

    def __str__(self) -> str:
        gamma, nu = self.worst
        most = "" if self.gamma.numel() == 1 else " at most"
        return f"γ{most} {gamma:.4f}, ν{most} {nu:.2e}"


@torch.no_grad()
def certify(M: Tensor, T: Tensor) -> Certificate:
    """γ = 1 − ⟨M, T⟩/‖M‖_* and ν = max(0, ‖T‖_op − 1), from float64 singular values.

    This costs two SVDs, which suits studies, tests and sampled steps;
    :func:`polarstep.diagnostics.cheap_certificate` is cheap enough for every step. γ is slightly
    negative where singular values of T exceed 1, as with the Jordan and PolarExpress coefficients.
    A zero M, or one without entries, has γ = 0. γ is NaN where M or T has a NaN or an infinity, ν where
    T has one; the other matrices of the batch are not affected.

    >>> import polarstep as ps
    >>> M = torch.diag(torch.tensor([3.0, 1.0]))
    >>> certify(M, ps.Exact()(M)).worst
    (0.0, 0.0)
    >>> print(certify(M, torch.diag(torch.tensor([1.0, 0.5]))))
    γ 0.1250, ν 0.00e+00

    Args:
        M: matrices of shape ``(..., m, n)``.
        T: the output of a polar map for M, of the same shape.
    """
    check_step(M, T, "certify")
    M, T = in_float64(M), in_float64(T)
    gamma = alignment_lost(M, T, singular_values(M))
    return Certificate(gamma, excess_of_norm(singular_values(T)))
