"""Algorithms 1 and 2, written out with QR on the same sketch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.solvers import Divided, factored
from tests.spectra import SPECTRA, batch, gaussian, matrix, operator_norm, orthogonal
from torch.utils.flop_counter import FlopCounterMode

from polarstep import Exact, Gaussian, Kaczmarz, LowRank, NewtonSchulz, rng
from polarstep.maps import Warm
from polarstep.maps.base import Lift, counted_norm, one_step
from polarstep.ops.cpu import Cpu

ORTH = ["householder", "cholesky", "products"]


def written_out(M, Omega, power, inner, delta=torch.linalg.vector_norm):
    """Algorithm 1 line by line for a wide M; a half power starts from the short side."""
    for_half = 2 * power % 2 == 1
    Y = M.mT @ Omega if for_half else M @ Omega
    side = M.mT if for_half else M
    for _ in range(int(2 * power)):
        side = side.mT
        Y = side @ torch.linalg.qr(Y).Q
    Q = torch.linalg.qr(Y).Q
    B = Q.mT @ M
    U, S, Vh = torch.linalg.svd(B, full_matrices=False)
    Z = S / delta(S)
    for _ in range(inner):
        Z = (15 * Z - 10 * Z**3 + 3 * Z**5) / 8
    return Q @ ((U * Z) @ Vh)


@pytest.mark.parametrize("power", [0, 1, 2])
@pytest.mark.parametrize("form", ["plain", "gram"])
def test_algorithm_2_has_the_operator_norm_of_b_as_delta(power, form):
    inner = NewtonSchulz(3, "quintic", delta="operator", form=form)
    solver = LowRank(8, 4, power, Kaczmarz(), inner, always_sketch=True)
    for seed, M in enumerate((matrix("power-law", 24, 60), gaussian(30, 30))):
        Omega = Kaczmarz().matrix(M, 12, rng.generator("Ω", seed))
        T = solver(M, generator=rng.generator("Ω", seed))
        printed = written_out(M, Omega, power, 3, delta=torch.amax)
        usual = written_out(M, Omega, power, 3)
        error = torch.linalg.matrix_norm(T - printed)
        # δ is ‖B‖_op up to a thousandth, which three steps enlarge by at most (15/8)³.
        assert error < 0.01 * torch.linalg.matrix_norm(printed)
        assert error < 0.05 * torch.linalg.matrix_norm(usual - printed)
        assert operator_norm(T) <= 1 + 1e-12


@pytest.mark.parametrize("power", [0, 0.5, 1, 2])
@pytest.mark.parametrize("sketch", [Gaussian(), Kaczmarz(), Warm()], ids=str)
@pytest.mark.parametrize("form", ["plain", "gram"])
def test_is_the_algorithm(power, sketch, form):
    if isinstance(sketch, Warm) and power == 0.5:
        pytest.skip("a warm start lies on the long side, where half powers do not begin")
    solver = LowRank(8, 4, power, sketch, NewtonSchulz(7, "quintic", form=form), always_sketch=True)
    for seed, M in enumerate((matrix("power-law", 24, 60), gaussian(30, 30))):
        side = M.mT if power == 0.5 else M
        cold = Gaussian() if isinstance(sketch, Warm) else sketch
        Omega = cold.matrix(side, 12, rng.generator("Ω", seed))
        T = written_out(M, Omega, power, 7)
        torch.testing.assert_close(
            solver(M, generator=rng.generator("Ω", seed)), T, atol=1e-8, rtol=0
        )
        torch.testing.assert_close(
            solver(M.mT.contiguous().mT, generator=rng.generator("Ω", seed)), T, atol=1e-8, rtol=0
        )
        if M.shape[0] < M.shape[1]:  # a tall matrix is transposed first
            tall = solver(M.mT, generator=rng.generator("Ω", seed))
            torch.testing.assert_close(tall, T.mT, atol=1e-8, rtol=0)


@pytest.mark.parametrize("power", [0, 0.5, 1])  # at 2, (MMᵀ)²MΩ itself is beyond float64
def test_repeated_columns_are_those_of_algorithm_2(power):
    """Ω as Algorithm 2 writes it, column by column, and orth(Y) with as many columns as Y has rank."""
    M = matrix("one-dominant", 16, 40)
    side = M.mT if power == 0.5 else M
    merged = Kaczmarz().matrix(side, 12, rng.generator("Ω", 3))
    pi = side.square().sum(0) / side.square().sum()
    counts = (merged.square().sum(-1) * 12 * pi).round().int()
    assert counts.sum() == 12
    assert counts.max() > 1  # or there is nothing to see
    drawn = torch.arange(len(pi)).repeat_interleave(counts)
    Omega = torch.zeros(len(pi), 12, dtype=torch.float64)
    Omega[drawn, torch.arange(12)] = 1 / (12 * pi[drawn]).sqrt()
    torch.testing.assert_close(merged @ merged.mT, Omega @ Omega.mT)

    gram = M @ M.mT
    Y = side @ Omega if power != 0.5 else M @ (side @ Omega)
    for _ in range(int(power)):
        Y = gram @ Y
    U, S, _ = torch.linalg.svd(Y, full_matrices=False)
    Q = U[:, 1e-10 * S[0] < S]
    T = Q @ NewtonSchulz(7, "quintic")(Q.mT @ M)
    solver = LowRank(8, 4, power, Kaczmarz(), orth="cholesky", always_sketch=True)
    torch.testing.assert_close(solver(M, generator=rng.generator("Ω", 3)), T, atol=1e-8, rtol=0)


@pytest.mark.parametrize("orth", ORTH)
def test_every_orthonormalization_gives_the_algorithm_in_float32(orth):
    M = batch("power-law", 3, 24, 60).float()
    solver = LowRank(8, 4, 1, orth=orth, always_sketch=True)
    Omega = Gaussian().matrix(M, 12, rng.generator("Ω")).double()
    reference = torch.stack([written_out(m, Omega, 1, 7) for m in M.double()])
    T = solver(M, generator=rng.generator("Ω")).double()
    torch.testing.assert_close(T, reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sketch", [Gaussian(), Kaczmarz(), Warm()], ids=str)
@pytest.mark.parametrize("rank", [1, 5, 12])
def test_is_exact_where_the_rank_fits(sketch, rank):
    sigma = torch.linspace(1, 0.1, rank, dtype=torch.float64)
    M = (orthogonal(30, 1, rank) * sigma) @ orthogonal(50, 2, rank).mT
    solver = LowRank(rank, 8, 1, sketch, NewtonSchulz(25, "quintic"), always_sketch=True)
    reference = orthogonal(30, 1, rank) @ orthogonal(50, 2, rank).mT
    T = solver(M, generator=rng.generator("exact"))
    if isinstance(sketch, Kaczmarz):  # a few columns may miss a direction of a matrix of rank 12
        assert (M * T).sum() >= 0.8 * sigma.sum()
    else:
        torch.testing.assert_close(T, reference, atol=1e-6, rtol=0)
        torch.testing.assert_close(T, Exact(rtol=1e-9)(M), atol=1e-6, rtol=0)


def test_is_exact_at_full_width():
    M = gaussian(12, 20)
    solver = LowRank(12, 0, 1, inner=NewtonSchulz(40, "quintic"), always_sketch=True)
    assert solver.full_space_reason(12, 20) == "ℓ=12 ≥ 12"
    torch.testing.assert_close(solver(M), Exact()(M), atol=1e-6, rtol=0)
    nearly = LowRank(11, 0, 1, inner=NewtonSchulz(40, "quintic"), always_sketch=True)
    assert nearly.full_space_reason(12, 20) is None
    sketched = torch.linalg.svdvals(nearly(M))
    torch.testing.assert_close(sketched[:11], torch.ones(11).double(), atol=1e-6, rtol=0)
    assert sketched[11] < 1e-8


@pytest.mark.parametrize("sketch", [Gaussian(), Kaczmarz()], ids=str)
@pytest.mark.parametrize("orth", ORTH)
@pytest.mark.parametrize("power", [0, 0.5, 1])
@pytest.mark.parametrize(
    "inner", [NewtonSchulz(9, "cubic", "spectral"), NewtonSchulz(7, "quintic"), Exact()]
)
def test_norm_is_at_most_one_at_working_size(sketch, orth, power, inner, momentum):
    solver = LowRank(12, 8, power, sketch, inner, orth, always_sketch=True)
    synthetic = torch.stack([matrix(s, 64, 96) for s in SPECTRA]).float()
    for M in (synthetic, *(m[:12] for m in momentum.values())):
        T = solver(M, generator=rng.generator("norm"))
        assert T.isfinite().all()
        assert (operator_norm(T) <= 1 + 1e-5).all()


@pytest.mark.parametrize("orth", ORTH)
def test_real_momentum_keeps_its_alignment_in_float32(orth, momentum):
    """Against Algorithm 1 in float64: what rounding may cost is alignment, and little of it."""
    solver = LowRank(12, 8, 1, orth=orth, always_sketch=True)
    for M in momentum.values():
        wide = (M if M.shape[-2] <= M.shape[-1] else M.mT).double()
        Omega = Gaussian().matrix(wide.float(), 20, rng.generator("Ω")).double()
        reference = torch.stack([written_out(m, Omega, 1, 7) for m in wide if m.any()])
        T = solver(M, generator=rng.generator("Ω")).double()
        T = (T if M.shape[-2] <= M.shape[-1] else T.mT)[wide.any(-1).any(-1)]
        wide = wide[wide.any(-1).any(-1)]
        nuclear = torch.linalg.matrix_norm(wide, "nuc")
        got, expected = ((wide * each).sum((-2, -1)) / nuclear for each in (T, reference))
        assert (got > expected - (0.02 if orth == "products" else 1e-4)).all()


@pytest.mark.parametrize("sketch", [Gaussian(), Kaczmarz(), Warm()], ids=str)
@pytest.mark.parametrize("orth", ORTH)
@given(rank=st.integers(1, 6), log_scale=st.integers(-30, 30), seed=st.integers(0, 5))
def test_full_alignment_on_what_rank_there_is(sketch, orth, rank, log_scale, seed):
    # Every column of M has the same norm, so that Kaczmarz finds its range with few columns.
    sigma = torch.linspace(1, 0.5, rank, dtype=torch.float64)
    columns = gaussian(rank, 40, seed=seed)
    M = (orthogonal(24, seed, rank) * sigma) @ (columns / columns.norm(dim=0))
    M = (M * 10.0**log_scale).float()[None].repeat(3, 1, 1)
    M[1] = 0
    M[2, :, 1:] = M[2, :, :1]  # of rank one, in repeated columns
    solver = LowRank(10, 8, 1, sketch, NewtonSchulz(20, "quintic"), orth, always_sketch=True)
    T = solver(M, generator=rng.generator("aligned", seed)).double()
    nuclear = torch.linalg.matrix_norm(M.double(), "nuc")
    aligned = (M.double() * T).sum((-2, -1)) / nuclear.clamp_min(1e-300)
    assert aligned[0] > 1 - 1e-3
    assert aligned[2] > 1 - 1e-5
    assert not T[1].any()
    assert (operator_norm(T) <= 1 + 1e-5).all()


def test_the_inner_delta_may_be_a_number():
    M = 4 * matrix("flat", 24, 60)
    solver = LowRank(8, 4, 1, inner=NewtonSchulz(1, ((1.0, 0.0),), delta=8.0), always_sketch=True)
    T = solver(M)
    sigma = torch.linalg.svdvals(T)
    torch.testing.assert_close(sigma[:12], torch.full((12,), 0.5).double(), atol=1e-8, rtol=0)
    assert abs(operator_norm(solver(M.float() * 2)) - 1) < 1e-5


@pytest.mark.parametrize("power", [0, 0.5, 1, 2])
def test_the_large_products_are_those_of_the_formula(power):
    m, n, ell = 24, 60, 12
    solver = LowRank(8, 4, power, inner=Divided(), orth="householder", always_sketch=True)
    counter = FlopCounterMode(display=False)
    with counter:
        solver(gaussian(m, n).float())
    assert counter.get_total_flops() == (4 * power + 6) * m * n * ell
    qr = 2 * m * ell**2 - 2 * ell**3 // 3
    assert solver.flops(m, n) == (4 * power + 6) * m * n * ell + qr
    kaczmarz = LowRank(8, 4, power, Kaczmarz(), Divided(), "householder", True)
    with counter:
        kaczmarz(gaussian(m, n).float())
    assert counter.get_total_flops() == (4 * power + 4) * m * n * ell


def test_where_sketching_does_not_pay_the_inner_map_runs(monkeypatch):
    solver = LowRank(200)
    assert solver.full_space_reason(768, 3072) is None
    assert solver.full_space_reason(128, 512) == "ℓ=210 ≥ 128"
    assert solver.full_space_reason(220, 220) == "sketching would cost more"
    assert "full space: ℓ=210 ≥ 128" in solver.describe(128, 512)
    for has_tiles, named in ((False, "Gaussian)"), (True, "Gaussian in bfloat16)")):
        monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda has=has_tiles: has)
        assert f"LowRank(200+10, h=1, {named}" in solver.describe(768, 3072)
    M = gaussian(24, 60)
    assert torch.equal(solver(M), solver.inner(M))
    assert solver.flops(24, 60) == solver.inner.flops(24, 60)
    always = LowRank(200, always_sketch=True)
    assert always.full_space_reason(220, 220) is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 0}, ValueError, r"rank=0: expected an integer ≥ 1; the paper takes"),
        ({"rank": 2.5}, TypeError, r"rank=2\.5: expected an integer"),
        ({"rank": True}, TypeError, r"rank=True: expected an integer"),
        ({"oversample": -1}, ValueError, r"oversample=-1: expected an integer ≥ 0"),
        ({"power": -1}, ValueError, r"power=-1: expected one of 0, ½, 1"),
        ({"power": 0.3}, ValueError, r"power=0\.3: expected one of 0, ½, 1"),
        ({"power": float("nan")}, ValueError, r"power=nan: expected one of 0, ½, 1"),
        ({"power": None}, TypeError, r"power=None: expected a number, one of 0, ½, 1"),
        ({"power": float("inf")}, ValueError, r"power=inf: expected one of 0, ½, 1"),
        ({"sketch": "gaussian"}, TypeError, r"sketch='gaussian': expected a Sketch such as"),
        ({"inner": "quintic"}, TypeError, r"inner='quintic': expected a polar map such as"),
        ({"inner": LowRank(3)}, ValueError, r"inner is a LowRank map: expected a full-space"),
        ({"orth": "svd"}, ValueError, r"orth='svd': expected one of auto, householder"),
        ({"always_sketch": "no"}, TypeError, r"always_sketch='no': expected True or False"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        LowRank(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_both_factors_have_the_precision_of_the_inner_map(dtype):
    M = batch("power-law", 2, 24, 60).float()
    inner = NewtonSchulz(5, "quintic", dtype=dtype, form="gram")
    solver = LowRank(8, 3, inner=inner, always_sketch=True)
    T, factors = factored(solver, M, rng.generator("Ω"))
    assert factors.Q.dtype == factors.Z.dtype == dtype
    assert factors.B.dtype == T.dtype == torch.float32
    torch.testing.assert_close(T.to(dtype), factors.Q @ factors.Z)


@pytest.fixture
def in_bfloat16(monkeypatch):
    """Products in bfloat16, as on a GPU."""
    monkeypatch.setattr(Cpu, "dtype", lambda self, given: torch.bfloat16)


@pytest.mark.parametrize("sketch", [Gaussian(), Kaczmarz(), Warm()], ids=str)
def test_zero_columns_for_the_tensor_cores_change_nothing(sketch, in_bfloat16, monkeypatch):
    solver = LowRank(8, 3, 1, sketch, orth="products", always_sketch=True)
    M, ends = batch("power-law", 2, 24, 60).float(), []
    for aligned in (1, 16):
        monkeypatch.setattr(
            Cpu, "padded", lambda self, width, dtype, to=aligned: width + -width % to
        )
        T, factors = factored(solver, M, rng.generator("Ω"))
        assert factors.Q.shape == (2, 24, 11)
        assert factors.Z.shape == factors.B.shape == (2, 11, 60)
        ends.append(T)
    torch.testing.assert_close(*ends, atol=2e-2, rtol=0)
    assert (operator_norm(ends[1]) > 0.98).all()


@pytest.fixture
def tiles(monkeypatch):
    """Say whether the CPU multiplies in bfloat16, matrices of any size."""
    monkeypatch.setattr("polarstep.ops.cpu.TILES_FROM", 1)
    return lambda has: monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda: has)


@pytest.mark.parametrize("power", [0, 0.5, 1, 2])
@pytest.mark.parametrize("sketch", [Gaussian(), Kaczmarz(), Warm()], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_rounded_sketch_gives_as_good_a_basis(power, sketch, spectrum, tiles):
    if isinstance(sketch, Warm) and power == 0.5:
        pytest.skip("a warm start lies on the long side, where half powers do not begin")
    solver = LowRank(12, 4, power, sketch, always_sketch=True)
    for m, n in ((40, 64), (64, 40), (48, 48)):
        M, made = batch(spectrum, 2, m, n), []
        nuclear = torch.linalg.svdvals(M).sum(-1)
        for has in (False, True):
            tiles(has)
            T = solver(M.float(), generator=rng.generator("Ω")).double()
            assert (operator_norm(T) <= 1 + 1e-5).all()
            made.append((M * T).sum((-2, -1)))
        assert (made[1] >= made[0] - 0.01 * nuclear).all()
    # One product would gain by it as much as rounding M takes.
    rounds = power > (0.5 if isinstance(sketch, Kaczmarz) else 0) and not isinstance(sketch, Warm)
    assert ("bfloat16" in solver.describe(40, 64)) == rounds


def test_what_a_rounded_sketch_rounds(tiles):
    """Directions; T in the basis of the same directions is the same to float32."""
    solver = LowRank(12, 4, always_sketch=True)
    sampled = LowRank(12, 4, 0, Kaczmarz(), always_sketch=True)
    M = batch("power-law", 2, 40, 64).float()
    tiles(False)
    before = [polar(M, generator=rng.generator("Ω")) for polar in (solver, sampled)]
    tiles(True)
    T, factors = factored(solver, M, rng.generator("Ω"))
    identity = torch.eye(16).expand(2, 16, 16)
    torch.testing.assert_close(factors.Q.mT @ factors.Q, identity, atol=2e-6, rtol=0)
    inner = solver.inner(factors.Q.double().mT @ M.double())
    torch.testing.assert_close(T.double(), factors.Q.double() @ inner, atol=3e-5, rtol=0)
    assert not torch.equal(T, before[0])
    assert torch.equal(sampled(M, generator=rng.generator("Ω")), before[1])


def test_z_is_made_when_it_is_asked_for():
    """On a CPU T = (QW)B, with a W of size ℓ×ℓ."""
    solver = LowRank(8, 4, always_sketch=True)
    M = batch("power-law", 2, 24, 60).float()
    step = one_step(solver, M, rng.generator("Ω"))
    L, R = step.two_factors
    assert R is step.factors.projected
    assert L.shape == (2, 24, 12)
    torch.testing.assert_close(L @ R, step.factors.Q @ step.factors.Z, atol=2e-6, rtol=0)
    torch.testing.assert_close(step.factors.Z, solver.inner(step.factors.B), atol=3e-5, rtol=0)


@pytest.mark.parametrize("given", [False, True], ids=["G is formed", "G is given"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_of_a_lift_is_known_without_multiplying_it_out(dtype, weighted, given):
    """For rows of lengths of one, from a tenth to one, of which one is not zero, and all zero."""
    rows = torch.stack([orthogonal(96, seed, 32).mT for seed in range(4)])
    one = (torch.arange(32) == 3).double()
    lengths = torch.stack([torch.ones(32), torch.linspace(0.1, 1, 32), one, 0 * one]).double()
    W = torch.diag_embed(lengths) @ orthogonal(32, 9, 32) if weighted else None
    X = (orthogonal(32, 9, 32).mT @ rows if weighted else lengths[..., None] * rows).to(dtype)
    found = Lift(X, W, G=X.float() @ X.float().mT if given else None).squared_norm()
    assert found.shape == (4,)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), lengths.square().sum(-1), atol=1e-5, rtol=rounding)


@pytest.mark.parametrize("rank", [1, 3, 40])
@pytest.mark.parametrize(
    "inner", [NewtonSchulz(7, "quintic"), NewtonSchulz(4, "polar-express-sketch")]
)
def test_the_norm_of_a_low_rank_map_is_its_own_where_the_matrix_has_a_low_rank(inner, rank):
    """Rounding errors of directions that are not there do not add up to a norm."""
    polar = LowRank(32, 8, inner=inner, always_sketch=True)
    for seed in range(5):
        M = (gaussian(80, rank, seed=seed) @ gaussian(rank, 200, seed=seed + 9)).float()
        step = one_step(polar, M)
        assert step is not None
        assert step.factors is not None
        assert step.squared_norm is not None
        exact = float(step.dense.double().square().sum())
        assert float(step.factors.lift.squared_norm()) == pytest.approx(exact, rel=1e-3)
        assert float(step.squared_norm()) == pytest.approx(max(exact, 40 / 9), rel=1e-3)


def test_the_norm_that_counts_is_a_ninth_of_l_at_least():
    squared = torch.tensor([0.0, 1.0, 3.9, 4.1, 40.0, torch.nan, torch.inf])
    found = counted_norm(squared, 36)
    assert found[:5].tolist() == pytest.approx([4, 4, 4, 4.1, 40])
    assert found[5].isnan()
    assert found[6].isinf()
