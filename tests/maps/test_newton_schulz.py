"""T(M) = U p_q(Σ/δ) Vᵀ in both forms, and a δ that is never too small."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.counting import Flops
from tests.spectra import (
    SPECTRA,
    batch,
    gaussian,
    matrix,
    operator_norm,
    with_singular_values,
)

from polarstep import NewtonSchulz
from polarstep.maps import coefficients, full_space
from polarstep.ops.cpu import Cpu

CUSTOM = ((2.0, -1.5, 0.5), (1.5, -0.5), (1.2, 0.1, -0.2, -0.1))
SETS = (*coefficients.names(), CUSTOM)


def delta_of(M, delta):
    """δ written out from the singular values."""
    sigma = torch.linalg.svdvals(M)
    if delta == "frobenius":
        return sigma.square().sum().sqrt()
    if delta == "spectral":
        return sigma.pow(8).sum().pow(1 / 8)
    if delta == "operator":
        return sigma[0] * (sigma / sigma[0]).pow(4096).sum().pow(1 / 4096)
    return torch.tensor(delta, dtype=torch.float64)


@pytest.mark.parametrize("coefficient_set", SETS, ids=str)
@pytest.mark.parametrize("delta", ["frobenius", "spectral", "operator", 2.5])
@pytest.mark.parametrize("form", ["plain", "gram", "auto"])
@pytest.mark.parametrize("steps", [1, 5])
def test_is_the_singular_value_map(coefficient_set, delta, form, steps):
    solver = NewtonSchulz(steps, coefficient_set, delta, form=form)
    for shape in ((9, 9), (6, 30), (30, 6)):
        M = matrix("power-law", *shape)
        U, S, Vh = torch.linalg.svd(M, full_matrices=False)
        p = coefficients.evaluate(solver.polynomials, S / delta_of(M, delta))
        torch.testing.assert_close(solver(M), (U * p) @ Vh, atol=1e-10, rtol=0)


@pytest.mark.parametrize("coefficient_set", ["cubic", "quintic"])
@pytest.mark.parametrize("form", ["plain", "gram"])
@given(steps=st.integers(1, 12), logs=st.lists(st.floats(-3, 0), min_size=1, max_size=8))
def test_is_the_singular_value_map_whatever_the_spectrum(coefficient_set, form, steps, logs):
    sigma = 10.0 ** torch.tensor(sorted(logs, reverse=True), dtype=torch.float64)
    M = with_singular_values(sigma, len(sigma), 12)
    solver = NewtonSchulz(steps, coefficient_set, form=form)
    p = coefficients.evaluate(solver.polynomials, sigma / sigma.norm())
    torch.testing.assert_close(
        solver(M), with_singular_values(p, len(sigma), 12), atol=1e-10, rtol=0
    )


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("name", ["cubic", "quintic", "polar-express"])
def test_many_steps_converge_to_the_exact_factor(form, name):
    M = batch("power-law", 3, 10, 30)
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    tolerance = 1e-6 if name != "polar-express" else 0.02  # its safety factor stops short of one
    T = NewtonSchulz(40, name, form=form)(M)
    torch.testing.assert_close(T, U @ Vh, atol=tolerance, rtol=0)


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("name", ["cubic", "quintic"])
@pytest.mark.parametrize("delta", ["frobenius", "spectral", "operator"])
@pytest.mark.parametrize("steps", [1, 5, 7, 9, 12, 25])
def test_norm_is_at_most_one_for_any_number_of_steps(form, name, delta, steps, momentum):
    # The Gram form is at its worst between two restarts, at nine quintic steps.
    solver = NewtonSchulz(steps, name, delta, form=form)
    synthetic = torch.stack([matrix(s, 64, 96) for s in SPECTRA]).float()
    for M in (synthetic, *(m[:10] for m in momentum.values())):
        assert (operator_norm(solver(M).double()) <= 1 + 1e-5).all()


@pytest.mark.parametrize(("delta", "order"), [("spectral", 8), ("operator", 4096)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(data=st.data())
def test_delta_by_squarings_is_a_norm_from_above(delta, order, dtype, data):
    m, n = data.draw(st.integers(1, 24), "m"), data.draw(st.integers(1, 24), "n")
    kind = data.draw(st.sampled_from([*SPECTRA, "gaussian", "ones", "logs"]), "kind")
    if kind == "gaussian":
        M = gaussian(m, n, seed=m + 31 * n)
    elif kind == "ones":
        M = torch.ones(m, n, dtype=torch.float64)
    elif kind == "logs":
        r = min(m, n)
        logs = data.draw(st.lists(st.floats(-6, 0), min_size=r, max_size=r), "log σ")
        M = with_singular_values(10.0 ** torch.tensor(logs, dtype=torch.float64), m, n)
    else:
        M = matrix(kind, m, n)
    scale = 10.0 ** data.draw(st.integers(-30, 30), "log scale")
    M = (M * scale).to(dtype)
    over_delta = operator_norm(NewtonSchulz(1, ((1.0, 0.0),), delta=delta)(M).double())  # ‖M‖_op/δ
    assert over_delta <= 1 + (1e-12 if dtype == torch.float64 else 2e-7)  # measuring rounds too
    if M.any():
        assert over_delta >= min(m, n) ** (-1 / order) * (1 - 1e-5)


@pytest.mark.parametrize("delta", ["spectral", "operator"])
@pytest.mark.parametrize("shape", [(64, 4096), (512, 512)], ids=str)
def test_delta_by_squarings_is_a_norm_from_above_in_long_sums(shape, delta):
    # Equal terms round the same way: the worst case for a sum of this length.
    for M in (torch.ones(shape), torch.full(shape, 1 / 3), gaussian(*shape).float().abs()):
        assert operator_norm(NewtonSchulz(1, ((1.0, 0.0),), delta=delta)(M).double()) <= 1 + 2e-7


def products_of(form, shape, steps, coefficient_set, delta):
    """FLOPs of all products that a call in float32 runs."""
    solver = NewtonSchulz(steps, coefficient_set, delta, form=form)
    with Flops() as counter:
        solver(gaussian(*shape).float())
    return counter.total


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("delta", ["frobenius", "spectral", "operator", 3.0])
@pytest.mark.parametrize(
    "coefficient_set", ["cubic", "quintic", "polar-express", "jordan", CUSTOM], ids=str
)
@pytest.mark.parametrize("steps", [1, 5, 9])
def test_auto_runs_the_form_with_fewer_products(delta, coefficient_set, steps):
    for shape in ((16, 16), (16, 20), (20, 48), (48, 20), (16, 64)):
        plain, gram, auto = (
            products_of(form, shape, steps, coefficient_set, delta)
            for form in ("plain", "gram", "auto")
        )
        assert auto == min(plain, gram), shape


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("delta", ["frobenius", "spectral"])
def test_symmetric_products_compute_little_more_than_half(form, delta):
    whole = NewtonSchulz(2, "quintic").flops(540, 560) * (1.5 if delta == "spectral" else 1)
    assert products_of(form, (540, 560), 2, "quintic", delta) < 0.9 * whole


def test_restarts_by_precision():
    def lengths(name, steps, dtype):
        starts = full_space.restarts(coefficients.resolve(name, steps), full_space.rounding(dtype))
        return [b - a for a, b in itertools.pairwise([0, *starts, steps])]

    half, single = torch.float16, torch.float32
    assert lengths("polar-express", 5, half) == [1, 2, 2]  # [2, 3] has ν = 0.23 on 10^(-4k/m)
    assert lengths("polar-express", 6, half) == [1, 2, 2, 1]  # [1, 2, 3] has ν = 0.02
    assert lengths("quintic", 7, half) == [5, 2]
    assert lengths("polar-express", 5, single) == [3, 2]
    assert lengths("quintic", 7, single) == [6, 1]  # the last one settles


def test_flops_is_the_papers_count_whichever_form_runs():
    for form in ("plain", "gram"):
        assert NewtonSchulz(7, "quintic", form=form).flops(768, 3072) == 7 * (
            4 * 3072 * 768**2 + 2 * 768**3
        )
    assert NewtonSchulz(3, "cubic").flops(10, 20) == 3 * 4 * 20 * 10**2


def test_a_restart_keeps_what_the_gram_matrix_cannot_hold():
    # σ = 1e-4 is below what float32 can say of a Gram matrix with eigenvalue one.
    sigma = torch.tensor([1.0, 1e-4], dtype=torch.float64)
    M = with_singular_values(sigma, 2, 40)
    solver = NewtonSchulz(20, "quintic", form="gram")
    assert full_space.restarts(solver.polynomials, torch.finfo(torch.float32).eps)
    T = solver(M.float()).double()
    torch.testing.assert_close(torch.linalg.svdvals(T), torch.ones(2).double(), atol=1e-4, rtol=0)


def test_products_in_the_dtype_that_was_asked_for():
    M = matrix("flat", 8, 12).float()
    coarse = NewtonSchulz(3, "quintic", dtype=torch.bfloat16, form="plain")(M)
    assert coarse.dtype == torch.float32
    error = (coarse - NewtonSchulz(3, "quintic")(M)).abs().max()
    assert 1e-4 < error < 0.05
    precise = NewtonSchulz(3, "quintic", dtype=torch.float64)(M)
    torch.testing.assert_close(
        precise, NewtonSchulz(3, "quintic")(M.double()).float(), atol=1e-7, rtol=0
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficients": "newton"}, r"coefficients='newton': expected one of 'cubic'"),
        ({"coefficients": (1.5, -0.5)}, r"wrap a single polynomial"),
        ({"coefficients": ()}, r"coefficients=\(\): expected a sequence of tuples"),
        ({"steps": 0}, r"steps=0: expected an integer ≥ 1; 5 to 9 are usual"),
        ({"coefficients": ((1.5, math.nan),)}, r"two finite numbers"),
        ({"delta": "nuclear"}, r"delta='nuclear': expected \"frobenius\", \"spectral\""),
        ({"delta": 0.0}, r"delta=0\.0: expected a finite number > 0"),
        ({"delta": math.inf}, r"delta=inf: expected a finite number > 0"),
        ({"dtype": torch.int32}, r"dtype=torch.int32: expected a floating-point dtype"),
        ({"form": "small"}, r"form='small': expected one of auto, plain, gram"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        NewtonSchulz(**options)


@pytest.mark.parametrize("steps", [2.0, True])
def test_steps_are_an_integer(steps):
    with pytest.raises(
        TypeError, match=f"steps={steps}: expected an integer ≥ 1; 5 to 9 are usual"
    ):
        NewtonSchulz(steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": None}, r"delta=None: expected \"frobenius\", \"spectral\", \"operator\" or a"),
        ({"delta": torch.ones(2)}, r"delta=tensor\(\[1., 1.\]\): expected \"frobenius\""),
        (
            {"dtype": "float32"},
            r"dtype='float32': expected a torch.dtype such as torch.float32, or",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_of_another_type(options, message):
    with pytest.raises(TypeError, match=message):
        NewtonSchulz(**options)


@pytest.mark.parametrize("array", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_numbers_of_any_kind_make_the_same_map(array):
    """A map is a key of buckets and part of checkpoints: plain numbers, equal and hashed alike."""
    rows = [[2.0, -1.5, 0.5], [1.875, -1.25, 0.375]]
    plain = NewtonSchulz(5, tuple(map(tuple, rows)), 2.0)
    delta = 2 if array is list else array(2.0)
    polar = NewtonSchulz(5, array(rows), delta)
    assert polar == plain
    assert hash(polar) == hash(plain)
    assert repr(polar) == repr(plain)
    M = torch.eye(3)
    torch.testing.assert_close(polar(M), plain(M))


def test_coefficients_without_a_margin_are_not_run_in_16_bits(monkeypatch):
    """A dense spectrum has a singular value wherever a polynomial peaks."""
    monkeypatch.setattr(Cpu, "dtype", lambda self, given: torch.bfloat16)
    g = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(48, 48, generator=g)).Q for _ in range(2))
    M = (U * torch.linspace(0.02, 1, 48)) @ V.mT
    careful = NewtonSchulz(7, "polar-express-cifar10")
    assert not careful.traits.rounds_input
    assert "not below float32" in careful.describe(48, 48)
    assert torch.linalg.matrix_norm(careful(M), 2) < 1.01
    with pytest.warns(UserWarning, match=r"dtype=torch.bfloat16.*safety factor.*dtype=None") as t:
        careless = NewtonSchulz(7, "polar-express-cifar10", dtype=torch.bfloat16)  # as asked for
    assert t[0].filename == __file__
    assert not torch.linalg.matrix_norm(careless(M).float(), 2) < 10
    assert NewtonSchulz(7, "polar-express").traits.rounds_input
    assert careful(M.double()).dtype == torch.float64


def test_a_map_can_be_compiled_as_one_graph():
    """With coefficients that no other test has looked at."""
    polar = NewtonSchulz(3, ((1.90625, -1.28125, 0.375),))
    M = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda X: polar(X), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(M), polar(M))


@pytest.mark.parametrize("name", ["quintic", "polar-express", ((1.890625, -1.265625, 0.375),)])
def test_a_map_can_be_made_inside_a_compiled_function(name):
    M = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))

    def apply(X):
        return NewtonSchulz(4, name)(X)

    compiled = torch.compile(apply, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(M), apply(M))


@pytest.mark.parametrize("name", ["polar-express", ((1.859375, -1.234375, 0.375),)])
def test_an_unpickled_map_can_be_compiled_as_one_graph(name, monkeypatch):
    """Nothing is known of its coefficients, as in a new process that reads a checkpoint."""
    polar = NewtonSchulz(6, name)
    M = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    expected = polar(M)
    stored = pickle.dumps(polar)
    coefficients._named.cache_clear()
    for module, known in ((coefficients, "_SURVIVES"), (full_space, "_FITS")):
        monkeypatch.setattr(module, known, {})
    unpickled = pickle.loads(stored)
    compiled = torch.compile(lambda X: unpickled(X), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(M), expected)


def test_a_weight_shrinks_by_its_own_rounding_errors():
    """‖WX‖_op ≤ 1 without a last step that would settle it."""
    polynomials = coefficients.resolve("quintic", 7)
    for seed in range(20):
        X = (gaussian(1, 40, 60, seed=seed) + 99 * matrix("one-dominant", 40, 60)).float()
        W, _, _ = full_space.weight(X, polynomials)
        T = W.double() @ X.double()
        assert torch.linalg.matrix_norm(T, 2) <= 1
    exact, _, _ = full_space.weight(gaussian(40, 60)[None], polynomials)
    rounded, _, _ = full_space.weight(gaussian(40, 60)[None].float(), polynomials)
    assert 0.9e-5 < 1 - float((rounded / exact).median()) < 1.1e-5


@pytest.mark.parametrize("name", ["cubic", "quintic", "jordan", "polar-express"])
@pytest.mark.parametrize("steps", [1, 3])
def test_bounds_on_norm_and_loss_are_attained_by_numbers(name, steps):
    """All 1×1 matrices σ ≤ δ: T = p(σ/δ), of which σ(1 − p(σ/δ)) is lost."""
    delta = 7.0
    solver = NewtonSchulz(steps, name, delta=delta)
    sigma = torch.linspace(0, delta, 4001, dtype=torch.float64)
    T = solver(sigma[:, None, None]).flatten()
    norm = torch.tensor([delta, 1.0], dtype=torch.float64)
    largest, lost = solver.bounds(1, norm)
    torch.testing.assert_close(largest, T.max().expand(2), rtol=1e-4, atol=0)
    torch.testing.assert_close(lost, (sigma * (1 - T)).max().expand(2), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(solver.bounds(5, norm)[1], 5 * lost)
    beyond = torch.tensor([7.1], dtype=torch.float64)  # δ may be below ‖M‖_op
    assert solver.bounds(1, beyond) is None


def test_the_loss_in_full_space_is_relative_to_the_norm():
    norm = torch.tensor([2.0, 6.0], dtype=torch.float64)
    _, found = NewtonSchulz(3, "quintic").bounds(4, norm)
    one = torch.ones(1, dtype=torch.float64)
    _, expected = NewtonSchulz(3, "quintic", delta=1.0).bounds(1, one)
    torch.testing.assert_close(found, 4 * norm * expected)
    largest = NewtonSchulz(5, "jordan").bounds(1, norm)[0]
    assert largest[0] == largest[1] > 1


@pytest.mark.parametrize(
    ("polynomials", "fits"),
    [
        (coefficients.resolve("jordan", 5), True),
        (coefficients.resolve("quintic", 9), True),
        (((90.0, -89.0),), False),  # 34.8 at x = 0.58, and one at x = 1
        (((1.5, -0.5), (90.0, -89.0)), False),
        (((90.0, -89.0), (0.001, 0.0)), False),  # on the way, not at the end
        (((101.0, -201.0, 101.0),), False),
    ],
)
def test_polynomials_that_grow_between_zero_and_one_do_not_fit_float16(polynomials, fits):
    assert full_space.fits_float16(polynomials) == fits


@pytest.mark.parametrize("delta", ["spectral", "operator"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_by_squarings_is_never_below_the_largest_singular_value(delta, dtype):
    """M/δ, by the polynomial x: of rank one, where the Schatten norms are ‖M‖_op up to rounding."""
    u, v = gaussian(200, 9, 1).float(), gaussian(200, 1, 14, seed=1).float()
    X = NewtonSchulz(1, ((1.0, 0.0),), delta=delta, dtype=dtype, form="plain")(u @ v)
    norm = operator_norm(X.double())
    assert (norm <= 1).all()
    assert (norm >= 1 - 16 * torch.finfo(dtype).eps).all()
