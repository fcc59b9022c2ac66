"""The bounds of a map that keeps its rest, against what such maps do."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.theory.spectra import random_spectra, with_spectrum

from polarstep import Exact, certify, rng
from polarstep.polar import deflation
from polarstep.polar.coefficients import polar_express, resolve
from polarstep.theory.bounds import deflated as bounds

M_ROWS, N_COLS = 20, 28
SETS = {
    "none": (),
    "cubic": resolve("cubic", 1),
    "quintic x2": resolve("quintic", 2),
    "cubic, then quintic": resolve("cubic", 1) + resolve("quintic", 1),
    "jordan x2": resolve("jordan", 2),
    "minimax": polar_express(0.2, 1),
}
PAPER = ("none", "cubic", "quintic x2")
over_sets = pytest.mark.parametrize("polynomials", SETS.values(), ids=SETS.keys())


def operator_norm(X):
    return torch.linalg.matrix_norm(X, 2)


def sketched(M, ell, h, *key):
    """Q of Algorithm 1 with h power iterations, B = QᵀM and its polar factor."""
    Omega = torch.randn(M.shape[-1], ell, generator=rng.generator(*key), dtype=M.dtype)
    Q = torch.linalg.qr(M @ Omega).Q
    for _ in range(h):
        Q = torch.linalg.qr(M @ torch.linalg.qr(M.mT @ Q).Q).Q
    B = Q.mT @ M
    return Q, B, Exact()(B)


def apart(M, Q, B, Z, delta, polynomials):
    if not polynomials:
        return deflation.scaled_rest(M, Q, B, Z, delta)
    return deflation.lifted_apart(M, Q, B, Z, delta, polynomials)


def apart_scale(polynomials):
    return deflation.apart_scale(polynomials) if polynomials else 1.0


def alignment(M, T):
    return (M * T).sum((-2, -1))


# γ


@over_sets
@pytest.mark.parametrize("ell", [1, 5])
def test_gamma_of_an_ideal_basis_is_what_the_map_gives(polynomials, ell):
    sigma = random_spectra(12, M_ROWS)
    M = with_spectrum(sigma, M_ROWS, N_COLS)
    Q = torch.linalg.svd(M).U[..., :ell]
    B = Q.mT @ M
    Z = Exact()(B)
    delta = 1.1 * sigma[:, ell]
    args = M, Q, B, Z, delta[:, None, None]
    found = 1 - alignment(M, apart(*args, polynomials)) / sigma.sum(-1)
    expected = bounds.ideal_deflated_gamma(
        sigma, ell, delta, polynomials, scale=apart_scale(polynomials)
    )
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    if polynomials:
        T = deflation.lifted_jointly(*args, polynomials)
        found = 1 - alignment(M, T) / sigma.sum(-1)
        s = deflation.joint_scale(polynomials)
        expected = bounds.ideal_deflated_gamma(
            sigma, ell, delta, polynomials, scale=s, form="jointly"
        )
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_gamma_falls_with_the_head_and_vanishes_for_a_flat_rest():
    sigma = random_spectra(8, 16)
    gammas = torch.stack([bounds.ideal_deflated_gamma(sigma, ell) for ell in range(16)])
    assert (gammas[-1].abs() < 1e-15).all()  # one singular value is a flat rest
    assert (gammas >= -1e-15).all()
    flat = torch.cat([torch.tensor([50.0, 9.0]), torch.ones(10)])
    assert bounds.ideal_deflated_gamma(flat, 2) == pytest.approx(0, abs=1e-15)
    assert bounds.ideal_deflated_gamma(flat, 1) > 0.1


CASES = list(itertools.product((2, 5, 9), (2, 4), (0, 1, 2), PAPER))


def test_expected_gamma_is_below_its_bound_over_hundreds_of_cases():
    """E γ by Monte-Carlo for δ = ‖R‖_op, the bound taken at the largest δ of all draws."""
    sigma = random_spectra(12, M_ROWS)
    M = with_spectrum(sigma, M_ROWS, N_COLS)
    draws, checked, informative = 16, 0, 0
    for s, p, h, name in CASES:
        polynomials, gammas, deltas = SETS[name], [], []
        for draw in range(draws):
            Q, B, Z = sketched(M, s + p, h, "expected", s, p, h, draw)
            delta = operator_norm(M - Q @ B)
            T = apart(M, Q, B, Z, delta[:, None, None], polynomials)
            gammas.append(1 - alignment(M, T) / sigma.sum(-1))
            deltas.append(delta)
        largest = torch.stack(deltas).amax(0)
        bound = bounds.expected_deflated_gamma(
            sigma, s, p, h, largest, polynomials, scale=apart_scale(polynomials), d0=M_ROWS
        )
        found = torch.stack(gammas)
        error = found.std(0) / math.sqrt(draws)
        assert (found.mean(0) <= bound + 4 * error + 1e-9).all(), (s, p, h, name)
        checked += len(sigma)
        informative += int((bound < 0.5).sum())
    assert checked == 648
    assert informative > 400  # a bound of one is no test


def test_expected_gamma_without_polynomials_is_its_closed_form():
    sigma = random_spectra(8, 20, seed=2)
    s, p, h = 6, 4, 1
    decay = sigma[:, s] / sigma[:, s - 1]
    energy = (1 + s / (p - 1) * decay**4) * sigma[:, s:].square().sum(-1)
    left, delta = 20 - s - p, torch.full((8,), 1.5, dtype=torch.float64)
    low = energy <= left * delta.square() / 4
    closed = ((left * energy).sqrt() - energy / delta) / sigma.sum(-1)
    found = bounds.expected_deflated_gamma(sigma, s, p, h, delta)
    assert low.sum() >= 4
    torch.testing.assert_close(found[low], closed[low], atol=1e-4, rtol=1e-3)
    nothing_left = bounds.expected_deflated_gamma(sigma, 16, 4)
    assert torch.equal(nothing_left, torch.zeros(8, dtype=torch.float64))


def certificate(M, Q, B, Z, delta, polynomials, **options):
    return bounds.certified_deflated_gamma(
        torch.linalg.matrix_norm(M),
        torch.linalg.matrix_norm(B),
        alignment(B, Z),
        0.0,
        delta,
        min(M.shape[-2:]) - B.shape[-2],
        polynomials,
        scale=apart_scale(polynomials),
        **options,
    )


@over_sets
@pytest.mark.parametrize("h", [0, 1])
@pytest.mark.parametrize("factor", [0.75, 1.0, 1.2])
def test_the_certificate_is_above_gamma(polynomials, h, factor):
    M = with_spectrum(random_spectra(24, M_ROWS), M_ROWS, N_COLS)
    informative = 0
    for ell in (3, 8):
        Q, B, Z = sketched(M, ell, h, "certificate", ell)
        delta = factor * operator_norm(M - Q @ B)
        T = apart(M, Q, B, Z, delta[:, None, None], polynomials)
        gamma = certify(M, T).gamma
        bound = certificate(M, Q, B, Z, delta, polynomials)
        assert (gamma <= bound + 1e-9).all()
        measured = certificate(M, Q, B, Z, delta, polynomials, alignment=alignment(M, T))
        assert (gamma <= measured + 1e-9).all()
        informative += int((bound < 0.5).sum())
        if polynomials:
            T = deflation.lifted_jointly(M, Q, B, Z, delta[:, None, None], polynomials)
            bound = certificate(M, Q, B, Z, delta, polynomials, alignment=alignment(M, T))
            assert (certify(M, T).gamma <= bound + 1e-9).all()
    assert informative > 30


@pytest.mark.parametrize("polynomials", [SETS[name] for name in PAPER], ids=PAPER)
def test_the_certificate_on_real_momentum(polynomials, momentum):
    for matrices in momentum.values():
        M = matrices[::3].double()
        M = M if M.shape[-2] <= M.shape[-1] else M.mT
        Q, B, Z = sketched(M, 8, 1, "momentum")
        norm = deflation.frobenius_norm(M)
        delta = deflation.rest_norm(M, Q, B, norm, deflation.rest_frobenius(norm, B)).delta
        T = apart(M, Q, B, Z, delta, polynomials)
        bound = certificate(M, Q, B, Z, delta[:, 0, 0], polynomials)
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
    assert float(certificate(M, Q, B, Z, one, ())) == pytest.approx(0, abs=1e-5)
    low_rank = float(certify(M, Q @ Z).gamma)
    assert float(certificate(M, Q, B, Z, never, ())) == pytest.approx(low_rank, abs=1e-9)


def test_the_certificate_of_zero_is_zero():
    zero = torch.zeros(2, dtype=torch.float64)
    never = torch.full((2,), math.inf, dtype=torch.float64)
    found = bounds.certified_deflated_gamma(zero, zero, zero, 0.0, never, 5)
    assert torch.equal(found, zero)


# ν


@over_sets
@pytest.mark.parametrize("h", [0, 1])
@pytest.mark.parametrize("too_small", [0.0, 0.3])
def test_nu_is_below_its_bound(polynomials, h, too_small):
    sigma = random_spectra(24, M_ROWS)
    M = with_spectrum(sigma, M_ROWS, N_COLS)
    Q, B, Z = sketched(M, 4, h, "nu")
    R = M - Q @ B
    delta = (1 - too_small) * operator_norm(R)[:, None, None]
    forms = {"apart": apart(M, Q, B, Z, delta, polynomials)}
    scales = {"apart": apart_scale(polynomials)}
    overlaps = {"apart": operator_norm(Z @ (forms["apart"] - Q @ Z).mT)}
    if polynomials:
        forms["jointly"] = deflation.lifted_jointly(M, Q, B, Z, delta, polynomials)
        scales["jointly"] = deflation.joint_scale(polynomials)
        overlaps["jointly"] = operator_norm(Z @ R.mT / delta)
    for form, T in forms.items():
        options = {"scale": scales[form], "form": form, "too_small": too_small}
        nu = certify(M, T).nu
        whatever = bounds.deflated_nu(polynomials, **options)
        for found, overlap in zip(nu.tolist(), overlaps[form].tolist(), strict=True):
            known = bounds.deflated_nu(polynomials, overlap=overlap, **options)
            assert found <= known + 1e-9
            assert known <= whatever + 1e-6
        if form == "jointly" and polynomials in (SETS["cubic"], SETS["quintic x2"]):
            assert too_small > 0 or whatever <= 3e-6


def test_nu_is_attained_where_head_and_rest_share_a_row():
    row = torch.randn(1, 9, generator=rng.generator("row"), dtype=torch.float64)
    M = torch.cat([3 * row, row])
    T = torch.cat([row, row]) / row.norm()
    nu = float(certify(M, T).nu)
    assert bounds.deflated_nu() == pytest.approx(nu, abs=1e-12) == math.sqrt(2) - 1
    assert bounds.deflated_nu(overlap=0.5) == pytest.approx(math.sqrt(1.5) - 1)
    assert bounds.deflated_nu(too_small=0.3) == pytest.approx(math.hypot(1, 1 / 0.7) - 1)


# ‖R‖_op


@pytest.mark.parametrize("count", [1, 3])
def test_the_norm_that_vectors_see_is_above_its_floor(count):
    sigma = random_spectra(60, 16, seed=4)
    R = with_spectrum(sigma, 16, 24, seed=4)
    r = torch.linalg.svd(R).Vh[:, 0, :, None]
    for part in (0.01, 0.3, 1.0):
        V = torch.randn(60, 24, count, generator=rng.generator("v", count), dtype=R.dtype)
        V[..., :1] += r * 5 * part
        V = torch.linalg.qr(V).Q
        kappa = (V.mT @ r).square().sum((-2, -1))
        W = R.mT @ torch.linalg.qr(R @ V).Q
        seen = operator_norm(W) / sigma[:, 0]
        assert (seen >= bounds.subspace_norm_floor(kappa) - 1e-12).all()


@pytest.mark.parametrize("kappa", [0.5, 0.065, 0.001])
def test_the_floor_is_attained(kappa):
    root = math.sqrt(kappa)
    y = root / (1 + root)
    R = torch.diag(torch.tensor([1.0, math.sqrt(y)], dtype=torch.float64))
    v = torch.tensor([[root], [math.sqrt(1 - kappa)]], dtype=torch.float64)
    u = R @ v
    seen = float(torch.linalg.vector_norm(R.mT @ u) / torch.linalg.vector_norm(u))
    assert float(bounds.subspace_norm_floor(kappa)) == pytest.approx(seen, rel=1e-12)


def test_the_margin_covers_what_the_docstring_says():
    floor = bounds.subspace_norm_floor
    assert deflation.MARGIN * float(floor(0.5)) >= 1
    assert deflation.MARGIN * float(floor(0.45)) < 1
    assert deflation.MARGIN * float(floor(0.065)) >= 1 - deflation.TOLERATED_ERROR


FLAT = torch.ones(8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bounds.ideal_deflated_gamma(FLAT, 8), "0 ≤ ℓ < 8.*no rest"),
        (lambda: bounds.ideal_deflated_gamma(FLAT, 2, 0.5), r"below ‖R‖_op.*delta=None"),
        (lambda: bounds.expected_deflated_gamma(FLAT, 8, 4), "1 ≤ s < r = 8"),
        (lambda: bounds.expected_deflated_gamma(FLAT, 2, 1), "p ≥ 2"),
        (lambda: bounds.expected_deflated_gamma(FLAT, 4, 5), r"ℓ ≤ min\(m, n\) = 8"),
        (lambda: bounds.deflated_nu(too_small=1.0), "too_small=1.0"),
        (lambda: bounds.subspace_norm_floor(1.5), "0 ≤ κ ≤ 1"),
    ],
)
def test_errors_name_the_assumption_and_the_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()
