from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.spectra import SPECTRA, batch, gaussian, orthogonal, with_singular_values

from polarstep.maps.subspace import orthonormalize

METHODS = ["auto", "householder", "cholesky", "products"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_never_longer_than_one(method, spectrum, dtype):
    for shape in ((2, 96, 24), (2, 24, 24), (1, 5, 1)):
        Q = orthonormalize(batch(spectrum, *shape).to(dtype), method)
        assert Q.isfinite().all()
        assert (torch.linalg.matrix_norm(Q.double(), 2) <= 1 + 5e-6).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_basis_of_the_range(method, scale):
    sigma = torch.linspace(1, 0.05, 8, dtype=torch.float64)
    Y = torch.stack([with_singular_values(sigma, 40, 8, seed=s) for s in range(3)])
    Q = orthonormalize((scale * Y).float(), method).double()
    torch.testing.assert_close(Q.mT @ Q, torch.eye(8).double().expand(3, 8, 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(Q @ (Q.mT @ Y), Y, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@given(logs=st.lists(st.floats(-6, 0), min_size=2, max_size=10))
def test_what_is_above_rounding_is_captured(method, logs):
    # PolarExpress lifts directions down to 1e-4 of the norm; the other two go down to rounding.
    floor = 1e-3 if method == "products" else 1e-5
    sigma = 10.0 ** torch.tensor(sorted(logs, reverse=True), dtype=torch.float64)
    U = orthogonal(30, 3, len(sigma))
    Y = (U * sigma) @ orthogonal(len(sigma), 4).mT
    Q = orthonormalize(Y[None].float(), method)[0].double()
    large = U[:, sigma > floor * sigma.sum()]
    kept = torch.linalg.vector_norm(Q.mT @ large, dim=0)
    assert (kept > (0.9 if method == "products" else 0.97)).all()


@pytest.mark.parametrize("method", METHODS)
def test_zero_columns_and_zero_matrices(method):
    Y = gaussian(3, 20, 6).float()
    Y[1] = 0
    Y[2, :, 3:] = 0
    Q = orthonormalize(Y, method)
    assert Q.isfinite().all()
    assert (torch.linalg.matrix_norm(Q.double(), 2) <= 1 + 1e-5).all()
    residual = Y - Q @ (Q.mT @ Y)
    torch.testing.assert_close(residual, torch.zeros_like(Y), atol=1e-4, rtol=0)
    if method in ("cholesky", "products"):
        assert not Q[1].any()
        assert not Q[2, :, 3:].any()


@pytest.mark.parametrize("method", METHODS)
def test_rough_is_a_well_conditioned_basis_of_the_same_range(method):
    decay = torch.logspace(0, -2.5, 10, dtype=torch.float64)
    Y = torch.stack([with_singular_values(decay, 40, 10, seed=s) for s in range(2)]).float()
    Q = orthonormalize(Y, method, rough=True).double()
    sigma = torch.linalg.svdvals(Q)
    assert (sigma[:, 0] / sigma[:, -1] < (4 if method == "products" else 1.5)).all()
    both = torch.cat([Q, Y.double()], dim=-1)
    assert (torch.linalg.matrix_rank(both, rtol=1e-5) == 10).all()


def test_cholesky_and_householder_agree_in_every_sign():
    sigma = torch.logspace(0, -2, 8, dtype=torch.float64)
    Y = torch.stack([with_singular_values(sigma, 40, 8, seed=s) for s in range(3)])
    one, other = (orthonormalize(Y, method) for method in ("householder", "cholesky"))
    torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


def test_cholesky_falls_back_where_it_must_and_only_there():
    # Nine directions of 3e-7 beside one: float32's Gram matrix knows nothing of them.
    sigma = torch.full((10,), 3e-7, dtype=torch.float64)
    sigma[0] = 1
    hard = with_singular_values(sigma, 50, 10).float()
    easy = gaussian(50, 10).float()
    Q = orthonormalize(torch.stack([easy, hard]), "cholesky")
    torch.testing.assert_close(Q[0], orthonormalize(easy[None], "cholesky")[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(Q[1].mT @ Q[1], torch.eye(10), atol=1e-5, rtol=0)


def test_whitened_polynomials_lift_three_thousandths_and_never_exceed_one():
    from polarstep.maps.coefficients import evaluate
    from polarstep.maps.subspace import whitened_polynomials

    polynomials = sum(whitened_polynomials(), ())
    x = torch.linspace(0.003, 1, 20_001, dtype=torch.float64)
    lifted = evaluate(polynomials, x)
    assert lifted.max() < 1
    assert lifted.min() > 0.985
    below = torch.linspace(0, 0.003, 1001, dtype=torch.float64)
    assert evaluate(polynomials, below).max() < 1
