from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.spectra import gaussian, with_singular_values

from polarstep import Exact, Gaussian, Kaczmarz, LowRank
from polarstep.maps import Warm


def test_is_the_sign_of_the_singular_values():
    M = torch.diag(torch.tensor([3.0, -2.0, 0.0, 1e-3], dtype=torch.float64))
    torch.testing.assert_close(Exact()(M), torch.diag(torch.tensor([1.0, -1, 0, 1]).double()))


@given(m=st.integers(1, 12), n=st.integers(1, 12), rank=st.integers(0, 12))
def test_is_a_partial_isometry_that_attains_the_nuclear_norm(m, n, rank):
    sigma = torch.linspace(3, 0.1, min(m, n), dtype=torch.float64)
    sigma[rank:] = 0
    M = with_singular_values(sigma, m, n)
    T = Exact(rtol=1e-9)(M)
    torch.testing.assert_close(T @ T.mT @ T, T, atol=1e-10, rtol=0)
    torch.testing.assert_close((M * T).sum(), sigma.sum(), atol=1e-10, rtol=0)
    assert torch.linalg.matrix_rank(T) == min(rank, m, n)


def test_float32_is_computed_in_float64():
    M = gaussian(12, 20)
    torch.testing.assert_close(
        Exact()(M.float()), Exact()(M.float().double()).float(), atol=0, rtol=0
    )


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 24, 40)], ids=str)
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("sketch", [Gaussian(), Kaczmarz(), Warm()], ids=repr)
def test_a_low_rank_map_of_it_does_not_lift_rounding_errors(shape, rank, sketch):
    """B = QᵀM has eight rows, of which the last are nothing but the rounding errors of the product."""
    *batch, m, n = shape
    M = (gaussian(*batch, m, rank) @ gaussian(*batch, rank, n, seed=1)).float()
    T = LowRank(6, 2, sketch=sketch, inner=Exact(), always_sketch=True)(M)
    values = torch.linalg.svdvals(T.double())
    torch.testing.assert_close(values[..., :rank], torch.ones(*batch, rank).double())
    assert values[..., rank:].max() < 1e-5
    # On its own it keeps every direction of the matrix that it is given.
    assert torch.linalg.svdvals(Exact()(M).double()).min() > 0.99


@pytest.mark.parametrize("shape", [(3, 40), (40, 3)], ids=str)
def test_the_default_rtol_is_the_long_side_times_epsilon(shape):
    zero = 40 * torch.finfo(torch.float64).eps
    M = torch.zeros(shape, dtype=torch.float64)
    M[0, 0], M[1, 1], M[2, 2] = 1.0, 2 * zero, zero / 2
    expected = torch.zeros_like(M)
    expected[0, 0] = expected[1, 1] = 1
    torch.testing.assert_close(Exact()(M), expected)


def test_rtol_says_what_counts_as_zero():
    M = torch.diag(torch.tensor([1.0, 1e-3]))
    assert torch.linalg.matrix_rank(Exact()(M)) == 2
    assert torch.linalg.matrix_rank(Exact(rtol=1e-2)(M)) == 1
    for bad in (-1e-9, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"rtol=.*expected 0 ≤ rtol < 1"):
            Exact(rtol=bad)
    with pytest.raises(TypeError, match=r"rtol='0\.1': expected a number, 0 ≤ rtol < 1"):
        Exact(rtol="0.1")
