"""Range finders by themselves: what they go on from, what they leave, when they draw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.spectra import gaussian, matrix
from torch.nn import Parameter

from polarstep import Gaussian, Kaczmarz, LowRank, Muon, NewtonSchulz, Warm
from polarstep.maps import Draw, MapState
from polarstep.maps.subspace import Fresh

M, N, WIDTH = 12, 20, 6


def warm_map(noise: float = 0.1) -> LowRank:
    return LowRank(4, 2, sketch=Warm(noise), inner=NewtonSchulz(7, "quintic"), always_sketch=True)


@pytest.mark.parametrize(
    ("carry", "resumes"),
    [
        (MapState(), False),
        (MapState(basis=torch.zeros(1, WIDTH, N)), True),
        (MapState(basis=torch.zeros(3, WIDTH, N), whitening=torch.zeros(3, WIDTH, WIDTH)), True),
        (MapState(basis=torch.zeros(1, WIDTH - 1, N)), False),
        (MapState(basis=torch.zeros(1, WIDTH + 1, N)), False),
        (MapState(basis=torch.zeros(1, WIDTH, M)), False),
        (MapState(kept=torch.zeros(1, WIDTH, N)), False),
    ],
    ids=[
        "nothing",
        "its own",
        "factored",
        "narrower",
        "wider",
        "another shape",
        "another finder's",
    ],
)
def test_a_warm_start_goes_on_from_an_omega_of_its_width_and_shape(carry, resumes):
    assert Warm().resumes(carry, M, N, WIDTH) == resumes


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1])
def test_a_warm_start_of_another_width_is_a_cold_one(width):
    """Somebody has changed the rank; the step is that of a map which has no start."""
    A, carry = gaussian(2, M, N), MapState(basis=gaussian(2, width, N))
    draw = Draw(gaussian(N, WIDTH))
    cold = Warm().basis(A, WIDTH, MapState(), draw)
    assert torch.equal(Warm().basis(A, WIDTH, carry, draw).Q, cold.Q)


@pytest.mark.parametrize("sketch", [Gaussian(), Kaczmarz()], ids=str)
def test_a_fresh_sketch_has_other_numbers_at_every_step(sketch):
    for finder in (Fresh(sketch), LowRank(4, 2, sketch=sketch)):
        assert getattr(finder, "traits", finder).draws == "every step"


def test_the_numbers_of_a_warm_start_are_the_same_at_every_step():
    assert Warm().draws == LowRank(4, 2, sketch=Warm()).traits.draws == "once"


@pytest.mark.parametrize("noise", [0.05, 0.1, 2.0])
def test_a_warm_step_leaves_its_factor_and_scaled_noise(noise):
    """Ωᵀ = Z + noise·Nᵀ/√n, entry by entry."""
    A, numbers = matrix("power-law", M, N)[None], gaussian(N, WIDTH, seed=1)
    carry = MapState()
    for _ in range(2):  # from a cold start, and from a warm one
        polar, carry = warm_map(noise).step(A, carry, Draw(numbers))
        assert polar.factors is not None
        left = carry["basis"] - polar.factors.Z
        torch.testing.assert_close(left, noise * numbers.mT[None] / math.sqrt(N))


def test_a_warm_start_comes_out_of_zero_by_its_noise():
    """After M = 0 the factor is zero, and the noise alone finds what is there at the next step."""
    polar_map, draw = warm_map(), Draw(gaussian(N, WIDTH, seed=1))
    _, carry = polar_map.step(torch.zeros(1, M, N, dtype=torch.float64), MapState(), draw)
    A = matrix("rank-deficient", M, N)[None]  # rank 4 of the sketch's 6
    polar, _ = polar_map.step(A, carry, draw)
    aligned = (A * polar.dense).sum() / torch.linalg.matrix_norm(A, "nuc")
    assert float(aligned) > 0.99


def test_the_words_for_a_finder_leave_out_the_options_of_its_map():
    assert repr(Warm(0.1)) == "Warm(noise=0.1)"
    assert repr(replace(Warm(0.1), orth="householder")) == "Warm(noise=0.1)"


@pytest.mark.parametrize(
    ("sketch", "options", "own"),
    [
        (Warm(power=3), {}, "power=3"),
        (Warm(power=3), {"power": 2}, "power=3"),
        (Warm(orth="householder"), {}, "orth='householder'"),
        (Fresh(orth="cholesky"), {"orth": "products"}, "orth='cholesky'"),
    ],
    ids=str,
)
def test_an_option_of_a_finder_that_its_map_would_replace_is_refused(sketch, options, own):
    with pytest.raises(ValueError, match=rf"{own} of .* no effect .* LowRank\(..., {own}\)"):
        LowRank(4, 2, sketch=sketch, **options)


def test_a_finder_has_the_options_of_its_map():
    assert LowRank(4, 2, 3, sketch=Warm(power=3)).finder == replace(Warm(), power=3)
    assert LowRank(4, 2, sketch=Fresh(power=2)).finder == Fresh(power=2)
    again = LowRank(
        4, 2, 2, sketch=LowRank(4, 2, 2, sketch=Warm(), orth="cholesky").finder, orth="cholesky"
    )
    assert again.finder == replace(Warm(), power=2, orth="cholesky")


def test_numbers_that_are_kept_have_the_precision_of_their_parameters():
    """Of two parameters of one shape, the one in float64 draws as if it were alone."""
    gradients = [gaussian(8, 12, seed=step) for step in range(2)]

    def trained(*dtypes):
        params = [Parameter(torch.zeros(8, 12, dtype=dtype)) for dtype in dtypes]
        polar = LowRank(3, 2, sketch=Warm(), always_sketch=True)
        optimizer = Muon(params, lr=0.1, polar=polar)
        for G in gradients:
            for p in params:
                p.grad = G.to(p.dtype)
            optimizer.step()
        return params[-1]

    assert torch.equal(trained(torch.float32, torch.float64), trained(torch.float64))
