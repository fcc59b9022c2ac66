"""Convergence of Muon: the right-hand sides of the paper's theorems, term by term.

Each theorem bounds min_{0≤k<K} E‖∇f(X_k)‖_F by a sum of six terms. The statements hide constants
that depend on α and d₀ in an O(·); the proofs in the appendix give all constants, up to
C_α ∈ (0, 2]. A :class:`Term` therefore carries two numbers. ``value`` has the constants of the proof
and is an upper bound. ``order`` is the expression inside the paper's O(·) and is not a bound.

The theorems assume Nesterov momentum, an L-smooth f bounded below by f_⋆, and noise whose α-th
central moment is at most σ₀^α + σ₁^α‖∇f‖^α. The same bounds hold for the average over k, since the
proofs bound the sum of all E‖∇f(X_k)‖_F.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from polarstep.theory import checks as check
from polarstep.theory.bounds.batch_noise import PAPER_CONSTANT, initial_bias_bound
from polarstep.theory.schedules import from_tail_index, universal

__all__ = [
    "Bound",
    "Setting",
    "Term",
    "batch_threshold",
    "exact_polar_bound",
    "inexact_polar_bound",
    "rho",
    "smallest_batch",
    "universal_bound",
]


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
    noise = _noise_factor(alpha, d0, nu, C_alpha) * check.nonnegative("sigma1", sigma1)
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
    """ρ = 1 − γ̄ − (1 + √d₀(1 + ν̄))·2√π·C_α^{1/α}·σ₁/B^{(α−1)/α}; ρ_ex has γ̄ = ν̄ = 0.

    Every term of the bounds is divided by ρ. A negative ρ means that B is below the threshold,
    where the theorems do not apply; :class:`Setting` refuses such a B.
    """
    alpha = check.tail_index(alpha)
    B = check.at_least_one_sample(B)
    noise = _noise_factor(alpha, d0, nu, C_alpha) * check.nonnegative("sigma1", sigma1)
    return 1 - _gamma(gamma) - noise / B ** ((alpha - 1) / alpha)


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
        S0: E‖S₀‖_F; ``None`` means :func:`~polarstep.theory.bounds.batch_noise.initial_bias_bound`.
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
    def rho(self) -> float:
        """ρ, or ρ_ex where γ̄ = ν̄ = 0."""
        return rho(
            self.alpha, self.sigma1, self.d0, self.B, self.gamma, self.nu, C_alpha=self.C_alpha
        )

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
    assumption and B above the threshold. With c = 1 + √d₀(1 + ν̄), κ = 2√π·C_α^{1/α} and
    Γ_α = (2^α + 1)^{1/α}, the proof gives

        descent           (f(X₀) − f_⋆)/(ρηK)
        drift             β²Lη√d₀(1 + ν̄)c/(ρ(1 − β))
        noise             cκΓ_α·σ₀(1 − β)^{(α−1)/α}/(ρB^{(α−1)/α})
        curvature         Ld₀η(1 + ν̄)²/(2ρ)
        initial bias      c·E‖S₀‖_F/(ρ(1 − β)K)
        relative noise    cκ·σ₁‖∇f(X₀)‖_F/(ρB^{(α−1)/α}K)
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
    s, r = setting, setting.rho
    alpha, spread = s.alpha, 1 + s.nu
    root = math.sqrt(s.d0)
    c = 1 + root * spread
    kappa = 2 * math.sqrt(math.pi) * s.C_alpha ** (1 / alpha)
    Gamma = (2**alpha + 1) ** (1 / alpha)
    batch = s.B ** ((alpha - 1) / alpha)
    averaged = (1 - beta) ** ((alpha - 1) / alpha)
    S0, gradient0 = s.initial_bias(beta), s.initial_gradient
    descent = s.gap / (r * eta * K)
    drift = beta_squared * s.L * eta / (r * (1 - beta))
    noise = s.sigma0 * averaged / (r * batch)
    curvature = s.L * eta * spread**2 / r
    bias = S0 / (r * (1 - beta) * K)
    relative = s.sigma1 * gradient0 / (r * batch * K)
    terms = (
        Term("descent", descent, descent),
        Term("drift", drift * root * spread * c, drift * spread**2),
        Term("noise", c * kappa * Gamma * noise, spread * noise),
        Term("curvature", curvature * s.d0 / 2, curvature),
        Term("initial bias", c * bias, spread * bias),
        Term("relative noise", c * kappa * relative, spread * relative),
    )
    return Bound(statement, K, eta, beta, r, terms)


def _gamma(gamma: float) -> float:
    if not 0 <= gamma < 1:
        raise ValueError(
            f"gamma={gamma}: the inexactness assumption needs 0 ≤ γ̄ < 1; at γ = 1 the polar map "
            "keeps no alignment with M: raise the rank, the power iterations or the steps"
        )
    return float(gamma)


def _short_side(d0: int) -> int:
    return check.whole("d0", d0, 1, "min(m, n), a whole number ≥ 1")


def _noise_factor(alpha: float, d0: int, nu: float, C_alpha: float) -> float:
    """(1 + √d₀(1 + ν̄))·2√π·C_α^{1/α}, the factor of σ₁/B^{(α−1)/α} in ρ."""
    d0 = _short_side(d0)
    nu, C_alpha = check.nonnegative("nu", nu), check.positive("C_alpha", C_alpha)
    return (1 + math.sqrt(d0) * (1 + nu)) * 2 * math.sqrt(math.pi) * C_alpha ** (1 / alpha)
