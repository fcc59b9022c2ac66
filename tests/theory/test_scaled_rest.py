"""The bounds of a map whose rest is only scaled, against what such maps do."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.spectra import operator_norm
from tests.theory.matrices import (
    COLS,
    ROWS,
    alignment,
    flattened,
    random_spectra,
    sketched,
    sketched_basis,
    with_spectrum,
)

from polarstep import Exact, certify, rng
from polarstep.theory import bounds

# γ

CASES = list(itertools.product((2, 5, 9), (2, 4), (0, 1, 2), (0.3, 1.0, 2.0)))


def test_expected_gamma_is_below_its_bound_over_hundreds_of_cases():
    """E γ by Monte-Carlo for δ = factor·‖R‖_op, the bound taken at the largest δ of all draws."""
    sigma = random_spectra(12, ROWS)
    M = with_spectrum(sigma, ROWS, COLS)
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
        bound = bounds.expected_deflated_gamma(sigma, s, p, h, largest, d0=ROWS)
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


# ν


@pytest.mark.parametrize("h", [0, 1])
@pytest.mark.parametrize("too_small", [0.0, 0.3])
def test_nu_of_a_scaled_rest_is_below_its_bound(h, too_small):
    M = with_spectrum(random_spectra(24, ROWS), ROWS, COLS)
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
    M = with_spectrum(random_spectra(24, ROWS), ROWS, COLS)
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
    k = torch.arange(1, ROWS + 1).double()
    gaps = torch.stack([torch.where(k <= few, 30.0, 1.0) for few in (1, 2, 4)])
    uneven = gaps * (1 + 0.2 * torch.rand(3, ROWS, generator=rng.generator("uneven")))
    sigma = torch.cat([gaps, uneven, random_spectra(6, ROWS)])
    sigma = sigma.sort(descending=True).values
    M = with_spectrum(sigma, ROWS, COLS)
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
    flat = bounds.expected_deflated_nu(torch.ones(ROWS), 8)
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


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_delta_that_is_no_positive_number_is_refused(bad):
    """A negative δ gave a γ all the same, as large as without steps or below zero."""
    with pytest.raises(ValueError, match=r"delta=.*: expected"):
        bounds.expected_deflated_gamma(FLAT, 1, 2, 0, bad)
