from __future__ import annotations

import math

import pytest
import torch
from tests.solvers import factored, over_solvers
from tests.spectra import SPECTRA, matrix
from torch.utils.flop_counter import FlopCounterMode

import polarstep as ps
from polarstep import rng
from polarstep.certificate import certified, certify, cheap_certificate, measure
from polarstep.certificate.exact import update_ratio
from polarstep.maps import PolarMap
from polarstep.maps.base import Polar, one_step
from polarstep.theory import bounds

MAPS = {
    "exact": ps.Exact(),
    "quintic-5": ps.NewtonSchulz(5, "quintic"),
    "quintic-9": ps.NewtonSchulz(9, "quintic"),
    "spectral": ps.NewtonSchulz(5, "quintic", delta="spectral"),
    "number": ps.NewtonSchulz(5, "quintic", delta=100.0),
    "jordan": ps.NewtonSchulz(5, "jordan"),
    "polar-express": ps.NewtonSchulz(5, "polar-express"),
    "gaussian": ps.LowRank(8, 4, 1, always_sketch=True),
    "half-power": ps.LowRank(8, 4, 0.5, always_sketch=True),
    "no-power": ps.LowRank(4, 2, 0, always_sketch=True),
    "products": ps.LowRank(8, 4, 1, orth="products", always_sketch=True),
    "kaczmarz": ps.LowRank(8, 4, 1, ps.Kaczmarz(), always_sketch=True),
    "exact-inside": ps.LowRank(8, 4, 1, inner=ps.Exact(), always_sketch=True),
    "deflated": ps.Deflated(ps.LowRank(4, 2, always_sketch=True)),
    "deflated-cubic": ps.Deflated(
        ps.LowRank(4, 2, always_sketch=True), ps.NewtonSchulz(2, "cubic")
    ),
    "deflated-flat": ps.Deflated(ps.LowRank(4, 2, always_sketch=True), ps.NewtonSchulz(1, "flat")),
    "jordan-inside": ps.LowRank(8, 4, inner=ps.NewtonSchulz(5, "jordan"), always_sketch=True),
}
SHAPES = [(40, 40), (40, 64), (96, 40), (5, 7)]


class Unknown(PolarMap):
    """A map the certificate has never heard of, and a bad one."""

    def step(self, M, carry, draw):
        polar, left = ps.NewtonSchulz(3, "quintic").step(M, carry, draw)
        return Polar(M, 1.7 * polar.dense), left


def test_certify_is_the_definition():
    M = matrix("power-law", 9, 7)
    T = ps.NewtonSchulz(3, "quintic")(M)
    sigma = torch.linalg.svdvals(M)
    found = certify(M, T)
    assert float(found.gamma) == pytest.approx(float(1 - (M * T).sum() / sigma.sum()))
    assert float(found.gamma) == pytest.approx(float(bounds.newton_schulz_gamma(sigma, 3)))
    assert float(certify(M, 1.25 * ps.Exact()(M)).nu) == pytest.approx(0.25)
    batch = certify(torch.stack([M, 2 * M, 0 * M]), torch.stack([T, T, 0 * T]))
    assert batch.gamma.shape == batch.nu.shape == (3,)
    assert float(batch.gamma[0]) == pytest.approx(float(batch.gamma[1]))
    assert float(batch.gamma[2]) == float(batch.nu[2]) == 0


def test_certify_of_a_matrix_that_is_not_finite_is_nan_and_its_own_matter():
    """As the maps have it: LAPACK would refuse the whole batch."""
    M = torch.stack([matrix("power-law", 9, 7)] * 4)
    T = ps.NewtonSchulz(3, "quintic")(M)
    M[1, 2, 3], T[2, 0, 0], M[3, 1, 1] = torch.nan, torch.nan, torch.inf
    found, good = certify(M, T), certify(M[:1], T[:1])
    assert found.gamma.isnan().tolist() == [False, True, True, True]
    assert found.nu.isnan().tolist() == [False, False, True, False]
    assert float(found.gamma[0]) == pytest.approx(float(good.gamma[0]))
    whole = measure(M, T)
    for column, poisoned in (("gamma", [1, 2, 3]), ("nu", [2]), ("stable_rank", [1, 3])):
        assert getattr(whole, column).isnan().nonzero().flatten().tolist() == poisoned
    assert whole.effective_rank.isnan().tolist() == [False, True, False, True]
    assert whole.captured_energy.isnan().tolist() == [False, True, True, True]


@pytest.mark.parametrize("name", [*MAPS, "unknown"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cheap_certificate_is_never_below_the_exact_one(name, dtype):
    """Every map, spectrum and shape, at three scales; the bound must be one always."""
    polar = MAPS.get(name, Unknown())
    for m, n in SHAPES:
        batch = torch.stack([matrix(spectrum, m, n) for spectrum in SPECTRA]).to(dtype)
        for scale in (1.0, 1e-30, 1e30):
            M = batch * scale if name != "number" else batch
            T, cheap = certified(polar, M, generator=rng.generator("cheap", m, n))
            exact = certify(M, T)
            assert (cheap.gamma >= exact.gamma).all(), (m, n, scale, cheap.gamma - exact.gamma)
            assert (cheap.nu >= exact.nu).all(), (m, n, scale, cheap.nu - exact.nu)
            assert torch.equal(T, polar(M, generator=rng.generator("cheap", m, n)))


@pytest.mark.parametrize("name", ["quintic-5", "gaussian", "kaczmarz", "products"])
def test_cheap_certificate_over_hundreds_of_random_matrices(name):
    g = rng.generator("hundreds")
    decay = torch.rand(200, 1, generator=g) * 2
    sigma = torch.arange(1, 33) ** -decay
    M = torch.linalg.qr(torch.randn(200, 32, 32, generator=g)).Q * sigma[:, None]
    M = M @ torch.linalg.qr(torch.randn(200, 48, 32, generator=g)).Q.mT
    T, cheap = certified(MAPS[name], M, generator=g)
    exact = certify(M, T)
    assert (cheap.gamma >= exact.gamma).all()
    assert (cheap.nu >= exact.nu).all()


def test_cheap_certificate_is_tight_for_sketched_maps():
    """Where a spectrum decays the bound is within a tenth; at worst it is still a certificate."""
    M = torch.stack([matrix("power-law", 64, 96), matrix("one-dominant", 64, 96)]).float()
    T, cheap = certified(ps.LowRank(24, 8, 1, always_sketch=True), M)
    gap = cheap.gamma - certify(M, T).gamma
    assert (gap < 0.1).all()
    assert (cheap.gamma < 1).all()


@pytest.mark.parametrize("shape", [(768, 768), (1536, 768), (768, 1536)])
@pytest.mark.parametrize("polar", [ps.LowRank(200, 10, 1), ps.NewtonSchulz(5, "quintic")], ids=type)
def test_cheap_certificate_multiplies_less_than_a_twentieth_of_the_map(polar, shape):
    """In matrix products, counted by torch; benchmarks/certificates.py has the time."""
    M = torch.randn(shape, generator=rng.generator("cost"))
    with FlopCounterMode(display=False) as whole:
        step = one_step(polar, M)
        T = step.dense.reshape(M.shape)
    with FlopCounterMode(display=False) as extra:
        cheap_certificate(M, T, polar, step.factors)
    assert 0 <= extra.get_total_flops() < 0.05 * whole.get_total_flops()


def test_exact_map_is_certified_exact():
    M = matrix("power-law", 30, 20).float()
    assert float(certified(ps.Exact(), M)[1].gamma) < 1e-4


def test_cheap_gamma_meets_the_assumption_in_the_theorems():
    """What the bounds take as γ̄ and ν̄ comes straight from a certificate."""
    M = matrix("power-law", 64, 96).float()
    gamma, nu = certified(ps.LowRank(24, 8, 1, always_sketch=True), M)[1].worst
    setting = bounds.Setting(1.0, 1.0, 64, 1.5, 1.0, gamma=gamma, nu=nu)
    assert 0 < setting.rho < 1


def test_measures_on_known_matrices():
    def ranks(M):
        found = measure(M, M)
        return [*found.stable_rank.flatten().tolist(), *found.effective_rank.flatten().tolist()]

    one = torch.ones(6, 4)
    assert ranks(torch.eye(6)) == pytest.approx([6, 6])
    assert ranks(one) == pytest.approx([1, 1])
    assert ranks(torch.diag(torch.tensor([0.5, 0.25, 0.25]))) == pytest.approx([1.5, 2**1.5])
    assert ranks(torch.zeros(2, 3, 4)) == [0, 0, 0, 0]
    assert float(update_ratio(0.1 * one, one)) == pytest.approx(0.1, rel=1e-6)
    assert float(update_ratio(one, 0 * one)) == math.inf
    assert float(update_ratio(0 * one, 0 * one)) == 0


@pytest.mark.parametrize(("m", "n"), [(24, 40), (40, 24)])
@pytest.mark.parametrize("power", [0, 0.5, 1])
def test_captured_energy_is_that_of_the_basis(m, n, power):
    M = matrix("power-law", m, n)
    polar = ps.LowRank(5, 3, power, always_sketch=True)
    T, factors = factored(polar, M, rng.generator("energy"))
    expected = factors.B.square().sum() / M.square().sum()
    for X, its in ((T, float(expected)), (ps.NewtonSchulz(5, "quintic")(M), 1)):
        assert float(measure(M, X).captured_energy) == pytest.approx(its, abs=1e-8)
    assert float(measure(0 * M, 0 * M).captured_energy) == 1


@over_solvers()
@pytest.mark.parametrize("shape", [(2, 12, 20), (20, 12)], ids=str)
def test_certified_is_what_the_map_gives_bit_for_bit_and_bounds_it(solver, shape):
    """Over the table of all maps: those with state as one step from nothing."""
    M = torch.randn(shape, generator=rng.generator("table")).to(torch.float32)
    T, cheap = certified(solver.map, M, generator=rng.generator("numbers"))
    assert torch.equal(T, solver.map(M, generator=rng.generator("numbers")))
    exact = certify(M, T)
    assert (cheap.gamma >= exact.gamma - 1e-6).all()
    assert (cheap.nu >= exact.nu - 1e-6).all()


@pytest.mark.parametrize("name", [name for name in MAPS if MAPS[name].traits.ignores_scale])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_matrices_that_are_not_finite_have_no_certificate_and_spoil_no_other(name, bad, scale):
    M = scale * torch.stack([matrix("power-law", 40, 64).float()] * 3)
    M[1, 3, 5] = bad
    T, bound = certified(MAPS[name], M)
    exact = certify(M, T)
    for found in (bound, exact):
        assert found.gamma.isnan().tolist() == [False, True, False]
        assert found.nu.isnan().tolist() == [False, True, False]
    # A map that lost the NaN on its way has no γ either.
    unaware = torch.nan_to_num(T)
    for function in (certify, cheap_certificate):
        assert function(M, unaware).gamma.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (0, 3, 4)])
def test_matrices_without_entries_are_like_zero_matrices(shape):
    M = torch.empty(shape)
    for name in ("quintic-5", "gaussian", "deflated"):
        T, bound = certified(MAPS[name], M)
        assert T.shape == shape
        for found in (bound, certify(M, T)):
            assert found.gamma.shape == found.nu.shape == shape[:-2]
            assert found.worst == (0.0, 0.0)
    found = measure(M, M)
    assert not found.stable_rank.any()
    assert not found.effective_rank.any()
    assert (found.captured_energy == 1).all()


@pytest.mark.parametrize("function", [certify, cheap_certificate, measure])
def test_what_cannot_be_a_step_is_refused(function):
    M = matrix("power-law", 8, 6).float()
    T = ps.Exact()(M)
    with pytest.raises(ValueError, match=rf"T \(6, 8\) on cpu: .*{function.__name__}\(M, polar"):
        function(M, T.mT)
    with pytest.raises(ValueError, match=r"M has shape \(2, 8, 6\)"):
        function(torch.stack([M, M]), T)  # would broadcast
    with pytest.raises(TypeError, match=r"T is torch\.int32: .*call T\.float"):
        function(M, T.int())
    with pytest.raises(TypeError, match=r"M is torch\.complex64"):
        function(M + 0j, T + 0j)
    with pytest.raises(TypeError, match="M is a list"):
        function(M.tolist(), T.tolist())
    with pytest.raises(TypeError, match=r"call M\.to_dense"):
        function(M.to_sparse(), T.to_sparse())
    with pytest.raises(TypeError, match="meta device"):
        function(M.to("meta"), T.to("meta"))
    with pytest.raises(ValueError, match=r"M\[None\] is a vector"):
        function(M[0], T[0])


def test_floats_of_eight_bits_are_measured():
    M = matrix("power-law", 8, 6).to(torch.float8_e4m3fn)
    assert measure(M, M) == measure(M.double(), M.double())


def test_a_cheap_certificate_of_two_precisions_is_refused():
    M = torch.eye(3, dtype=torch.float64)
    with pytest.raises(
        TypeError, match=r"M is torch.float64 and T torch.float32.*certify takes any"
    ):
        cheap_certificate(M, M.float())
