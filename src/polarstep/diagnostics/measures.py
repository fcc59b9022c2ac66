"""Numbers that describe a matrix or a step, each a pure function of tensors.

All take matrices of shape ``(..., m, n)`` and return one float64 number a matrix. Zero matrices have
rank 0 in every sense and captured energy 1, there being nothing to miss.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["captured_energy", "effective_rank", "stable_rank", "update_ratio"]


@torch.no_grad()
def stable_rank(M: Tensor) -> Tensor:
    """‖M‖²_F/‖M‖²_op: 1 for a matrix that one direction dominates, min(m, n) for a flat spectrum.

    >>> float(stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))))
    1.5
    """
    sigma = _spectrum(M)
    return torch.where(sigma[..., 0] > 0, sigma.square().sum(-1) / sigma[..., 0].square(), 0.0)


@torch.no_grad()
def effective_rank(M: Tensor) -> Tensor:
    """exp of the entropy of σ/Σσ (Roy and Vetterli 2007): how many directions there really are.

    >>> round(float(effective_rank(torch.eye(4))), 6)
    4.0
    """
    sigma = _spectrum(M)
    total = sigma.sum(-1, keepdim=True)
    weight = torch.where(total > 0, sigma / total, 0.0)
    entropy = -torch.xlogy(weight, weight).sum(-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), 0.0)


@torch.no_grad()
def captured_energy(M: Tensor, T: Tensor) -> Tensor:
    """‖QᵀM‖²_F/‖M‖²_F of the subspace that the step T moved in; 1 for a full-space map.

    Q is read off T itself. If T = QZ with Z a polar factor of QᵀM, then with the singular vectors
    U and V of T, UUᵀMVVᵀ = QQᵀM, whichever side the sketch was on.
    """
    M, T = M.to(torch.float64), T.to(torch.float64)
    U, sigma, Vh = torch.linalg.svd(T, full_matrices=False)
    kept = sigma > 1e-6 * sigma[..., :1]
    inside = (U * kept[..., None, :]).mT @ M @ (Vh * kept[..., None]).mT
    energy = torch.linalg.matrix_norm(M).square()
    return torch.where(energy > 0, torch.linalg.matrix_norm(inside).square() / energy, 1.0)


@torch.no_grad()
def update_ratio(update: Tensor, weight: Tensor) -> Tensor:
    """‖update‖_F/‖weight‖_F, the relative length of a step; infinite for a zero weight."""
    return torch.linalg.matrix_norm(update.to(torch.float64)) / torch.linalg.matrix_norm(
        weight.to(torch.float64)
    )


def _spectrum(M: Tensor) -> Tensor:
    return torch.linalg.svdvals(M.to(torch.float64))
