"""The rest of a sketch: its norm, the three forms that keep it, and what a wrong norm does to them."""

from __future__ import annotations

import math

import pytest
import torch
from tests.spectra import SPECTRA, batch, gaussian, matrix, orthogonal, with_singular_values
from torch.utils._python_dispatch import TorchDispatchMode

from polarstep import Exact, products, rng
from polarstep.polar import deflation
from polarstep.polar.coefficients import evaluate, polar_express, resolve

M_ROWS, N_COLS, ELL = 24, 40, 6
CUBIC, QUINTIC = resolve("cubic", 1), resolve("quintic", 1)

BOUNDED = {
    "cubic": CUBIC,
    "cubic x3": CUBIC * 3,
    "quintic": QUINTIC,
    "quintic x2": QUINTIC * 2,
    "quintic x3": QUINTIC * 3,
    "cubic, then quintic": CUBIC + QUINTIC,
}
OVERSHOOTING = {
    "jordan": resolve("jordan", 1),
    "jordan x2": resolve("jordan", 2),
    "minimax": polar_express(0.2, 1),
    "minimax x2": polar_express(0.1, 2),
    "minimax of degree 9": polar_express(0.15, 1, 9),
}
SETS = BOUNDED | OVERSHOOTING

FORMS = {
    "scaled": deflation.scaled_rest,
    **{
        f"{way}: {name}": lambda *args, _form=form, _set=polynomials: _form(*args, _set)
        for way, form in (
            ("apart", deflation.lifted_apart),
            ("jointly", deflation.lifted_jointly),
        )
        for name, polynomials in SETS.items()
    },
}
over_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
over_sets = pytest.mark.parametrize("polynomials", SETS.values(), ids=SETS.keys())


def operator_norm(X):
    return torch.linalg.matrix_norm(X.double(), 2)


def head(M, ell=ELL, *, power=1, key=0):
    """Q, B and Z of a Gaussian sketch with ``power`` iterations and an exact inner map."""
    Omega = torch.randn(M.shape[-1], ell, generator=rng.generator("head", key), dtype=torch.float64)
    A = M.double()
    A = A / A.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
    Q = torch.linalg.qr(A @ Omega).Q
    for _ in range(power):
        Q = torch.linalg.qr(A @ torch.linalg.qr(A.mT @ Q).Q).Q
    Q = Q.to(M.dtype)
    B = Q.mT @ M
    return Q, B, Exact()(B)


def norm_of_rest(M, Q, B, **options):
    norm = deflation.frobenius_norm(M)
    return deflation.rest_norm(M, Q, B, norm, deflation.rest_frobenius(norm, Q.mT @ M), **options)


def with_delta(form, M, Q, B, Z):
    return form(M, Q, B, Z, norm_of_rest(M, Q, B).delta)


def mixed(dtype=torch.float64):
    names = ["flat", "power-law", "one-dominant", "zero", "low-rank-and-noise", "rank-deficient"]
    return torch.stack([matrix(s, M_ROWS, N_COLS, seed=i) for i, s in enumerate(names)]).to(dtype)


# The norm of the rest


def test_the_rest_is_orthogonal_to_the_basis_and_has_the_energy_left():
    M = mixed()
    Q, B, _ = head(M)
    R = deflation.rest(M, Q, B)
    torch.testing.assert_close(Q.mT @ R, torch.zeros_like(B), atol=1e-13, rtol=0)
    bound = deflation.rest_frobenius(deflation.frobenius_norm(M), B)
    assert (bound >= deflation.frobenius_norm(R)).all()
    torch.testing.assert_close(bound, deflation.frobenius_norm(R), atol=2e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("power", [0, 1])
@pytest.mark.parametrize("spectrum", ["flat", "power-law", "one-dominant", "low-rank-and-noise"])
def test_delta_is_the_norm_with_its_margin(spectrum, power, dtype):
    M = batch(spectrum, 4, 96, 160).to(dtype)
    vectors = None
    for step in range(4):
        Q, B, _ = head(M, 12, power=power, key=step)
        found = norm_of_rest(M, Q, B, vectors=vectors)
        vectors = found.vectors
        ratio = found.delta.flatten() / operator_norm(deflation.rest(M, Q, B))
        # The first vectors know nothing of M; what they miss is within what every form tolerates.
        assert (ratio > (0.7 if step == 0 else 0.8)).all(), step
        assert (ratio < 1.1 * 16**0.125 + 1e-3).all(), step
        norm = operator_norm(deflation.rest(M, Q, B))
        assert (found.least.flatten() <= norm * (1 + 1e-5)).all()
        assert (found.most.flatten() >= norm * (1 - 1e-5)).all()


def test_delta_on_real_momentum_from_the_first_step_on(momentum):
    """Zero matrices and ranks below ℓ are among these: there δ may be ∞, but never wrong."""
    seen = 0
    for matrices in momentum.values():
        steps = matrices.unflatten(0, (9, -1))
        vectors = None
        for step, M in enumerate(steps):
            M = M if M.shape[-2] <= M.shape[-1] else M.mT
            Q, B, _ = head(M, 8, power=step % 2, key=step)
            found = norm_of_rest(M, Q, B, vectors=vectors)
            vectors = found.vectors
            norm = operator_norm(deflation.rest(M, Q, B))
            assert (found.delta.flatten() >= 0.8 * norm).all()
            real = norm > 1e-4 * operator_norm(M)
            assert (found.delta.flatten()[real] <= 1.4 * norm[real]).all()
            assert (found.most.flatten() >= norm * (1 - 1e-5)).all()
            seen += int(real.sum())
    assert seen > 50


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spectrum", ["rank-deficient", "rank-one-within-rounding", "zero"])
def test_where_the_basis_has_it_all_there_is_no_rest(spectrum, dtype):
    M = batch(spectrum, 3, 12, 20).to(dtype)
    Q, B, Z = head(M, 5)
    found = norm_of_rest(M, Q, B)
    assert found.delta.isinf().all()
    assert found.vectors.isfinite().all()
    assert (found.vectors.abs().amax((-2, -1)) > 0).all()
    T = deflation.scaled_rest(M, Q, B, Z, found.delta)
    torch.testing.assert_close(T, Q @ Z, atol=1e-6, rtol=0)


class Reads(TorchDispatchMode):
    """Counts the operations that read a tensor; to make a view of it is none."""

    def __init__(self, X):
        super().__init__()
        self.address, self.count = X.data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        reads = any(isinstance(a, torch.Tensor) and a.data_ptr() == self.address for a in args)
        is_view = isinstance(result, torch.Tensor) and result.data_ptr() == self.address
        self.count += reads and not is_view
        return result


def test_the_norm_reads_the_matrix_twice():
    M = gaussian(2, M_ROWS, N_COLS)
    Q, B, _ = head(M)
    norm = deflation.frobenius_norm(M)
    frobenius = deflation.rest_frobenius(norm, B)
    with Reads(M) as reads:
        deflation.rest_norm(M, Q, B, norm, frobenius)
    assert reads.count == 2


def test_a_nan_does_not_stay_in_the_vectors():
    M = gaussian(3, M_ROWS, N_COLS)
    Q, B, _ = head(M)
    clean = norm_of_rest(M, Q, B)
    bad = M.clone()
    bad[1, 2, 3] = math.nan
    found = norm_of_rest(bad, Q, Q.mT @ bad)
    assert found.delta[1].isnan().all()
    assert found.vectors.isfinite().all()
    torch.testing.assert_close(found.delta[[0, 2]], clean.delta[[0, 2]])
    again = norm_of_rest(M, Q, B, vectors=found.vectors)
    assert (again.delta.flatten() >= 0.8 * operator_norm(deflation.rest(M, Q, B))).all()


def test_a_basis_that_is_orthonormal_but_roughly():
    """Columns of norm 1 − 2⁻⁸, as bfloat16 leaves them, under a head that towers over the rest."""
    sigma = torch.where(torch.arange(M_ROWS) < 1, 1.0, 1e-3).double()
    M = with_singular_values(sigma, M_ROWS, N_COLS)[None]
    Q, _, _ = head(M)
    exact = operator_norm(deflation.rest(M, Q, Q.mT @ M))
    Q = (1 - 2**-8) * Q
    B = Q.mT @ M
    assert (operator_norm(deflation.rest(M, Q, B)) > 5 * exact).all()
    D = deflation.projection(Q, B)
    torch.testing.assert_close(operator_norm(deflation.rest(M, Q, D)), exact, rtol=1e-2, atol=0)
    norm = deflation.frobenius_norm(M)
    for coefficients in (B, D):
        bound = deflation.rest_frobenius(norm, B)
        assert (bound >= deflation.frobenius_norm(deflation.rest(M, Q, coefficients))).all()
    assert float(norm_of_rest(M, Q, D).delta) == pytest.approx(1.1 * float(exact), rel=0.1)


@pytest.mark.parametrize("spectrum", ["flat", "power-law", "one-dominant"])
def test_in_bfloat16_the_forms_are_near_those_of_float32(spectrum):
    M = batch(spectrum, 3, 64, 96).float()
    Q, B, Z = head(M, 8)
    fine = norm_of_rest(M, Q, B).delta
    M16, Q16 = M.bfloat16(), ((1 - 2**-8) * Q).bfloat16()
    B16 = Q16.float().mT @ M16.float()  # a GPU accumulates in float32
    D, norm = deflation.projection(Q16, B16), deflation.frobenius_norm(M16)
    bound = deflation.rest_frobenius(norm, B16, 2.0**-8)
    delta = deflation.rest_norm(M16, Q16, D, norm, bound).delta
    torch.testing.assert_close(delta, fine, rtol=0.05, atol=0)
    for name in ("scaled", "apart: jordan x2", "jointly: cubic, then quintic"):
        rounded = FORMS[name](M16, Q16, D, Z.bfloat16(), delta)
        exact = FORMS[name](M, Q, B, Z, fine)
        assert rounded.dtype == torch.float32
        assert (operator_norm(rounded - exact) < 0.15).all()
        # The head of "one-dominant" is 100 times δ, and M/δ has its rounding.
        assert (operator_norm(rounded) < operator_norm(exact) + 0.1).all()


# The three forms


def spectral(X, value):
    """U·value(σ)·Vᵀ."""
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    return (U * value(sigma)[..., None, :]) @ Vh


@over_sets
def test_the_forms_are_their_formulas(polynomials):
    M = mixed()[[0, 1, 2, 4]]
    Q, B, Z = head(M)
    delta = operator_norm(deflation.rest(M, Q, B))[:, None, None]
    X = deflation.rest(M, Q, B) / delta
    close = {"atol": 1e-10, "rtol": 0}
    args = M, Q, B, Z, delta
    torch.testing.assert_close(deflation.scaled_rest(*args), Q @ Z + X, **close)
    s = deflation.apart_scale(polynomials)
    apart = Q @ Z + spectral(X, lambda x: evaluate(polynomials, s * x))
    torch.testing.assert_close(deflation.lifted_apart(*args, polynomials), apart, **close)
    s = deflation.joint_scale(polynomials)
    jointly = spectral(Q @ Z + X, lambda x: evaluate(polynomials, s * x))
    torch.testing.assert_close(deflation.lifted_jointly(*args, polynomials), jointly, **close)


@over_forms
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_batch_is_its_matrices(form, dtype):
    M = mixed(dtype)
    parts = head(M)
    together = with_delta(form, M, *parts)
    alone = [with_delta(form, M[i : i + 1], *(X[i : i + 1] for X in parts)) for i in range(len(M))]
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(together, torch.cat(alone), atol=tolerance, rtol=0)
    assert together.shape == M.shape
    assert together.dtype == dtype


@over_forms
def test_zero_stays_zero_beside_others(form):
    M = mixed(torch.float32)
    T = with_delta(form, M, *head(M))
    assert torch.equal(T[3], torch.zeros_like(T[3]))
    assert T.isfinite().all()
    assert (operator_norm(T[[0, 1, 2, 4, 5]]) > 0.3).all()


@over_forms
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-20, 2.0**20, 2.0**100])
def test_scale_does_not_matter(form, scale):
    M = mixed(torch.float32)
    Q, B, Z = head(M)
    T = with_delta(form, M, Q, B, Z)
    torch.testing.assert_close(with_delta(form, scale * M, Q, scale * B, Z), T, atol=1e-5, rtol=0)


@over_forms
def test_deterministic_and_without_side_effects(form, untouched_rng):
    M = mixed(torch.float32)
    parts = head(M)
    before = [X.clone() for X in (M, *parts)]
    assert torch.equal(with_delta(form, M, *parts), with_delta(form, M, *parts))
    assert all(torch.equal(X, Y) for X, Y in zip((M, *parts), before, strict=True))


@over_forms
def test_a_transposed_tall_matrix_stays_one(form):
    M = mixed(torch.float32)
    tall = M.mT.contiguous().mT
    T = with_delta(form, tall, *head(M))
    assert T.mT.is_contiguous()
    torch.testing.assert_close(T, with_delta(form, M, *head(M)), atol=1e-4, rtol=0)


def test_without_a_rest_it_is_the_low_rank_map():
    M = mixed()
    Q, B, Z = head(M)
    delta = torch.full((len(M), 1, 1), math.inf, dtype=M.dtype)
    for form in (deflation.scaled_rest, FORMS["apart: jordan x2"]):
        torch.testing.assert_close(form(M, Q, B, Z, delta), Q @ Z, atol=1e-14, rtol=0)
    T = FORMS["jointly: cubic, then quintic"](M, Q, B, Z, delta)
    torch.testing.assert_close(T, Q @ Z, atol=1e-12, rtol=0)


# ‖T‖_op


def overlapping(dtype=torch.float32):
    """The worst case: the rest has the very row of the head, and ‖QZ + R/δ‖_op = √2."""
    row = gaussian(1, 1, N_COLS).to(dtype)
    M = torch.cat([2 * row, row, torch.zeros(1, M_ROWS - 2, N_COLS, dtype=dtype)], dim=1)
    Q = torch.eye(M_ROWS, 1, dtype=dtype)[None]
    B = Q.mT @ M
    return M, Q, B, Exact()(B)


@pytest.mark.parametrize("polynomials", BOUNDED.values(), ids=BOUNDED.keys())
def test_joint_steps_of_the_papers_polynomials_stay_within_one(polynomials, momentum):
    batches = [batch(spectrum, 3, M_ROWS, N_COLS).float() for spectrum in SPECTRA]
    batches += [M if M.shape[-2] <= M.shape[-1] else M.mT for M in momentum.values()]
    for M in batches:
        for power in (0, 1):
            Q, B, Z = head(M, power=power)
            found = norm_of_rest(M, Q, B).delta
            norm = operator_norm(deflation.rest(M, Q, B)).float()[:, None, None]
            for delta in (found, torch.where(found.isinf(), found, norm)):
                T = deflation.lifted_jointly(M, Q, B, Z, delta, polynomials)
                assert (operator_norm(T) <= 1 + 1e-5).all()


@pytest.mark.parametrize("polynomials", BOUNDED.values(), ids=BOUNDED.keys())
def test_joint_steps_stay_within_one_in_the_worst_case(polynomials):
    M, Q, B, Z = overlapping()
    delta = operator_norm(deflation.rest(M, Q, B)).float()[:, None, None]
    apart = deflation.scaled_rest(M, Q, B, Z, delta)
    assert float(operator_norm(apart)) == pytest.approx(math.sqrt(2), rel=1e-6)
    T = deflation.lifted_jointly(M, Q, B, Z, delta, polynomials)
    assert operator_norm(T) <= 1 + 1e-5


def test_the_scales_are_those_of_the_docstrings():
    assert deflation.apart_scale(QUINTIC * 2) == deflation.apart_scale(CUBIC) == 1
    assert deflation.joint_scale(CUBIC) == deflation.joint_scale(CUBIC + QUINTIC * 2) == 1
    assert deflation.joint_scale(QUINTIC) == pytest.approx(1 / math.sqrt(2), rel=0.02)
    assert deflation.joint_scale(QUINTIC) * math.sqrt(2) >= 1
    assert deflation.joint_scale(QUINTIC * 2) == pytest.approx(0.81, abs=0.005)
    assert deflation.apart_scale(SETS["jordan"]) == pytest.approx(0.94, abs=0.005)
    assert deflation.apart_scale(SETS["jordan x2"]) == pytest.approx(0.89, abs=0.005)


@over_sets
@pytest.mark.parametrize("case", ["spectra", "worst"])
def test_a_delta_too_small_by_30_percent_does_no_harm(polynomials, case):
    if case == "worst":
        M, Q, B, Z = overlapping(torch.float64)
    else:
        M = mixed()[[0, 1, 2, 4]]
        Q, B, Z = head(M, power=0)
    delta = 0.7 * operator_norm(deflation.rest(M, Q, B))[:, None, None]
    scaled = deflation.scaled_rest(M, Q, B, Z, delta)
    assert (operator_norm(scaled) <= math.hypot(1, 1 / 0.7) + 1e-9).all()
    apart = deflation.lifted_apart(M, Q, B, Z, delta, polynomials)
    assert (operator_norm(apart) <= math.hypot(1, 2) + 1e-9).all()
    jointly = deflation.lifted_jointly(M, Q, B, Z, delta, polynomials)
    assert (operator_norm(jointly) <= 2 + 1e-9).all()


def test_without_its_scale_a_delta_too_small_explodes():
    M = mixed()[:1]
    R = deflation.rest(M, *head(M)[:2])
    X = R / (0.7 * operator_norm(R)[:, None, None])
    assert operator_norm(products.of(X.device).iterate(X, SETS["jordan x2"])) > 100
    assert operator_norm(products.of(X.device).iterate(X, SETS["minimax x2"])) > 1e5


def test_vectors_start_without_a_pattern():
    """Columns are nearly orthonormal, so that they span what they are meant to, at every length."""
    for n in (8, 40, 768, 4096):
        V = deflation.first_vectors(torch.zeros(2, n // 2, n))
        assert V.shape == (2, n, min(n // 2, 16))
        sigma = torch.linalg.svdvals(V[0].double() * math.sqrt(2))
        assert sigma[-1] > 0.3
        assert sigma[0] < 1.8


def test_orthogonal_blocks_cannot_hide_from_the_vectors():
    """A direction that the carried vectors have no part of is found again within a few steps."""
    U, V = orthogonal(M_ROWS, 1), orthogonal(N_COLS, 2, M_ROWS)
    weak = torch.cat([torch.full((16,), 1.0), torch.zeros(8)]).double()
    strong = torch.cat([torch.full((16,), 1.0), torch.full((8,), 5.0)]).double()
    Q = torch.zeros(1, M_ROWS, 1, dtype=torch.float64)
    vectors, deltas = None, []
    for sigma in [weak] * 6 + [strong] * 6:
        M = ((U * sigma) @ V.mT)[None]
        found = norm_of_rest(M, Q, Q.mT @ M, vectors=vectors)
        vectors = found.vectors
        deltas.append(float(found.delta) / float(sigma.max()))
    assert deltas[5] == pytest.approx(1.1, rel=0.05)
    assert deltas[-1] > 1
