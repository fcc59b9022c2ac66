"""The kernel for the size of a sketch's rest against the same operation in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polarstep.ops import ops_of
from polarstep.ops.base import Products

PLAIN = Products()


def randn(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["wide", "transposed"])
def test_the_inverse_size_of_the_rest(
    device: torch.device, dtype: torch.dtype, layout: str
) -> None:
    A = randn(5, 70, 130, device=device)
    A[1] = 0
    B = A[:, :9] / 2
    A[2, 9:] /= 100
    A[4, 9:] /= 100
    B[2], B[4] = (
        1.1 * A[2, :9],
        1.2 * A[4, :9],
    )  # more energy in B than in A: the floor, and no rest
    A, B = A.to(dtype), B.to(dtype)
    A = A if layout == "wide" else A.mT.contiguous().mT
    got = ops_of(device).inverse_rest_size(A, B, 61, 1.5, 2.0**-12)
    want = PLAIN.inverse_rest_size(A, B, 61, 1.5, 2.0**-12)
    assert got.shape == want.shape == (5, 1, 1)
    assert got[1] == got[4] == 0
    assert (got[[0, 2, 3]] > 0).all()
    assert torch.allclose(got.double(), want.double(), rtol=1e-5, atol=0)
    # From sums of squares in 1,300 parts, as momentum leaves them.
    squares = A.double().flatten(1).square().unflatten(1, (1300, 7)).sum(2)
    for ops in (ops_of(device), PLAIN):
        again = ops.inverse_rest_size(torch.ones_like(A), B, 61, 1.5, 2.0**-12, squares)
        assert torch.allclose(again.double(), want.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1e-30, 1e30, 1e-44])
def test_the_inverse_size_at_the_ends_of_float32(device: torch.device, size: float) -> None:
    A = size * randn(2, 20, 40, device=device)
    got = ops_of(device).inverse_rest_size(A, A[:, :5], 15, 1.5, 2.0**-12)
    want = PLAIN.inverse_rest_size(A, A[:, :5], 15, 1.5, 2.0**-12)
    assert got.isfinite().all()
    most = 1e38  # where the kernel ends
    assert torch.allclose(got.double(), want.double().clamp_max(most), rtol=1e-5, atol=0)
