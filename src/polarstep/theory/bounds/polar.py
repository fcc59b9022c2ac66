"""Bounds on the inexactness of polar maps: Propositions 1 and 2 and the captured-energy lemma.

Most functions take singular values (``torch.linalg.svdvals(M)``) of shape ``(..., r)``, in any order
and possibly with zeros, and work in float64 on each matrix of the batch.

With σ₁ ≥ … ≥ σ_r > 0, a target rank s, an oversampling p and h power iterations, the symbols are

    H_s = Σ_{j≤s} σ_j²        T_s = Σ_{j>s} σ_j²        ϱ_s = σ_{s+1}/σ_s
    A_{s,h} = H_s − s/(p−1) · ϱ_s^{4h} · T_s           θ_{s,h} = [A_{s,h}]₊/(δ‖M‖_*)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polarstep.polar import coefficients as polynomials
from polarstep.theory import checks as check

__all__ = [
    "SketchBound",
    "captured_energy_bound",
    "captured_energy_of_sketch",
    "covered_by_proposition_1",
    "kept_basis_gamma",
    "newton_schulz_gamma",
    "power_iterations_needed",
    "randomized_polar_bound",
]

COVERED = ("cubic", "quintic")
"""The polynomials of Propositions 1 and 2: they map [0, 1] into itself and satisfy φ(x) ≥ x."""


def newton_schulz_gamma(
    singular_values: Tensor,
    steps: int,
    delta: Tensor | float | None = None,
    coefficients: Literal["cubic", "quintic"] = "quintic",
) -> Tensor:
    """γ of q Newton–Schulz steps, exactly: Proposition 1. ν is 0.

    γ = 1 − Σσᵢ p_q(σᵢ/δ) / Σσᵢ,  where p₀(x) = x and p_{t+1} = φ(p_t).

    Assumes δ ≥ ‖M‖_op (``None``: δ = ‖M‖_F, the usual choice) and φ one of the paper's two
    polynomials, ``"cubic"`` or ``"quintic"``.

    >>> sigma = torch.tensor([1.0, 0.5, 0.1])
    >>> float(newton_schulz_gamma(sigma, 9, delta=1.0)) < 1e-6 < float(newton_schulz_gamma(sigma, 1))
    True
    """
    if coefficients not in COVERED:
        raise ValueError(
            f"coefficients={coefficients!r}: Proposition 1 covers {' and '.join(COVERED)}, which "
            "never exceed one on [0, 1]; for any other polynomial measure γ and ν with "
            "polarstep.certify(M, T)"
        )
    q = check.whole("steps", steps, 0, "a whole number q ≥ 0 of Newton–Schulz steps")
    sigma = check.spectrum(singular_values)
    x = sigma / check.delta_covers(delta, sigma)[..., None]
    reached = polynomials.evaluate(polynomials.resolve(coefficients, q), x) if q else x
    return (1 - (sigma * reached).sum(-1) / sigma.sum(-1)).clamp_min(0)


def covered_by_proposition_1(polynomial: Sequence[float]) -> bool:
    """Whether 0 ≤ φ(x) ≤ 1, φ(x) ≥ x and φ′(x) ≥ 0 on [0, 1]: the lemmas on the two polynomials.

    ``polynomial`` is (a, b, c, …) for ax + bx³ + cx⁵ + …. The propositions are about polynomials with
    these properties, so a polynomial of your own that has them keeps ν = 0 and the closed form of γ.
    The properties are looked at on a grid of 10,001 points, with room for rounding.

    >>> covered_by_proposition_1((1.875, -1.25, 0.375)), covered_by_proposition_1((2.0, -1.5, 0.5))
    (True, False)
    """
    (row,) = polynomials.validated((tuple(polynomial),))
    x = torch.linspace(0, 1, 10_001, dtype=torch.float64, device="cpu")
    value = polynomials.evaluate((row,), x)
    slope = sum(((2 * i + 1) * a * x ** (2 * i) for i, a in enumerate(row)), torch.zeros_like(x))
    small = 1e-12
    inside = bool((value >= -small).all() and (value <= 1 + small).all())
    return inside and bool((value >= x - small).all() and (slope >= -small).all())


@dataclass(frozen=True)
class SketchBound:
    """The quantities of Proposition 2 for a spectrum, or a batch of spectra, at one (s, p, h, δ)."""

    head: Tensor
    """H_s, the sum of the s largest squared singular values."""
    tail: Tensor
    """T_s, the sum of the other squared singular values."""
    decay: Tensor
    """ϱ_s = σ_{s+1}/σ_s."""
    A: Tensor
    """A_{s,h}; where it is not positive, the proposition gives no guarantee."""
    alignment: Tensor
    """[A_{s,h}]₊/δ, the lower bound on E⟨M, T(M; Ω)⟩."""
    theta: Tensor
    """θ_{s,h} ∈ [0, 1], ``alignment`` as a fraction of ‖M‖_*."""

    @property
    def gamma(self) -> Tensor:
        """γ = 1 − θ of the inexactness assumption; 1 where the bound is vacuous."""
        return 1 - self.theta

    @property
    def vacuous(self) -> Tensor:
        """Where A_{s,h} ≤ 0. Raise h (:func:`power_iterations_needed`) or p, or change s."""
        return self.A <= 0


def randomized_polar_bound(
    singular_values: Tensor,
    s: int,
    p: int,
    h: float = 0,
    delta: Tensor | float | None = None,
    d0: int | None = None,
) -> SketchBound:
    """The expected alignment of Algorithm 1: Proposition 2. ν is 0, almost surely.

    E⟨M, T_{h,q}(M; Ω)⟩ ≥ (1/δ)·[A_{s,h}]₊ for a Gaussian Ω with ℓ = s + p columns, either of the
    paper's polynomials and any q ≥ 0.

    Assumes 1 ≤ s < rank(M), p ≥ 2, ℓ ≤ d₀ = min(m, n) (checked where ``d0`` is given) and
    δ ≥ ‖M‖_op (``None``: ‖M‖_F). Of the polynomial the bound uses only p_q(x) ≥ x, so it is the
    bound of q = 0: it does not improve with more steps, and with δ = ‖M‖_F it is far from sharp.

    Half-integers h are the half iterations of :class:`polarstep.LowRank`: Y = (MMᵀ)^{h+½}Ω with Ω on
    the short side. The paper has whole h only; its proof holds for half-integers with Uᵢ for Vᵢ.
    """
    sigma = check.spectrum(singular_values)
    s = check.target_rank(s, sigma)
    p = check.oversampling(p, s, check.short_side(d0, sigma))
    h = check.power_iterations(h)
    bound_delta = check.delta_covers(delta, sigma)
    head, tail, decay = _split(sigma, s)
    A = head - s / (p - 1) * decay ** (4 * h) * tail
    alignment = A.clamp_min(0) / bound_delta
    return SketchBound(head, tail, decay, A, alignment, alignment / sigma.sum(-1))


def captured_energy_bound(
    singular_values: Tensor, s: int, p: int, h: float = 0, d0: int | None = None
) -> Tensor:
    """The lower bound on E‖QᵀM‖²_F over Gaussian sketches: the captured-energy lemma.

    E‖P_Q M‖²_F ≥ [H_s − s/(p−1)·ϱ_s^{4h}·T_s]₊ under the conditions of
    :func:`randomized_polar_bound`. Divide by ‖M‖²_F = Σσ² for the captured fraction.
    """
    return randomized_polar_bound(singular_values, s, p, h, d0=d0).A.clamp_min(0)


def captured_energy_of_sketch(M: Tensor, Omega: Tensor, s: int, h: int = 0) -> Tensor:
    """The deterministic part of the captured-energy lemma, for a given Ω of shape (n, ℓ).

    ‖P_Q M‖²_F ≥ ‖Σ₁‖²_F − ϱ_s^{4h}·‖Σ₂Ω₂Ω₁†‖²_F with Ωᵢ = VᵢᵀΩ. It holds for every Ω, so also for
    the Kaczmarz sketch, as long as Ω₁ has full row rank s. Otherwise (with repeated columns, say)
    a ``ValueError`` is raised.
    """
    if h != int(h):
        raise ValueError(
            f"h={h}: the deterministic bound is stated for whole power iterations; take h = 0, 1, 2, …"
        )
    check.power_iterations(h)
    _, sigma, Vh = torch.linalg.svd(M.detach().to(torch.float64), full_matrices=False)
    check.spectrum(sigma)
    rank = sigma > sigma.amax(-1, keepdim=True) * max(M.shape[-2:]) * torch.finfo(sigma.dtype).eps
    s = check.target_rank(s, torch.where(rank, sigma, 0.0))
    sigma = torch.where(rank, sigma, 0.0)
    projected = Vh @ Omega.detach().to(torch.float64)
    Omega1, Omega2 = projected[..., :s, :], projected[..., s:, :]
    if bool((torch.linalg.matrix_rank(Omega1) < s).any()):
        raise ValueError(
            f"Ω₁ = V₁ᵀΩ has rank below s = {s}: the lemma assumes full row rank; draw more columns "
            f"than ℓ = {Omega.shape[-1]} or lower s"
        )
    leak = sigma[..., s:, None] * (Omega2 @ torch.linalg.pinv(Omega1))
    head, _, decay = _split(sigma, s)
    energy = head - decay ** (4 * h) * torch.linalg.matrix_norm(leak).square()
    return energy.clamp_min(0)


def power_iterations_needed(singular_values: Tensor, s: int, p: int) -> int:
    """The h of the paper's rule, which makes A_{s,h} > 0 for every matrix of the batch.

    h = 0 if H_s > s/(p−1)·T_s, else 1 + ⌊log(s T_s/((p−1)H_s)) / (4 log(1/ϱ_s))⌋. Without a gap at
    s (ϱ_s = 1) power iterations change nothing; if they are needed, a ``ValueError`` is raised.

    >>> power_iterations_needed(torch.tensor([1.0, 0.9] + [0.8] * 30), s=2, p=2)
    7
    """
    sigma = check.spectrum(singular_values)
    s = check.target_rank(s, sigma)
    p = check.oversampling(p)
    head, tail, decay = (part.flatten() for part in _split(sigma, s))
    needed = 0
    for H, T, rho in zip(head.tolist(), tail.tolist(), decay.tolist(), strict=True):
        excess = s * T / ((p - 1) * H)
        if excess < 1:
            continue
        if rho >= 1:
            enough = 2 + math.floor(s * T / H)
            raise ValueError(
                f"no h makes the bound positive at s={s}: there is no spectral gap there "
                f"(σ_{s} = σ_{s + 1}), and H_s = {H:g} ≤ s/(p−1)·T_s = {excess * H:g}; choose an s "
                f"with σ_(s+1) < σ_s, or an oversampling p ≥ {enough}"
            )
        needed = max(needed, 1 + math.floor(math.log(excess) / (4 * math.log(1 / rho))))
    return needed


def _split(sigma: Tensor, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """H_s, T_s and ϱ_s."""
    squares = sigma.square()
    head, tail = squares[..., :s].sum(-1), squares[..., s:].sum(-1)
    return head, tail, sigma[..., s] / sigma[..., s - 1]


def kept_basis_gamma(gamma: Tensor | float, drift: Tensor | float) -> Tensor:
    """An upper bound on γ of a step in the basis of an earlier step. Not in the paper.

    Let Q have orthonormal columns, and T(M) = Q·polar(QᵀM) with an exact inner map, so that
    ⟨M, T(M)⟩ = ‖QᵀM‖_*. If Q was made from M₀ with γ₀, and d = ‖M − M₀‖_*/‖M‖_*,

        ‖QᵀM‖_* ≥ ‖QᵀM₀‖_* − ‖M − M₀‖_* ≥ (1 − γ₀)‖M₀‖_* − ‖M − M₀‖_*,

    and ‖M₀‖_* ≥ ‖M‖_* − ‖M − M₀‖_*; hence γ ≤ γ₀ + (2 − γ₀)d. ν stays zero.

    >>> kept_basis_gamma(0.1, 0.05)
    tensor(0.1950, dtype=torch.float64)
    """
    gamma, drift = (torch.as_tensor(x, dtype=torch.float64) for x in (gamma, drift))
    if not bool(((gamma >= 0) & (gamma <= 1)).all()):
        raise ValueError(f"gamma={gamma}: expected the γ of the basis when it was made, 0 ≤ γ ≤ 1")
    if not bool((drift >= 0).all()):
        raise ValueError(f"drift={drift}: expected ‖M − M₀‖_*/‖M‖_* ≥ 0")
    return (gamma + (2 - gamma) * drift).clamp_max(1)
