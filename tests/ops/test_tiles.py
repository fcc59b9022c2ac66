"""Full space and a step on the rest in bfloat16, as on CPUs with tiles; every CPU can multiply so."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from tests.spectra import SPECTRA, batch, gaussian, operator_norm, orthogonal

import polarstep as ps
from polarstep import rng
from polarstep.certificate import certified
from polarstep.maps.coefficients import evaluate, resolve
from polarstep.numerics import Squaring, squarings
from polarstep.ops.cpu import Cpu, polynomial_in_tiles
from polarstep.ops.lazy import Head

HEAD = ps.LowRank(
    12, 4, power=0, inner=ps.NewtonSchulz(4, "polar-express-sketch"), always_sketch=True
)
STEP = ps.NewtonSchulz(1, "flat")
FULL = {"polar-express": 5, "quintic": 7}
ROUNDED, EXACT = ps.Deflated(HEAD, STEP), ps.Deflated(HEAD, STEP, float8=False)
SHAPES = [(64, 64), (64, 160), (160, 64)]
# The largest value of "flat" between 0.1 and 1.17 is 1.14.
HIGHEST = 1.14


@pytest.fixture
def tiles(monkeypatch):
    """A CPU that has tiles, and gains from them at any size."""
    monkeypatch.setattr("polarstep.ops.cpu.TILES_FROM", 1)
    monkeypatch.setattr("polarstep.ops.cpu.FULL_TILES_FROM", 1)
    monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda: True)


def key():
    return rng.generator("tiles")


def gram(sigma: torch.Tensor) -> torch.Tensor:
    """U·diag(σ²)·Uᵀ in bfloat16."""
    U = orthogonal(len(sigma))
    return ((U * sigma.square()) @ U.mT).bfloat16()


# The polynomial.


@pytest.mark.parametrize("name", ["cubic", "quintic", "flat"])
@pytest.mark.parametrize("scale", [0.02, 1.0, 50.0])
def test_the_polynomial_is_that_of_its_singular_values(name, scale):
    (polynomial,) = resolve(name, 1)
    chain, s = squarings(polynomial), 1 / scale
    if chain is None:
        pytest.skip("a cubic has no product of its own to square")
    G = gram(scale * torch.linspace(0.1, 1, 64, dtype=torch.float64))
    values, U = torch.linalg.eigh(G.double())
    x = s * values.clamp_min(0).sqrt()
    expected = (U * (evaluate((polynomial,), x) / x)) @ U.mT
    found = polynomial_in_tiles(G, chain, s)
    assert found.dtype == torch.bfloat16
    assert operator_norm(found.double() - expected) <= 0.02 * operator_norm(expected)


def test_a_diagonal_is_rounded_once():
    """G² + 0.82G + 0.137 is nearly zero on the diagonal, where rounding before the sum would stay."""
    step = Squaring(1.0, 0.82, 0.1374, 0)
    G = -gram(torch.full((64,), 0.64, dtype=torch.float64)) + 0.01 * gaussian(64, 64)
    G = ((G + G.mT) / 2).bfloat16()
    exact = (G.double() @ G.double() + step.plus * G.double()).diagonal() + step.identity
    found = polynomial_in_tiles(G, (step,), 1.0).double().diagonal()
    assert exact.abs().median() < 0.05
    assert ((found - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()


def test_powers_of_two_of_s_and_g_cancel():
    (polynomial,) = resolve("flat", 1)
    chain, G = squarings(polynomial), gram(torch.linspace(0.1, 1, 48, dtype=torch.float64))
    assert chain is not None
    once = polynomial_in_tiles(G, chain, 0.75)
    assert torch.equal(polynomial_in_tiles(2.0**20 * G, chain, 0.75 * 2.0**-10), once)


def test_without_a_scale_it_is_zero_or_nan():
    (polynomial,) = resolve("flat", 1)
    chain, G = squarings(polynomial), torch.ones(4, 4, dtype=torch.bfloat16)
    assert chain is not None
    assert not polynomial_in_tiles(G, chain, 0.0).any()
    assert polynomial_in_tiles(torch.nan * G, chain, 0.0).isnan().all()


# The map.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_rounding_moves_little(shape, spectrum, tiles):
    M = batch(spectrum, 2, *shape).float()
    rounded, exact = (polar(M, generator=key()).double() for polar in (ROUNDED, EXACT))
    assert M.count_nonzero() == 0 or not torch.equal(rounded, exact)
    assert (operator_norm(rounded) <= HIGHEST + 0.04).all()
    nuclear = torch.linalg.matrix_norm(M.double(), "nuc")
    lost = ((exact - rounded) * M.double()).sum((-2, -1))
    assert (lost.abs() <= 0.015 * nuclear).all()
    assert (torch.linalg.matrix_norm(rounded - exact) <= 0.02 * 8 + 1e-9).all()  # ‖T‖_F is 8


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_certificates_are_upper_bounds(shape, spectrum, tiles):
    M = batch(spectrum, 2, *shape).float()
    T, bound = certified(ROUNDED, M, generator=key())
    assert torch.equal(T, ROUNDED(M, generator=key()))
    exact = ps.certify(M, T)
    assert (bound.gamma >= exact.gamma).all()
    assert (bound.nu >= exact.nu).all()
    assert (bound.nu <= exact.nu + 0.15).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scale_does_not_matter(shape, tiles):
    M = gaussian(2, *shape).float()
    T = ROUNDED(M, generator=key())
    for scale in (2.0**-99, 2.0**-40, 0.5, 2.0**40, 2.0**99):
        assert torch.equal(ROUNDED(scale * M, generator=key()), T), scale
    for scale in (1e-30, 1e30):
        assert operator_norm((ROUNDED(scale * M, generator=key()) - T).double()).amax() < 0.05


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zero_stays_zero_and_nan_stays_in_its_matrix(shape, tiles):
    M = gaussian(4, *shape).float()
    whole = ROUNDED(M, generator=key())
    M[0] = 0
    M[2, 3, 4] = torch.nan
    T = ROUNDED(M, generator=key())
    assert torch.equal(T[0], torch.zeros_like(T[0]))
    assert T[2].isnan().any()
    assert torch.equal(T[[1, 3]], whole[[1, 3]])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_is_its_matrices_in_any_memory_layout(shape, tiles):
    M = gaussian(3, *shape).float()
    before, T = M.clone(), ROUNDED(M, generator=key())
    assert torch.equal(M, before)
    assert torch.equal(T, ROUNDED(M, generator=key()))
    assert T.dtype == M.dtype
    for i in range(3):
        torch.testing.assert_close(ROUNDED(M[i], generator=key()), T[i], atol=5e-3, rtol=0)
    for other in (M.mT.contiguous().mT, M.repeat_interleave(2, -1)[..., ::2]):
        torch.testing.assert_close(ROUNDED(other, generator=key()), T, atol=5e-3, rtol=0)
    if shape[0] != shape[1]:  # else the sketch is of the other side
        flipped = ROUNDED(M.mT, generator=key()).mT
        torch.testing.assert_close(flipped, T, atol=5e-3, rtol=0)


@pytest.mark.parametrize(
    ("polar", "dtype"),
    [
        (EXACT, torch.float32),
        (ROUNDED, torch.float64),
        (
            ps.Deflated(HEAD, STEP, full=ps.NewtonSchulz(5, "quintic", dtype=torch.float32)),
            torch.float32,
        ),
        (ps.Deflated(HEAD, ps.NewtonSchulz(2, "quintic")), torch.float32),
    ],
    ids=["float8=False", "float64", "a dtype of its own", "two steps"],
)
def test_what_is_not_rounded(polar, dtype, monkeypatch):
    monkeypatch.setattr("polarstep.ops.cpu.TILES_FROM", 1)
    check_it_is_not_rounded(polar, dtype, monkeypatch)


def check_it_is_not_rounded(polar, dtype, monkeypatch):
    """Tiles change no digit of T, and the routing table does not name bfloat16."""
    M, found = gaussian(2, 64, 96).to(dtype), []
    for has in (False, True):
        monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda has=has: has)
        found.append(polar(M, generator=key()))
        assert dtype == torch.float64 or "in bfloat16" not in polar.describe(64, 96)
    assert torch.equal(*found)


def test_small_matrices_are_not_rounded(monkeypatch):
    monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda: True)
    M = gaussian(2, 64, 96).float()
    assert torch.equal(ROUNDED(M, generator=key()), EXACT(M, generator=key()))
    for rows, named in ((511, False), (512, True)):
        assert ("flat) in bfloat16" in ROUNDED.describe(rows, 900)) == named
        assert ("flat) in bfloat16" in ROUNDED.describe(900, rows)) == named


def test_no_tiles_no_rounding(no_tiles):
    M = gaussian(1, 520, 530).float()
    assert torch.equal(ROUNDED(M, generator=key()), EXACT(M, generator=key()))
    assert "in bfloat16" not in ROUNDED.describe(520, 530)


def test_gradients_are_those_of_the_step_in_float32(tiles):
    grads = []
    for polar in (ROUNDED, EXACT):
        M = gaussian(1, 24, 40).float().requires_grad_()
        polar(M, generator=key()).square().sum().backward()
        grads.append(M.grad)
    assert grads[0] is not None
    assert torch.equal(*grads)


def test_a_compiled_step_is_in_float32(tiles):
    """torch.compile cannot write a product to given memory, and leaves precisions as they are."""
    A, (polynomial,) = gaussian(2, 24, 40).float(), resolve("flat", 1)
    Q = torch.linalg.qr(A[..., :6]).Q
    B = Q.mT @ A
    head = Head(Q, B, torch.linalg.qr(B.mT).Q.mT)
    inverse = Cpu().inverse_rest_size(A, B, 18, 2.0, 1e-5)

    def step(A, float8):
        return Cpu().flat_step(A, head, inverse, polynomial, 1.08, most=99.0, float8=float8)[0]

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(A, True), compiled(A, False))
    assert not torch.equal(step(A, True), step(A, False))
    torch.testing.assert_close(compiled(A, True), step(A, False))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_optimizer_takes_the_step(shape, tiles):
    """Parameters move by −η·T(M), with M the gradient at the first step."""
    ends = []
    for polar in (ROUNDED, EXACT):
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = gaussian(*shape).float()
        optimizer = ps.Muon([p], lr=1.0, polar=polar, shape_scale="none", weight_decay=0.0)
        optimizer.step()
        ends.append(p.detach().double())
    assert "in bfloat16" in str(ps.Muon([p], polar=ROUNDED).routes)
    assert 0 < operator_norm(ends[0] - ends[1]) < 0.05
    assert operator_norm(ends[0]) > 0.9


# Full space.


def both(name):
    """A full-space map that may round, and one that may not."""
    steps = FULL[name]
    return ps.NewtonSchulz(steps, name), ps.NewtonSchulz(steps, name, dtype=torch.float32)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_rounding_in_full_space_loses_little_alignment(name, shape, spectrum, tiles):
    M = batch(spectrum, 2, *shape).float()
    rounded, exact = (polar(M).double() for polar in both(name))
    assert M.count_nonzero() == 0 or not torch.equal(rounded, exact)
    highest = float(both(name)[0].bounds(1, torch.ones(1))[0])
    assert (operator_norm(rounded) <= highest + 2.0**-7).all()
    nuclear = torch.linalg.matrix_norm(M.double(), "nuc")
    lost = ((exact - rounded) * M.double()).sum((-2, -1))
    # Where all values are equal, rounding moves all of them along one wave of the polynomial.
    assert (lost <= (0.04 if spectrum == "flat" else 0.01) * nuclear).all()


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_certificates_of_full_space_know_its_precision(name, shape, spectrum, tiles):
    M = batch(spectrum, 2, *shape).float()
    rounded, exact = both(name)
    T, bound = certified(rounded, M)
    assert torch.equal(T, rounded(M))
    found = ps.certify(M, T)
    assert (bound.gamma >= found.gamma).all()
    assert (bound.nu >= found.nu).all()
    room = bound.nu - certified(exact, M)[1].nu
    assert M.count_nonzero() == 0 or ((room > 0.01) & (room < 0.02)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_full_space_ignores_scale_and_keeps_nan_in_its_matrix(shape, tiles):
    polar, _ = both("polar-express")
    M = gaussian(4, *shape).float()
    T = polar(M)
    for scale in (2.0**-99, 2.0**-40, 0.5, 2.0**40, 2.0**99):
        assert torch.equal(polar(scale * M), T), scale
    M[0] = 0
    M[2, 3, 4] = torch.nan
    found = polar(M)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert found[2].isnan().any()
    assert torch.equal(found[[1, 3]], T[[1, 3]])
    torch.testing.assert_close(polar(M.mT)[[1, 3]].mT, T[[1, 3]], atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("polar", "dtype"),
    [
        (both("polar-express")[1], torch.float32),
        (both("polar-express")[0], torch.float64),
        (ps.NewtonSchulz(5, "quintic", form="gram"), torch.float32),
        (ps.NewtonSchulz(7, "polar-express-cifar10"), torch.float32),
        (ps.LowRank(20, 4, inner=both("quintic")[0], always_sketch=True), torch.float32),
        (ps.Deflated(HEAD, STEP, float8=False), torch.float32),
    ],
    ids=["dtype=float32", "float64", "Gram form", "no margin", "inner map", "deflated"],
)
def test_what_full_space_does_not_round(polar, dtype, monkeypatch):
    monkeypatch.setattr("polarstep.ops.cpu.FULL_TILES_FROM", 1)
    check_it_is_not_rounded(polar, dtype, monkeypatch)


def test_routes_say_where_full_space_is_in_bfloat16(monkeypatch):
    monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda: True)
    polar = ps.NewtonSchulz(5, "polar-express")
    for rows, named in ((191, False), (192, True)):
        assert ("polar-express) in bfloat16" in polar.describe(rows, 900)) == named
        assert ("polar-express) in bfloat16" in polar.describe(900, rows)) == named
    p = torch.nn.Parameter(torch.zeros(192, 200))
    assert "in bfloat16" in str(ps.Muon([p]).routes)
    wide = ps.LowRank(200, inner=polar)
    assert wide.describe(200, 400).startswith(
        "NewtonSchulz(5 × polar-express) in bfloat16, full space"
    )
    assert "in bfloat16" not in wide.describe(400, 400)  # sketched: the inner map is in float32


def test_a_run_with_tiles_resumes_bit_for_bit_and_goes_on_without(tiles, monkeypatch):
    def stepped(optimizer, p, seed):
        p.grad = gaussian(48, 64, seed=seed).float()
        optimizer.step()

    p = torch.nn.Parameter(torch.zeros(48, 64))
    optimizer = ps.Muon([p], lr=0.1)
    stepped(optimizer, p, 0)
    saved = deepcopy(optimizer.state_dict())
    ends = []
    for has in (True, True, False):
        monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda has=has: has)
        q = torch.nn.Parameter(p.detach().clone())
        resumed = ps.Muon([q], lr=0.1)
        resumed.load_state_dict(deepcopy(saved))
        stepped(resumed, q, 1)
        ends.append(q.detach())
    monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda: True)
    stepped(optimizer, p, 1)
    assert torch.equal(p, ends[0])
    assert torch.equal(ends[0], ends[1])
    assert 0 < operator_norm(ends[2] - ends[0]) < 0.1 * 0.2
