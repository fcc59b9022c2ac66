"""Numbers that describe a matrix or a step, each a pure function of tensors.

All functions take matrices of shape ``(..., m, n)`` and return one float64 number per matrix. For a
zero matrix both ranks are 0 and the captured energy is 1. For a matrix with a NaN or an infinity all
are NaN; the other matrices of its batch are not affected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Measures",
    "alignment_lost",
    "captured_energy",
    "effective_rank",
    "measure",
    "singular_values",
    "stable_rank",
    "update_ratio",
]


@dataclass(frozen=True)
class Measures:
    """The numbers that :func:`measure` computes, one of each kind per matrix."""

    gamma: Tensor
    nu: Tensor
    captured_energy: Tensor
    stable_rank: Tensor
    effective_rank: Tensor


@torch.no_grad()
def measure(M: Tensor, T: Tensor) -> Measures:
    """γ, ν, captured energy, stable and effective rank from one SVD of M and one of T.

    The same numbers as from :func:`polarstep.certify` and the functions below, with fewer SVDs.
    """
    M, T = M.to(torch.float64), T.to(torch.float64)
    sigma = singular_values(M)
    U, reached, Vh = _svd(T)
    return Measures(
        gamma=alignment_lost(M, T, sigma),
        nu=(reached[..., 0] - 1).clamp_min(0),
        captured_energy=_captured(M, U, reached, Vh),
        stable_rank=_stable_rank(sigma),
        effective_rank=_effective_rank(sigma),
    )


@torch.no_grad()
def stable_rank(M: Tensor) -> Tensor:
    """‖M‖²_F/‖M‖²_op: 1 for a matrix that one direction dominates, min(m, n) for a flat spectrum.

    >>> float(stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))))
    1.5
    """
    return _stable_rank(singular_values(M))


@torch.no_grad()
def effective_rank(M: Tensor) -> Tensor:
    """exp of the entropy of σ/Σσ (Roy and Vetterli 2007): how many directions carry the spectrum.

    >>> round(float(effective_rank(torch.eye(4))), 6)
    4.0
    """
    return _effective_rank(singular_values(M))


@torch.no_grad()
def captured_energy(M: Tensor, T: Tensor) -> Tensor:
    """‖QᵀM‖²_F/‖M‖²_F for the subspace of the step T, with basis Q; 1 for a full-space map.

    Q is recovered from T. If T = QZ with Z a polar factor of QᵀM, then with the singular vectors
    U and V of T, UUᵀMVVᵀ = QQᵀM, whichever side the sketch was on.
    """
    M = M.to(torch.float64)
    return _captured(M, *_svd(T))


@torch.no_grad()
def update_ratio(update: Tensor, weight: Tensor) -> Tensor:
    """‖update‖_F/‖weight‖_F over all of a parameter; infinite for a zero weight."""
    return update.to(torch.float64).norm() / weight.to(torch.float64).norm()


def alignment_lost(M: Tensor, T: Tensor, sigma: Tensor) -> Tensor:
    """γ = 1 − ⟨M, T⟩/‖M‖_* for the singular values ``sigma`` of M; a zero M has 0."""
    nuclear = sigma.sum(-1)
    return torch.where(nuclear == 0, 0.0, 1 - (M * T).sum((-2, -1)) / nuclear)


def singular_values(M: Tensor) -> Tensor:
    """Singular values in float64, largest first; NaN for a matrix that is not finite."""
    finite = _finite(M)
    return torch.where(finite[..., 0], torch.linalg.svdvals(_safe(M, finite)), torch.nan)


def _svd(M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    finite = _finite(M)
    U, sigma, Vh = torch.linalg.svd(_safe(M, finite), full_matrices=False)
    return torch.where(finite, U, torch.nan), torch.where(finite[..., 0], sigma, torch.nan), Vh


def _finite(M: Tensor) -> Tensor:
    return M.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)


def _safe(M: Tensor, finite: Tensor) -> Tensor:
    return torch.where(finite, M, 0).to(torch.float64)


def _stable_rank(sigma: Tensor) -> Tensor:
    largest = sigma[..., 0]
    return torch.where(largest == 0, 0.0, (sigma / largest[..., None]).square().sum(-1))


def _effective_rank(sigma: Tensor) -> Tensor:
    total = sigma.sum(-1, keepdim=True)
    weight = torch.where(total == 0, 0.0, sigma / total)
    entropy = -torch.xlogy(weight, weight).sum(-1)
    return torch.where(total[..., 0] == 0, 0.0, entropy.exp())


def _captured(M: Tensor, U: Tensor, sigma: Tensor, Vh: Tensor) -> Tensor:
    # Singular values of T beyond its rank ℓ are rounding errors.
    kept = sigma > 1e-6 * sigma[..., :1]
    inside = (U * kept[..., None, :]).mT @ M @ (Vh * kept[..., None]).mT
    energy = torch.linalg.matrix_norm(M).square()
    return torch.where(energy == 0, 1.0, torch.linalg.matrix_norm(inside).square() / energy)
