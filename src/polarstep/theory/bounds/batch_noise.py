"""The paper's batch-noise lemma: how averaging over a mini-batch reduces heavy-tailed noise."""

from __future__ import annotations

from polarstep.theory import checks as check

__all__ = ["PAPER_CONSTANT", "batch_noise_bound", "hilbert_constant", "initial_bias_bound"]

PAPER_CONSTANT = 2.0
"""The paper states its results for some 0 < C_α ≤ 2; 2 is always valid."""


def hilbert_constant(alpha: float) -> float:
    """2^{2−α}, a smaller valid C_α: it tends to 2 as α → 1 and is 1 at α = 2.

    The von Bahr–Esseen inequality sums ‖x + y‖^α ≤ ‖x‖^α + α‖x‖^{α−2}⟨x, y⟩ + C‖y‖^α over
    independent, mean-zero y; in a Hilbert space C = 2^{2−α} is enough. The bounds here take C_α = 2
    by default; pass this value as ``C_alpha`` for sharper ones.
    """
    return float(2 ** (2 - check.tail_index(alpha)))


def batch_noise_bound(
    alpha: float,
    sigma0: float,
    sigma1: float,
    B: int,
    gradient_norm: float,
    C_alpha: float = PAPER_CONSTANT,
) -> float:
    """E‖G_k − ∇f(X_k)‖^α_F ≤ C_α/B^{α−1}·(σ₀^α + σ₁^α‖∇f(X_k)‖^α_F): the batch-noise lemma.

    Assumes B independent, unbiased samples whose α-th central moment, in the Frobenius norm, is at
    most σ₀^α + σ₁^α‖∇f‖^α (the assumption of generalized heavy-tailed noise). For α = 2 this is the
    familiar 1/B; for α → 1 a larger batch hardly helps.
    """
    alpha = check.tail_index(alpha)
    B = check.at_least_one_sample(B)
    sigma0, sigma1 = check.nonnegative("sigma0", sigma0), check.nonnegative("sigma1", sigma1)
    gradient = check.nonnegative("gradient_norm", gradient_norm)
    C_alpha = check.positive("C_alpha", C_alpha)
    return C_alpha / B ** (alpha - 1) * (sigma0**alpha + (sigma1 * gradient) ** alpha)


def initial_bias_bound(
    beta: float,
    alpha: float,
    sigma0: float,
    sigma1: float,
    B: int,
    gradient_norm: float,
    C_alpha: float = PAPER_CONSTANT,
) -> float:
    """An upper bound on E‖S₀‖_F, which the theorems leave as a symbol.

    S₀ = (1−β)M₀ − ∇f(X₀). With C₋₁ = 0, M₀ = (1+β)G₀, so S₀ = (1−β²)(G₀ − ∇f(X₀)) − β²∇f(X₀), and
    E‖S₀‖_F ≤ β²‖∇f(X₀)‖_F + (1−β²)·(the batch-noise lemma)^{1/α} by Jensen. This bound is not in
    the paper.
    """
    beta, alpha = check.momentum(beta), check.tail_index(alpha)
    gradient_norm = check.nonnegative("gradient_norm", gradient_norm)
    noise = batch_noise_bound(alpha, sigma0, sigma1, B, gradient_norm, C_alpha)
    return beta**2 * gradient_norm + (1 - beta**2) * noise ** (1 / alpha)
