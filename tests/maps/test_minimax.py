"""Minimax odd polynomials and their composition: Chebyshev's theorem is the test."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from polarstep import NewtonSchulz
from polarstep.maps.coefficients import evaluate, minimax, polar_express, resolve, survives_16_bits

DEGREES = (3, 5, 7, 11)
LOWERS = (1e-9, 1e-6, 1e-3, 0.02, 0.3, 0.9)


def values(polynomial: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    return evaluate([polynomial], torch.from_numpy(np.asarray(x))).numpy()


def critical_points(polynomial: tuple[float, ...]) -> np.ndarray:
    """Positive zeros of p', from p'(x) = Σ (2i + 1) cᵢ yⁱ with y = x²."""
    derivative = [(2 * i + 1) * c for i, c in enumerate(polynomial)]
    return np.sqrt(np.sort(np.roots(derivative[::-1]).real))


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("lower", LOWERS)
@pytest.mark.parametrize("upper", [1.0, 1.7])
def test_error_equioscillates_at_one_point_more_than_there_are_coefficients(lower, upper, degree):
    polynomial, E = minimax(lower * upper, upper, degree)
    assert len(polynomial) == (degree + 1) // 2
    points = np.array([lower * upper, *critical_points(polynomial), upper])
    assert len(points) == (degree + 3) // 2
    assert np.all(np.diff(points) > 0)
    alternating = E * (-1.0) ** np.arange(len(points))
    np.testing.assert_allclose(1 - values(polynomial, points), alternating, atol=1e-12)


@pytest.mark.parametrize("degree", [3, 5, 7])
@pytest.mark.parametrize("lower", [1e-3, 0.05, 0.4])
def test_no_odd_polynomial_does_better(lower, degree):
    """The linear program min E, |1 − p| ≤ E on a fine grid, finds the same polynomial."""
    polynomial, E = minimax(lower, 1.0, degree)
    k = len(polynomial)
    grid = np.concatenate([np.geomspace(lower, 1, 1500), np.linspace(lower, 1, 1500)])
    powers = grid[:, None] ** (2 * np.arange(k) + 1)
    slack = -np.ones((len(grid), 1))
    solution = linprog(
        c=[0] * k + [1],
        A_ub=np.block([[powers, slack], [-powers, slack]]),
        b_ub=np.concatenate([np.ones(len(grid)), -np.ones(len(grid))]),
        bounds=[(None, None)] * k + [(0, None)],
    )
    assert solution.fun == pytest.approx(E, rel=1e-4)
    assert solution.fun <= E * (1 + 1e-9)  # the grid asks for less than the interval
    np.testing.assert_allclose(solution.x[:k], polynomial, rtol=2e-2)


@pytest.mark.parametrize("lower", LOWERS)
def test_cubic_is_the_closed_form(lower):
    """Amsel et al. give the cubic case in closed form: p(x) = β(3αx − (αx)³)/2, E = β − 1."""
    alpha = math.sqrt(3 / (1 + lower + lower**2))
    beta = 4 / (2 + lower * (1 + lower) * alpha**3)
    polynomial, E = minimax(lower, 1.0, degree=3)
    assert polynomial == pytest.approx((1.5 * alpha * beta, -0.5 * alpha**3 * beta), rel=1e-13)
    assert abs(E - (beta - 1)) < 1e-14


@pytest.mark.parametrize("degree", [3, 5, 7, 9])
def test_a_point_interval_gives_newton_schulz(degree):
    """φ(1) = 1 and all derivatives that (degree + 1)/2 coefficients can kill are zero there."""
    polynomial, E = minimax(1.0, 1.0, degree)
    assert E == 0
    k = len(polynomial)
    p = np.zeros(degree + 1)
    p[1::2] = polynomial
    derivatives = [np.polynomial.Polynomial(p).deriv(i)(1.0) for i in range(1, k)]
    assert np.polynomial.Polynomial(p)(1.0) == pytest.approx(1, abs=1e-14)
    np.testing.assert_allclose(derivatives, 0, atol=1e-11)
    scaled, _ = minimax(3.0, 3.0, degree)
    assert scaled == pytest.approx([c / 3.0 ** (2 * i + 1) for i, c in enumerate(polynomial)])


@pytest.mark.parametrize("width", [1e-4, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize(("degree", "constant"), [(3, 3 / 16), (5, 5 / 64)])
def test_error_keeps_its_relative_precision_on_short_intervals(degree, constant, width):
    """1 − φ(1 + ε) ≈ 3ε²/2 (cubic) and −5ε³/2 (quintic), times Chebyshev's factor 2(w/4)ᵏ."""
    _, error = minimax(1 - width, 1.0, degree)
    exact_width = 1.0 - (1 - width)  # what float64 made of it
    leading_term = constant * exact_width ** ((degree + 1) // 2)
    assert error == pytest.approx(leading_term, rel=2 * width + 1e-10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0, 5), "0 < lower ≤ upper"),
        ((2.0, 1.0, 5), "lower=2.0, upper=1.0"),
        ((0.1, math.inf, 5), "0 < lower ≤ upper"),
        ((math.nan, 1.0, 5), "lower=nan"),
        ((0.1, 1.0, 4), "degree=4: expected an odd degree ≥ 3"),
        ((0.1, 1.0, 1), "degree=1: expected an odd degree ≥ 3"),
    ],
)
def test_minimax_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        minimax(*arguments)


def composition_range(polynomials, lower: float) -> tuple[float, float]:
    x = torch.cat(
        [
            torch.logspace(math.log10(lower), 0, 100_001, dtype=torch.float64),
            torch.linspace(lower, 1, 100_001, dtype=torch.float64),
        ]
    ).clamp(lower, 1)
    y = evaluate(polynomials, x)
    return float(y.min()), float(y.max())


@pytest.mark.parametrize("degree", [3, 5, 7])
@pytest.mark.parametrize("lower", [1e-6, 1e-3, 0.1])
def test_composition_is_centred_and_every_step_improves_it(lower, degree):
    errors = []
    for steps in range(1, 8):
        least, most = composition_range(polar_express(lower, steps, degree, safety=1.0), lower)
        E = 1 - least
        assert most <= 1 + E + 1e-6  # a gain of 1e6 on rounding errors, which CPUs differ in
        errors.append(E)
    strictly = [e for e in errors if e > 1e-12]
    assert strictly == sorted(set(strictly), reverse=True)
    if lower >= 1e-3 and degree >= 5:
        assert errors[-1] < 1e-6


@pytest.mark.parametrize("steps", [3, 5, 7])
@pytest.mark.parametrize("name", ["quintic", "quintic-2", "jordan", "polar-express"])
def test_no_named_quintic_set_beats_it_in_the_worst_case(name, steps):
    """Optimality of the composition, against every other one at hand, each at its best scale."""
    lower = 1e-3
    least, _ = composition_range(polar_express(lower, steps, safety=1.0), lower)
    other_least, other_most = composition_range(resolve(name, steps), lower)
    # Scaling the output to be centred at 1 only flatters the competitor.
    other = (other_most - other_least) / (other_most + other_least)
    assert 1 - least <= other + 1e-12


@settings(max_examples=60, deadline=None)
@given(
    lower=st.floats(1e-6, 1.0),
    steps=st.integers(0, 10),
    degree=st.sampled_from([3, 5, 7, 9]),
    cushion=st.sampled_from([0.0, 0.02, 0.1]),
    safety=st.sampled_from([1.0, 1.01, 1.05]),
)
def test_composition_maps_the_interval_to_a_neighbourhood_of_one(
    lower, steps, degree, cushion, safety
):
    polynomials = polar_express(lower, steps, degree, cushion=cushion, safety=safety)
    assert len(polynomials) == steps
    assert all(len(p) == (degree + 1) // 2 for p in polynomials)
    x = torch.tensor([lower, 1.0], dtype=torch.float64)
    x = torch.cat([x, torch.linspace(lower, 1, 2001, dtype=torch.float64).clamp(lower, 1)])
    y = evaluate(polynomials, x)
    if steps:
        image_of_lower = float(y[0])
        rounding = (
            1e-6  # each step is steep at its upper end: up to 40 times what the last one left
        )
        assert y.min() >= image_of_lower - rounding
        assert y.max() <= 2 - image_of_lower + rounding


def test_safety_factor_forgives_singular_values_above_one():
    plain = polar_express(1e-3, 6, cushion=0.02, safety=1.0)
    safe = polar_express(1e-3, 6, cushion=0.02, safety=1.02)
    above = torch.tensor([1.02], dtype=torch.float64)
    assert (evaluate(safe, above) - 1).abs() < 0.02
    assert (evaluate(plain, above) - 1).abs() > (evaluate(safe, above) - 1).abs()


@pytest.mark.parametrize("degree", [3, 5, 7, 9, 11])
@pytest.mark.parametrize("lower", [1e-6, 1e-4, 1e-2])
def test_what_is_generated_survives_16_bits_by_default(lower, degree):
    assert all(survives_16_bits(polar_express(lower, steps, degree)) for steps in range(1, 10))
    without = [polar_express(lower, steps, degree, safety=1.0) for steps in range(1, 10)]
    assert all(map(survives_16_bits, without)) == (degree not in (5, 9))


@pytest.mark.parametrize(("lower", "steps", "degree"), [(1e-4, 7, 9), (1e-6, 9, 9), (1e-3, 8, 5)])
def test_matrices_of_rank_one_stay_bounded(lower, steps, degree):
    """Without a safety factor a third of them became NaN in float32."""
    polar = NewtonSchulz(steps, polar_express(lower, steps, degree))
    g = torch.Generator().manual_seed(0)
    for _ in range(30):
        m, n = torch.randint(8, 64, (2,), generator=g).tolist()
        M = torch.outer(torch.randn(m, generator=g), torch.randn(n, generator=g))
        norm = torch.linalg.matrix_norm(polar(M).double(), 2)
        assert 0.99 < norm < 1.01


# As printed in the paper, Appendix "Experiment Details and Ablation Study".
NANOGPT = (
    (8.1566, -22.4833, 15.8788),
    (4.0429, -2.8089, 0.5000),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3005, -1.6112, 0.3833),
    (1.8631, -1.2042, 0.3422),
    (1.8383, -1.1779, 0.3397),
    (1.8382, -1.1779, 0.3396),
    (1.8750, -1.2500, 0.3750),
)
CIFAR10 = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
    (1.8913, -1.2680, 0.3768),
    (1.8750, -1.2500, 0.3750),
    (1.8750, -1.2500, 0.3750),
    (1.8750, -1.2500, 0.3750),
)


@pytest.mark.parametrize(
    ("generated", "printed"),
    [
        (polar_express(1e-3, 9, cushion=0.02, safety=1.02), NANOGPT),
        (polar_express(1e-3, 9, cushion=0.02407327424182761, safety=1.0), CIFAR10),
        (resolve("polar-express-nanogpt", 9), NANOGPT),
        (resolve("polar-express-cifar10", 9), CIFAR10),
    ],
    ids=["nanogpt", "cifar10", "name-nanogpt", "name-cifar10"],
)
def test_the_papers_lists_come_out_to_every_printed_decimal(generated, printed):
    assert tuple(tuple(round(c, 4) for c in p) for p in generated) == printed


def test_modded_nanogpts_list_comes_out_to_rounding():
    """The five triples of KellerJordan/modded-nanogpt's train_gpt.py."""
    published = (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    )
    generated = polar_express(1e-3, 5, cushion=0.02, safety=1.02)
    np.testing.assert_allclose(generated, published, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0.0, 5), {}, "lower=0.0: expected 0 < lower ≤ 1"),
        ((1.5, 5), {}, "lower=1.5"),
        ((1e-3, -1), {}, "steps=-1: expected an integer ≥ 0"),
        ((1e-3, 5, 6), {}, "degree=6: expected an odd degree"),
        ((1e-3, 5), {"cushion": 1.0}, "cushion=1.0: expected 0 ≤ cushion < 1"),
        ((1e-3, 5), {"safety": 0.99}, "safety=0.99: expected 1 ≤ safety"),
    ],
)
def test_polar_express_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        polar_express(*arguments, **options)


def test_a_degree_for_each_step():
    mixed = polar_express(0.01, 4, (5, 7, 7, 5), safety=1.0)
    assert [len(p) for p in mixed] == [3, 4, 4, 3]
    x = torch.linspace(0.01, 1, 20_001, dtype=torch.float64)
    errors = [
        float((evaluate(p, x) - 1).abs().max()) for p in (mixed, polar_express(0.01, 4, safety=1.0))
    ]
    assert errors[0] < errors[1] / 10
    assert polar_express(0.01, 2, (5, 5)) == polar_express(0.01, 2)
    with pytest.raises(ValueError, match="expected one degree, or 3, one for each step"):
        polar_express(0.01, 3, (5, 5))
