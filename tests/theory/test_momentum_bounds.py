"""The lemmas on Nesterov momentum and descent, against equation (1) written out and against Muon."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from polarstep import Exact, Muon, NewtonSchulz, certify, rng
from polarstep.theory import bounds, schedules
from polarstep.theory.bounds import Setting
from polarstep.theory.noise import AlphaStable, GradientNoise, SkewedPareto

SHAPE = (4, 6)
BETAS = (0.1, 0.5, 0.9, 0.99)


def drawn(count, *key):
    return list(torch.randn(count, *SHAPE, generator=rng.generator(*key), dtype=torch.float64))


def scaled(gradients, beta):
    """(1−β)M_k of equation (1) for every k, from C₋₁ = 0."""
    C = torch.zeros(SHAPE, dtype=torch.float64)
    momenta = []
    for G in gradients:
        C = beta * C + G
        momenta.append((1 - beta) * (beta * C + G))
    return momenta


# The scaled recurrence and the momentum error


@pytest.mark.parametrize("beta", BETAS)
def test_the_recurrence_is_the_momentum_of_muon(beta):
    weight = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
    optimizer = Muon([weight], lr=1e-3, momentum=beta, polar=Exact())
    gradients = drawn(12, "recurrence", str(beta))
    previous = (1 - beta**2) * gradients[0]
    for k, G in enumerate(gradients):
        weight.grad = G
        optimizer.step()
        (state,) = (state for state in optimizer.state.values() if "momentum_buffer" in state)
        M = beta * state["momentum_buffer"] + G
        if k:
            previous = bounds.scaled_momentum(previous, G, gradients[k - 1], beta)
        torch.testing.assert_close(previous, (1 - beta) * M, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 2, 3, 20])
def test_the_error_of_momentum_unrolls(beta, k):
    gradients, noises = drawn(k + 1, "∇f", k), drawn(k + 1, "ξ", k)
    momenta = scaled([g + xi for g, xi in zip(gradients, noises, strict=True)], beta)
    S0, direct = momenta[0] - gradients[0], momenta[k] - gradients[k]
    found = bounds.momentum_error(S0, gradients, noises, beta)
    torch.testing.assert_close(found, direct, atol=1e-12, rtol=1e-12)


def test_the_weights_of_the_noise_are_below_the_constant_of_the_proof():
    """(Σ|a_s|^α)^{1/α} ≤ Γ_α(1−β)^{(α−1)/α}, and for long memories not by more than a factor of 3."""
    for beta, k, alpha in itertools.product((*BETAS, 0.999), (1, 2, 9, 400), (1.05, 1.5, 2.0)):
        norm = float(bounds.noise_weights(k, beta).abs().pow(alpha).sum() ** (1 / alpha))
        limit = (2**alpha + 1) ** (1 / alpha) * (1 - beta) ** ((alpha - 1) / alpha)
        assert norm <= limit * (1 + 1e-12)
        if k * (1 - beta) > 1:
            assert norm >= limit / (3 * (2**alpha + 1) ** (1 / alpha))


def heavy_run(setting, noise, K, schedule, replicas):
    """E‖∇f(X_k)‖_F and E‖S_k‖_F of Muon with exact polar factors on f = ½‖X‖²_F, for k < K."""
    generator = rng.generator("run", str(setting.alpha), K)
    X = torch.randn(replicas, *SHAPE, generator=generator, dtype=torch.float64)
    X = X / torch.linalg.matrix_norm(X)[:, None, None] * math.sqrt(2 * setting.gap)
    C = torch.zeros_like(X)
    eta, beta = schedule.lr, schedule.momentum
    gradients, errors = [], []
    for _ in range(K):
        G = noise(X, generator=generator)
        C = beta * C + G
        M = beta * C + G
        gradients.append(float(torch.linalg.matrix_norm(X).mean()))
        errors.append(float(torch.linalg.matrix_norm((1 - beta) * M - X).mean()))
        X = X - eta * Exact()(M)
    return gradients, errors


@pytest.mark.parametrize("sigma1", [0.0, 0.05])
@pytest.mark.parametrize("alpha", [1.3, 1.6, 2.0])
def test_the_errors_of_heavy_tailed_runs_are_below_their_bounds(alpha, sigma1):
    """Monte-Carlo: 400 replicas of K = 48 steps under noise with hardly a moment above the α-th."""
    K = 48
    law = AlphaStable(2.0) if alpha == 2 else SkewedPareto(alpha + 0.1)
    noise = GradientNoise(law, alpha, sigma0=0.3, sigma1=sigma1)
    schedule = schedules.from_tail_index(K, alpha)
    eta, beta = schedule.lr, schedule.momentum
    setting = Setting(1.0, 1.0, min(SHAPE), alpha, 0.3, sigma1, gradient0=math.sqrt(2.0))
    gradients, errors = heavy_run(setting, noise, K, schedule, replicas=400)
    for k in range(K):
        limit = bounds.momentum_error_bound(setting, eta, beta, gradients[: k + 1])
        assert errors[k] <= limit, k
    summed = bounds.summed_momentum_error_bound(setting, K, eta, beta, sum(gradients))
    assert sum(errors) <= summed
    each = [bounds.momentum_error_bound(setting, eta, beta, gradients[: k + 1]) for k in range(K)]
    assert sum(each) <= summed * (1 + 1e-12)  # the second lemma is the sum of the first
    assert summed < 40 * sum(errors)  # and no empty bound
    assert sum(gradients) <= bounds.summed_gradient_bound(setting, K, eta, sum(errors))


# Descent


@pytest.mark.parametrize(
    "polar", [Exact(), NewtonSchulz(3, "quintic"), NewtonSchulz(5, "jordan")], ids=str
)
def test_no_step_gains_less_than_the_descent_lemma_says(polar):
    """Every step of 60, with the γ and ν of that step: the lemma's proof holds step by step."""
    beta, eta, L = 0.9, 0.05, 3.0
    X = drawn(1, "X")[0]
    C = torch.zeros_like(X)
    tight = 0
    for k in range(60):
        gradient = L * X
        G = gradient + drawn(1, "step", k)[0]
        C = beta * C + G
        M = beta * C + G
        T = polar(M)
        certificate = certify(M, T)
        gamma, nu = max(float(certificate.gamma), 0.0), max(float(certificate.nu), 0.0)
        setting = Setting(1.0, L, min(SHAPE), 2.0, 1.0, gamma=gamma, nu=nu)
        S = torch.linalg.matrix_norm((1 - beta) * M - gradient)
        limit = bounds.one_step_descent_bound(
            setting, eta, float(torch.linalg.matrix_norm(gradient)), float(S)
        )
        X_next = X - eta * T
        change = float(L / 2 * (X_next.square().sum() - X.square().sum()))
        assert change <= limit + 1e-12, k
        tight += limit < change + 2.0
        X = X_next
    assert tight > 20


@pytest.mark.parametrize("sigma1", [0.0, 0.05])
@pytest.mark.parametrize(("gamma", "nu"), [(0.0, 0.0), (0.2, 0.1)])
def test_the_lemmas_together_are_the_theorem(gamma, nu, sigma1):
    """With x = K times the theorem's bound, descent and momentum error reproduce x."""
    setting = Setting(3.0, 2.0, 9, 1.5, 0.7, sigma1, 40, gamma, nu, gradient0=1.0, S0=0.5)
    K, eta, beta = 500, 0.01, 0.9
    x = K * float(bounds.inexact_polar_bound(setting, K, eta, beta))
    errors = bounds.summed_momentum_error_bound(setting, K, eta, beta, x)
    assert bounds.summed_gradient_bound(setting, K, eta, errors) == pytest.approx(x)


# The martingale lemma


def signed_by_the_past(draws, T, alpha, *key):
    """W_t = s_t·|W_t| with a fair sign, and a size that doubles after a positive sum: a martingale."""
    generator = rng.generator("martingale", *key)
    law = AlphaStable(2.0) if alpha == 2 else AlphaStable(alpha + 0.05)
    total = torch.zeros(draws, *SHAPE, dtype=torch.float64)
    norms = []
    for _ in range(T):
        W = law.sample((draws,), math.prod(SHAPE), generator, torch.float64).reshape(-1, *SHAPE)
        W = W * torch.where(total.sum((-2, -1)) > 0, 2.0, 1.0)[:, None, None]
        total = total + W
        norms.append(torch.linalg.matrix_norm(W))
    return torch.linalg.matrix_norm(total), torch.stack(norms, -1)


@pytest.mark.parametrize("T", [1, 4, 32])
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_sums_of_heavy_tailed_martingale_differences_are_below_the_lemma(alpha, T):
    sums, norms = signed_by_the_past(4000, T, alpha, T, str(alpha))
    limit = float(bounds.martingale_bound(norms, alpha))
    assert float(sums.mean()) <= limit
    by_the_longest = 2 * math.sqrt(math.pi) * T ** (1 / alpha) * float(norms.amax(-1).mean())
    assert limit <= by_the_longest * (1 + 1e-12)  # equal for T = 1, but for rounding
    assert limit < 12 * float(sums.mean())
    sharper = float(bounds.martingale_bound(norms, 2.0))
    assert sharper <= limit * (1 + 1e-12)  # ‖·‖₂ ≤ ‖·‖_α: p = 2 where the draws allow it


def test_a_gaussian_row_is_at_least_as_long_as_its_bound():
    g = torch.randn(20_000, 1, 5, generator=rng.generator("row"), dtype=torch.float64)
    one = torch.outer(torch.arange(1.0, 6.0), torch.ones(3)).double()
    for M, is_sharp in ((one, True), (torch.eye(5, dtype=torch.float64), False)):
        mean = float(torch.linalg.matrix_norm(g @ M).mean())
        limit = float(bounds.gaussian_row_bound(M))
        assert mean >= 0.98 * limit
        assert (mean <= 1.02 * limit) == is_sharp


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bounds.noise_weights(0, 0.5), "k ≥ 1"),
        (lambda: bounds.scaled_momentum(*drawn(3, "e"), 1.0), "0 < β < 1"),
        (lambda: bounds.momentum_error(*drawn(1, "e"), drawn(3, "e"), drawn(2, "e"), 0.5), "same"),
        (
            lambda: bounds.momentum_error_bound(Setting(1, 1, 4, 2, 1), 0.1, 0.5, []),
            "is empty",
        ),
        (lambda: bounds.martingale_bound(torch.ones(2, 2), 1.0), "1 < p ≤ 2"),
        (lambda: bounds.martingale_bound(torch.ones(2), 1.5), r"\(draws, \.\.\., T\)"),
        (lambda: bounds.martingale_bound(-torch.ones(2, 2), 1.5), "finite and ≥ 0"),
        (
            lambda: bounds.one_step_descent_bound(Setting(1, 1, 4, 2, 1), 0.0, 1.0, 1.0),
            "eta=0",
        ),
    ],
)
def test_errors_name_the_assumption(call, words):
    with pytest.raises(ValueError, match=words):
        call()
