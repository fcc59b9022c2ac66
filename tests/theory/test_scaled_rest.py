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
from polarstep.polar.rest_norm import FRESH, MARGIN, rest_norm
from polarstep.products.start_vectors import first_vectors
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


# How long a step can be: κ, the estimate of ‖R‖_op, and δ

WIDE, LONG, ELL = 768, 3072, 128


def least_delta(m, n, unseen):
    """The least δ/‖R‖_op that the bound allows for: ‖T‖²_op = 1 + (‖R‖_op/δ)²."""
    return (bounds.longest_deflated_step(m, n, unseen=unseen) ** 2 - 1) ** -0.5


@pytest.mark.parametrize("carried", ["flat", "a few directions", "one direction", "none"])
def test_the_vectors_hold_as_much_of_a_new_direction_as_is_said(carried):
    """κ of directions that are orthogonal to the carried vectors; a percent of them has less."""
    n, count = LONG, 4000
    g = rng.generator("carried", carried)
    lengths = {"flat": 16, "a few directions": 4, "one direction": 1, "none": 0}[carried]
    W = torch.zeros(n, 16, dtype=torch.float64)
    W[:16, :16] = torch.eye(16)
    W[:, lengths:] = 0
    W *= (16 / max(lengths, 1)) ** 0.5
    V = W + FRESH * first_vectors(WIDE, n, torch.device("cpu"))[0].double().mT
    r = torch.randn(n, count, generator=g, dtype=torch.float64)
    r[:16] = 0
    kappa = (torch.linalg.qr(V).Q.mT @ r).square().sum(0) / r.square().sum(0)
    for unseen in (0.01, 0.2):
        floor = least_delta(WIDE, n, unseen)
        below = MARGIN * bounds.subspace_norm_floor(kappa) < floor
        assert float(below.double().mean()) <= 1.2 * unseen
        if carried == "flat":  # the worst that can be carried; the bound gives little away
            assert float(below.double().mean()) >= 0.5 * unseen


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
        seen = torch.linalg.matrix_norm(W, 2) / sigma[:, 0]
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
    assert MARGIN * float(floor(0.5)) >= 1
    assert MARGIN * float(floor(0.45)) < 1
    assert MARGIN * float(floor(0.065)) >= 0.7


def test_a_mass_outside_its_range_is_refused():
    for bad in (math.nan, 1.5, -0.1):
        with pytest.raises(ValueError, match=f"mass={bad}: expected.*0 ≤ κ ≤ 1"):
            bounds.subspace_norm_floor(bad)


def ratios(size, seeds):
    """δ/‖R‖_op for directions of ``size`` that are new in a flat rest of size one.

    The rest begins in columns of M that were zero before. The head holds the first rows of M.
    """
    Q = torch.eye(WIDE, ELL, dtype=torch.float32)[None]
    flat, carried = torch.eye(WIDE, LONG, dtype=torch.float32)[None], None
    for _ in range(2):
        carried = rest_norm(flat, Q, flat[:, :ELL], 2.0**-23, vectors=carried).vectors
    found = []
    for seed in seeds:
        g = rng.generator("new direction", seed)
        u = torch.randn(WIDE, 1, generator=g, dtype=torch.float32)
        v = torch.randn(1, LONG - WIDE, generator=g, dtype=torch.float32)
        u[:ELL] = 0
        M = flat.clone()
        M[0, :, WIDE:] = size * (u / u.norm()) @ (v / v.norm())
        estimate = rest_norm(M, Q, M[:, :ELL], 2.0**-23, vectors=carried.clone())
        found.append(1 / float(estimate.inverse) / (1 + size**2) ** 0.5)
    return found


def test_delta_on_768x3072_is_above_its_floor(monkeypatch):
    """A new direction of the worst size; with less of the first vectors δ is far below the floor."""
    floor = least_delta(WIDE, LONG, 0.001)
    worst = min(ratios(6.0, range(16)))
    assert floor <= worst <= 1.2 * floor
    assert min(ratios(2.0, range(2)) + ratios(40.0, range(2))) > 1.5 * worst
    assert min(ratios(10.0, range(3))) > floor
    monkeypatch.setattr("polarstep.polar.rest_norm.FRESH", 2.0**-5)
    assert max(ratios(10.0, range(3))) < floor


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
