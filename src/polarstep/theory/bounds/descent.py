"""The paper's descent lemmas: how much f falls in a step, and in a run, with inexact M and T."""

from __future__ import annotations

import math

from polarstep.theory import checks as check
from polarstep.theory.bounds.convergence import Setting

__all__ = ["one_step_descent_bound", "summed_gradient_bound"]


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
    return -eta * (1 - setting.gamma) * gradient + eta * _c(setting) * error + curvature


def summed_gradient_bound(setting: Setting, K: int, eta: float, error_sum: float) -> float:
    """The bound on Σ_{k<K} E‖∇f(X_k)‖_F of the descent lemma, with ``error_sum`` Σ_{k<K} E‖S_k‖_F.

    (f(X₀) − f_⋆ + η(1 + √d₀(1 + ν̄))·error_sum + ½Ld₀η²(1 + ν̄)²K) / (η(1 − γ̄))

    With :func:`~polarstep.theory.bounds.momentum.summed_momentum_error_bound` in place of
    ``error_sum`` this becomes the inexact-polar theorem.
    """
    K, eta = check.at_least_one_step(K), check.positive("eta", eta)
    error = check.nonnegative("error_sum", error_sum)
    curvature = setting.L * setting.d0 / 2 * (eta * (1 + setting.nu)) ** 2 * K
    return (setting.gap + eta * _c(setting) * error + curvature) / (eta * (1 - setting.gamma))


def _c(setting: Setting) -> float:
    """1 + √d₀(1 + ν̄)."""
    return 1 + math.sqrt(setting.d0) * (1 + setting.nu)
