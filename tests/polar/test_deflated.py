"""The deflated map: what it is made of, and the bounds of theory/bounds/deflated.py on its result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.solvers import CUBIC_THEN_QUINTIC
from tests.spectra import SPECTRA, batch, gaussian
from torch.utils.flop_counter import FlopCounterMode

import polarstep as ps
from polarstep import flops, rng
from polarstep.polar import deflation
from polarstep.polar.base import Carry
from polarstep.theory import bounds

HEAD = ps.LowRank(4, 2, inner=ps.Exact(), always_sketch=True)
FORMS = {
    "scaled": ps.Deflated(HEAD),
    "jointly": ps.Deflated(HEAD, ps.NewtonSchulz(2, CUBIC_THEN_QUINTIC)),
    "jointly, jordan": ps.Deflated(HEAD, ps.NewtonSchulz(2, "jordan")),
    "apart": ps.Deflated(HEAD, ps.NewtonSchulz(2, "quintic"), jointly=False),
    "apart, jordan": ps.Deflated(HEAD, ps.NewtonSchulz(2, "jordan"), jointly=False),
}


def key():
    return rng.generator("deflated")


def proved(polar: ps.Deflated) -> float:
    """The bound on ν for δ ≥ ‖R‖_op, whatever the overlap of head and rest."""
    polynomials = () if polar.rest is None else polar.rest.polynomials
    joint = polar.jointly and polar.rest is not None
    scale = (deflation.joint_scale if joint else deflation.apart_scale)(polynomials)
    form = "jointly" if joint else "apart"
    return bounds.deflated_nu(polynomials, scale=scale if polynomials else 1.0, form=form)


@pytest.mark.parametrize("polar", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_norm_is_within_its_bound(polar, spectrum):
    M = batch(spectrum, 3, 24, 40)
    for X in (M, M.float()):
        T = polar(X, generator=key()).double()
        assert (torch.linalg.matrix_norm(T, 2) <= 1 + proved(polar) + 1e-5).all()


@pytest.mark.parametrize("form", ["scaled", "jointly", "apart", "apart, jordan"])
@pytest.mark.parametrize("spectrum", ["flat", "power-law", "one-dominant"])
def test_the_rest_adds_alignment_to_the_head(form, spectrum):
    """Not with ``"jordan"`` jointly, which brings the head's values of one down to 0.7."""
    M, polar = batch(spectrum, 3, 24, 40), FORMS[form]
    kept = ps.certify(M, polar(M, generator=key())).gamma
    dropped = ps.certify(M, HEAD(M, generator=key())).gamma
    assert (kept < dropped - 0.05).all()


def test_the_forms_are_those_of_deflation():
    """T by the map, and by the functions that the mathematics is written in."""
    M = gaussian(2, 24, 40)
    step = HEAD.from_nothing(M, key())
    Q, B, Z = step.factors.Q, step.factors.B, step.factors.Z
    norm = deflation.frobenius_norm(M)
    found = deflation.rest_norm(M, Q, B, norm, deflation.rest_frobenius(norm, B), rounds=2)
    terms = (M, Q, B, Z, found.delta)
    for name, polar in FORMS.items():
        if polar.rest is None:
            expected = deflation.scaled_rest(*terms)
        else:
            lift = deflation.lifted_jointly if polar.jointly else deflation.lifted_apart
            expected = lift(*terms, polar.rest.polynomials)
        torch.testing.assert_close(polar(M, generator=key()), expected, msg=name)


@pytest.mark.parametrize("polar", FORMS.values(), ids=FORMS.keys())
def test_it_claims_nothing_of_its_head_for_itself(polar):
    """The head's polynomial bounds QZ, not T: the cheap certificate must look at T."""
    norm = torch.ones(2)
    assert polar.innermost is polar
    assert polar.largest_value(norm) is None
    assert polar.alignment_loss(24, norm) is None
    step = polar.from_nothing(gaussian(2, 24, 40), key())
    assert step.factors is None
    assert step.two_factors is None


def test_it_ignores_scale_where_the_maps_inside_do():
    fixed = ps.NewtonSchulz(7, delta=8.0)
    assert ps.Deflated().ignores_scale
    assert not ps.Deflated(replace(HEAD, inner=fixed)).ignores_scale
    assert not ps.Deflated(HEAD, full=fixed).ignores_scale


def test_flops_are_those_of_its_products():
    m, n, ell, vectors = 64, 96, 6, deflation.VECTORS
    polar = ps.Deflated(replace(HEAD, inner=ps.NewtonSchulz(0)))
    M = gaussian(1, m, n, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        polar(M, generator=key())
    # Beside the passes over M there are products with Q and B, of size ℓ or 16 on one side at least.
    passes = 2 * 2 * flops.matmul(m, vectors, n) + polar.head.flops(m, n) - flops.qr(m, ell) * 3
    small = 2 * 2 * 2 * (m + n) * ell * vectors + 2 * ell**2 * (m + n)
    assert passes <= counter.get_total_flops() <= passes + 4 * small + 64 * vectors**3
    estimate = polar.flops(m, n) - polar.head.flops(m, n)
    assert estimate == 4 * flops.matmul(m, vectors, n)


def test_small_matrices_run_in_full_space():
    polar = ps.Deflated()
    assert "ℓ=56 ≥ 24" in polar.describe(24, 40)
    M = gaussian(24, 40)
    assert torch.equal(polar(M), polar.full(M))
    assert polar.flops(24, 40) == polar.full.flops(24, 40)
    assert polar.full_space_reason(1024, 1024) is None
    dear = ps.Deflated(rest=ps.NewtonSchulz(5, "polar-express"))
    assert dear.full_space_reason(1024, 1024) == "deflating would cost more"


def test_it_goes_on_from_vectors_of_its_shape_only():
    polar = ps.Deflated(HEAD)
    assert polar.carries == ("rest",)
    assert polar.resumes(Carry(rest=torch.zeros(3, 16, 40)), 24, 40)
    assert polar.resumes(Carry(rest=torch.zeros(3, 16, 40)), 40, 24)
    assert not polar.resumes(Carry(rest=torch.zeros(3, 16, 24)), 24, 40)
    assert not polar.resumes(Carry(), 24, 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": ps.NewtonSchulz()}, "expected a LowRank map"),
        ({"rest": ps.Exact()}, "expected None or polynomial steps"),
        ({"jointly": 1}, "jointly=1: expected True or False"),
        ({"full": HEAD}, "expected a full-space map without random numbers"),
    ],
)
def test_what_cannot_be_deflated(options, message):
    with pytest.raises(TypeError, match=message):
        ps.Deflated(**options)


def test_the_routing_table_says_what_happens_to_the_rest():
    joint = ps.Deflated(HEAD, ps.NewtonSchulz(2, "quintic"))
    assert joint.describe(64, 96).endswith("; NewtonSchulz(2 × quintic)")
    assert ps.Deflated(HEAD).describe(64, 96).endswith("; rest scaled")
