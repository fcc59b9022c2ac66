"""A pass of the orthonormalization on shards: L⁻¹ of a Gram matrix G = LLᵀ, without any process."""

from __future__ import annotations

import pytest
import torch
from tests.spectra import gaussian

from polarstep.distributed.sharded import _inverse, _packed, _unpacked

NO_FACTOR = 2.0


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("zero", [[], [1], [0, 3]])
def test_zero_columns_stay_zero_and_the_others_become_orthonormal(is_first, zero):
    Y = gaussian(3, 20, 4)
    Y[..., zero] = 0
    found = _inverse(4, is_first)(_packed(Y.mT @ Y))
    assert (found[:, -1] != NO_FACTOR).all()
    Q = Y @ _unpacked(found[:, :-1], 4).mT
    expected = torch.eye(4, dtype=Y.dtype).index_fill(0, torch.tensor(zero, dtype=torch.long), 0)
    torch.testing.assert_close(Q.mT @ Q, expected.expand(3, 4, 4), atol=1e-12, rtol=0)


def test_a_gram_matrix_without_a_factor_is_flagged():
    G = torch.diag(torch.tensor([1.0, -1.0, 1.0]))[None].double()
    assert _inverse(3, False)(_packed(G))[0, -1] == NO_FACTOR
