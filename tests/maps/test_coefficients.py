"""Named coefficient sets: what they promise, how they are chosen, what is refused."""

import math
from typing import get_args

import pytest
import torch

from polarstep.maps.coefficients import (
    Name,
    evaluate,
    names,
    resolve,
    survives_16_bits,
)
from polarstep.numerics import squarings

UNIT = torch.linspace(0, 1, 200_001, dtype=torch.float64)


def test_an_editor_completes_every_name():
    assert get_args(Name) == names()


def test_every_name_gives_exactly_the_steps_asked_for():
    for name in names():
        for steps in (0, 1, 3, 9, 12):
            polynomials = resolve(name, steps)
            assert len(polynomials) == steps
            assert all(isinstance(c, float) for p in polynomials for c in p)


@pytest.mark.parametrize("name", ["cubic", "quintic"])
@pytest.mark.parametrize("steps", [1, 5, 10])
def test_the_papers_polynomials_are_monotone_and_stay_below_one(name, steps):
    """What Proposition 1 needs for ν = 0."""
    y = evaluate(resolve(name, steps), UNIT)
    assert y[0] == 0
    assert y.max() <= 1 + 1e-14
    assert y.diff().min() >= -1e-14
    assert torch.all(y >= UNIT - 1e-14)


def test_quintic_2_overshoots_as_documented():
    y = evaluate(resolve("quintic-2", 7), UNIT)
    assert float(y.max()) == pytest.approx(1.0018, abs=5e-5)


def test_jordan_keeps_its_documented_range_and_never_converges():
    x = UNIT[UNIT > 1e-3]
    for steps in (8, 20, 41):
        y = evaluate(resolve("jordan", steps), x)
        assert 0.68 <= y.min() <= 0.69
        assert 1.12 <= y.max() <= 1.21


@pytest.mark.parametrize("name", [name for name in names() if name != "jordan"])
def test_all_others_converge_to_one(name):
    x = UNIT[UNIT >= 1e-3]
    y = evaluate(resolve(name, 30), x)
    assert (y - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["polar-express-nanogpt", "polar-express-cifar10"])
def test_published_lists_repeat_their_last_polynomial_and_are_cut_from_the_front(name):
    nine = resolve(name, 9)
    assert len(set(nine)) > 5
    assert resolve(name, 4) == nine[:4]
    assert resolve(name, 11) == (*nine, nine[-1], nine[-1])


def test_our_default_is_made_for_the_number_of_steps():
    """Its last polynomial has no safety factor, so the result is centred at 1 for every q."""
    x = UNIT[UNIT >= 1e-3]
    for steps in (3, 5, 6):
        y = evaluate(resolve("polar-express", steps), x)
        assert float(y.max() + y.min()) == pytest.approx(2, abs=5e-3)
    assert resolve("polar-express", 6)[:5] != resolve("polar-express", 5)


def test_a_sequence_is_taken_as_it_is_and_its_last_polynomial_repeats():
    rows = [[2, -1.5, 0.5], [1.5, -0.5]]
    assert resolve(rows, 1) == ((2.0, -1.5, 0.5),)
    assert resolve(rows, 3) == ((2.0, -1.5, 0.5), (1.5, -0.5), (1.5, -0.5))


def test_evaluate_composes_first_polynomial_first():
    p, q = (2.0, -1.5, 0.5), (1.5, -0.25, 0.5, 0.125)
    x = torch.linspace(-1.2, 1.2, 101, dtype=torch.float64)
    inner = 2 * x - 1.5 * x**3 + 0.5 * x**5
    outer = 1.5 * inner - 0.25 * inner**3 + 0.5 * inner**5 + 0.125 * inner**7
    torch.testing.assert_close(evaluate([p, q], x), outer)
    assert not torch.allclose(evaluate([q, p], x), outer)
    torch.testing.assert_close(evaluate([], x), x)
    torch.testing.assert_close(evaluate([p, q], -x), -outer)  # odd


def test_compiled_code_resolves_names_as_it_is_traced():
    def apply(x: torch.Tensor) -> torch.Tensor:
        return evaluate(resolve("polar-express", 5), x)

    compiled = torch.compile(apply, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(UNIT), apply(UNIT))


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="coefficients='quartic'") as error:
        resolve("quartic", 5)
    assert all(repr(name) in str(error.value) for name in names())


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ((3.4445, -4.7750, 2.0315), "wrap a single polynomial"),
        ((), "coefficients=\\(\\): expected a sequence"),
        (((1.5,),), "at least two finite numbers"),
        (((1.5, math.nan),), "at least two finite numbers"),
        (((1.5, -0.5), (math.inf, 1.0)), "at least two finite numbers"),
        ((("a", "b"),), "expected a sequence of tuples"),
        (None, "expected a sequence of tuples"),
    ],
)
def test_malformed_sequences_are_refused(coefficients, message):
    with pytest.raises(ValueError, match=message):
        resolve(coefficients, 5)


@pytest.mark.parametrize(
    ("steps", "error"), [(-1, ValueError), (2.0, TypeError), (True, TypeError), ("5", TypeError)]
)
def test_steps_must_be_a_count(steps, error):
    with pytest.raises(error, match="expected an integer ≥ 0"):
        resolve("quintic", steps)


@pytest.mark.parametrize("steps", [1, 2, 5, 7, 9])
def test_all_sets_but_one_survive_rounding_to_16_bits(steps):
    """The paper's triples for CIFAR-10 have no safety factor; two steps can do no harm."""
    without_margin = {"polar-express-cifar10"} if steps > 2 else set()
    broken = {name for name in names() if not survives_16_bits(resolve(name, steps))}
    assert broken == without_margin


@pytest.mark.parametrize("name", [name for name in names() if name != "polar-express-cifar10"])
def test_sets_that_survive_stay_bounded_whatever_the_rounding(name):
    g = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 1, 20_001, dtype=torch.float64).repeat(8, 1)
    for polynomial in resolve(name, 9):
        up = torch.rand(x.shape, generator=g, dtype=x.dtype) < 0.9  # mostly the harmful way
        x = evaluate((polynomial,), x * torch.where(up, 1 + 2**-8, 1 - 2**-8))
    assert x.abs().max() < 1.25


def test_without_a_safety_factor_it_is_the_excess_over_the_edge_that_grows():
    """The numbers in survives_16_bits, where the edge is the largest value without rounding."""
    edge = rounded = 1.0
    slopes, largest = [], []
    for polynomial in resolve("polar-express-cifar10", 9)[:4]:
        slopes.append(sum((2 * i + 1) * c * edge ** (2 * i) for i, c in enumerate(polynomial)))
        edge = float(evaluate((polynomial,), edge * UNIT).max())
        rounded = float(evaluate((polynomial,), rounded * (1 + 2**-8) * UNIT).max())
        largest.append(rounded)
    assert [round(slope) for slope in slopes] == [24, 12, 11, 8]
    assert largest == pytest.approx([2.09, 3.49, 180, 9.9e10], rel=5e-3)


def test_the_set_for_sketches_has_the_gain_of_seven_quintic_steps_in_four():
    four, seven = resolve("polar-express-sketch", 4), resolve("quintic", 7)
    small = torch.tensor(1e-6, dtype=torch.float64)
    gains = [float(evaluate(each, small) / small) for each in (four, seven)]
    assert gains == pytest.approx([81, 81], rel=0.02)
    x = torch.linspace(0.03, 1, 20_001, dtype=torch.float64)
    assert (evaluate(four, x) - 1).abs().max() < 5.5e-5


def test_jordans_coefficients_are_the_published_ones():
    """From the slope at zero to the highest power; each reaches the polynomial."""
    assert resolve("jordan", 1) == ((3.4445, -4.7750, 2.0315),)
    x = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    expected = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    torch.testing.assert_close(evaluate(resolve("jordan", 1), x), expected)


def test_the_flat_set_has_its_documented_values():
    (polynomial,) = flat = resolve("flat", 1)
    x = torch.linspace(0.1, 1, 20_001, dtype=torch.float64)
    error = (evaluate(flat, x) - 1).abs()
    assert 0.139 < float(error.max()) < 0.14
    assert polynomial[0] == pytest.approx(9.9, abs=0.02)
    below = evaluate(flat, torch.linspace(0, 0.1, 2001, dtype=torch.float64))
    assert (below.diff() > 0).all()  # what is below 0.1 climbs, and in order
    beyond = torch.tensor([1.05, 1.15], dtype=torch.float64)
    assert evaluate(flat, beyond).tolist() == pytest.approx([1.32, 2.4], abs=0.01)
    assert float(evaluate(flat, torch.linspace(0, 1.2, 5001, dtype=torch.float64)).max()) <= 2.6


def test_the_flat_set_takes_three_products():
    assert len(resolve("flat", 1)[0]) == 9  # degree 17
    assert len(squarings(resolve("flat", 1)[0])) == 3


def test_steps_after_the_flat_one_are_quintic():
    assert resolve("flat", 3) == (*resolve("flat", 1), *resolve("quintic", 2))
    twice = resolve("flat", 1) * 2
    assert float(evaluate(twice, UNIT).max()) > 2.2  # which is why
