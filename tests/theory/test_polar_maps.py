"""Propositions 1 and 2, the captured-energy lemma and what a sketch leaves out, against the maps."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.theory.matrices import (
    COLS,
    OVER,
    ROWS,
    basis,
    below,
    parts,
    random_spectra,
    sketched_basis,
    with_spectrum,
)

from polarstep import certify, rng
from polarstep.maps import Draw, LowRank, MapState, NewtonSchulz
from polarstep.maps.sketches import Gaussian, Kaczmarz
from polarstep.theory import bounds


@pytest.mark.parametrize("coefficients", ["cubic", "quintic"])
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_gamma_is_what_the_map_gives(coefficients, steps):
    sigma = random_spectra(12, 10)
    M = with_spectrum(sigma, 12, 10)
    norm = torch.linalg.matrix_norm(M)
    T = NewtonSchulz(steps, coefficients)(M) if steps else M / norm[:, None, None]
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
    sigma = random_spectra(16, ROWS)
    M = with_spectrum(sigma, ROWS, COLS)
    draws, checked, informative = 24, 0, 0
    for s, p, h in CASES:
        bound = bounds.randomized_polar_bound(sigma, s, p, h, delta=1.0, d0=ROWS)
        energy, alignment = [], []
        for draw in range(draws):
            g = rng.generator("case", s, p, str(h), draw)
            polar = LowRank(
                s, p, h, inner=NewtonSchulz(2, "quintic", delta=1.0), always_sketch=True
            )
            numbers = polar.numbers(*M.shape[-2:], g, M.dtype)
            Q = polar.finder.basis(M, polar.width, MapState(), Draw(numbers)).Q
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
        (lambda: bounds.missed_directions(FLAT, 8), "1 ≤ ℓ < 8 = rank.*no rest"),
        (lambda: bounds.sketched_rest_bound(FLAT, 0), "ell=0: expected a whole number"),
        (lambda: bounds.missed_directions(FLAT, 3, 0.3), "power iterations"),
    ],
)
def test_errors_name_the_assumption_and_the_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_remedy_for_h_works():
    with pytest.raises(ValueError, match="p ≥ 8"):
        bounds.power_iterations_needed(FLAT, 2, 7)
    assert bounds.power_iterations_needed(FLAT, 2, 8) == 0


def test_the_two_polynomials_of_the_propositions_are_covered_and_no_other_set_is():
    from polarstep.maps import coefficients

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


def test_a_short_side_below_the_rank_is_refused():
    """ℓ = d₀ would leave nothing out, but a matrix with d₀ = 5 has no 8 singular values."""
    sigma = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match=r"d0=5: expected min\(m, n\).* 8 singular values"):
        bounds.randomized_polar_bound(sigma, 3, 2, d0=5)
    with pytest.raises(ValueError, match="complex"):
        bounds.randomized_polar_bound(sigma + 1j, 3, 2)


# What a Gaussian sketch leaves out


@pytest.mark.parametrize("h", [0, 0.5, 1, 2])
@pytest.mark.parametrize("ell", [3, 8])
def test_a_sketch_misses_no_more_than_the_bounds_say(ell, h):
    M = with_spectrum(OVER, ROWS, COLS)
    U = torch.linalg.svd(M, full_matrices=False).U
    missed, rest = [], {name: [] for name in bounds.RestBound.__dataclass_fields__}
    for draw in range(100):
        Q = sketched_basis(M, ell, h, "missed", ell, h, draw)
        missed.append(1 - (Q.mT @ U).square().sum(-2))
        B, Z, R = parts(M, Q)
        b, V = torch.linalg.svd(B, full_matrices=False)[1:]
        r, rows = torch.linalg.svd(R, full_matrices=False)[1:]
        overlaps = (R @ V.mT).square().sum(-2)
        shared = (Z @ rows[:, : ROWS - ell].mT).square().sum((-2, -1))
        rest["energy"].append(r.square().sum(-1))
        rest["squared_norm"].append(r[:, 0].square())
        rest["coupling"].append((R @ B.mT).square().sum((-2, -1)))
        rest["overlap"].append(overlaps.sum(-1))
        rest["weighted_overlap"].append((b * overlaps).sum(-1))
        rest["shared_rows"].append(r.square().sum(-1) * shared)
    bound = bounds.missed_directions(OVER, ell, h)
    found = torch.stack(missed)
    assert below(found, bound)
    if ell == 8 and h <= 1:  # two leading directions above a flat rest
        assert (found.mean(0)[12, :2] > 0.5 * bound[12, :2]).all()
    for name, values in rest.items():
        limit = getattr(bounds.sketched_rest_bound(OVER, ell, h), name)
        assert below(torch.stack(values), limit), name


@pytest.mark.parametrize("kind", ["leading", "trailing", "between", "sketch", "random"])
def test_each_step_to_the_bounds_on_the_rest_holds_for_every_basis(kind):
    M = with_spectrum(OVER, ROWS, COLS)
    U = torch.linalg.svd(M, full_matrices=False).U
    squares = OVER.square()
    for ell in (2, 7):
        Q = basis(M, kind, ell)
        B, Z, R = parts(M, Q)
        t = 1 - (Q.mT @ U).square().sum(-2)
        b, V = torch.linalg.svd(B, full_matrices=False)[1:]
        r, rows = torch.linalg.svd(R, full_matrices=False)[1:]
        overlaps, energy = (R @ V.mT).square().sum(-2), r.square().sum(-1)
        W, C = overlaps.sum(-1), (R @ B.mT).square().sum((-2, -1))
        weighted, top = (b * overlaps).sum(-1), r[:, 0].square()
        shared = (Z @ rows[:, : ROWS - ell].mT).square().sum((-2, -1))
        torch.testing.assert_close(t.sum(-1), torch.full_like(energy, ROWS - ell))
        torch.testing.assert_close((squares * t).sum(-1), energy)
        limits = [
            (top, energy - squares[:, ell + 1 :].sum(-1)),
            (W, ell * top),
            (W, energy - squares[:, 2 * ell :].sum(-1)),
            (W, C / squares[:, -1]),
            (weighted, (C * W).sqrt()),
            (weighted, top * OVER[:, :ell].sum(-1)),
            (weighted, (OVER**3 * t).sum(-1)),
            (shared, torch.full_like(W, ell)),
            (shared, W / squares[:, -1]),
            (energy, squares[:, : ROWS - ell].sum(-1)),
        ]
        for c in squares.T[:, :, None]:
            shifted = (squares - c).square()
            limits += [
                (top, c[:, 0] + ((squares - c).clamp_min(0) * t).sum(-1)),
                (C, (shifted * t).sum(-1)),
                (C, shifted.topk(ell).values.sum(-1)),
            ]
        for number, (found, limit) in enumerate(limits):
            assert (found <= limit + 1e-9).all(), number


@pytest.mark.parametrize(("ell", "h"), [(2, 0), (5, 0), (7, 0.5), (7, 1), (12, 2)])
def test_the_bounds_on_the_rest_are_their_closed_forms(ell, h):
    left = ROWS - ell
    for spectrum in OVER[[0, 1, 3, 13, 14, 15]]:
        sigma = spectrum.tolist()
        missed = [1.0] * ROWS
        for k in range(1, ell - 1):
            for i in range(k):
                f = sum((x / sigma[i]) ** (4 * h + 2) for x in sigma[k:]) / (ell - k - 1)
                missed[i] = min(missed[i], f / (1 + f))
        found = bounds.missed_directions(spectrum, ell, h)
        torch.testing.assert_close(found, torch.tensor(missed).double(), rtol=1e-6, atol=1e-12)

        def most(weights, missed=missed):
            total, room = 0.0, float(left)
            for weight, part in sorted(zip(weights, missed, strict=True), reverse=True):
                total, room = total + weight * min(part, room), room - min(part, room)
            return total

        def tail(k, sigma=sigma):
            return sum(x * x for x in sigma[k:])

        squares = [x * x for x in sigma]
        energy = most(squares)
        norm = energy - tail(ell + 1)
        coupling = math.inf
        for c in squares:
            parts_above = (max(y - c, 0) * t for y, t in zip(squares, missed, strict=True))
            norm = min(norm, c + sum(parts_above))
            shifted = [(y - c) ** 2 for y in squares]
            coupling = min(coupling, most(shifted), sum(sorted(shifted)[-ell:]))
        overlap = min(ell * norm, energy - tail(2 * ell), coupling / squares[-1])
        weighted = min(
            math.sqrt(coupling * overlap), norm * sum(sigma[:ell]), most([x**3 for x in sigma])
        )
        shared = min(ell * energy, sum(squares[:left]) * coupling / squares[-1] ** 2)
        rest = bounds.sketched_rest_bound(spectrum, ell, h)
        for name, value in {
            "energy": energy,
            "squared_norm": norm,
            "coupling": coupling,
            "overlap": overlap,
            "weighted_overlap": weighted,
            "shared_rows": shared,
        }.items():
            assert float(getattr(rest, name)) == pytest.approx(value, rel=1e-6, abs=1e-12), name


def test_the_rest_of_a_flat_spectrum_is_known():
    found = bounds.sketched_rest_bound(3 * torch.ones(20), 6)
    assert float(found.energy) == pytest.approx(9 * 14)
    assert float(found.squared_norm) == pytest.approx(9)
    for each in (found.coupling, found.overlap, found.weighted_overlap, found.shared_rows):
        assert float(each) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("h", [0, 0.5, 1, 2])
def test_the_energy_is_never_above_that_of_the_captured_energy_lemma(h):
    whole = OVER.square().sum(-1)
    energy = bounds.sketched_rest_bound(OVER, 9, h).energy
    for s in range(1, 8):
        lemma = whole - bounds.randomized_polar_bound(OVER, s, 9 - s, h).A
        assert (energy <= lemma * (1 + 1e-12)).all()
