"""What a Gaussian sketch leaves out: the rest R = M − QQᵀM and its overlap with the head.

None of these bounds is in the paper, though the first sharpens its captured-energy lemma.

Q spans the range of (MMᵀ)^h MΩ, as in Algorithm 1, and B = QᵀM has the polar factor Z. bᵢ and vᵢ are the
singular values and right singular vectors of B, rⱼ and dⱼ those of R. Everything here follows from how
much of each left singular vector uᵢ of M the sketch misses, which :func:`missed_directions` bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep.theory import checks as check

__all__ = ["RestBound", "missed_directions", "sketched_rest_bound"]

# How many c are tried in the bound on ‖RBᵀ‖²_F. Each is valid, and the best is taken.
SHIFTS = 64


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

    Half-integers h are half iterations, as in :func:`polarstep.theory.bounds.randomized_polar_bound`.

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
