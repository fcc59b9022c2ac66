"""The bounds of a map that keeps its rest, against what such maps do."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.theory.sketches import STEPS as SETS
from tests.theory.sketches import sketched_basis
from tests.theory.spectra import random_spectra, with_spectrum

from polarstep import Exact, certify, rng
from polarstep.polar.coefficients import evaluate
from polarstep.polar.rest_norm import rest_norm
from polarstep.theory.bounds import deflated as bounds
from polarstep.theory.bounds.lifted import lifted_gamma

M_ROWS, N_COLS = 20, 28
over_sets = pytest.mark.parametrize("polynomials", SETS.values(), ids=SETS.keys())


def operator_norm(X):
    return torch.linalg.matrix_norm(X, 2)


def sketched(M, ell, h, *key):
    """Q of Algorithm 1 with h power iterations, B = QᵀM and its polar factor."""
    Q = sketched_basis(M, ell, h, *key)
    B = Q.mT @ M
    return Q, B, Exact()(B)


def flattened(M, Q, B, Z, delta):
    """X₀ = QZ + R/δ."""
    return Q @ Z + (M - Q @ B) / delta[:, None, None]


def lifted(X, polynomials):
    """p on the singular values."""
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    return (U * evaluate(polynomials, sigma)[..., None, :]) @ Vh


def any_positive(count, *key):
    """Factors from 0.1 to 10, for a δ or a scale that no bound may depend on."""
    return 10 ** (2 * torch.rand(count, generator=rng.generator("any", *key)).double() - 1)


def alignment(M, T):
    return (M * T).sum((-2, -1))


# γ


@pytest.mark.parametrize("ell", [1, 5])
@pytest.mark.parametrize("name", ["none", *SETS])
def test_gamma_of_an_ideal_basis_is_what_the_map_gives(name, ell):
    sigma = random_spectra(12, M_ROWS)
    M = with_spectrum(sigma, M_ROWS, N_COLS)
    Q = torch.linalg.svd(M).U[..., :ell]
    B = Q.mT @ M
    Z = Exact()(B)
    if name == "none":
        delta = 1.1 * sigma[:, ell]
        T = flattened(M, Q, B, Z, delta)
        expected = bounds.ideal_deflated_gamma(sigma, ell, delta)
    else:  # δ may be anything, also far below ‖R‖_op
        delta = any_positive(12, ell) * sigma[:, ell]
        X = flattened(M, Q, B, Z, delta)
        scale = torch.linspace(0.3, 1, 12).double() / operator_norm(X)
        T = lifted(scale[:, None, None] * X, SETS[name])
        expected = bounds.ideal_deflated_gamma(sigma, ell, delta, SETS[name], scale=scale)
    found = 1 - alignment(M, T) / sigma.sum(-1)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@over_sets
def test_the_scale_is_one_over_the_norm_unless_given(polynomials):
    sigma = random_spectra(8, 16)
    for factor in (0.2, 3.0):
        delta = factor * sigma[:, 4]
        norm = (sigma[:, 4] / delta).clamp_min(1)
        found = bounds.ideal_deflated_gamma(sigma, 4, delta, polynomials)
        given = bounds.ideal_deflated_gamma(sigma, 4, delta, polynomials, scale=1 / norm)
        torch.testing.assert_close(found, given)


@over_sets
def test_without_a_head_gamma_does_not_depend_on_delta(polynomials):
    """Then X₀ = M/δ, and s = 1/‖X₀‖_op makes s·X₀ = M/‖M‖_op of it, for a δ of any size."""
    sigma = random_spectra(8, 16)
    expected = bounds.ideal_deflated_gamma(sigma, 0, None, polynomials)
    for factor in (0.2, 3.0):
        found = bounds.ideal_deflated_gamma(sigma, 0, factor * sigma[:, 0], polynomials)
        torch.testing.assert_close(found, expected)


def test_gamma_falls_with_the_head_and_vanishes_for_a_flat_rest():
    sigma = random_spectra(8, 16)
    gammas = torch.stack([bounds.ideal_deflated_gamma(sigma, ell) for ell in range(16)])
    assert (gammas[-1].abs() < 1e-15).all()  # one singular value is a flat rest
    assert (gammas >= -1e-15).all()
    flat = torch.cat([torch.tensor([50.0, 9.0]), torch.ones(10)])
    assert bounds.ideal_deflated_gamma(flat, 2) == pytest.approx(0, abs=1e-15)
    assert bounds.ideal_deflated_gamma(flat, 1) > 0.1


CASES = list(itertools.product((2, 5, 9), (2, 4), (0, 1, 2), (0.3, 1.0, 2.0)))


def test_expected_gamma_is_below_its_bound_over_hundreds_of_cases():
    """E γ by Monte-Carlo for δ = factor·‖R‖_op, the bound taken at the largest δ of all draws."""
    sigma = random_spectra(12, M_ROWS)
    M = with_spectrum(sigma, M_ROWS, N_COLS)
    draws, checked, informative = 16, 0, 0
    for s, p, h, factor in CASES:
        gammas, deltas = [], []
        for draw in range(draws):
            Q, B, Z = sketched(M, s + p, h, "expected", s, p, h, draw)
            delta = factor * operator_norm(M - Q @ B)
            T = flattened(M, Q, B, Z, delta)
            gammas.append(1 - alignment(M, T) / sigma.sum(-1))
            deltas.append(delta)
        largest = torch.stack(deltas).amax(0)
        bound = bounds.expected_deflated_gamma(sigma, s, p, h, largest, d0=M_ROWS)
        found = torch.stack(gammas)
        error = found.std(0) / math.sqrt(draws)
        assert (found.mean(0) <= bound + 4 * error + 1e-9).all(), (s, p, h, factor)
        checked += len(sigma)
        informative += int((bound < 0.5).sum())
    assert checked == 648
    assert informative > 400  # a bound of one is no test


def test_expected_gamma_is_its_closed_form():
    sigma = random_spectra(8, 20, seed=2)
    s, p, h = 6, 4, 1
    decay = sigma[:, s] / sigma[:, s - 1]
    energy = (1 + s / (p - 1) * decay**4) * sigma[:, s:].square().sum(-1)
    left, delta = 20 - s - p, torch.full((8,), 1.5, dtype=torch.float64)
    low = energy <= left * delta.square() / 4
    closed = ((left * energy).sqrt() - energy / delta) / sigma.sum(-1)
    found = bounds.expected_deflated_gamma(sigma, s, p, h, delta)
    assert low.sum() >= 4
    torch.testing.assert_close(found[low], closed[low], atol=1e-12, rtol=0)
    nothing_left = bounds.expected_deflated_gamma(sigma, 16, 4)
    assert torch.equal(nothing_left, torch.zeros(8, dtype=torch.float64))


def test_expected_gamma_of_one_matrix_is_that_of_a_batch():
    sigma = random_spectra(3, 20, seed=2)
    each = torch.stack([bounds.expected_deflated_gamma(one, 6, 4, 1, 1.5) for one in sigma])
    torch.testing.assert_close(each, bounds.expected_deflated_gamma(sigma, 6, 4, 1, 1.5))


def certificate(M, Q, B, Z, **given):
    return bounds.certified_deflated_gamma(
        torch.linalg.matrix_norm(M),
        torch.linalg.matrix_norm(B),
        alignment(B, Z),
        0.0,
        min(M.shape[-2:]) - B.shape[-2],
        **given,
    )


@pytest.mark.parametrize("h", [0, 1])
@pytest.mark.parametrize("factor", [0.2, 0.75, 1.0, 1.2])
def test_the_certificate_of_a_scaled_rest_is_above_gamma(h, factor):
    M = with_spectrum(random_spectra(24, M_ROWS), M_ROWS, N_COLS)
    informative = 0
    for ell in (3, 8):
        Q, B, Z = sketched(M, ell, h, "certificate", ell)
        delta = factor * operator_norm(M - Q @ B)
        T = flattened(M, Q, B, Z, delta)
        bound = certificate(M, Q, B, Z, delta=delta)
        assert (certify(M, T).gamma <= bound + 1e-9).all()
        measured = certificate(M, Q, B, Z, alignment=alignment(M, T))
        torch.testing.assert_close(bound, measured, atol=1e-9, rtol=0)
        informative += int((bound < 0.5).sum())
    assert informative > 30


@over_sets
@pytest.mark.parametrize("h", [0, 1])
def test_the_certificate_of_steps_is_above_gamma_whatever_delta_and_scale_are(polynomials, h):
    M = with_spectrum(random_spectra(24, M_ROWS), M_ROWS, N_COLS)
    informative = 0
    for ell in (3, 8):
        Q, B, Z = sketched(M, ell, h, "certificate", ell)
        X = flattened(M, Q, B, Z, any_positive(24, ell, h) * operator_norm(M - Q @ B))
        for reach in (0.5, 1.0, 1.17):
            T = lifted(X * (reach / operator_norm(X))[:, None, None], polynomials)
            bound = certificate(M, Q, B, Z, alignment=alignment(M, T))
            assert (certify(M, T).gamma <= bound + 1e-9).all()
            informative += int((bound < 0.5).sum())
    assert informative > 30


def test_the_certificate_on_real_momentum(momentum):
    for matrices in momentum.values():
        M = matrices[::3].double()
        M = M if M.shape[-2] <= M.shape[-1] else M.mT
        Q, B, Z = sketched(M, 8, 1, "momentum")
        delta = 1 / rest_norm(M, Q, B, 2.0**-52).inverse[:, 0, 0]
        T = flattened(M, Q, B, Z, delta)
        bound = certificate(M, Q, B, Z, delta=delta)
        assert bound.isfinite().all()
        assert (certify(M, T).gamma <= bound + 1e-9).all()
        assert bound.median() < 0.6


def test_the_certificate_is_sharp_for_a_flat_rest_and_without_one():
    sigma = torch.cat([torch.tensor([9.0, 5.0]), torch.ones(10)]).double()[None]
    M = with_spectrum(sigma, 12, 16)
    Q = torch.linalg.svd(M).U[..., :2]
    B = Q.mT @ M
    Z = Exact()(B)
    one, never = torch.ones(1).double(), torch.full((1,), math.inf).double()
    assert float(certificate(M, Q, B, Z, delta=one)) == pytest.approx(0, abs=1e-5)
    low_rank = float(certify(M, Q @ Z).gamma)
    assert float(certificate(M, Q, B, Z, delta=never)) == pytest.approx(low_rank, abs=1e-9)


def test_the_certificate_of_zero_is_zero():
    zero = torch.zeros(2, dtype=torch.float64)
    never = torch.full((2,), math.inf, dtype=torch.float64)
    found = bounds.certified_deflated_gamma(zero, zero, zero, 0.0, 5, delta=never)
    assert torch.equal(found, zero)


# ν


@pytest.mark.parametrize("h", [0, 1])
@pytest.mark.parametrize("too_small", [0.0, 0.3])
def test_nu_of_a_scaled_rest_is_below_its_bound(h, too_small):
    M = with_spectrum(random_spectra(24, M_ROWS), M_ROWS, N_COLS)
    Q, B, Z = sketched(M, 4, h, "nu")
    R = M - Q @ B
    delta = (1 - too_small) * operator_norm(R)
    nu = certify(M, flattened(M, Q, B, Z, delta)).nu
    whatever = bounds.deflated_nu(too_small=too_small)
    overlaps = operator_norm(Z @ R.mT) / delta
    for found, overlap in zip(nu.tolist(), overlaps.tolist(), strict=True):
        known = bounds.deflated_nu(overlap=overlap, too_small=too_small)
        assert found <= known + 1e-9
        assert known <= whatever + 1e-9


@pytest.mark.parametrize("too_small", [0.0, 0.3])
def test_nu_of_a_basis_that_is_not_orthonormal_is_below_its_bound(too_small):
    """As in 16 bits, where B = QᵀM and R = M − QB are of a Q with ‖QᵀQ − I‖ of a percent and more."""
    M = with_spectrum(random_spectra(24, M_ROWS), M_ROWS, N_COLS)
    M[12:] += (
        1e4 * M[12:, :, :1] @ M[12:, :1]
    )  # what leaks of one large direction is most of the rest
    leaks = []
    for error in (1e-3, 0.02, 0.3):
        Q = sketched_basis(M, 4, 0, "not orthonormal")
        noise = torch.randn(4, 4, generator=rng.generator("noise"), dtype=torch.float64)
        Q = Q @ (torch.eye(4, dtype=torch.float64) + error * noise)
        stretches = operator_norm(Q).clamp_min(1)
        B = Q.mT @ M
        Z, R = Exact()(B), M - Q @ B
        delta = (1 - too_small) * operator_norm(R)
        nu = certify(M, flattened(M, Q, B, Z, delta)).nu
        found = zip(
            nu.tolist(),
            (operator_norm(Z @ R.mT) / delta).tolist(),
            stretches.tolist(),
            (operator_norm(Q.mT @ R) / delta).tolist(),
            strict=True,
        )
        for value, overlap, stretch, leak in found:
            known = {"too_small": too_small, "stretch": stretch}
            bound = bounds.deflated_nu(overlap=overlap, leak=leak, **known)
            assert value <= bound + 1e-9
            assert bound <= bounds.deflated_nu(leak=leak, **known) + 1e-12
            whatever = bounds.deflated_nu(leak=None, **known)
            assert whatever == pytest.approx(stretch + 1 / (1 - too_small) - 1)
            assert bound <= whatever + 1e-12
            leaks.append(leak)
    assert min(leaks) < 0.01
    assert max(leaks) > 0.5


def test_expected_nu_is_below_its_bound():
    """E ν by Monte-Carlo for δ = (1 − too_small)·‖R‖_op."""
    k = torch.arange(1, M_ROWS + 1).double()
    gaps = torch.stack([torch.where(k <= few, 30.0, 1.0) for few in (1, 2, 4)])
    uneven = gaps * (1 + 0.2 * torch.rand(3, M_ROWS, generator=rng.generator("uneven")))
    sigma = torch.cat([gaps, uneven, random_spectra(6, M_ROWS)])
    sigma = sigma.sort(descending=True).values
    M = with_spectrum(sigma, M_ROWS, N_COLS)
    informative = 0
    for ell, h, too_small in itertools.product((8, 12), (0, 0.5, 1, 2), (0.0, 0.3)):
        found = []
        for draw in range(16):
            Q, B, Z = sketched(M, ell, h, "expected nu", ell, h, draw)
            delta = (1 - too_small) * operator_norm(M - Q @ B)
            found.append(certify(M, flattened(M, Q, B, Z, delta)).nu)
        nu = torch.stack(found)
        bound = bounds.expected_deflated_nu(sigma, ell, h, too_small=too_small)
        error = nu.std(0) / math.sqrt(len(found))
        assert (nu.mean(0) <= bound + 4 * error + 1e-9).all(), (ell, h, too_small)
        whatever = bounds.deflated_nu(too_small=too_small)
        assert (bound <= whatever + 1e-12).all()
        informative += int((bound < 0.9 * whatever).sum())
    assert informative > 40  # of 192
    flat = bounds.expected_deflated_nu(torch.ones(M_ROWS), 8)
    assert flat == pytest.approx(0, abs=1e-12)


def test_nu_is_attained_where_head_and_rest_share_a_row():
    row = torch.randn(1, 9, generator=rng.generator("row"), dtype=torch.float64)
    M = torch.cat([3 * row, row])
    T = torch.cat([row, row]) / row.norm()
    nu = float(certify(M, T).nu)
    assert bounds.deflated_nu() == pytest.approx(nu, abs=1e-12) == math.sqrt(2) - 1
    assert bounds.deflated_nu(overlap=0.5) == pytest.approx(math.sqrt(1.5) - 1)
    assert bounds.deflated_nu(too_small=0.3) == pytest.approx(math.hypot(1, 1 / 0.7) - 1)


FLAT = torch.ones(8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bounds.ideal_deflated_gamma(FLAT, 8), "0 ≤ ℓ < 8.*no rest"),
        (lambda: bounds.ideal_deflated_gamma(FLAT, 2, 0.5), r"= 2: expected at most 1.*delta=None"),
        (
            lambda: bounds.ideal_deflated_gamma(FLAT, 2, 2.0, SETS["cubic"], scale=1.5),
            r"s·‖X₀‖_op = 1\.5: expected at most 1.*scale=None",
        ),
        (
            lambda: bounds.certified_deflated_gamma(FLAT, FLAT, FLAT, 0.0, 4),
            "neither of delta and alignment",
        ),
        (lambda: bounds.expected_deflated_gamma(FLAT, 8, 4), "1 ≤ s < r = 8"),
        (lambda: bounds.expected_deflated_gamma(FLAT, 2, 1), "p ≥ 2"),
        (lambda: bounds.expected_deflated_gamma(FLAT, 4, 5), r"ℓ ≤ min\(m, n\) = 8"),
        (lambda: bounds.deflated_nu(too_small=1.0), "too_small=1.0"),
        (lambda: bounds.deflated_nu(overlap=-0.5), "overlap=-0.5"),
        (lambda: bounds.deflated_nu(overlap=math.nan), "overlap=nan"),
        (lambda: bounds.deflated_nu(leak=-0.1), "leak=-0.1: expected ‖QᵀR‖_op/δ"),
        (lambda: bounds.deflated_nu(stretch=0.9), "stretch=0.9: expected ‖Q‖_op"),
        (lambda: bounds.expected_deflated_nu(FLAT, 8), "1 ≤ ℓ < 8 = rank.*no rest"),
    ],
)
def test_errors_name_the_assumption_and_the_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()


SPECTRUM = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.1, 0.1])
BASIS = torch.eye(3)[:, :1]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("delta", lambda bad: bounds.ideal_deflated_gamma(SPECTRUM, 2, bad)),
        (
            "scale",
            lambda bad: bounds.ideal_deflated_gamma(SPECTRUM, 2, None, [(1.5, -0.5)], scale=bad),
        ),
        ("delta", lambda bad: bounds.expected_deflated_gamma(SPECTRUM, 1, 2, 0, bad)),
        ("scale", lambda bad: lifted_gamma(torch.eye(3), BASIS, [(1.5, -0.5)], 1.0, scale=bad)),
        ("delta", lambda bad: lifted_gamma(torch.eye(3), BASIS, [(1.5, -0.5)], bad)),
    ],
)
def test_a_size_that_is_no_positive_number_is_refused(name, call, bad):
    """A negative δ gave a γ all the same, as large as without steps or below zero."""
    with pytest.raises(ValueError, match=f"{name}=.*: expected"):
        call(bad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_plain_numbers_go_with_a_spectrum_on_a_gpu():
    sigma, steps = SPECTRUM.double(), [(1.5, -0.5)]
    for call in (
        lambda of: bounds.ideal_deflated_gamma(of(sigma), 2, 0.3, steps, scale=0.5),
        lambda of: bounds.expected_deflated_gamma(of(sigma), 1, 2, 0, 0.5),
        lambda of: lifted_gamma(of(torch.diag(sigma[:3])), of(BASIS), steps, 0.5, scale=0.5),
    ):
        found, expected = call(lambda x: x.cuda()), call(lambda x: x)
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), expected)


def test_the_certificate_of_a_step_that_is_not_finite_is_no_number():
    """γ = 0 would say that nothing was lost."""
    norm = torch.tensor([1.0, math.nan, 0.0])
    found = bounds.certified_deflated_gamma(norm, norm, norm, 0.0, 4, alignment=norm)
    torch.testing.assert_close(found, norm.double() * 0, equal_nan=True)
