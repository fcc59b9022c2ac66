"""Bounds on full-space and low-rank polar maps: Propositions 1 and 2 and the captured-energy lemma.

Most functions take singular values (``torch.linalg.svdvals(M)``) of shape ``(..., r)``, in any order
and possibly with zeros, and work in float64 on each matrix of the batch.

With σ₁ ≥ … ≥ σ_r > 0, a target rank s, an oversampling p and h power iterations, the symbols are

    H_s = Σ_{j≤s} σ_j²        T_s = Σ_{j>s} σ_j²        ϱ_s = σ_{s+1}/σ_s
    A_{s,h} = H_s − s/(p−1) · ϱ_s^{4h} · T_s           θ_{s,h} = [A_{s,h}]₊/(δ‖M‖_*)

Some bounds on what a Gaussian sketch leaves out are not in the paper, though :func:`missed_directions`
sharpens its captured-energy lemma. There Q spans the range of (MMᵀ)^h MΩ, as in Algorithm 1, B = QᵀM has
the polar factor Z, and R = M − QB is the rest. bᵢ and vᵢ are the singular values and right singular
vectors of B, rⱼ and dⱼ those of R.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polarstep.maps import coefficients as polynomials
from polarstep.theory import checks as check

__all__ = [
    "RestBound",
    "SketchBound",
    "captured_energy_bound",
    "captured_energy_of_sketch",
    "covered_by_proposition_1",
    "missed_directions",
    "newton_schulz_gamma",
    "power_iterations_needed",
    "randomized_polar_bound",
    "sketched_rest_bound",
]

COVERED = ("cubic", "quintic")
"""The polynomials of Propositions 1 and 2: they map [0, 1] into itself and satisfy φ(x) ≥ x."""

# How many c are tried in the bound on ‖RBᵀ‖²_F. Each is valid, and the best is taken.
SHIFTS = 64


# Proposition 1: Newton–Schulz steps


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


# Proposition 2: Algorithm 1


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


# What a Gaussian sketch leaves out, and how much rest and head overlap; not in the paper


def missed_directions(singular_values: Tensor, ell: int, h: float = 0) -> Tensor:
    """Bounds tᵢ on E‖(I − QQᵀ)uᵢ‖² over Gaussian sketches, uᵢ the left singular vectors of M.

        tᵢ = min over k of f/(1 + f),   f = Σ_{j>k}(σⱼ/σᵢ)^{4h+2}/(ℓ − k − 1),   i ≤ k ≤ ℓ − 2

    and 1 where there is no such k. This implies the captured-energy lemma of the paper: E‖R‖²_F is at
    most Σσᵢ²tᵢ, and k = s makes that at most (1 + s/(p − 1)·ϱ_s^{4h})·T_s, as σⱼ/σᵢ ≤ ϱ_s for i ≤ s < j.

    Proof. Let Y = (MMᵀ)^h MΩ, Ω₁ and Ω₂ the parts of Ω along the first k and the other right singular
    vectors, Σ₁ and Σ₂ the singular values, and F = Σ₂^{2h+1}Ω₂Ω₁†Σ₁^{−2h−1}. Then YΩ₁†Σ₁^{−2h−1} =
    U·[I; F], so span Q contains the range of U·[I; F], and the first k×k block of Uᵀ(I − QQᵀ)U is at
    most I − (I + FᵀF)⁻¹. x/(1 + x) is concave, so ‖(I − QQᵀ)uᵢ‖² ≤ f̃/(1 + f̃) for f̃ = (FᵀF)ᵢᵢ, and the
    mean over Ω may be taken inside. E(Ω₁Ω₁ᵀ)⁻¹ = I/(ℓ − k − 1), so that E f̃ = f. ∎

    Half-integers h are half iterations, as in :func:`randomized_polar_bound`.

    >>> missed_directions(torch.tensor([10.0, 1.0, 1.0, 1.0, 1.0, 1.0]), ell=4)
    tensor([0.0244, 0.8000, 1.0000, 1.0000, 1.0000, 1.0000], dtype=torch.float64)
    """
    sigma = check.spectrum(singular_values)
    ell, h = check.sketch_width(ell, sigma), check.power_iterations(h)
    logs = (4 * h + 2) * sigma.log()
    missed = torch.ones_like(sigma)
    for k in range(1, ell - 1):
        others = torch.logsumexp(logs[..., k:], -1, keepdim=True) - math.log(ell - k - 1)
        part = torch.sigmoid(others - logs[..., :k])  # f/(1 + f)
        missed[..., :k] = torch.minimum(missed[..., :k], part)
    return missed


@dataclass(frozen=True)
class RestBound:
    """What E over Gaussian sketches is at most, for the rest R = M − QQᵀM and its overlap with B."""

    energy: Tensor
    """≥ E‖R‖²_F."""
    squared_norm: Tensor
    """≥ E‖R‖²_op."""
    coupling: Tensor
    """≥ E‖RBᵀ‖²_F, which is zero where Q spans singular vectors of M."""
    overlap: Tensor
    """≥ E‖RZᵀ‖²_F = E Σ‖Rvᵢ‖²."""
    weighted_overlap: Tensor
    """≥ E Σbᵢ‖Rvᵢ‖²."""
    shared_rows: Tensor
    """≥ E‖R‖²_F·Σ‖Zdⱼ‖²."""


def sketched_rest_bound(singular_values: Tensor, ell: int, h: float = 0) -> RestBound:
    """How large a Gaussian sketch of ℓ columns leaves the rest, and how much head and rest overlap.

    Let P = QQᵀ, tᵢ = ‖(I − P)uᵢ‖², of which Σtᵢ = N = d₀ − ℓ and E tᵢ has the bound of
    :func:`missed_directions`, and T_k = Σ_{j>k}σⱼ². For weights wᵢ ≥ 0, E Σwᵢtᵢ is at most the largest
    Σwᵢxᵢ with xᵢ below these bounds and Σxᵢ = N; ⟪w⟫ is short for that.

    * ‖R‖²_F = Σσᵢ²tᵢ, so E‖R‖²_F ≤ ⟪σ²⟫.
    * MMᵀ is at most c·I plus its part above c, so ‖R‖²_op ≤ c + Σ(σᵢ² − c)₊tᵢ for every c ≥ 0. Also
      ‖R‖²_op ≤ ‖R‖²_F − T_{ℓ+1}, because rⱼ ≥ σ_{j+ℓ}.
    * RBᵀ = (I − P)MMᵀQ = (I − P)(MMᵀ − c·I)Q, so ‖RBᵀ‖²_F ≤ Σ(σᵢ² − c)²tᵢ for every c. It is also at
      most the sum of the ℓ largest (σᵢ² − c)², as Q has ℓ orthonormal columns.
    * W = ‖RZᵀ‖²_F is at most the sum of the ℓ largest rⱼ², which is at most ℓ‖R‖²_op and at most
      ‖R‖²_F − T_{2ℓ}. And W ≤ ‖RBᵀ‖²_F/σ_{d₀}², as bᵢ ≥ σ_{d₀} and ‖RBᵀ‖²_F = Σbᵢ²‖Rvᵢ‖².
    * Σbᵢ‖Rvᵢ‖² ≤ ‖RBᵀ‖_F·√W by Cauchy–Schwarz, and ≤ ‖R‖²_op·Σ_{i≤ℓ}σᵢ. And it is tr(R(BᵀB)^½Rᵀ) ≤
      tr(R(MᵀM)^½Rᵀ) = Σσᵢ³tᵢ, as BᵀB ≤ MᵀM and the root keeps the order of matrices.
    * Σ‖Zdⱼ‖² ≤ ‖Z‖²_F = ℓ. It is also at most W/σ_{d₀}², as rⱼ ≥ σ_{d₀}; then ‖R‖²_F ≤ Σ_{j≤N}σⱼ². ∎

    The spectrum has d₀ = min(m, n) values, and more than ℓ of them are not zero.
    """
    sigma = check.spectrum(singular_values)
    ell = check.sketch_width(ell, sigma)
    missed = missed_directions(sigma, ell, h)
    squares, left = sigma.square(), sigma.shape[-1] - ell
    energy = _most(squares, missed, left)
    above = (squares * missed).cumsum(-1) - squares * missed.cumsum(-1)  # Σ(σᵢ² − c)₊tᵢ at c = σₖ²
    norm = torch.minimum((squares + above).amin(-1), energy - squares[..., ell + 1 :].sum(-1))
    some = squares[..., :: math.ceil(sigma.shape[-1] / SHIFTS)]
    shifted = (squares[..., None, :] - some[..., :, None]).square()
    coupling = torch.minimum(
        _most(shifted, missed[..., None, :].expand_as(shifted), left),
        shifted.topk(ell).values.sum(-1),
    ).amin(-1)
    last = squares[..., -1]
    overlap = torch.minimum(ell * norm, energy - squares[..., 2 * ell :].sum(-1))
    overlap = torch.minimum(overlap, _ratio(coupling, last))
    weighted = torch.minimum(
        torch.minimum((coupling * overlap).sqrt(), norm * sigma[..., :ell].sum(-1)),
        _most(sigma**3, missed, left),
    )
    most = squares[..., :left].sum(-1)
    shared = torch.minimum(ell * energy, most * _ratio(_ratio(coupling, last), last))
    return RestBound(energy, norm, coupling, overlap, weighted, shared)


def _most(weights: Tensor, bounds: Tensor, total: int) -> Tensor:
    """The largest Σwᵢxᵢ with 0 ≤ xᵢ ≤ ``bounds`` and Σxᵢ ≤ ``total``: the largest weights first."""
    weights, order = weights.sort(dim=-1, descending=True)
    bounds = bounds.gather(-1, order)
    before = bounds.cumsum(-1) - bounds
    return (weights * torch.minimum(bounds, (total - before).clamp_min(0))).sum(-1)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """above/below, and ∞ for below = 0."""
    return torch.where(below > 0, above / torch.where(below > 0, below, 1), math.inf)
