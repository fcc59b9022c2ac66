"""The cost formulas against products that are counted as they run, and against the paper's numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polarstep import flops
from polarstep.numerics import norm_products

SHAPES = [(5, 5), (7, 12), (12, 7), (1, 6)]


def counted(function, *arguments) -> int:
    """FLOPs of the matrix products that ``function`` runs."""
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


def horner(G, degree):
    """r(G) of degree (degree − 1)/2 ≥ 1: the first power is free."""
    P = G
    for _ in range((degree - 3) // 2):
        P = P @ G
    return P


def plain(X, steps, degree):
    for _ in range(steps):
        X = horner(X @ X.mT, degree) @ X
    return X


def on_the_gram_matrix(X, steps, degree):
    R, W = X @ X.mT, None
    for step in range(steps):
        P = horner(R, degree)
        W = P if W is None else P @ W
        if step < steps - 1:
            R = P @ (P @ R)
    return W @ X


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("degree", [3, 5, 7, 9])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_polynomials_by_horners_rule(m, n, degree, steps):
    wide = torch.ones(min(m, n), max(m, n))
    assert flops.newton_schulz(m, n, steps, degree) == counted(plain, wide, steps, degree)
    expected = counted(on_the_gram_matrix, wide, steps, degree)
    assert flops.gram_newton_schulz(m, n, steps, degree) == expected


@pytest.mark.parametrize("formula", [flops.newton_schulz, flops.gram_newton_schulz])
def test_a_number_of_products_takes_the_place_of_horners_rule(formula):
    assert formula(4, 9, 3, 9, products=2) == formula(4, 9, 3, 7)
    assert formula(4, 9, 3, 17, products=0) == formula(4, 9, 3, 3)
    assert formula(4, 9, 3) == formula(4, 9, 3, 5)
    assert formula(4, 9, 0) == 0


@pytest.mark.parametrize("degree", [-1, 1, 2, 4, 8])
def test_a_degree_that_is_not_odd_or_too_small_is_refused(degree):
    with pytest.raises(ValueError, match=f"degree={degree}: expected an odd degree ≥ 3"):
        flops.newton_schulz(4, 4, 1, degree)


def test_the_gram_form_pays_off_for_wide_matrices_alone():
    assert flops.gram_newton_schulz(64, 64, 5) > flops.newton_schulz(64, 64, 5)
    assert flops.gram_newton_schulz(64, 512, 5) < flops.newton_schulz(64, 512, 5)


def householder(m, ell):
    """2mℓ² − ⅔ℓ³ to the leading order: a reflection updates all columns to its right."""
    return sum(4 * (m - k) * (ell - k) for k in range(min(m, ell)))


@pytest.mark.parametrize(("m", "ell"), [(2000, 100), (2000, 1000), (1500, 1500)])
def test_qr_is_householders(m, ell):
    assert flops.qr(m, ell) == pytest.approx(householder(m, ell), rel=0.03)


def test_qr_in_whole_flops():
    assert flops.qr(10, 3) == 2 * 10 * 9 - 18
    assert flops.qr(10, 1) == 20  # ⅔ is less than one
    assert flops.qr(3, 10) == 2 * 3 * 100 - 18


def test_sketches_and_normalization():
    M, Omega = torch.ones(6, 10), torch.ones(10, 4)
    assert flops.gaussian_sketch(6, 10, 4) == counted(torch.matmul, M, Omega) == 480
    assert flops.kaczmarz_sketch(6, 10, 4) == 2 * 6 * 10 + 6 * 4
    assert flops.normalization(6, 10) == 3 * 60


@pytest.mark.parametrize(("power", "products"), [(0, 0), (0.5, 1), (1, 2), (1.5, 3), (2, 4)])
def test_an_iteration_is_two_products(power, products):
    assert flops.power_products(power) == products
    assert isinstance(flops.power_products(power), int)


@pytest.mark.parametrize("power", [-0.5, -1, 0.25, 1.1])
def test_other_powers_are_refused(power):
    with pytest.raises(ValueError, match="expected 0, ½, 1, 1½"):
        flops.power_products(power)


def algorithm_1(M, ell, power):
    """The products of Algorithm 1, without those inside QR and the inner map."""
    Y = M @ torch.ones(M.shape[1], ell)
    for k in range(2 * power):
        Y = (M.mT if k % 2 == 0 else M) @ Y
    Q = torch.ones(M.shape[0], min(M.shape[0], ell))
    return Q @ (Q.mT @ M)


@pytest.mark.parametrize(("m", "n", "ell"), [(12, 20, 5), (6, 20, 9)])
@pytest.mark.parametrize("power", [0, 1, 2])
def test_low_rank_is_the_sum_of_its_parts(m, n, ell, power):
    products = counted(algorithm_1, torch.ones(m, n), ell, power)
    assert flops.low_rank(m, n, ell, power, 1000) == products + flops.qr(m, ell) + 1000
    parts = flops.low_rank_parts(m, n, ell, power, 1000)
    assert parts["polynomial steps"] == 1000
    assert parts["power iteration"] == 2 * power * 2 * m * n * ell


def test_parts_that_are_given_replace_the_usual_ones():
    usual = flops.low_rank_parts(12, 20, 5, 1, 7)
    given = flops.low_rank_parts(12, 20, 5, 1, 7, sketch_flops=11, orth_flops=0)
    differ = {part for part in usual if usual[part] != given[part]}
    assert differ == {"sketch MΩ", "orthonormal basis"}
    assert (given["sketch MΩ"], given["orthonormal basis"]) == (11, 0)


def test_the_papers_example_is_forty_times_cheaper():
    d, ell, q = 4096, 256, 5
    inner = flops.newton_schulz(ell, d, q)
    assert flops.newton_schulz(d, d, q) / flops.low_rank(d, d, ell, 1, inner) == pytest.approx(
        42.07, abs=0.01
    )


def norm_of_x0(M):
    V = torch.ones(M.shape[0], 16)
    for _ in range(norm_products(M.shape[0])):
        V = torch.ones(M.shape[0], M.shape[0]) @ V


@pytest.mark.parametrize(("m", "n"), [(20, 50), (50, 20), (7, 9), (1030, 1025)])
def test_what_deflation_adds(m, n):
    wide = torch.ones(min(m, n), max(m, n))
    steps = flops.deflation_parts(m, n, 77)
    assert steps == {"norm of X₀": counted(norm_of_x0, wide), "polynomial steps on X₀": 77}
