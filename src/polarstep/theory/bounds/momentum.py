"""The paper's lemmas on Nesterov momentum: how far (1 − β)M_k is from the gradient.

With C̃_k = (1−β)C_k and M̃_k = (1−β)M_k, the momentum of equation (1) is a moving average, and its error
is S_k = M̃_k − ∇f(X_k). The proofs need E‖S_k‖_F, which these functions bound.

    S_k = β^k S₀ + β² Σ_{s≤k} β^{k−s} D_s + Σ_{s≤k} a_s ξ_s

D_s = ∇f(X_{s−1}) − ∇f(X_s) is the drift of the gradient, ξ_s = G_s − ∇f(X_s) the noise, and the weights
a_s are those of :func:`noise_weights`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polarstep.theory import checks as check
from polarstep.theory.bounds.convergence import Setting

__all__ = [
    "momentum_error",
    "momentum_error_bound",
    "noise_weights",
    "scaled_momentum",
    "summed_momentum_error_bound",
]


def scaled_momentum(previous: Tensor, G: Tensor, G_previous: Tensor, beta: float) -> Tensor:
    """M̃_k = βM̃_{k−1} + (1−β)((1+β)G_k − βG_{k−1}): the scaled-recurrence lemma, for k ≥ 1.

    ``previous`` is M̃_{k−1}. The recurrence has no C in it, which makes M̃ easy to unroll.
    """
    beta = check.momentum(beta)
    return beta * previous + (1 - beta) * ((1 + beta) * G - beta * G_previous)


def noise_weights(k: int, beta: float) -> Tensor:
    """a₀, …, a_k: what the noise of steps 0 to k counts in S_k, as float64 of length k + 1.

    a₀ = −(1−β)β^k, a_s = (1−β)β^{k+1−s} for 0 < s < k, and a_k = (1−β)(1+β).

    >>> noise_weights(2, 0.5)
    tensor([-0.1250,  0.1250,  0.7500], dtype=torch.float64)
    """
    k, beta = _after_the_start(k), check.momentum(beta)
    s = torch.arange(k + 1, dtype=torch.float64)
    weights = (1 - beta) * beta ** (k + 1 - s)
    weights[0], weights[k] = -(1 - beta) * beta**k, (1 - beta) * (1 + beta)
    return weights


def momentum_error(
    S0: Tensor, gradients: Sequence[Tensor], noises: Sequence[Tensor], beta: float
) -> Tensor:
    """S_k, unrolled: the momentum-error lemma, for k = len(gradients) − 1 ≥ 1.

    ``gradients`` are ∇f(X₀), …, ∇f(X_k), ``noises`` are ξ₀, …, ξ_k.
    """
    if len(noises) != len(gradients):
        raise ValueError(
            f"{len(gradients)} gradients and {len(noises)} noises: expected ∇f(X_s) and ξ_s for the "
            "same steps s = 0, …, k"
        )
    k, beta = _after_the_start(len(gradients) - 1), check.momentum(beta)
    drift = sum(beta ** (k - s) * (gradients[s - 1] - gradients[s]) for s in range(1, k + 1))
    weights = noise_weights(k, beta).tolist()
    noise = sum(a * xi for a, xi in zip(weights, noises, strict=True))
    return beta**k * S0 + beta**2 * drift + noise


def momentum_error_bound(
    setting: Setting, eta: float, beta: float, gradient_norms: Sequence[float]
) -> float:
    """The bound on E‖S_k‖_F, for k = len(gradient_norms) − 1, with ``gradient_norms`` E‖∇f(X_s)‖_F.

    With κ = 2√π·C_α^{1/α}/B^{(α−1)/α} and Γ_α = (2^α + 1)^{1/α},

        E‖S_k‖_F ≤ β^k·E‖S₀‖_F + β²Lη√d₀(1 + ν̄)/(1 − β)
                   + κ·(Γ_α·σ₀(1−β)^{(α−1)/α} + σ₁ Σ_s |a_s|·E‖∇f(X_s)‖_F).

    The lemma for the exact polar factor has ν̄ = 0. At k = 0 the bound is E‖S₀‖_F.
    """
    eta, beta = check.positive("eta", eta), check.momentum(beta)
    norms = [check.nonnegative("gradient_norms", norm) for norm in gradient_norms]
    if not norms:
        raise ValueError("gradient_norms is empty: expected E‖∇f(X_s)‖_F for s = 0, …, k")
    k = len(norms) - 1
    S0 = setting.initial_bias(beta)
    if k == 0:
        return S0
    weights = noise_weights(k, beta).abs().tolist()
    relative = setting.sigma1 * sum(a * norm for a, norm in zip(weights, norms, strict=True))
    noise = _kappa(setting) * (_averaged_noise(setting, beta) + relative)
    return beta**k * S0 + _drift(setting, eta, beta) + noise


def summed_momentum_error_bound(
    setting: Setting, K: int, eta: float, beta: float, gradient_sum: float
) -> float:
    """The bound on Σ_{k<K} E‖S_k‖_F, with ``gradient_sum`` Σ_{k<K} E‖∇f(X_k)‖_F.

    E‖S₀‖_F/(1−β) + K·β²Lη√d₀(1 + ν̄)/(1−β) + K·κ·Γ_α·σ₀(1−β)^{(α−1)/α}
    + κσ₁·(‖∇f(X₀)‖_F + gradient_sum), with the symbols of :func:`momentum_error_bound`.
    """
    K = check.at_least_one_step(K)
    eta, beta = check.positive("eta", eta), check.momentum(beta)
    total = check.nonnegative("gradient_sum", gradient_sum)
    kappa = _kappa(setting)
    steady = _drift(setting, eta, beta) + kappa * _averaged_noise(setting, beta)
    relative = kappa * setting.sigma1 * (setting.initial_gradient + total)
    return setting.initial_bias(beta) / (1 - beta) + K * steady + relative


def _drift(setting: Setting, eta: float, beta: float) -> float:
    """β²Lη√d₀(1 + ν̄)/(1 − β), the part of the error that the moving point causes."""
    return beta**2 * setting.L * eta * math.sqrt(setting.d0) * (1 + setting.nu) / (1 - beta)


def _kappa(setting: Setting) -> float:
    """κ = 2√π·C_α^{1/α}/B^{(α−1)/α}, from the martingale and the batch-noise lemma."""
    alpha = setting.alpha
    constant = 2 * math.sqrt(math.pi) * setting.C_alpha ** (1 / alpha)
    return float(constant / setting.B ** ((alpha - 1) / alpha))


def _averaged_noise(setting: Setting, beta: float) -> float:
    """Γ_α·σ₀(1−β)^{(α−1)/α} ≥ σ₀·(Σ|a_s|^α)^{1/α}."""
    alpha = setting.alpha
    Gamma = (2**alpha + 1) ** (1 / alpha)
    return float(Gamma * setting.sigma0 * (1 - beta) ** ((alpha - 1) / alpha))


def _after_the_start(k: int) -> int:
    return check.whole("k", k, 1, "a step k ≥ 1; at k = 0 the error is S₀ itself")
