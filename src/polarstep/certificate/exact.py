"""γ and ν of the paper's inexactness assumption, and other measures of a step, from singular values.

All functions take matrices of shape ``(..., m, n)`` and compute in float64. A number is NaN where a
matrix that it is computed from has a NaN or an infinity; other matrices of the batch are not affected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep.numerics import in_float64

__all__ = ["Certificate", "Measures", "certify", "check_step", "measure", "update_ratio"]


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
    :func:`polarstep.certificate.cheap_certificate` is cheap enough for every step. γ is slightly
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
    gamma = _alignment_lost(M, T, _singular_values(M))
    return Certificate(gamma, _excess_of_norm(_singular_values(T)))


@dataclass(frozen=True)
class Measures:
    """The numbers that :func:`measure` computes, one of each kind per matrix."""

    gamma: Tensor
    nu: Tensor
    captured_energy: Tensor
    """‖QᵀM‖²_F/‖M‖²_F for the basis Q of the subspace of T; 1 for a full-space map and for M = 0."""
    stable_rank: Tensor
    """‖M‖²_F/‖M‖²_op: 1 for one direction, min(m, n) for a flat spectrum, 0 for M = 0."""
    effective_rank: Tensor
    """exp of the entropy of σ/Σσ (Roy and Vetterli 2007), another count of directions; 0 for M = 0."""


@torch.no_grad()
def measure(M: Tensor, T: Tensor) -> Measures:
    """γ, ν, captured energy, stable and effective rank, from one SVD of M and one of T.

    γ and ν are those of :func:`certify`.

    >>> M = torch.diag(torch.tensor([2.0, 1.0, 1.0]))
    >>> found = measure(M, torch.diag(torch.tensor([1.0, 0.0, 0.0])))
    >>> float(found.stable_rank), round(float(found.captured_energy), 3)
    (1.5, 0.667)
    """
    check_step(M, T, "measure")
    M, T = in_float64(M), in_float64(T)
    sigma = _singular_values(M)
    finite = _finite(T)
    U, reached, Vh = torch.linalg.svd(torch.where(finite, T, 0), full_matrices=False)
    U, reached = torch.where(finite, U, torch.nan), torch.where(finite[..., 0], reached, torch.nan)
    return Measures(
        gamma=_alignment_lost(M, T, sigma),
        nu=_excess_of_norm(reached),
        captured_energy=_captured_energy(M, U, reached, Vh),
        stable_rank=_stable_rank(sigma),
        effective_rank=_effective_rank(sigma),
    )


@torch.no_grad()
def update_ratio(update: Tensor, weight: Tensor) -> Tensor:
    """‖update‖_F/‖weight‖_F over all of a parameter; infinite for a zero weight, 0 for no update.

    >>> weight = torch.zeros(2, 2)
    >>> float(update_ratio(torch.eye(2), weight)), float(update_ratio(weight, weight))
    (inf, 0.0)
    """
    moved = in_float64(update).norm()
    return torch.where(moved == 0, 0.0, moved / in_float64(weight).norm())


def check_step(M: Tensor, T: Tensor, function: str) -> None:
    """Raise if ``T`` cannot be what a polar map made of ``M``; ``function`` is what was called."""
    for name, X in (("M", M), ("T", T)):
        if not isinstance(X, Tensor):
            raise TypeError(
                f"{name} is a {type(X).__name__}: expected a tensor (..., m, n), as "
                f"torch.as_tensor({name}) makes one of an array, or torch.stack of a list of matrices"
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
                f"{name} is on the meta device, which holds no numbers: expected its values; give the "
                'model memory and weights first, as by model.to_empty(device="cpu") and load_state_dict'
            )
        if X.ndim < 2:
            raise ValueError(
                f"{name} has shape {tuple(X.shape)}: expected matrices (..., m, n); {name}[None] is a "
                "vector as a matrix of one row"
            )
    if M.shape != T.shape or M.device != T.device:
        raise ValueError(
            f"M has shape {tuple(M.shape)} on {M.device} and T {tuple(T.shape)} on {T.device}: expected "
            f"the same shape (..., m, n) on one device, as in {function}(M, polar(M))"
        )


def _singular_values(M: Tensor) -> Tensor:
    """Singular values, largest first; NaN for a matrix that is not finite, which LAPACK refuses."""
    finite = _finite(M)
    return torch.where(finite[..., 0], torch.linalg.svdvals(torch.where(finite, M, 0)), torch.nan)


def _finite(M: Tensor) -> Tensor:
    """Whether all entries of a matrix are finite, of shape ``(..., 1, 1)``."""
    return M.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)


def _alignment_lost(M: Tensor, T: Tensor, sigma: Tensor) -> Tensor:
    """γ = 1 − ⟨M, T⟩/‖M‖_* for the singular values ``sigma`` of M; a zero M has 0."""
    nuclear = sigma.sum(-1)
    return torch.where(nuclear == 0, 0.0, 1 - (M * T).sum((-2, -1)) / nuclear)


def _excess_of_norm(reached: Tensor) -> Tensor:
    """ν = max(0, ‖T‖_op − 1) for the singular values ``reached`` of T."""
    return (_largest(reached) - 1).clamp_min(0)


def _largest(sigma: Tensor) -> Tensor:
    """The largest singular value, 0 for a matrix without entries."""
    return sigma[..., 0] if sigma.shape[-1] else sigma.new_zeros(sigma.shape[:-1])


def _stable_rank(sigma: Tensor) -> Tensor:
    largest = _largest(sigma)
    return torch.where(largest == 0, 0.0, (sigma / largest[..., None]).square().sum(-1))


def _effective_rank(sigma: Tensor) -> Tensor:
    total = sigma.sum(-1, keepdim=True)
    weight = torch.where(total == 0, 0.0, sigma / total)
    entropy = -torch.xlogy(weight, weight).sum(-1)
    return torch.where(total[..., 0] == 0, 0.0, entropy.exp())


def _captured_energy(M: Tensor, U: Tensor, sigma: Tensor, Vh: Tensor) -> Tensor:
    """‖QᵀM‖²_F/‖M‖²_F from the SVD of T.

    If T = QZ with Z a polar factor of QᵀM, then with the singular vectors U and V of T, UUᵀMVVᵀ = QQᵀM,
    whichever side the sketch was on.
    """
    # Singular values of T beyond its rank ℓ are rounding errors.
    kept = sigma > 1e-6 * sigma[..., :1]
    inside = (U * kept[..., None, :]).mT @ M @ (Vh * kept[..., None]).mT
    energy = torch.linalg.matrix_norm(M).square()
    return torch.where(energy == 0, 1.0, torch.linalg.matrix_norm(inside).square() / energy)
