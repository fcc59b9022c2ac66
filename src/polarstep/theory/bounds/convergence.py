"""Convergence of Muon: the paper's lemmas on noise, momentum and descent, and its theorems.

The functions stand in the order of the proof. Averaging over a mini-batch reduces heavy-tailed noise
(the batch-noise and the martingale lemma); momentum is near the gradient (the momentum-error lemmas);
so f falls (the descent lemmas). Together these are the theorems.

All statements assume Nesterov momentum, an L-smooth f bounded below by f_⋆, and noise whose α-th
central moment, in the Frobenius norm, is at most σ₀^α + σ₁^α‖∇f‖^α. Symbols that several of them share:

    c = 1 + √d₀(1 + ν̄)        κ = 2√π·C_α^{1/α}/B^{(α−1)/α}        Γ_α = (2^α + 1)^{1/α}

**Momentum.** With C̃_k = (1−β)C_k and M̃_k = (1−β)M_k, the momentum of equation (1) is a moving average,
and its error is S_k = M̃_k − ∇f(X_k). The proofs need E‖S_k‖_F.

    S_k = β^k S₀ + β² Σ_{s≤k} β^{k−s} D_s + Σ_{s≤k} a_s ξ_s

D_s = ∇f(X_{s−1}) − ∇f(X_s) is the drift of the gradient, ξ_s = G_s − ∇f(X_s) the noise, and the weights
a_s are those of :func:`noise_weights`.

**Theorems.** Each bounds min_{0≤k<K} E‖∇f(X_k)‖_F by a sum of six terms. The statements hide constants
that depend on α and d₀ in an O(·); the proofs in the appendix give all constants, up to
C_α ∈ (0, 2]. A :class:`Term` therefore carries two numbers. ``value`` has the constants of the proof
and is an upper bound. ``order`` is the expression inside the paper's O(·) and is not a bound. The same
bounds hold for the average over k, since the proofs bound the sum of all E‖∇f(X_k)‖_F.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polarstep.theory import checks as check
from polarstep.theory.schedules import from_tail_index, universal

__all__ = [
    "PAPER_CONSTANT",
    "Bound",
    "Setting",
    "Term",
    "batch_noise_bound",
    "batch_threshold",
    "exact_polar_bound",
    "gaussian_row_bound",
    "hilbert_constant",
    "inexact_polar_bound",
    "initial_bias_bound",
    "martingale_bound",
    "momentum_error",
    "momentum_error_bound",
    "noise_weights",
    "one_step_descent_bound",
    "rho",
    "scaled_momentum",
    "smallest_batch",
    "summed_gradient_bound",
    "summed_momentum_error_bound",
    "universal_bound",
]

PAPER_CONSTANT = 2.0
"""The paper states its results for some 0 < C_α ≤ 2; 2 is always valid."""


# Noise of a mini-batch, and of many steps


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


# The problem, and the batch that it needs


@dataclass(frozen=True)
class Setting:
    """The constants of the theorems besides η, β and K: of the problem, its noise and the polar map.

    Args:
        gap: f(X₀) − f_⋆.
        L: the smoothness constant, in the Frobenius norm.
        d0: min(m, n).
        alpha: α, the tail index of the noise of one sample.
        sigma0: σ₀, the part of the noise that does not depend on the gradient.
        sigma1: σ₁, the part of the noise that grows with the gradient.
        B: samples in a mini-batch; it must exceed :func:`batch_threshold`.
        gamma: γ̄, the largest γ over the run; 0 for the exact polar factor.
        nu: ν̄, the largest ν over the run; 0 for the exact polar factor.
        gradient0: ‖∇f(X₀)‖_F; ``None`` means its largest possible value √(2L·gap).
        S0: E‖S₀‖_F; ``None`` means :func:`initial_bias_bound`.
        C_alpha: the constant of the batch-noise lemma.
    """

    gap: float
    L: float
    d0: int
    alpha: float
    sigma0: float
    sigma1: float = 0.0
    B: int = 1
    gamma: float = 0.0
    nu: float = 0.0
    gradient0: float | None = None
    S0: float | None = None
    C_alpha: float = PAPER_CONSTANT

    def __post_init__(self) -> None:
        # Numbers of NumPy and torch become plain ones: a bound is computed in float64, on no device.
        plain: dict[str, float] = {"alpha": check.tail_index(self.alpha)}
        for name in ("gap", "L", "sigma0", "sigma1", "nu", "gradient0", "S0"):
            if name not in ("gradient0", "S0") or getattr(self, name) is not None:
                plain[name] = check.nonnegative(name, getattr(self, name))
        plain |= {"d0": _short_side(self.d0), "B": check.at_least_one_sample(self.B)}
        plain |= {"gamma": _gamma(self.gamma), "C_alpha": check.positive("C_alpha", self.C_alpha)}
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if self.rho <= 0:
            needed = smallest_batch(
                self.alpha, self.sigma1, self.d0, self.gamma, self.nu, self.C_alpha
            )
            raise ValueError(
                f"B={self.B} is below the threshold {self.batch_threshold:.4g} that σ₁={self.sigma1:g}, "
                f"α={self.alpha:g}, d₀={self.d0}, γ̄={self.gamma:g} and ν̄={self.nu:g} set (ρ = "
                f"{self.rho:.3g} ≤ 0): the theorem needs B ≥ {needed}, or "
                "noise with a smaller σ₁"
            )

    @property
    def c(self) -> float:
        """c = 1 + √d₀(1 + ν̄)."""
        return _c(self.d0, self.nu)

    @property
    def kappa(self) -> float:
        """κ = 2√π·C_α^{1/α}/B^{(α−1)/α}."""
        return _kappa(self.alpha, self.B, self.C_alpha)

    @property
    def rho(self) -> float:
        """ρ, or ρ_ex where γ̄ = ν̄ = 0."""
        return 1 - self.gamma - self.c * self.kappa * self.sigma1

    @property
    def batch_threshold(self) -> float:
        """The threshold that B must exceed."""
        return batch_threshold(
            self.alpha, self.sigma1, self.d0, self.gamma, self.nu, C_alpha=self.C_alpha
        )

    @property
    def initial_gradient(self) -> float:
        """‖∇f(X₀)‖_F if given, else √(2L(f(X₀) − f_⋆)), the largest value for an L-smooth f."""
        return math.sqrt(2 * self.L * self.gap) if self.gradient0 is None else self.gradient0

    def initial_bias(self, beta: float) -> float:
        """E‖S₀‖_F if given, else its bound."""
        if self.S0 is not None:
            return self.S0
        return initial_bias_bound(
            beta,
            self.alpha,
            self.sigma0,
            self.sigma1,
            self.B,
            self.initial_gradient,
            self.C_alpha,
        )


def batch_threshold(
    alpha: float,
    sigma1: float,
    d0: int,
    gamma: float = 0.0,
    nu: float = 0.0,
    C_alpha: float = PAPER_CONSTANT,
) -> float:
    """The threshold that B must exceed for ρ > 0 in both theorems.

    {2√π(1 + √d₀(1 + ν̄))·C_α^{1/α}·σ₁/(1 − γ̄)}^{α/(α−1)}, with γ̄ = ν̄ = 0 for the exact-polar
    theorem. For σ₁ = 0 the threshold is 0: every batch size is allowed. Near α = 1 it may be larger than
    any number of float64, and is infinite.
    """
    alpha = check.tail_index(alpha)
    noise = _c(d0, nu) * _kappa(alpha, 1, C_alpha) * check.nonnegative("sigma1", sigma1)
    try:
        return float((noise / (1 - _gamma(gamma))) ** (alpha / (alpha - 1)))
    except OverflowError:  # the power grows without bound as α falls to 1
        return math.inf


def smallest_batch(
    alpha: float,
    sigma1: float,
    d0: int,
    gamma: float = 0.0,
    nu: float = 0.0,
    C_alpha: float = PAPER_CONSTANT,
) -> int:
    """The smallest whole B above :func:`batch_threshold`, up to rounding, with ρ > 0.

    >>> smallest_batch(alpha=2, sigma1=0.1, d0=16), smallest_batch(alpha=1.5, sigma1=0.1, d0=16)
    (7, 23)
    """
    threshold = batch_threshold(alpha, sigma1, d0, gamma, nu, C_alpha)
    if math.isinf(threshold):
        raise ValueError(
            f"no batch is large enough for alpha={alpha} and sigma1={sigma1}: expected an α further "
            "from 1, or noise with a smaller σ₁"
        )
    B, more = math.floor(threshold) + 1, 1
    # Where the threshold is far above 10^14, rounding makes ρ ≤ 0 for batches just above it.
    while rho(alpha, sigma1, d0, B, gamma, nu, C_alpha) <= 0:
        B, more = B + more, 2 * more
    return B


def rho(
    alpha: float,
    sigma1: float,
    d0: int,
    B: int,
    gamma: float = 0.0,
    nu: float = 0.0,
    C_alpha: float = PAPER_CONSTANT,
) -> float:
    """ρ = 1 − γ̄ − cκσ₁ with c = 1 + √d₀(1 + ν̄) and κ = 2√π·C_α^{1/α}/B^{(α−1)/α}; ρ_ex has γ̄ = ν̄ = 0.

    Every term of the bounds is divided by ρ. A negative ρ means that B is below the threshold,
    where the theorems do not apply; :class:`Setting` refuses such a B.
    """
    alpha = check.tail_index(alpha)
    kappa = _kappa(alpha, check.at_least_one_sample(B), C_alpha)
    return 1 - _gamma(gamma) - _c(d0, nu) * kappa * check.nonnegative("sigma1", sigma1)


# Momentum


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

    With κ and Γ_α of the module's docstring,

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
    noise = setting.kappa * (_averaged_noise(setting, beta) + relative)
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
    steady = _drift(setting, eta, beta) + setting.kappa * _averaged_noise(setting, beta)
    relative = setting.kappa * setting.sigma1 * (setting.initial_gradient + total)
    return setting.initial_bias(beta) / (1 - beta) + K * steady + relative


# Descent


def one_step_descent_bound(
    setting: Setting, eta: float, gradient_norm: float, error_norm: float
) -> float:
    """An upper bound on E[f(X_{k+1})] − f(X_k) for a step of size η: the proof of the descent lemma.

    −η(1 − γ̄)‖∇f(X_k)‖_F + η(1 + √d₀(1 + ν̄))‖S_k‖_F + ½Ld₀η²(1 + ν̄)²

    ``gradient_norm`` is ‖∇f(X_k)‖_F and ``error_norm`` is ‖S_k‖_F, the error of (1−β)M_k. The
    expectation is over the polar map, given X_k and M_k. With γ̄ = ν̄ = 0 it is the lemma for the exact
    polar factor.
    """
    eta = check.positive("eta", eta)
    gradient = check.nonnegative("gradient_norm", gradient_norm)
    error = check.nonnegative("error_norm", error_norm)
    spread = 1 + setting.nu
    curvature = setting.L * setting.d0 / 2 * (eta * spread) ** 2
    return -eta * (1 - setting.gamma) * gradient + eta * setting.c * error + curvature


def summed_gradient_bound(setting: Setting, K: int, eta: float, error_sum: float) -> float:
    """The bound on Σ_{k<K} E‖∇f(X_k)‖_F of the descent lemma, with ``error_sum`` Σ_{k<K} E‖S_k‖_F.

    (f(X₀) − f_⋆ + η(1 + √d₀(1 + ν̄))·error_sum + ½Ld₀η²(1 + ν̄)²K) / (η(1 − γ̄))

    With :func:`summed_momentum_error_bound` in place of
    ``error_sum`` this becomes the inexact-polar theorem.
    """
    K, eta = check.at_least_one_step(K), check.positive("eta", eta)
    error = check.nonnegative("error_sum", error_sum)
    curvature = setting.L * setting.d0 / 2 * (eta * (1 + setting.nu)) ** 2 * K
    return (setting.gap + eta * setting.c * error + curvature) / (eta * (1 - setting.gamma))


# The theorems


@dataclass(frozen=True)
class Term:
    """One summand of a bound."""

    name: str
    value: float
    """The term with the constants of the proof."""
    order: float
    """The term inside the O(·) of the statement; not a bound."""


@dataclass(frozen=True)
class Bound:
    """The right-hand side of a theorem; ``float(bound)`` is its value, iteration gives its terms."""

    statement: str
    K: int
    eta: float
    beta: float
    rho: float
    terms: tuple[Term, ...]

    def __float__(self) -> float:
        return sum(term.value for term in self.terms)

    def __iter__(self) -> Iterator[Term]:
        return iter(self.terms)

    @property
    def order(self) -> float:
        """The sum inside the paper's O(·)."""
        return sum(term.order for term in self.terms)

    @property
    def dominant(self) -> Term:
        """The largest term."""
        return max(self.terms, key=lambda term: term.value)

    def __str__(self) -> str:
        head = (
            f"{self.statement}: K={self.K:,}, η={self.eta:.3g}, β={self.beta:.4g}, ρ={self.rho:.3g}"
        )
        rows = [f"  {term.name:<22}{term.value:>12.4g}   O({term.order:.4g})" for term in self]
        return "\n".join([head, *rows, f"  {'sum':<22}{float(self):>12.4g}   O({self.order:.4g})"])


def inexact_polar_bound(setting: Setting, K: int, eta: float, beta: float) -> Bound:
    """The inexact-polar theorem, for any η > 0 and β ∈ (0, 1).

    Assumes the inexactness assumption with γ̄ and ν̄, L-smoothness, the heavy-tailed noise
    assumption and B above the threshold. With c = 1 + √d₀(1 + ν̄), κ = 2√π·C_α^{1/α}/B^{(α−1)/α} and
    Γ_α = (2^α + 1)^{1/α}, the proof gives

        descent           (f(X₀) − f_⋆)/(ρηK)
        drift             β²Lη√d₀(1 + ν̄)c/(ρ(1 − β))
        noise             cκΓ_α·σ₀(1 − β)^{(α−1)/α}/ρ
        curvature         Ld₀η(1 + ν̄)²/(2ρ)
        initial bias      c·E‖S₀‖_F/(ρ(1 − β)K)
        relative noise    cκ·σ₁‖∇f(X₀)‖_F/(ρK)
    """
    K = check.at_least_one_step(K)
    eta, beta = check.positive("eta", eta), check.momentum(beta)
    return _terms("inexact-polar theorem", setting, K, eta, beta, beta**2)


def exact_polar_bound(setting: Setting, K: int) -> Bound:
    """The exact-polar theorem: η = K^{−(2α−1)/(3α−2)}, β = 1 − K^{−α/(3α−2)}, γ̄ = ν̄ = 0.

    The dominant terms fall like K^{−(α−1)/(3α−2)}. As in the proof, the factor β² ≤ 1 of the drift
    term is dropped.
    """
    if setting.gamma or setting.nu:
        raise ValueError(
            f"γ̄={setting.gamma:g}, ν̄={setting.nu:g}: this theorem is about the exact polar factor, "
            "γ̄ = ν̄ = 0; use inexact_polar_bound(setting, K, eta, beta) for an inexact polar map"
        )
    schedule = from_tail_index(K, setting.alpha)
    return _terms("exact-polar theorem", setting, schedule.K, schedule.lr, schedule.momentum, 1.0)


def universal_bound(setting: Setting, K: int) -> Bound:
    """The corollary without α: η = K^{−3/4}, β = 1 − K^{−1/2}, for σ₁ = 0 and any B ≥ 1.

    The dominant noise term falls like K^{−(α−1)/(2α)}. As in the proof, the factor β² ≤ 1 of the
    drift term is dropped. The bound depends on α, the schedule does not.
    """
    if setting.sigma1 > 0:
        raise ValueError(
            f"sigma1={setting.sigma1:g}: the corollary without α assumes σ₁ = 0 (noise that does "
            "not grow with the gradient); with σ₁ > 0 use inexact_polar_bound and a schedule for α"
        )
    schedule = universal(K)
    bound = _terms("corollary without α", setting, schedule.K, schedule.lr, schedule.momentum, 1.0)
    return replace(bound, terms=tuple(t for t in bound.terms if t.name != "relative noise"))


def _terms(
    statement: str, setting: Setting, K: int, eta: float, beta: float, beta_squared: float
) -> Bound:
    s, r, c, kappa = setting, setting.rho, setting.c, setting.kappa
    spread, root = 1 + s.nu, math.sqrt(s.d0)
    Gamma = (2**s.alpha + 1) ** (1 / s.alpha)
    power = (s.alpha - 1) / s.alpha

    descent = s.gap / (r * eta * K)
    drift = beta_squared * s.L * eta * spread / (r * (1 - beta))
    noise = s.sigma0 * (1 - beta) ** power / r
    curvature = s.L * eta * spread**2 / r
    bias = s.initial_bias(beta) / (r * (1 - beta) * K)
    relative = s.sigma1 * s.initial_gradient / (r * K)

    terms = (
        Term("descent", descent, descent),
        Term("drift", drift * root * c, drift * spread),
        Term("noise", c * kappa * Gamma * noise, spread * noise / s.B**power),
        Term("curvature", curvature * s.d0 / 2, curvature),
        Term("initial bias", c * bias, spread * bias),
        Term("relative noise", c * kappa * relative, spread * relative / s.B**power),
    )
    return Bound(statement, K, eta, beta, r, terms)


def _drift(setting: Setting, eta: float, beta: float) -> float:
    """β²Lη√d₀(1 + ν̄)/(1 − β), the part of the error that the moving point causes."""
    return beta**2 * setting.L * eta * math.sqrt(setting.d0) * (1 + setting.nu) / (1 - beta)


def _averaged_noise(setting: Setting, beta: float) -> float:
    """Γ_α·σ₀(1−β)^{(α−1)/α} ≥ σ₀·(Σ|a_s|^α)^{1/α}."""
    alpha = setting.alpha
    Gamma = (2**alpha + 1) ** (1 / alpha)
    return float(Gamma * setting.sigma0 * (1 - beta) ** ((alpha - 1) / alpha))


def _after_the_start(k: int) -> int:
    return check.whole("k", k, 1, "a step k ≥ 1; at k = 0 the error is S₀ itself")


def _gamma(gamma: float) -> float:
    if not 0 <= gamma < 1:
        raise ValueError(
            f"gamma={gamma}: the inexactness assumption needs 0 ≤ γ̄ < 1; at γ = 1 the polar map "
            "keeps no alignment with M: raise the rank, the power iterations or the steps"
        )
    return float(gamma)


def _short_side(d0: int) -> int:
    return check.whole("d0", d0, 1, "min(m, n), a whole number ≥ 1")


def _c(d0: int, nu: float) -> float:
    """c = 1 + √d₀(1 + ν̄)."""
    return 1 + math.sqrt(_short_side(d0)) * (1 + check.nonnegative("nu", nu))


def _kappa(alpha: float, B: int, C_alpha: float) -> float:
    """κ = 2√π·C_α^{1/α}/B^{(α−1)/α}, from the martingale and the batch-noise lemma."""
    constant = 2 * math.sqrt(math.pi) * check.positive("C_alpha", C_alpha) ** (1 / alpha)
    return float(constant / B ** ((alpha - 1) / alpha))
