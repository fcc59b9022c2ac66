"""The bounds on γ and ν of a sketch whose rest is lifted, against what such maps do."""

from __future__ import annotations

import math

import pytest
import torch
from tests.theory.sketches import STEPS, sketched_basis
from tests.theory.spectra import random_spectra, with_spectrum

import polarstep as ps
from polarstep import Exact, certify, rng
from polarstep.polar.coefficients import evaluate, resolve
from polarstep.polar.flat_step_scale import tolerant_scale
from polarstep.polar.rest_norm import FACTOR
from polarstep.theory import bounds
from polarstep.theory.bounds import lifted as lifted_bounds

ROWS, COLS = 20, 28
SETS = STEPS | {"polar-express": resolve("polar-express", 5)}
over_sets = pytest.mark.parametrize("polynomials", SETS.values(), ids=SETS.keys())


def parts(M, Q):
    """B, its polar factor Z, and R."""
    B = Q.mT @ M
    return B, Exact()(B), M - Q @ B


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


def basis(M, kind, ell):
    """An orthonormal Q: some have rows of head and rest overlap as much as they can."""
    U = torch.linalg.svd(M).U
    if kind == "leading":
        return U[..., :ell]
    if kind == "trailing":
        return U[..., -ell:]
    if kind == "between":  # half a leading direction each, and half a trailing one
        return (U[..., :ell] + U[..., -ell:].flip(-1)) / math.sqrt(2)
    if kind == "sketch":
        return sketched_basis(M, ell, 0, "basis", ell)
    random = torch.randn(M.shape[0], M.shape[1], ell, generator=rng.generator("random", ell))
    return torch.linalg.qr(random.double()).Q


def any_positive(count, *key):
    """Factors from 0.1 to 10, for a δ that no bound may depend on."""
    return 10 ** (2 * torch.rand(count, generator=rng.generator("any", *key)).double() - 1)


# For a given Q


@over_sets
@pytest.mark.parametrize("kind", ["leading", "trailing", "between", "sketch", "random"])
def test_gamma_is_below_its_bound_for_every_basis(polynomials, kind):
    M = with_spectrum(random_spectra(8, ROWS), ROWS, COLS)
    overlaps, informative = [], 0
    for ell in (3, 9):
        Q = basis(M, kind, ell)
        _, Z, R = parts(M, Q)
        for delta in (size(R, ell), any_positive(8, kind, ell) * size(R, ell)):
            overlaps.append(torch.linalg.matrix_norm(R @ Z.mT) / delta)
            for reach in (0.6, 1.17 * tolerant_scale(polynomials)):
                T, scale = lift(M, Q, delta, polynomials, reach)
                bound = bounds.lifted_gamma(M, Q, polynomials, delta, scale=scale)
                assert (lost(M, T) <= bound + 1e-9).all()
                informative += int((bound < 0.9).sum())
    overlap = torch.stack(overlaps)
    assert (overlap.max() < 1e-6) == (kind in ("leading", "trailing"))
    assert informative > 20


@over_sets
def test_the_bound_of_a_sketch_is_close_to_gamma(polynomials):
    """What convexity gives away, and what ripples of p do: a bound that is too high fails here."""
    M = with_spectrum(random_spectra(12, ROWS), ROWS, COLS)
    Q = sketched_basis(M, 6, 1, "close")
    T, scale = lift(M, Q, size(parts(M, Q)[2], 6), polynomials, 1.0)
    bound = bounds.lifted_gamma(M, Q, polynomials, scale=scale)
    torch.testing.assert_close(bound, bounds.lifted_gamma(M, Q, polynomials))  # s = 1/‖X₀‖_op
    assert (bound - lost(M, T)).median() < (0.3 if polynomials == SETS["jordan x2"] else 0.12)


def test_it_is_the_gamma_of_an_ideal_basis_where_the_polynomial_allows():
    sigma = random_spectra(12, ROWS)
    M = with_spectrum(sigma, ROWS, COLS)
    for ell in (1, 5):
        Q = basis(M, "leading", ell)
        delta = any_positive(12, "ideal", ell) * sigma[:, ell]
        for name in ("cubic", "quintic x2"):  # x and x²·(…) with a convex q
            ideal = bounds.ideal_deflated_gamma(sigma, ell, delta, SETS[name])
            found = bounds.lifted_gamma(M, Q, SETS[name], delta)
            torch.testing.assert_close(
                found, ideal, atol=1e-11 if name == "cubic" else 1e-6, rtol=0
            )


def test_it_takes_one_matrix_and_tall_ones():
    M = with_spectrum(random_spectra(3, ROWS), COLS, ROWS)
    Q = torch.linalg.qr(M[..., :4]).Q
    found = bounds.lifted_gamma(M, Q, SETS["flat"])
    each = [bounds.lifted_gamma(one, basis, SETS["flat"]) for one, basis in zip(M, Q, strict=True)]
    torch.testing.assert_close(found, torch.stack(each))
    T, _ = lift(M, Q, size(parts(M, Q)[2], 4), SETS["flat"], 1.0)
    assert (lost(M, T) <= found + 1e-9).all()


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
    q = (V * lifted_bounds._slope(SETS["quintic x2"], y)[:, None]) @ V.mT
    b, v = torch.linalg.svd(B, full_matrices=False)[1:]
    r, d = torch.linalg.svd(R, full_matrices=False)[1:]
    head = scale * (b * (v @ q * v).sum(-1)).sum(-1)
    rest = scale / delta[:, 0, 0] * (r.square() * (d @ q * d).sum(-1)).sum(-1)
    torch.testing.assert_close(head + rest, (M * T).sum((-2, -1)), atol=1e-9, rtol=0)


@over_sets
@pytest.mark.parametrize("reach", [0.5, 1.0, 1.07])
def test_the_convex_part_is_convex_and_below_between_the_points_of_its_grid(polynomials, reach):
    y = torch.rand(20_000, generator=rng.generator("hull"), dtype=torch.float64).sort().values
    y = y.square() * reach**2
    hull = lifted_bounds._convex_part(polynomials, y, reach)
    q = lifted_bounds._slope(polynomials, y)
    assert (hull <= q + 1e-12).all()
    rise = hull.diff() / y.diff()
    assert (rise.diff() >= -1e-6 * (1 + rise[1:].abs())).all()
    assert ((q - hull).amin() < 1e-2 * q.max()).all()


@over_sets
def test_the_floor_is_below_the_polynomial(polynomials):
    reach = 1.17 * tolerant_scale(polynomials)
    a, b = lifted_bounds._floors(polynomials, reach)
    x = torch.rand(20_000, generator=rng.generator("floor"), dtype=torch.float64) * reach
    floor = x / (b[:, None] + a[:, None] * x.square()).sqrt()
    value = evaluate(polynomials, x)
    assert (floor <= value + 1e-12).all()
    assert ((value - floor).amin(-1) < 0.02).all()  # b is nearly the least


def test_kappa_is_the_largest_value():
    t = torch.logspace(-6, 6, 1_000_001, dtype=torch.float64)
    value = t.sqrt() - t / (1 + t).sqrt()
    assert float(value.max()) <= lifted_bounds.KAPPA == pytest.approx(float(value.max()), rel=1e-9)


# Over Gaussian sketches

HARD = torch.stack(
    [
        torch.cat([torch.full((2,), 50.0), torch.ones(18)]),
        torch.cat([torch.full((6,), 5.0), torch.linspace(1, 0.5, 14)]),
        torch.ones(20),
        torch.linspace(1, 0.9, 20),
    ]
).double()
OVER = torch.cat([random_spectra(12, ROWS), HARD / HARD[:, :1]])


def below(found, bound):
    """Whether the mean over draws is below, up to four standard errors and rounding."""
    error = found.std(0) / math.sqrt(len(found))
    return bool((found.mean(0) <= bound * (1 + 1e-9) + 4 * error + 1e-12).all())


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
    monkeypatch.setattr(lifted_bounds, "sketched_rest_bound", lambda *_: own)
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
    kept = head / z.sqrt() + tail / math.sqrt(a) - lifted_bounds.KAPPA / a * root
    one = (1 - kept / sigma.sum(-1)).clamp_max(1)
    assert (best <= one + 1e-9).all()
    floor = torch.tensor([a]).double(), torch.tensor([b]).double()
    monkeypatch.setattr(lifted_bounds, "_floors", lambda *_: floor)
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


@pytest.mark.parametrize("polynomials", STEPS.values(), ids=STEPS.keys())
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


FLAT = torch.ones(8, dtype=torch.float64)
EYE = torch.eye(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bounds.missed_directions(FLAT, 8), "1 ≤ ℓ < 8 = rank.*no rest"),
        (lambda: bounds.sketched_rest_bound(FLAT, 0), "ell=0: expected a whole number"),
        (lambda: bounds.missed_directions(FLAT, 3, 0.3), "power iterations"),
        (lambda: bounds.expected_lifted_gamma(FLAT, 4, []), "no step at all"),
        (lambda: bounds.expected_lifted_gamma(FLAT, 4, SETS["flat"], factor=0), "factor=0"),
        (
            lambda: bounds.expected_lifted_gamma(FLAT, 4, SETS["flat"], reach=(1.0, 0.9)),
            r"0 < t₀ ≤ t₁.*\(1, 1\)",
        ),
        (
            lambda: bounds.expected_lifted_gamma(FLAT, 4, SETS["cubic"], reach=(1.0, 1.8)),
            r"p\(1\.73\) ≤ 0.*smaller reach",
        ),
        (lambda: bounds.lifted_gamma(EYE, EYE[:3, :2], SETS["flat"]), "expected .*m, ℓ"),
        (lambda: bounds.lifted_gamma(EYE, 2 * EYE[:, :2], SETS["flat"]), "orthonormal columns"),
        (lambda: bounds.lifted_gamma(EYE, EYE[:, :2], SETS["flat"], 0.0), "expected δ > 0"),
    ],
)
def test_errors_name_the_assumption_and_the_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()
