"""Numbers that describe a matrix or a step, each a pure function of tensors.

All functions take matrices of shape ``(..., m, n)`` and return one float64 number per matrix. For a
zero matrix, and for one without entries, both ranks are 0 and the captured energy is 1. A number is NaN
where a matrix that it is computed from has a NaN or an infinity; the other matrices of the batch are not
affected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep.float64 import in_float64

__all__ = [
    "Measures",
    "alignment_lost",
    "captured_energy",
    "check_step",
    "effective_rank",
    "excess_of_norm",
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
    check_step(M, T, "measure")
    M, T = in_float64(M), in_float64(T)
    sigma = singular_values(M)
    U, reached, Vh = _svd(T)
    return Measures(
        gamma=alignment_lost(M, T, sigma),
        nu=excess_of_norm(reached),
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
    _check_matrices("M", M)
    return _stable_rank(singular_values(M))


@torch.no_grad()
def effective_rank(M: Tensor) -> Tensor:
    """exp of the entropy of σ/Σσ (Roy and Vetterli 2007): how many directions carry the spectrum.

    >>> round(float(effective_rank(torch.eye(4))), 6)
    4.0
    """
    _check_matrices("M", M)
    return _effective_rank(singular_values(M))


@torch.no_grad()
def captured_energy(M: Tensor, T: Tensor) -> Tensor:
    """‖QᵀM‖²_F/‖M‖²_F for the subspace of the step T, with basis Q; 1 for a full-space map.

    Q is recovered from T. If T = QZ with Z a polar factor of QᵀM, then with the singular vectors
    U and V of T, UUᵀMVVᵀ = QQᵀM, whichever side the sketch was on.
    """
    check_step(M, T, "captured_energy")
    M = in_float64(M)
    return _captured(M, *_svd(T))


@torch.no_grad()
def update_ratio(update: Tensor, weight: Tensor) -> Tensor:
    """‖update‖_F/‖weight‖_F over all of a parameter; infinite for a zero weight, 0 for no update.

    >>> weight = torch.zeros(2, 2)
    >>> float(update_ratio(torch.eye(2), weight)), float(update_ratio(weight, weight))
    (inf, 0.0)
    """
    moved = in_float64(update).norm()
    return torch.where(moved == 0, 0.0, moved / in_float64(weight).norm())


def _check_matrices(name: str, X: Tensor) -> None:
    """Raise if ``X``, the argument called ``name``, is not a tensor of real matrices."""
    if not isinstance(X, Tensor):
        raise TypeError(
            f"{name} is a {type(X).__name__}: expected a tensor (..., m, n), as torch.as_tensor({name}) "
            "makes one of an array, or torch.stack of a list of matrices"
        )
    if not X.is_floating_point():
        raise TypeError(
            f"{name} is {X.dtype}: expected real floating-point matrices; call {name}.float()"
        )
    if X.layout != torch.strided:
        raise TypeError(
            f"{name} has layout {X.layout}: expected dense matrices; call {name}.to_dense()"
        )
    if X.is_meta:
        raise TypeError(
            f"{name} is on the meta device, which holds no numbers: expected its values; give the model "
            'memory and weights first, as by model.to_empty(device="cpu") and load_state_dict'
        )
    if X.ndim < 2:
        raise ValueError(
            f"{name} has shape {tuple(X.shape)}: expected matrices (..., m, n); {name}[None] is a "
            "vector as a matrix of one row"
        )


def check_step(M: Tensor, T: Tensor, function: str) -> None:
    """Raise if ``T`` cannot be what a polar map made of ``M``; ``function`` is what was called."""
    _check_matrices("M", M)
    _check_matrices("T", T)
    if M.shape != T.shape or M.device != T.device:
        raise ValueError(
            f"M has shape {tuple(M.shape)} on {M.device} and T {tuple(T.shape)} on {T.device}: expected "
            f"the same shape (..., m, n) on one device, as in {function}(M, polar(M))"
        )


def alignment_lost(M: Tensor, T: Tensor, sigma: Tensor) -> Tensor:
    """γ = 1 − ⟨M, T⟩/‖M‖_* for the singular values ``sigma`` of M; a zero M has 0."""
    nuclear = sigma.sum(-1)
    return torch.where(nuclear == 0, 0.0, 1 - (M * T).sum((-2, -1)) / nuclear)


def excess_of_norm(reached: Tensor) -> Tensor:
    """ν = max(0, ‖T‖_op − 1) for the singular values ``reached`` of T."""
    return (_largest(reached) - 1).clamp_min(0)


def singular_values(M: Tensor) -> Tensor:
    """Singular values in float64, largest first; NaN for a matrix that is not finite."""
    M = in_float64(M)
    finite = _finite(M)
    return torch.where(finite[..., 0], torch.linalg.svdvals(_safe(M, finite)), torch.nan)


def _svd(M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    M = in_float64(M)
    finite = _finite(M)
    U, sigma, Vh = torch.linalg.svd(_safe(M, finite), full_matrices=False)
    return torch.where(finite, U, torch.nan), torch.where(finite[..., 0], sigma, torch.nan), Vh


def _largest(sigma: Tensor) -> Tensor:
    """The largest singular value, 0 for a matrix without entries."""
    return sigma[..., 0] if sigma.shape[-1] else sigma.new_zeros(sigma.shape[:-1])


def _finite(M: Tensor) -> Tensor:
    return M.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)


def _safe(M: Tensor, finite: Tensor) -> Tensor:
    return torch.where(finite, M, 0)


def _stable_rank(sigma: Tensor) -> Tensor:
    largest = _largest(sigma)
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
