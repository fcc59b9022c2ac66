"""The lemmas on noise, momentum and descent and the theorems, against runs and their proofs."""

from __future__ import annotations

import functools
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


# Noise of a mini-batch, and of many steps


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
@pytest.mark.parametrize("B", [1, 8, 64])
def test_batch_noise_lemma_holds_for_heavy_tails(alpha, B):
    """One-sided Pareto noise, the worst case: hardly any moment above the α-th is finite."""
    index = alpha + 0.3
    u = torch.rand(40_000, B, generator=rng.generator("lemma", B), dtype=torch.float64)
    x = (1 - u) ** (-1 / index) - index / (index - 1)
    one = float((x.abs() ** alpha).mean())
    many = x.mean(1).abs() ** alpha
    bound = bounds.batch_noise_bound(
        alpha, one ** (1 / alpha), 0.0, B, 5.0, bounds.hilbert_constant(alpha)
    )
    slack = 4 * float(many.std()) / math.sqrt(len(many))
    assert float(many.mean()) <= bound * 1.1 + slack
    assert bound <= bounds.batch_noise_bound(alpha, one ** (1 / alpha), 0.0, B, 5.0)


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.7, 2.0])
def test_hilbert_constant_is_valid(alpha):
    """‖x+y‖^α ≤ ‖x‖^α + α‖x‖^{α−2}⟨x,y⟩ + C‖y‖^α for all x and y of a plane."""
    radius = torch.logspace(-3, 3, 601, dtype=torch.float64)[:, None]
    angle = torch.linspace(0, math.pi, 361, dtype=torch.float64)
    dot = radius * angle.cos()  # x = e₁, ‖y‖ = radius
    excess = (1 + 2 * dot + radius**2).clamp_min(0) ** (alpha / 2) - 1 - alpha * dot
    largest = float((excess / radius**alpha).max())
    C = bounds.hilbert_constant(alpha)
    assert largest <= C * (1 + 1e-9)
    assert largest > (1.0 if alpha < 2 else 0.99)  # so 1 would not do below α = 2


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


# The batch that is needed


def test_rho_is_zero_at_the_threshold():
    for alpha in (1.3, 1.7, 2.0):
        threshold = bounds.batch_threshold(alpha, 0.01, 16, gamma=0.3, nu=0.05)
        B = bounds.smallest_batch(alpha, 0.01, 16, gamma=0.3, nu=0.05)
        assert B - 1 <= threshold < B
        assert bounds.rho(alpha, 0.01, 16, B, 0.3, 0.05) > 0
        if B > 1:
            assert bounds.rho(alpha, 0.01, 16, B - 1, 0.3, 0.05) <= 0
    assert bounds.batch_threshold(1.5, 0.0, 16) == 0
    assert bounds.smallest_batch(1.5, 0.0, 16) == 1
    assert bounds.batch_threshold(1.0001, 1.0, 16) == math.inf
    with pytest.raises(
        ValueError, match=r"no batch is large enough for alpha=1\.0001 and sigma1=1"
    ):
        bounds.smallest_batch(1.0001, 1.0, 16)


def test_setting_refuses_a_small_batch_and_its_remedy_works():
    with pytest.raises(ValueError, match=r"B=1 is below the threshold .* needs B ≥ 456") as caught:
        Setting(1.0, 1.0, 16, 1.5, 1.0, sigma1=0.2735, B=1)
    assert "σ₁" in str(caught.value)
    assert Setting(1.0, 1.0, 16, 1.5, 1.0, sigma1=0.2735, B=456).rho > 0


@pytest.mark.parametrize("alpha", [1.05, 1.1, 1.147, 1.3, 2.0])
def test_the_smallest_batch_is_one_that_a_setting_takes(alpha):
    """Above 10^14 neighbouring whole numbers give the same ρ after rounding."""
    for sigma1 in (0.01, 0.1, 0.37, 1.0, 1.93494):
        for d0 in (1, 16, 768):
            B = bounds.smallest_batch(alpha, sigma1, d0)
            assert Setting(1.0, 1.0, d0, alpha, 1.0, sigma1, B).rho > 0
            threshold = bounds.batch_threshold(alpha, sigma1, d0)
            assert threshold < B <= threshold * (1 + 1e-12) + 1


def test_a_setting_for_which_no_batch_is_large_enough():
    with pytest.raises(ValueError, match=r"no batch is large enough for alpha=1\.001"):
        Setting(1.0, 1.0, 768, 1.001, 1.0, sigma1=1.0)


def test_the_largest_initial_gradient_is_that_of_a_parabola():
    """f(x) = L/2·x² has the gap L/2·x₀² and the gradient L·x₀, and no L-smooth f a larger one."""
    L, x = 3.0, 0.7
    setting = Setting(L / 2 * x**2, L, 4, 1.5, 1.0)
    assert setting.initial_gradient == pytest.approx(L * x)
    assert Setting(L / 2 * x**2, L, 4, 1.5, 1.0, gradient0=0.2).initial_gradient == 0.2


# Momentum


def scaled(gradients, beta):
    """(1−β)M_k of equation (1) for every k, from C₋₁ = 0."""
    C = torch.zeros(SHAPE, dtype=torch.float64)
    momenta = []
    for G in gradients:
        C = beta * C + G
        momenta.append((1 - beta) * (beta * C + G))
    return momenta


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


# The theorems

EXACT = Setting(gap=3.0, L=2.0, d0=9, alpha=1.5, sigma0=0.7, gradient0=1.0, S0=0.5)

NOISY = Setting(3.0, 2.0, 9, 1.5, 0.7, sigma1=0.05, B=40, gamma=0.2, nu=0.1, gradient0=1.0, S0=0.5)


def test_terms_of_the_inexact_theorem_are_those_of_its_proof():
    """The constants of the last display of the proof, written out independently of the code."""
    K, eta, beta = 500, 0.01, 0.9
    a, d0, s = 1.5, 9, NOISY
    r = 1 - 0.2 - (1 + 3 * 1.1) * 2 * math.sqrt(math.pi) * 2 ** (1 / a) * 0.05 / 40 ** (1 / 3)
    assert s.rho == pytest.approx(r)
    k = 2 * math.sqrt(math.pi) * 2 ** (1 / a)
    gamma_alpha = (2**a + 1) ** (1 / a)
    expected = {
        "descent": 3.0 / (eta * r * K),
        "curvature": 2.0 * d0 * eta * 1.1**2 / (2 * r),
        "initial bias": (1 + 3 * 1.1) * 0.5 / (0.1 * K * r),
        "drift": 0.81 / (0.1 * r) * 2.0 * eta * 3 * 1.1 * (1 + 3 * 1.1),
        "noise": (1 + 3 * 1.1) * k / (r * 40 ** (1 / 3)) * gamma_alpha * 0.7 * 0.1 ** (1 / 3),
        "relative noise": (1 + 3 * 1.1) * k * 0.05 * 1.0 / (r * 40 ** (1 / 3) * K),
    }
    bound = bounds.inexact_polar_bound(s, K, eta, beta)
    assert {t.name: t.value for t in bound} == pytest.approx(expected)
    assert float(bound) == pytest.approx(sum(expected.values()))
    assert bound.dominant.name == max(expected, key=lambda name: expected[name])
    assert "O(" in str(bound)


def test_order_is_the_statement_without_constants():
    bound = bounds.inexact_polar_bound(NOISY, 500, 0.01, 0.9)
    order = {t.name: t.order for t in bound}
    assert order["drift"] == pytest.approx(0.81 * 2.0 * 1.1**2 * 0.01 / (NOISY.rho * 0.1))
    assert order["noise"] == pytest.approx(1.1 * 0.7 * 0.1 ** (1 / 3) / (NOISY.rho * 40 ** (1 / 3)))
    assert bound.order < float(bound)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.9, 2.0])
def test_exact_bound_falls_at_the_rate_of_the_theorem(alpha):
    setting = Setting(1.0, 1.0, 4, alpha, 1.0)
    low, high = (float(bounds.exact_polar_bound(setting, K)) for K in (10**12, 10**14))
    assert math.log(low / high, 100) == pytest.approx(schedules.rate(alpha), abs=0.004)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_universal_bound_falls_at_its_rate(alpha):
    setting = Setting(1.0, 1.0, 4, alpha, 1.0, gamma=0.3, nu=0.1)
    noise = [
        next(t.value for t in bounds.universal_bound(setting, K) if t.name == "noise")
        for K in (100, 10**4)
    ]
    expected = schedules.rate(alpha, knows_alpha=False)
    assert math.log(noise[0] / noise[1], 100) == pytest.approx(expected)


def test_exact_theorem_is_the_inexact_one_at_zero_up_to_beta_squared():
    K = 1000
    s = schedules.from_tail_index(K, EXACT.alpha)
    exact = {t.name: t.value for t in bounds.exact_polar_bound(EXACT, K)}
    inexact = {t.name: t.value for t in bounds.inexact_polar_bound(EXACT, K, s.lr, s.momentum)}
    inexact["drift"] /= s.momentum**2
    assert exact == pytest.approx(inexact)


@pytest.mark.parametrize("sigma1", [0.0, 0.05])
@pytest.mark.parametrize(("gamma", "nu"), [(0.0, 0.0), (0.2, 0.1)])
def test_the_lemmas_together_are_the_theorem(gamma, nu, sigma1):
    """With x = K times the theorem's bound, descent and momentum error reproduce x."""
    setting = Setting(3.0, 2.0, 9, 1.5, 0.7, sigma1, 40, gamma, nu, gradient0=1.0, S0=0.5)
    K, eta, beta = 500, 0.01, 0.9
    x = K * float(bounds.inexact_polar_bound(setting, K, eta, beta))
    errors = bounds.summed_momentum_error_bound(setting, K, eta, beta, x)
    assert bounds.summed_gradient_bound(setting, K, eta, errors) == pytest.approx(x)


def test_the_inexact_theorem_and_its_lemmas_hold_for_a_single_step():
    """Only the schedules need K ≥ 2; at K = 1 the theorem is the descent lemma with ‖S₀‖."""
    setting = Setting(gap=1.0, L=1.0, d0=4, alpha=1.5, sigma0=1.0, gamma=0.1, nu=0.2)
    eta, beta = 0.1, 0.9
    error = bounds.summed_momentum_error_bound(setting, 1, eta, beta, 0.0)
    by_lemmas = bounds.summed_gradient_bound(setting, 1, eta, error)
    assert float(bounds.inexact_polar_bound(setting, 1, eta, beta)) == pytest.approx(by_lemmas)
    with pytest.raises(ValueError, match="K=0: expected a whole number of steps, at least 1"):
        bounds.inexact_polar_bound(setting, 0, eta, beta)
    with pytest.raises(ValueError, match="K ≥ 2"):
        bounds.exact_polar_bound(Setting(1.0, 1.0, 4, 1.5, 1.0), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_torch_give_the_bound_of_plain_numbers(dtype):
    """A gap, an α or a horizon that was measured is often a tensor; bounds are in float64."""
    of = functools.partial(torch.tensor, dtype=dtype)
    known = {"gap": 2.0, "L": 0.5, "alpha": 1.5, "sigma0": 1.0, "sigma1": 0.125, "nu": 0.25}
    counts = {"d0": 4, "B": 512}
    plain = Setting(**known, **counts)
    setting = Setting(
        **{k: of(v) for k, v in known.items()}, **{k: of(float(v)) for k, v in counts.items()}
    )
    assert setting == plain
    assert all(type(getattr(setting, name)) is float for name in known)
    assert all(type(getattr(setting, name)) is int for name in counts)
    expected = bounds.inexact_polar_bound(plain, 100, 0.125, 0.5)
    found = bounds.inexact_polar_bound(setting, of(100.0), of(0.125), of(0.5))
    assert found == expected
    assert str(found) == str(expected)
    for bound in (bounds.exact_polar_bound, bounds.universal_bound):
        assert bound(EXACT, of(100.0)) == bound(EXACT, 100)
    plain_bias = bounds.initial_bias_bound(0.5, 1.5, 1.0, 0.125, 8, 2.0)
    of_tensors = bounds.initial_bias_bound(of(0.5), of(1.5), 1.0, 0.125, 8, of(2.0))
    assert type(of_tensors) is float
    assert of_tensors == plain_bias


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bounds.rho(1.0, 0, 4, 1), r"1 < α ≤ 2"),
        (lambda: bounds.rho(2.1, 0, 4, 1), r"1 < α ≤ 2"),
        (lambda: bounds.rho(1.5, 0, 4, 0), "at least 1"),
        (lambda: bounds.rho(1.5, 0, 0, 1), r"min\(m, n\)"),
        (lambda: bounds.rho(1.5, 0, 4, 1, gamma=1.0), "0 ≤ γ̄ < 1"),
        (lambda: bounds.rho(1.5, -1, 4, 1), "sigma1=-1"),
        (lambda: bounds.exact_polar_bound(NOISY, 100), "inexact_polar_bound"),
        (lambda: bounds.universal_bound(NOISY, 100), "σ₁ = 0"),
        (lambda: bounds.exact_polar_bound(EXACT, 1), "K ≥ 2"),
        (lambda: bounds.inexact_polar_bound(EXACT, 10, 0.1, 1.0), "0 < β < 1"),
        (lambda: bounds.inexact_polar_bound(EXACT, 10, 0.0, 0.9), "eta=0"),
        (lambda: bounds.inexact_polar_bound(EXACT, 10, "0.1", 0.9), "eta='0.1': expected a finite"),
        (
            lambda: bounds.inexact_polar_bound(EXACT, 10, 0.1, "0.9"),
            "beta='0.9': the theorems hold",
        ),
        (lambda: bounds.rho(1.5, None, 4, 1), "sigma1=None: expected a finite number ≥ 0"),
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
