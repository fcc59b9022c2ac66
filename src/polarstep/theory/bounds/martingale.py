"""The paper's martingale lemma: sums of heavy-tailed matrices that have mean zero given the past."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["gaussian_row_bound", "martingale_bound"]


def martingale_bound(norms: Tensor, p: float) -> Tensor:
    """The bound on E‖Σ_t W_t‖_F from ``norms`` ‖W_t‖_F of shape (draws, ..., T): the martingale lemma.

    E‖Σ_t W_t‖_F ≤ 2√π·E(Σ_t ‖W_t‖_F^p)^{1/p} for 1 < p ≤ 2 and matrices with E[W_t | W₁, …, W_{t−1}] = 0
    and a finite p-th moment. The outer expectation is the mean over the draws, the first dimension. With
    p below 2 the bound needs no variance; where a variance exists, p = 2 is sharper, up to the constant.

    >>> martingale_bound(torch.ones(3, 4), 2) / (2 * math.sqrt(math.pi))
    tensor(2., dtype=torch.float64)
    """
    if not 1 < p <= 2:
        raise ValueError(f"p={p}: the martingale lemma needs 1 < p ≤ 2; p = 2 is bounded variance")
    lengths = norms.detach().to(torch.float64)
    if lengths.ndim < 2:
        raise ValueError(
            f"norms has shape {tuple(lengths.shape)}: expected (draws, ..., T), the norms of T "
            "matrices for each draw of the whole sequence"
        )
    if bool((lengths < 0).any()) or not bool(lengths.isfinite().all()):
        raise ValueError("norms must be finite and ≥ 0; pass torch.linalg.matrix_norm(W)")
    return 2 * math.sqrt(math.pi) * lengths.pow(p).sum(-1).pow(1 / p).mean(0)


def gaussian_row_bound(M: Tensor) -> Tensor:
    """√(2/π)·‖M‖_F, a lower bound on E‖gᵀM‖ for standard normal g: a step of the lemma's proof."""
    return math.sqrt(2 / math.pi) * torch.linalg.matrix_norm(M.detach().to(torch.float64))
