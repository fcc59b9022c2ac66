"""The deflated map: what it is made of, and the bounds of theory/bounds/deflated.py on its result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.solvers import CUBIC_THEN_QUINTIC, Divided
from tests.spectra import SPECTRA, batch, gaussian, with_singular_values
from torch.utils.flop_counter import FlopCounterMode

import polarstep as ps
from polarstep import flops, rng
from polarstep.maps.base import MapState, one_step
from polarstep.maps.coefficients import evaluate
from polarstep.maps.deflated import MARGIN_OF_SCALE, TOLERATED_VALUE, tolerant_scale
from polarstep.numerics import frobenius_norm
from polarstep.ops import ops_of
from polarstep.theory import bounds

HEAD = ps.LowRank(4, 2, inner=ps.Exact(), always_sketch=True)
FORMS = {
    "flat": ps.Deflated(HEAD, ps.NewtonSchulz(1, "flat")),
    "cubic, then quintic": ps.Deflated(HEAD, ps.NewtonSchulz(2, CUBIC_THEN_QUINTIC)),
    "jordan": ps.Deflated(HEAD, ps.NewtonSchulz(2, "jordan")),
}
over_forms = pytest.mark.parametrize("polar", FORMS.values(), ids=FORMS.keys())


def key():
    return rng.generator("deflated")


def proved(polar: ps.Deflated) -> float:
    """The bound on ν, whatever δ is."""
    polynomials = polar.rest.polynomials
    reach = TOLERATED_VALUE * tolerant_scale(polynomials)
    return bounds.lifted_nu(polynomials, reach)


def parts(M, head=HEAD):
    """Q, B and Z of the head."""
    factors = one_step(head, M, key()).factors
    return factors.Q, factors.B, factors.Z


def spectral(X, value):
    """U·value(σ)·Vᵀ."""
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    return (U * value(sigma)[..., None, :]) @ Vh


@over_forms
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_norm_is_within_its_bound(polar, spectrum):
    M = batch(spectrum, 3, 24, 40)
    for X in (M, M.float()):
        T = polar(X, generator=key()).double()
        assert (torch.linalg.matrix_norm(T, 2) <= 1 + proved(polar) + 1e-5).all()


@pytest.mark.parametrize("form", ["flat", "cubic, then quintic"])
@pytest.mark.parametrize("spectrum", ["flat", "power-law", "one-dominant"])
def test_the_rest_adds_alignment_to_the_head(form, spectrum):
    """Not with ``"jordan"``, which brings the head's values of one down to 0.7."""
    M, polar = batch(spectrum, 3, 24, 40), FORMS[form]
    kept = ps.certify(M, polar(M, generator=key())).gamma
    dropped = ps.certify(M, HEAD(M, generator=key())).gamma
    assert (kept < dropped - 0.05).all()


@pytest.mark.parametrize("form", ["flat", "cubic, then quintic", "jordan"])
@pytest.mark.parametrize("spectrum", ["flat", "power-law", "one-dominant", "exponential"])
def test_steps_are_their_formula(form, spectrum):
    """T = p(s·X₀) by an SVD, with δ from ‖R‖_F and s from the estimate of ‖X₀‖_op."""
    polar, M = FORMS[form], batch(spectrum, 2, 24, 40)
    Q, B, Z = parts(M)
    R = M - Q @ B
    energy = torch.maximum(frobenius_norm(R), (64 * 2**-52) ** 0.5 * frobenius_norm(M))
    X = Q @ Z + R / (2 * energy / (24 - 6) ** 0.5)
    margin = MARGIN_OF_SCALE / tolerant_scale(polar.rest.polynomials)
    s = ops_of(M.device).scale_to_one(X @ X.mT, margin)
    expected = spectral(s * X, lambda x: evaluate(polar.rest.polynomials, x))
    torch.testing.assert_close(polar(M, generator=key()), expected, atol=1e-5, rtol=0)


WIDE = ps.LowRank(8, 4, inner=ps.NewtonSchulz(4, "polar-express-sketch"), always_sketch=True)


def recorded_like(kind):
    """Spectra like those of recorded momentum: leading directions, and a rest that is nearly flat."""
    k = torch.arange(1, 65, dtype=torch.float64)
    return {
        "one leading": torch.where(k == 1, 100.0, (1 + 1.5 * (64 - k) / 63) / 2),
        "a few leading": torch.where(k <= 6, 300 / k**2, (1 + 1.5 * (64 - k) / 63) / 2),
        "power law": 30 * k**-0.7,
        "random": torch.linalg.svdvals(gaussian(64, 128)),
    }[kind]


@pytest.mark.parametrize("kind", ["one leading", "a few leading", "power law", "random"])
@pytest.mark.parametrize("shape", [(64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_flat_step_brings_all_singular_values_near_one(kind, shape, dtype):
    M = with_singular_values(recorded_like(kind), *shape).to(dtype)
    T = ps.Deflated(WIDE, ps.NewtonSchulz(1, "flat"))(M, generator=key())
    sigma = torch.linalg.svdvals(T.double())
    assert sigma[0] <= 1.15
    assert sigma[-1] >= 0.8


def test_one_flat_step_on_real_momentum(momentum):
    """Rank-one and zero matrices are among these. ``"flat"`` may have 0.86 where the head has one."""
    polar = ps.Deflated(WIDE, ps.NewtonSchulz(1, "flat"))
    for M in momentum.values():
        T = polar(M, generator=key())
        assert T.isfinite().all()
        found = ps.certify(M, T)
        assert (found.nu <= 0.15).all()
        assert (found.gamma <= 0.15).all()


@over_forms
def test_it_claims_nothing_of_its_head_for_itself(polar):
    """The head's polynomial bounds QZ, not T: the cheap certificate must look at T."""
    assert polar.bounds(24, torch.ones(2)) is None
    step = one_step(polar, gaussian(2, 24, 40), key())
    assert step.factors is None
    assert step.two_factors is None


def test_it_ignores_scale_where_the_maps_inside_do():
    fixed = ps.NewtonSchulz(7, "quintic", delta=8.0)
    assert ps.Deflated().traits.ignores_scale
    assert not ps.Deflated(replace(HEAD, inner=fixed)).traits.ignores_scale
    assert not ps.Deflated(HEAD, full=fixed).traits.ignores_scale


@pytest.mark.parametrize("coefficients", ["flat", "quintic"])
def test_flops_are_those_of_its_products(coefficients):
    m, n, ell, columns = 64, 96, 6, 16
    polar = ps.Deflated(replace(HEAD, inner=Divided()), ps.NewtonSchulz(1, coefficients))
    M = gaussian(1, m, n, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        polar(M, generator=key())
    counted = polar.flops(m, n) - flops.qr(m, ell)
    # Not counted are products with Q and B, which have ℓ or 16 on two sides, and orthonormalizations.
    small = 4 * (m + n) * ell * columns + 4 * ell**2 * (m + n) + 64 * columns**3 + 6 * m * ell**2
    # A CPU makes G⁴v of two products with G², and not of four with G.
    saved = 2 * flops.matmul(m, m, columns)
    assert counted <= counter.get_total_flops() + 4 * ell**2 * m + saved
    assert counter.get_total_flops() <= counted + small
    beyond = polar.flops(m, n) - polar.head.flops(m, n)
    assert (
        beyond
        == {
            "flat": 5 * flops.matmul(m, m, columns) + 4 * n * m**2 + 3 * 2 * m**3,
            "quintic": 5 * flops.matmul(m, m, columns) + 4 * n * m**2 + 2 * m**3,
        }[coefficients]
    )


def test_small_matrices_run_in_full_space():
    polar = ps.Deflated()
    assert "ℓ=64 ≥ 24" in polar.describe(24, 40)
    M = gaussian(24, 40)
    assert torch.equal(polar(M), polar.full(M))
    assert polar.flops(24, 40) == polar.full.flops(24, 40)
    assert polar.full_space_reason(1024, 1024) is None
    dear = ps.Deflated(rest=ps.NewtonSchulz(5, "polar-express"))
    assert dear.full_space_reason(1024, 1024) == "deflating would cost more"


def test_it_carries_what_the_head_does():
    polar = FORMS["flat"]
    assert polar.traits.carries == ()
    assert polar.resumes(MapState(), 24, 40)
    assert (
        ps.Deflated(replace(HEAD, sketch=ps.Warm()), polar.rest).traits.carries
        == ps.LowRank(4, 2, sketch=ps.Warm()).traits.carries
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": ps.NewtonSchulz()}, "expected a LowRank map"),
        ({"rest": ps.Exact()}, "expected polynomial steps"),
        ({"full": HEAD}, "expected a full-space map without random numbers"),
        ({"float8": "x"}, "float8='x': expected True or False; False keeps"),
    ],
)
def test_what_cannot_be_deflated(options, message):
    with pytest.raises(TypeError, match=message):
        ps.Deflated(**options)


@pytest.mark.parametrize(
    "option", [{"delta": "spectral"}, {"delta": 1e9}, {"dtype": torch.float64}, {"form": "plain"}]
)
def test_options_without_effect_on_the_steps_are_refused(option):
    (name, value), *_ = option.items()
    with pytest.raises(
        ValueError, match=rf"rest has {name}={value!r}, .* NewtonSchulz\(1, 'flat'\)"
    ):
        ps.Deflated(HEAD, ps.NewtonSchulz(1, "flat", **option))


def test_the_routing_table_says_what_happens_to_the_rest():
    joint = ps.Deflated(HEAD, ps.NewtonSchulz(2, "quintic"))
    assert joint.describe(64, 96).endswith("; NewtonSchulz(2 × quintic)")
    assert ps.Deflated(HEAD).describe(64, 96).endswith("; NewtonSchulz(1 × flat)")
