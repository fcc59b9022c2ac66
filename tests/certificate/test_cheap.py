"""The parts of the cheap certificate: each bound against what it bounds, and how far off it may be."""

from __future__ import annotations

import math

import pytest
import torch
from tests.spectra import SPECTRA, batch, gaussian

import polarstep as ps
from polarstep.certificate import Monitor, certified, certify, cheap_certificate
from polarstep.certificate import cheap as cheap_bounds
from polarstep.maps.base import one_step
from polarstep.ops import ops_of


def nuclear(X):
    return torch.linalg.svdvals(X).sum(-1)


@pytest.mark.parametrize("first", ["rows", "columns", "strided"])
@pytest.mark.parametrize("second", ["rows", "columns", "strided"])
def test_inner_products_in_every_layout(first, second):
    def laid(X, layout):
        if layout == "columns":
            return X.mT.contiguous().mT
        return X if layout == "rows" else torch.stack([X, X], -1)[..., 0]

    for shape in ((3, 5, 32), (3, 32, 5), (2, 6, 7), (1, 16, 16)):
        X, Y = gaussian(*shape), gaussian(*shape, seed=1)
        found = cheap_bounds._inner_product(laid(X, first), laid(Y, second))
        torch.testing.assert_close(found, (X * Y).sum((-2, -1)))


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_row_norms_are_above_the_nuclear_norm(spectrum):
    B = batch(spectrum, 3, 6, 20)
    assert (cheap_bounds._row_norms(B) >= nuclear(B) - 1e-12).all()
    rows = torch.tensor([[[3.0, 4.0], [0.0, 2.0]]])
    assert cheap_bounds._row_norms(rows).tolist() == [7.0]


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("precision", [2.0**-52, 2.0**-23, 2.0**-7])
def test_what_is_outside_a_basis_is_bounded_by_its_energy(spectrum, precision):
    M = batch(spectrum, 3, 12, 20)
    Q = torch.linalg.qr(gaussian(3, 12, 4)).Q
    B, norm = Q.mT @ M, torch.linalg.matrix_norm(M)
    found = cheap_bounds._outside(torch.linalg.matrix_norm(B), norm, 8, precision)
    assert (found >= nuclear(M - Q @ B) - 1e-12).all()
    exact = math.sqrt(8) * torch.linalg.matrix_norm(M - Q @ B)
    room = 8 * precision if precision < 1e-5 else precision / 64
    assert (found.square() - exact.square() <= 8 * (2 * room * norm.square()) + 1e-12).all()


def test_a_flat_rest_is_bounded_exactly():
    """√rank·‖R‖_F is ‖R‖_* where all singular values of R are equal."""
    norm, norm_B = torch.tensor([math.sqrt(9 + 4)]), torch.tensor([3.0])
    assert cheap_bounds._outside(norm_B, norm, 4, 2.0**-52).item() == pytest.approx(
        2 * 2.0, rel=1e-6
    )
    more = torch.tensor([3.0 + 1e-6])  # rounding may make B longer than M
    assert cheap_bounds._outside(more, torch.tensor([3.0]), 4, 2.0**-52).item() == 0


@pytest.mark.parametrize("d0", [5, 8, 20, 400])
def test_the_sketch_of_a_full_space_map_bounds_the_nuclear_norm(d0):
    X = batch("power-law", 2, d0, d0 + 4)
    norm = torch.linalg.matrix_norm(X)
    found = cheap_bounds._by_own_sketch(X, norm)
    assert (found >= nuclear(X)).all()
    assert (found <= math.sqrt(d0) * norm * (1 + 1e-9)).all()
    if d0 <= 8:
        torch.testing.assert_close(found, cheap_bounds._row_norms(X))


def test_the_sketch_of_a_full_space_map_finds_leading_directions():
    """Two directions that tower over the others: 2‖M‖_op, where √d₀‖M‖_F would be seven times that."""
    sigma = torch.where(torch.arange(100) < 2, 1.0, 1e-6).double()
    U, V = (torch.linalg.qr(gaussian(1, 100, 100, seed=seed)).Q for seed in (1, 2))
    M = (U * sigma) @ V.mT
    found = cheap_bounds._by_own_sketch(M, torch.linalg.matrix_norm(M))
    assert nuclear(M).item() * (1 - 1e-9) <= found.item() < 4


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("transform", [None, ps.NormalizedRows()])
@pytest.mark.parametrize("polar", [ps.Auto(), ps.NewtonSchulz(5, "polar-express")])
def test_a_monitor_bounds_nu_closely_after_deflation_and_after_normalized_rows(polar, transform):
    """A bound of 12 where ν is 0.14 would be true, and of no use."""
    p = torch.nn.Parameter(torch.zeros(256, 300))
    optimizer = ps.Muon([("p", p)], lr=0.1, polar=polar, transform=transform)
    cheap_rows, exact_rows = (Monitor(optimizer, every=1, exact=exact) for exact in (False, True))
    for step in range(3):
        p.grad = (
            batch("power-law", 1, 256, 300)[0].float()
            + 0.01 * gaussian(256, 300, seed=step).float()
        )
        optimizer.step()
    for bound, exact in zip(cheap_rows.rows, exact_rows.rows, strict=True):
        assert exact["nu"] <= bound["nu"] <= exact["nu"] + 0.08
        assert exact["gamma"] <= bound["gamma"]
        if isinstance(polar, ps.Auto):  # whose head tells what a sketch of its own would not
            assert bound["gamma"] <= exact["gamma"] + 0.15


def test_room_for_rounding_grows_with_the_long_side():
    room = cheap_bounds._rounding_of_norm
    assert room(2.0**-7, 10**6) == 2.0**-6
    assert room(2.0**-23, 10) == 4e-5
    assert room(2.0**-52, 10) == 1e-10
    assert room(2.0**-23, 3072) == pytest.approx(3072 * 2.0**-23)
    T = ps.NewtonSchulz(5, "quintic", dtype=torch.float32)(torch.ones(768, 3072))
    assert float(torch.linalg.matrix_norm(T.double(), 2)) <= 1 + room(2.0**-23, 3072)


def test_norms_of_many_entries_are_exact():
    """torch adds up squares in float32 on a CPU, and is off by 8e-5 for these matrices."""
    M = gaussian(2, 2048, 2048, dtype=torch.float32)
    found = cheap_bounds._norm(M).double()
    torch.testing.assert_close(found, cheap_bounds._norm(M.double()), atol=0, rtol=1e-7)
    for layout in (M.mT, torch.stack([M, M], -1)[..., 0], M[:1]):
        torch.testing.assert_close(
            cheap_bounds._norm(layout).double(), found[: len(layout)], atol=0, rtol=1e-7
        )
    tiny = cheap_bounds._norm(M * 1e-25).double()
    torch.testing.assert_close(tiny, 1e-25 * found, atol=0, rtol=1e-6)


def test_a_small_rest_of_a_matrix_of_rank_one_is_seen():
    """Rounding to 16 bits leaves a rest of 0.2%, whose nuclear norm of 1.4% the bound includes."""
    u, v = (gaussian(n, 1, seed=n, dtype=torch.float32) for n in (256, 200))
    M = (u @ v.mT / (u.norm() * v.norm())).bfloat16().float()
    polar = ps.NewtonSchulz(5, "polar-express")
    T = polar(M)
    assert cheap_certificate(M, T, polar).gamma >= certify(M, T).gamma


@pytest.mark.parametrize("scale", [1e-25, 1e-16, 1e25])
@pytest.mark.parametrize("transform", [None, ps.NormalizedRows()], ids=type)
def test_a_monitor_bounds_gamma_of_deflated_maps_at_every_scale(transform, scale):
    polar = ps.Deflated(ps.LowRank(12, 4, always_sketch=True))
    G = gaussian(48, 64, dtype=torch.float32) * scale
    p = torch.nn.Parameter(torch.zeros(48, 64))
    optimizer = ps.Muon(
        [p], 1.0, polar=polar, transform=transform, shape_scale="none", momentum=0.0
    )
    with Monitor(optimizer, 1, exact=False, tail=False) as monitor:
        p.grad = G
        optimizer.step()
    exact = certify(G, -p.detach())
    assert exact.gamma <= monitor.rows[0]["gamma"] <= exact.gamma + 0.5


@pytest.mark.parametrize("scale", [1e-30, 1e-16, 1.0, 1e16, 1e30])
@pytest.mark.parametrize(
    "polar", [ps.NewtonSchulz(5, "quintic"), ps.LowRank(4, 2, always_sketch=True)], ids=type
)
def test_the_certificate_does_not_depend_on_the_scale(polar, scale):
    M = gaussian(2, 12, 20, dtype=torch.float32)
    unit, given = (
        certified(polar, s * M, generator=torch.Generator().manual_seed(0))[1] for s in (1, scale)
    )
    torch.testing.assert_close(given.gamma, unit.gamma, atol=1e-4, rtol=0)
    torch.testing.assert_close(given.nu, unit.nu, atol=1e-6, rtol=0)


def test_a_zero_matrix_beside_another_has_lost_nothing():
    M = torch.stack([torch.zeros(12, 20), gaussian(12, 20, dtype=torch.float32)])
    found = cheap_certificate(M, ps.NewtonSchulz(5, "quintic")(M), ps.NewtonSchulz(5, "quintic"))
    assert (found.gamma[0], found.nu[0]) == (0, 0)
    assert found.gamma[1] > 0


def test_many_steps_are_certified_tightly_in_full_space():
    """Nine steps lose next to nothing, and the certificate knows it by their polynomial."""
    M = batch("flat", 1, 12, 20)
    polar = ps.NewtonSchulz(9, "quintic")
    bound, exact = cheap_certificate(M, polar(M), polar), certify(M, polar(M))
    assert exact.gamma <= bound.gamma <= exact.gamma + 1e-2
    assert bound.nu <= 1e-9


def test_a_certificate_does_not_depend_on_the_other_matrices_of_its_batch():
    M, polar = gaussian(3000, 6, 8, dtype=torch.float32), ps.NewtonSchulz(5, "quintic")
    many, alone = (cheap_certificate(X, polar(X), polar) for X in (M, M[:1]))
    torch.testing.assert_close(many.gamma[:1], alone.gamma, atol=1e-6, rtol=0)
    torch.testing.assert_close(many.nu[:1], alone.nu, atol=1e-6, rtol=0)


@pytest.mark.parametrize("inner", [ps.Exact(), ps.NewtonSchulz(9, "quintic")], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_low_rank_map_is_certified_with_and_without_its_factors(inner, spectrum):
    """The inner map bounds what is lost of B; of M a sketch may lose nearly all."""
    M, polar = batch(spectrum, 2, 24, 40), ps.LowRank(3, 2, inner=inner, always_sketch=True)
    step = one_step(polar, M, None)
    exact = certify(M, step.dense)
    for factors in (None, step.factors):
        bound = cheap_certificate(M, step.dense, polar, factors)
        assert (bound.gamma >= exact.gamma).all()
        assert (bound.nu >= exact.nu).all()


@pytest.mark.parametrize("d0", [16, 64, 256])
def test_the_room_for_rounding_is_the_same_share_of_every_size(d0):
    """⟨I, cI⟩ = c·‖I‖_*: γ is 1 − c, and what is allowed for the rounding of a sum of d₀² products."""
    identity = torch.eye(d0, dtype=torch.float64)
    for length in (1, 4):
        gamma = float(cheap_certificate(identity, length * identity).gamma)
        room = 16 * length * (1 + length) * torch.finfo(torch.float64).eps
        assert room / 2 < gamma - (1 - length) < 2 * room


@pytest.mark.parametrize("d0", [16, 64, 256])
def test_the_room_for_products_in_16_bits(d0, monkeypatch):
    """Products that are off by ε‖M‖_F change ⟨M, T⟩ and ‖M‖_* by that much, or γ by 2ε/√d₀."""
    cpu = type(ops_of(torch.device("cpu")))
    monkeypatch.setattr(cpu, "dtype", lambda self, given: torch.bfloat16)
    identity = torch.eye(d0)
    gamma = float(cheap_certificate(identity, identity).gamma)
    assert gamma == pytest.approx(2 * 2.0**-7 / math.sqrt(d0), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tall_matrices_have_the_certificate_of_wide_ones(dtype):
    M, polar = gaussian(8, 3000).to(dtype), ps.NewtonSchulz(5, "quintic")
    wide, tall = (cheap_certificate(X, polar(X), polar) for X in (M, M.mT))
    torch.testing.assert_close(tall.gamma, wide.gamma, atol=1e-6, rtol=0)
    assert tall.nu == wide.nu
