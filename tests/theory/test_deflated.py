"""The bounds of a map that lifts the rest of its sketch, against what such maps do."""

from __future__ import annotations

import math

import pytest
import torch
from tests.spectra import operator_norm
from tests.theory.matrices import (
    COLS,
    OVER,
    ROWS,
    STEPS,
    alignment,
    any_positive,
    basis,
    below,
    flattened,
    parts,
    random_spectra,
    sketched_basis,
    with_spectrum,
)

import polarstep as ps
from polarstep import Exact, certify, rng
from polarstep.maps.coefficients import evaluate, resolve
from polarstep.maps.deflated import FACTOR, MARGIN_OF_SCALE, norm_floor, tolerant_scale
from polarstep.numerics import norm_products
from polarstep.theory import bounds
from polarstep.theory.bounds import deflated

SETS = STEPS | {"polar-express": resolve("polar-express", 5)}

over_steps = pytest.mark.parametrize("polynomials", STEPS.values(), ids=STEPS.keys())
over_sets = pytest.mark.parametrize("polynomials", SETS.values(), ids=SETS.keys())


def size(R, ell, factor=FACTOR):
    """δ = factor·‖R‖_F/√N."""
    return factor * torch.linalg.matrix_norm(R) / math.sqrt(min(R.shape[-2:]) - ell)


def lift(M, Q, delta, polynomials, reach):
    """T = p(s·X₀) with s·‖X₀‖_op = reach, and s."""
    _, Z, R = parts(M, Q)
    U, x, Vh = torch.linalg.svd(Q @ Z + R / delta[:, None, None], full_matrices=False)
    scale = reach / x[:, 0]
    return (U * evaluate(polynomials, scale[:, None] * x)[:, None]) @ Vh, scale


def lost(M, T):
    return 1 - (M * T).sum((-2, -1)) / torch.linalg.svdvals(M).sum(-1)


def lifted(X, polynomials):
    """p on the singular values."""
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    return (U * evaluate(polynomials, sigma)[..., None, :]) @ Vh


# An ideal basis


@pytest.mark.parametrize("ell", [1, 5])
@over_steps
def test_gamma_of_an_ideal_basis_is_what_the_map_gives(polynomials, ell):
    sigma = random_spectra(12, ROWS)
    M = with_spectrum(sigma, ROWS, COLS)
    Q = torch.linalg.svd(M).U[..., :ell]
    B = Q.mT @ M
    Z = Exact()(B)
    delta = any_positive(12, ell) * sigma[:, ell]  # anything, also far below ‖R‖_op
    X = flattened(M, Q, B, Z, delta)
    scale = torch.linspace(0.3, 1, 12).double() / operator_norm(X)
    T = lifted(scale[:, None, None] * X, polynomials)
    expected = bounds.ideal_deflated_gamma(sigma, ell, polynomials, delta, scale=scale)
    found = 1 - alignment(M, T) / sigma.sum(-1)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@over_steps
def test_the_scale_is_one_over_the_norm_unless_given(polynomials):
    sigma = random_spectra(8, 16)
    for factor in (0.2, 3.0):
        delta = factor * sigma[:, 4]
        norm = (sigma[:, 4] / delta).clamp_min(1)
        found = bounds.ideal_deflated_gamma(sigma, 4, polynomials, delta)
        given = bounds.ideal_deflated_gamma(sigma, 4, polynomials, delta, scale=1 / norm)
        torch.testing.assert_close(found, given)


@over_steps
def test_without_a_head_gamma_does_not_depend_on_delta(polynomials):
    """Then X₀ = M/δ, and s = 1/‖X₀‖_op makes s·X₀ = M/‖M‖_op of it, for a δ of any size."""
    sigma = random_spectra(8, 16)
    expected = bounds.ideal_deflated_gamma(sigma, 0, polynomials)
    for factor in (0.2, 3.0):
        found = bounds.ideal_deflated_gamma(sigma, 0, polynomials, factor * sigma[:, 0])
        torch.testing.assert_close(found, expected)


def test_gamma_falls_with_the_head_and_vanishes_for_a_flat_rest():
    sigma, cubic = random_spectra(8, 16), STEPS["cubic"]
    gammas = torch.stack([bounds.ideal_deflated_gamma(sigma, ell, cubic) for ell in range(16)])
    assert (gammas[-1].abs() < 1e-15).all()  # one singular value is a flat rest
    assert (gammas >= -1e-15).all()
    flat = torch.cat([torch.tensor([50.0, 9.0]), torch.ones(10)])
    assert bounds.ideal_deflated_gamma(flat, 2, cubic) == pytest.approx(0, abs=1e-15)
    assert bounds.ideal_deflated_gamma(flat, 1, cubic) > 0.1


# γ for any Q


def test_the_alignment_is_the_sum_of_the_docstring():
    M = with_spectrum(random_spectra(8, ROWS), ROWS, COLS)
    Q = sketched_basis(M, 5, 0, "identity")
    B, Z, R = parts(M, Q)
    delta = size(R, 5)[:, None, None]
    X = Q @ Z + R / delta
    T, scale = lift(M, Q, delta[:, 0, 0], SETS["quintic x2"], 1.0)
    s = scale[:, None, None]
    y, V = torch.linalg.eigh(s * s * X.mT @ X)
    y = y.clamp_min(0)
    q = (V * deflated._slope(SETS["quintic x2"], y)[:, None]) @ V.mT
    b, v = torch.linalg.svd(B, full_matrices=False)[1:]
    r, d = torch.linalg.svd(R, full_matrices=False)[1:]
    head = scale * (b * (v @ q * v).sum(-1)).sum(-1)
    rest = scale / delta[:, 0, 0] * (r.square() * (d @ q * d).sum(-1)).sum(-1)
    torch.testing.assert_close(head + rest, (M * T).sum((-2, -1)), atol=1e-9, rtol=0)


@over_sets
def test_the_floor_is_below_the_polynomial(polynomials):
    reach = 1.17 * tolerant_scale(polynomials)
    a, b = deflated._floors(polynomials, reach)
    x = torch.rand(20_000, generator=rng.generator("floor"), dtype=torch.float64) * reach
    floor = x / (b[:, None] + a[:, None] * x.square()).sqrt()
    value = evaluate(polynomials, x)
    assert (floor <= value + 1e-12).all()
    assert ((value - floor).amin(-1) < 0.02).all()  # b is nearly the least


def test_kappa_is_the_largest_value():
    t = torch.logspace(-6, 6, 1_000_001, dtype=torch.float64)
    value = t.sqrt() - t / (1 + t).sqrt()
    assert float(value.max()) <= deflated.KAPPA == pytest.approx(float(value.max()), rel=1e-9)


# γ over Gaussian sketches


@pytest.mark.parametrize("h", [0, 0.5, 1, 2])
@pytest.mark.parametrize("ell", [3, 6, 10])
def test_expected_gamma_is_below_its_bound(ell, h):
    """For every set of polynomials, three factors of δ, and s at both ends of its range."""
    M, draws = with_spectrum(OVER, ROWS, COLS), 24
    heads = [
        (Q, *parts(M, Q)) for Q in (sketched_basis(M, ell, h, "mean", ell, i) for i in range(draws))
    ]
    informative = dict.fromkeys(SETS, 0)
    for factor in (0.7, 2.0, 4.0):
        X = torch.stack([Q @ Z + R / size(R, ell, factor)[:, None, None] for Q, _, Z, R in heads])
        U, x, Vh = torch.linalg.svd(X, full_matrices=False)
        along = (U.mT @ M @ Vh.mT).diagonal(dim1=-2, dim2=-1)  # ⟨M, T⟩ = Σp(s·x)·this
        for name, polynomials in SETS.items():
            tolerant = tolerant_scale(polynomials)
            wide = bounds.expected_lifted_gamma(OVER, ell, polynomials, h, factor=factor)
            for reach in (tolerant / 1.08, 1.17 * tolerant):
                value = evaluate(polynomials, reach * x / x[..., :1])
                gammas = 1 - (along * value).sum(-1) / OVER.sum(-1)
                bound = bounds.expected_lifted_gamma(
                    OVER, ell, polynomials, h, factor=factor, reach=(reach, reach)
                )
                assert (bound <= wide + 1e-12).all()
                assert below(gammas, bound), (name, factor, reach)
                informative[name] += int((bound < 0.9).sum())
    assert min(informative.values()) > 20  # a bound of one is no test


def named(width):
    k = torch.arange(1, width + 1, dtype=torch.float64)
    return torch.stack(
        [
            torch.ones_like(k),
            k**-0.5,
            1 / k,
            torch.where(k <= width // 16, 100.0, 1.0),
        ]
    )


# For these spectra, h = 0 and h = 1, no more than this. γ is from −0.12 to 0.16.
USEFUL = {0: (0.19, 0.49, 0.70, 0.57), 1: (0.19, 0.38, 0.38, 0.17)}


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("h", [0, 1])
def test_the_bound_holds_for_the_product_and_says_something(width, h):
    sigma, ell = named(width), width // 6
    M = with_spectrum(sigma, width, 3 * width // 2)
    head = ps.LowRank(ell - 4, 4, power=h, inner=Exact(), always_sketch=True)
    polar = ps.Deflated(head, ps.NewtonSchulz(1, "flat"))
    generator = rng.generator("product", width, h)
    draws = 6
    gammas = torch.stack([certify(M, polar(M, generator=generator)).gamma for _ in range(draws)])
    bound = bounds.expected_lifted_gamma(sigma, ell, SETS["flat"], h)
    assert below(gammas, bound)
    assert (bound <= torch.tensor(USEFUL[h])).all()
    assert (gammas.mean(0) > -0.13).all()


def test_the_bound_on_real_momentum(momentum):
    for matrices in momentum.values():
        M = matrices.double()
        M = M if M.shape[-2] <= M.shape[-1] else M.mT
        sigma = torch.linalg.svdvals(M)
        M, sigma = M[sigma[:, -1] > 1e-9], sigma[sigma[:, -1] > 1e-9]
        for h, most in ((0, 0.8), (1, 0.55)):
            head = ps.LowRank(7, 4, power=h, inner=Exact(), always_sketch=True)
            polar = ps.Deflated(head, ps.NewtonSchulz(1, "flat"))
            generator = rng.generator("momentum", h)
            gammas = torch.stack(
                [certify(M, polar(M, generator=generator)).gamma for _ in range(8)]
            )
            bound = bounds.expected_lifted_gamma(sigma, 11, SETS["flat"], h)
            assert below(gammas, bound)
            assert bound.median() < most
            assert gammas.mean(0).median() < 0.1


@over_sets
@pytest.mark.parametrize("kind", ["trailing", "between", "sketch", "random"])
def test_the_bound_holds_for_one_basis_with_the_numbers_of_its_rest(monkeypatch, polynomials, kind):
    """The proof takes means at its very end, so each Q has the bound with its own numbers."""
    M, ell = with_spectrum(OVER, ROWS, COLS), 4
    Q = basis(M, kind, ell)
    B, Z, R = parts(M, Q)
    b, V = torch.linalg.svd(B, full_matrices=False)[1:]
    r, rows = torch.linalg.svd(R, full_matrices=False)[1:]
    overlaps, energy = (R @ V.mT).square().sum(-2), r.square().sum(-1)
    shared = energy * (Z @ rows[:, : ROWS - ell].mT).square().sum((-2, -1))
    own = bounds.RestBound(
        energy,
        r[:, 0].square(),
        (R @ B.mT).square().sum((-2, -1)),
        overlaps.sum(-1),
        (b * overlaps).sum(-1),
        shared,
    )
    monkeypatch.setattr(deflated, "sketched_rest_bound", lambda *_: own)
    tolerant = tolerant_scale(polynomials)
    informative = 0
    for factor in (0.7, 2.0, 4.0):
        for reach in (0.5, tolerant, 1.17 * tolerant):
            gamma = lost(M, lift(M, Q, size(R, ell, factor), polynomials, reach)[0])
            bound = bounds.expected_lifted_gamma(
                OVER, ell, polynomials, factor=factor, reach=(reach, reach)
            )
            assert (gamma <= bound + 1e-9).all()
            informative += int((bound < 0.9).sum())
    assert informative > 20


def test_expected_gamma_is_its_closed_form(monkeypatch):
    sigma, ell, f, a, b = OVER, 6, 1.5, 0.6, 0.45
    x = torch.linspace(0, 1, 1001).double()
    assert (evaluate(SETS["cubic"], x) >= x / (b + a * x * x).sqrt() - 1e-12).all()
    best = bounds.expected_lifted_gamma(sigma, ell, SETS["cubic"], 1, factor=f, reach=(0.9, 1.0))
    rest = bounds.sketched_rest_bound(sigma, ell, 1)
    left, beta = ROWS - ell, b / 0.9**2
    head, tail = sigma[:, :ell].sum(-1), sigma[:, ell:].sum(-1)
    delta = f * (sigma[:, ell:].square().sum(-1) / left).sqrt()
    z = a + beta + (beta * rest.squared_norm + a * rest.weighted_overlap / head) / delta**2
    root = f**2 * (left * beta * rest.energy + a * rest.shared_rows)
    root = (root + left**2 * beta * rest.squared_norm).sqrt()
    kept = head / z.sqrt() + tail / math.sqrt(a) - deflated.KAPPA / a * root
    one = (1 - kept / sigma.sum(-1)).clamp_max(1)
    assert (best <= one + 1e-9).all()
    floor = torch.tensor([a]).double(), torch.tensor([b]).double()
    monkeypatch.setattr(deflated, "_floors", lambda *_: floor)
    found = bounds.expected_lifted_gamma(sigma, ell, SETS["cubic"], 1, factor=f, reach=(0.9, 1.0))
    torch.testing.assert_close(found, one)


def test_expected_gamma_ignores_scale_and_order_and_falls_with_h():
    found = [bounds.expected_lifted_gamma(OVER, 6, SETS["flat"], h) for h in (0, 0.5, 1, 2)]
    for less, more in zip(found[1:], found, strict=False):
        assert (less <= more + 1e-12).all()
    again = bounds.expected_lifted_gamma(1e4 * OVER.flip(-1), 6, SETS["flat"])
    torch.testing.assert_close(again, found[0])
    one = bounds.expected_lifted_gamma(OVER[3], 6, SETS["flat"])
    torch.testing.assert_close(one, found[0][3])


def test_a_matrix_that_lacks_rank_has_a_bound():
    sigma = torch.cat([torch.linspace(2, 1, 9), torch.zeros(3)]).double()
    M = with_spectrum(sigma[None], 12, 16)
    gammas = []
    for draw in range(16):
        Q = sketched_basis(M, 4, 0, "rank", draw)
        T, _ = lift(M, Q, size(parts(M, Q)[2], 4), SETS["flat"], 1.0)
        gammas.append(lost(M, T))
    bound = bounds.expected_lifted_gamma(sigma, 4, SETS["flat"], reach=(1.0, 1.0))
    assert below(torch.stack(gammas), bound[None])
    assert float(bound) < 0.7


# ν


@over_steps
@pytest.mark.parametrize("reach", [0.4, 1.0, 1.17])
def test_nu_is_below_its_bound_whatever_delta_is(polynomials, reach):
    M = with_spectrum(random_spectra(24, ROWS), ROWS, COLS)
    Q = sketched_basis(M, 4, 0, "nu")
    delta = any_positive(24, "nu") * torch.linalg.matrix_norm(parts(M, Q)[2], 2)
    T, _ = lift(M, Q, delta, polynomials, reach)
    bound = bounds.lifted_nu(polynomials, reach)
    assert (certify(M, T).nu <= bound + 1e-9).all()
    peak = evaluate(polynomials, torch.linspace(0, reach, 100_001, dtype=torch.float64)).abs().max()
    assert bound == pytest.approx(max(float(peak) - 1, 0), abs=1e-4)


@pytest.mark.parametrize("reach", [1.0, 1.17])
@pytest.mark.parametrize("name", ["cubic", "quintic"])
def test_the_papers_cubic_has_no_nu_beyond_one_and_the_quintic_little(name, reach):
    bound = bounds.lifted_nu(resolve(name, 1), reach)
    assert bound <= (1e-6 if name == "cubic" or reach == 1 else 0.02)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_reach_that_is_no_positive_number_is_refused(bad):
    with pytest.raises(ValueError, match=f"reach={bad}: expected a bound"):
        bounds.lifted_nu([(1.5, -0.5)], bad)


@pytest.mark.parametrize("m", [768, 4096])
def test_the_best_start_column_holds_what_is_said(m):
    """With steps: the share of directions below the κ that the bound allows for."""
    g = rng.generator("start", m)
    best = torch.randn(100_000, 16, generator=g, dtype=torch.float64).square().amax(-1) / m
    for unseen in (0.01, 0.2):
        reach = 1 / (MARGIN_OF_SCALE * norm_floor(float(best.quantile(unseen)), norm_products(m)))
        norm = 1 + bounds.lifted_nu(SETS["flat"], reach)
        assert bounds.longest_deflated_step(m, m, SETS["flat"], unseen=unseen) == pytest.approx(
            norm, rel=0.03
        )


def test_the_bound_grows_with_the_sides_and_with_what_must_be_seen():
    polynomials = SETS["flat"]
    for sides in ((256, 768, 1024), (1025, 2048, 4096)):  # the second with two products more
        found = [bounds.longest_deflated_step(m, 2 * m, polynomials) for m in sides]
        assert found == sorted(found)
    found = [
        bounds.longest_deflated_step(768, 768, polynomials, unseen=0.1**k) for k in range(1, 7)
    ]
    assert found == sorted(found)
    of_tall = bounds.longest_deflated_step(512, 96, polynomials)
    assert of_tall == bounds.longest_deflated_step(96, 512, polynomials)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"m": 0}, "rows or columns"),
        ({"n": 1.5}, "rows or columns"),
        ({"unseen": 0.0}, "no bound holds for all"),
        ({"unseen": 1.0}, "between 0 and 1"),
    ],
)
def test_what_it_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        bounds.longest_deflated_step(**({"m": 8, "n": 8, "polynomials": SETS["flat"]} | arguments))


# What is refused

FLAT = torch.ones(8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bounds.ideal_deflated_gamma(FLAT, 8, SETS["cubic"]), "0 ≤ ℓ < 8.*no rest"),
        (
            lambda: bounds.ideal_deflated_gamma(FLAT, 2, SETS["cubic"], 2.0, scale=1.5),
            r"s·‖X₀‖_op = 1\.5: expected at most 1.*scale=None",
        ),
        (lambda: bounds.expected_lifted_gamma(FLAT, 4, []), "one per step"),
        (lambda: bounds.expected_lifted_gamma(FLAT, 4, SETS["flat"], factor=0), "factor=0"),
        (
            lambda: bounds.expected_lifted_gamma(FLAT, 4, SETS["flat"], reach=(1.0, 0.9)),
            r"0 < t₀ ≤ t₁.*\(1, 1\)",
        ),
        (
            lambda: bounds.expected_lifted_gamma(FLAT, 4, SETS["cubic"], reach=(1.0, 1.8)),
            r"p\(1\.73\) ≤ 0.*smaller reach",
        ),
    ],
)
def test_errors_name_the_assumption_and_the_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()


SPECTRUM = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("delta", lambda bad: bounds.ideal_deflated_gamma(SPECTRUM, 2, [(1.5, -0.5)], bad)),
        (
            "scale",
            lambda bad: bounds.ideal_deflated_gamma(SPECTRUM, 2, [(1.5, -0.5)], scale=bad),
        ),
    ],
)
def test_a_size_that_is_no_positive_number_is_refused(name, call, bad):
    """A negative δ gave a γ all the same, as large as without steps or below zero."""
    with pytest.raises(ValueError, match=f"{name}=.*: expected"):
        call(bad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_plain_numbers_go_with_a_spectrum_on_a_gpu():
    sigma, steps = SPECTRUM.double(), [(1.5, -0.5)]
    found = bounds.ideal_deflated_gamma(sigma.cuda(), 2, steps, 0.3, scale=0.5)
    assert found.is_cuda
    torch.testing.assert_close(
        found.cpu(), bounds.ideal_deflated_gamma(sigma, 2, steps, 0.3, scale=0.5)
    )
