from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.solvers import factored
from tests.theory.spectra import random_spectra, with_spectrum

from polarstep import certify, rng
from polarstep.polar import Carry, Draw, Exact, LowRank, NewtonSchulz
from polarstep.sketch import Gaussian, Kaczmarz
from polarstep.theory import bounds

M_ROWS, N_COLS = 20, 28


@pytest.mark.parametrize("coefficients", ["cubic", "quintic"])
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_gamma_is_what_the_map_gives(coefficients, steps):
    sigma = random_spectra(12, 10)
    M = with_spectrum(sigma, 12, 10)
    norm = torch.linalg.matrix_norm(M)
    T = NewtonSchulz(steps, coefficients)(M)
    measured = 1 - (M * T).sum((-2, -1)) / sigma.sum(-1)
    expected = bounds.newton_schulz_gamma(sigma, steps, norm, coefficients)
    torch.testing.assert_close(measured, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(
        bounds.newton_schulz_gamma(sigma, steps, None, coefficients), expected
    )


@pytest.mark.parametrize(
    "bound",
    [
        lambda sigma, *h: bounds.randomized_polar_bound(sigma, 4, 4, *h).A,
        lambda sigma, *h: bounds.captured_energy_bound(sigma, 4, 4, *h),
        lambda sigma, *h: bounds.missed_directions(sigma, 8, *h),
        lambda sigma, *h: bounds.sketched_rest_bound(sigma, 8, *h).energy,
        lambda sigma, *h: bounds.expected_deflated_gamma(sigma, 4, 4, *h),
        lambda sigma, *h: bounds.expected_lifted_gamma(sigma, 8, [(1.875, -1.25, 0.375)], *h),
    ],
)
def test_bounds_of_sketches_are_those_without_power_iterations_unless_asked(bound):
    """Those of h = 1 would promise too much of a plain sketch."""
    sigma = torch.arange(1, 17, dtype=torch.float64) ** -1.5
    torch.testing.assert_close(bound(sigma), bound(sigma, 0), rtol=0, atol=0)
    assert (bound(sigma) - bound(sigma, 1)).abs().max() > 1e-3


def test_newton_schulz_gamma_falls_with_steps_and_grows_with_delta():
    sigma = random_spectra(8, 16)
    gammas = torch.stack([bounds.newton_schulz_gamma(sigma, q) for q in range(12)])
    assert (gammas[:4].diff(dim=0) < 0).all()
    assert (gammas.diff(dim=0) <= 1e-15).all()  # later it has converged
    assert (gammas >= 0).all()
    assert (gammas < 1).all()
    sharp = bounds.newton_schulz_gamma(sigma, 5, delta=1.0)
    assert (sharp <= bounds.newton_schulz_gamma(sigma, 5, delta=3.0)).all()


CASES = list(itertools.product((1, 3, 6, 10), (2, 4, 8), (0, 0.5, 1, 2)))


def test_captured_energy_and_alignment_exceed_their_bounds_over_hundreds_of_cases():
    """E‖QᵀM‖² and E⟨M, T⟩ by Monte-Carlo against the lemma and Proposition 2, 768 cases.

    With q = 0 steps and δ = 1 the alignment is the captured energy itself.
    """
    sigma = random_spectra(16, M_ROWS)
    M = with_spectrum(sigma, M_ROWS, N_COLS)
    draws, checked, informative = 24, 0, 0
    for s, p, h in CASES:
        bound = bounds.randomized_polar_bound(sigma, s, p, h, delta=1.0, d0=M_ROWS)
        energy, alignment = [], []
        for draw in range(draws):
            g = rng.generator("case", s, p, str(h), draw)
            polar = LowRank(
                s, p, h, inner=NewtonSchulz(2, "quintic", delta=1.0), always_sketch=True
            )
            numbers = polar.draw(*M.shape[-2:], g, M.dtype)
            Q = polar.finder.basis(M, polar.width, Carry(), Draw(numbers)).Q
            energy.append(torch.linalg.matrix_norm(Q.mT @ M).square())
            g = rng.generator("case", s, p, str(h), draw)
            alignment.append((M * polar(M, generator=g)).sum((-2, -1)))
        for measured, at_least in (
            (torch.stack(energy), bounds.captured_energy_bound(sigma, s, p, h)),
            (torch.stack(alignment), bound.alignment),
        ):
            error = measured.std(0) / math.sqrt(draws)
            assert (measured.mean(0) + 4 * error + 1e-9 >= at_least).all(), (s, p, h)
        checked += len(sigma)
        informative += int((~bound.vacuous).sum())
    assert checked == 768
    assert informative > 500  # cases in which the bound is not zero


def test_alignment_bound_can_be_nearly_attained():
    """At a spectral gap of 1e-6 the bound with q = 0 is sharp."""
    sigma = torch.cat([torch.ones(4), torch.full((8,), 1e-6)]).double()[None]
    M = with_spectrum(sigma, 12, 14)
    T = LowRank(4, 4, 1, inner=NewtonSchulz(1, ((1.0, 0.0),), delta=1.0), always_sketch=True)(M)
    bound = bounds.randomized_polar_bound(sigma, 4, 4, 1, delta=1.0)
    assert float(bound.alignment) == pytest.approx(float((M * T).sum()), rel=1e-9)
    assert float(bound.gamma) < 1e-5


@pytest.mark.parametrize("sketch", [Gaussian(), Kaczmarz()])
@pytest.mark.parametrize("h", [0, 1, 2])
def test_deterministic_captured_energy_holds_for_every_single_sketch(sketch, h):
    sigma = random_spectra(10, 16, seed=3)
    M = with_spectrum(sigma, 16, 24, seed=3)
    checked = 0
    for draw in range(20):
        Omega = sketch.matrix(M, 9, rng.generator("omega", draw)).expand(10, 24, 9)
        Y = M @ Omega
        for _ in range(h):
            Y = M @ (M.mT @ torch.linalg.qr(Y).Q)
        U, S, _ = torch.linalg.svd(Y, full_matrices=False)
        Q = U * (S.gt(1e-12 * S[..., :1]))[:, None]
        for s in (2, 4):
            for i in range(10):
                if len(Omega[i].mT.unique(dim=0)) < s + 1:  # Kaczmarz drew one column too often
                    continue
                bound = bounds.captured_energy_of_sketch(M[i], Omega[i], s, h)
                energy = torch.linalg.matrix_norm(Q[i].mT @ M[i]).square()
                assert energy >= bound - 1e-9
                checked += 1
    assert checked > 300


def test_the_energy_of_a_sketch_is_its_formula_for_a_matrix_of_low_rank():
    """Singular values at rounding level are taken to be zero, and s must be below the rank."""
    sigma = torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    M = with_spectrum(sigma[None], 5, 8)[0]
    Omega = torch.randn(8, 3, generator=rng.generator("low rank"), dtype=torch.float64)
    Vh = torch.linalg.svd(M).Vh
    leak = Vh[2:3] @ Omega @ torch.linalg.pinv(Vh[:2] @ Omega)  # σ₃ = 1
    for h in (0, 1):
        expected = 9 + 4 - 0.5 ** (4 * h) * leak.square().sum()
        found = bounds.captured_energy_of_sketch(M, Omega, 2, h)
        torch.testing.assert_close(found, expected.clamp_min(0))
    with pytest.raises(ValueError, match="1 ≤ s < r = 3"):
        bounds.captured_energy_of_sketch(M, Omega, 3)


@pytest.mark.parametrize("s", [1, 4, 9])
@pytest.mark.parametrize("p", [2, 5])
def test_rule_for_h_is_the_smallest_that_makes_the_bound_positive(s, p):
    for sigma in random_spectra(40, 40, seed=5):
        if sigma[s] == sigma[s - 1]:
            continue
        h = bounds.power_iterations_needed(sigma, s, p)
        assert not bounds.randomized_polar_bound(sigma, s, p, h).vacuous
        if h > 0:
            assert bounds.randomized_polar_bound(sigma, s, p, h - 1).vacuous


def test_theta_is_a_fraction_and_more_power_never_hurts():
    sigma = random_spectra(32, 30, seed=7)
    previous = None
    for h in (0, 0.5, 1, 2, 8):
        bound = bounds.randomized_polar_bound(sigma, 5, 3, h)
        assert (bound.theta >= 0).all()
        assert (bound.theta <= 1).all()
        assert previous is None or (bound.theta >= previous).all()
        previous = bound.theta


def test_the_papers_cost_example_is_about_forty_fold():
    """(d, ℓ, q, h) = (4096, 256, 5, 1); the paper's count leaves the QR out."""
    d, ell, q, h = 4096, 256, 5, 1
    full = NewtonSchulz(q, "quintic", form="plain").flops(d, d)
    formula = (4 * h + 6) * d * d * ell + q * (4 * d * ell**2 + 2 * ell**3)
    assert 38 < full / formula < 44
    ours = LowRank(ell - 10, 10, h, inner=NewtonSchulz(q, "quintic", form="plain")).flops(d, d)
    assert 38 < full / ours < 44


FLAT = torch.ones(8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bounds.newton_schulz_gamma(FLAT, 5, 0.5), r"δ ≥ ‖M‖_op.*delta=None"),
        (lambda: bounds.newton_schulz_gamma(FLAT, 5, None, "jordan"), "Proposition 1.*certify"),
        (lambda: bounds.newton_schulz_gamma(FLAT, -1), "q ≥ 0"),
        (lambda: bounds.newton_schulz_gamma(torch.zeros(3), 5), "no polar factor"),
        (lambda: bounds.randomized_polar_bound(FLAT, 8, 4), "1 ≤ s < r = 8.*from 1 to 7"),
        (lambda: bounds.randomized_polar_bound(FLAT, 0, 4), "1 ≤ s < r"),
        (lambda: bounds.randomized_polar_bound(FLAT[:1], 1, 4), "needs no sketch"),
        (lambda: bounds.randomized_polar_bound(FLAT, 2, 1), "p ≥ 2.*infinite"),
        (lambda: bounds.randomized_polar_bound(FLAT, 4, 5, d0=8), r"ℓ ≤ min\(m, n\) = 8"),
        (lambda: bounds.randomized_polar_bound(FLAT, 2, 2, -1), "power iterations"),
        (lambda: bounds.randomized_polar_bound(FLAT, 2, 2, 1, delta=0.9), r"below ‖M‖_op = 1"),
        (lambda: bounds.power_iterations_needed(FLAT, 2, 2), "no spectral gap.*p ≥ 8"),
        (lambda: bounds.captured_energy_of_sketch(torch.eye(4), torch.zeros(4, 3), 2), "full row"),
    ],
)
def test_errors_name_the_assumption_and_the_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_remedy_for_h_works():
    with pytest.raises(ValueError, match="p ≥ 8"):
        bounds.power_iterations_needed(FLAT, 2, 7)
    assert bounds.power_iterations_needed(FLAT, 2, 8) == 0


@pytest.mark.parametrize("drift", [0.0, 0.003, 0.03, 0.3, 3.0])
def test_a_kept_basis_loses_no_more_than_its_bound(drift):
    before = with_spectrum(random_spectra(64, M_ROWS), M_ROWS, N_COLS)
    generator = torch.Generator().manual_seed(1)
    change = torch.randn(before.shape, generator=generator, dtype=torch.float64)
    size = drift * torch.linalg.svdvals(before).sum(-1) / torch.linalg.svdvals(change).sum(-1)
    change *= size[:, None, None]
    after = before + change
    polar = LowRank(4, 2, power=0, inner=Exact(), always_sketch=True)
    T, factors = factored(polar, before, rng.generator("kept"))
    gamma = certify(before, T).gamma
    T = factors.Q @ Exact()(factors.Q.mT @ after)
    found = certify(after, T)
    nuclear = torch.linalg.svdvals(after).sum(-1)
    moved = torch.linalg.svdvals(change).sum(-1) / nuclear
    bound = bounds.kept_basis_gamma(gamma, moved)
    assert (found.gamma <= bound + 1e-10).all()
    assert (found.nu <= 1e-10).all()
    if drift <= 0.03:
        assert (bound < 1).all()  # not vacuous
    if drift == 0:
        torch.testing.assert_close(found.gamma, bound)


@pytest.mark.parametrize(
    ("gamma", "drift", "message"),
    [(1.2, 0.1, "0 ≤ γ ≤ 1"), (0.1, -0.1, "≥ 0"), (math.nan, 0.1, "0 ≤ γ"), (0.1, math.nan, "≥ 0")],
)
def test_a_kept_basis_of_no_such_gamma(gamma, drift, message):
    with pytest.raises(ValueError, match=message):
        bounds.kept_basis_gamma(gamma, drift)


def test_the_two_polynomials_of_the_propositions_are_covered_and_no_other_set_is():
    from polarstep.polar import coefficients

    for name in coefficients.names():
        (row, *_) = coefficients.resolve(name, 1)
        assert bounds.covered_by_proposition_1(row) == (name in ("cubic", "quintic")), name
    own = (2.1875, -2.1875, 1.3125, -0.3125)  # degree 7, φ′ = 35/16·(1 − x²)³
    assert bounds.covered_by_proposition_1(own)
    sigma = random_spectra(6, 10)
    M = with_spectrum(sigma, 12, 10)
    T = NewtonSchulz(4, (own,))(M)
    assert (certify(M, T).nu <= 1e-12).all()


def test_plain_numbers_keep_their_precision():
    """A list goes to float64 without a stop at float32, in which 0.2 is larger than 0.2."""
    sigma = [0.2, 0.1]
    expected = bounds.newton_schulz_gamma(torch.tensor(sigma, dtype=torch.float64), 3, delta=0.2)
    assert torch.equal(bounds.newton_schulz_gamma(sigma, 3, delta=0.2), expected)
    # Singular values of float32 are rounded; δ need not be.
    rounded = bounds.newton_schulz_gamma(torch.tensor(sigma), 3, delta=0.2)
    torch.testing.assert_close(rounded, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: bounds.newton_schulz_gamma(FLAT, 5, math.nan),
        lambda: bounds.randomized_polar_bound(FLAT, 2, 2, 1, delta=math.nan),
    ],
)
def test_a_delta_that_is_no_number_is_refused(call):
    with pytest.raises(ValueError, match=r"delta=nan.*delta=None"):
        call()


@pytest.mark.parametrize("bound", [bounds.randomized_polar_bound, bounds.expected_deflated_gamma])
def test_a_short_side_below_the_rank_is_refused(bound):
    """ℓ = d₀ would leave nothing out, but a matrix with d₀ = 5 has no 8 singular values."""
    sigma = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match=r"d0=5: expected min\(m, n\).* 8 singular values"):
        bound(sigma, 3, 2, d0=5)
    with pytest.raises(ValueError, match="complex"):
        bound(sigma + 1j, 3, 2)
