"""What a rank makes of summed Gram matrices: L⁻¹ with G = LLᵀ, and W with T = WB. No process starts."""

from __future__ import annotations

import pytest
import torch
from tests.spectra import gaussian

import polarstep as ps
from polarstep.distributed.summed import inverse_root_of, packed_triangle, unpacked, weight_of

NO_FACTOR = 2.0


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("zero", [[], [1], [0, 3]])
def test_zero_columns_stay_zero_and_the_others_become_orthonormal(is_first, zero):
    Y = gaussian(3, 20, 4)
    Y[..., zero] = 0
    found = inverse_root_of(4, is_first)(packed_triangle(Y.mT @ Y))
    assert (found[:, -1] != NO_FACTOR).all()
    Q = Y @ unpacked(found[:, :-1], 4).mT
    expected = torch.eye(4, dtype=Y.dtype).index_fill(0, torch.tensor(zero, dtype=torch.long), 0)
    torch.testing.assert_close(Q.mT @ Q, expected.expand(3, 4, 4), atol=1e-12, rtol=0)


def test_a_gram_matrix_without_a_factor_is_flagged():
    G = torch.diag(torch.tensor([1.0, -1.0, 1.0]))[None].double()
    assert inverse_root_of(3, False)(packed_triangle(G))[0, -1] == NO_FACTOR


@pytest.mark.parametrize("by_norm", [False, True])
@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("delta", ["frobenius", "spectral"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_weight_is_that_of_the_inner_map_at_every_scale(delta, scale, steps, by_norm):
    inner = ps.NewtonSchulz(steps, "quintic", delta=delta)
    B = scale * gaussian(3, 4, 20)
    B[1] = 0
    found = weight_of(inner, 0, steps, 4, by_norm=by_norm)(packed_triangle(B @ B.mT))
    T = inner(B)
    if by_norm:
        found, squared = found[:, :-1], found[:, -1]
        torch.testing.assert_close(squared, T.square().sum((-2, -1)), atol=1e-9, rtol=0)
    W = unpacked(found, 4, symmetric=True)
    torch.testing.assert_close(W @ B, T, atol=1e-9, rtol=0)
    assert W.isfinite().all()
    assert not W[1].any()
