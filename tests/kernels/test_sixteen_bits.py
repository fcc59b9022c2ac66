"""Steps in 16 bits against float64. An optimizer takes these steps on a GPU alone.

In float16, whose three bits more than bfloat16's show smaller errors.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polarstep.maps.coefficients import Polynomial, evaluate, polar_express, resolve
from polarstep.ops import ops_of

SHAPES = {
    "one launch": (2, 24, 40),
    "a launch for each product": (1, 72, 88),
    "tall in memory": (2, 24, 40),
}


def matrices(name: str, device: torch.device) -> Tensor:
    batch, m, n = SHAPES[name]
    X = torch.randn(batch, m, n, generator=torch.Generator().manual_seed(0))
    X = (0.9 * X / torch.linalg.matrix_norm(X, 2, keepdim=True)).half().to(device)
    return X.mT.contiguous().mT if name == "tall in memory" else X


def on_singular_values(polynomials: tuple[Polynomial, ...], X: Tensor) -> Tensor:
    U, sigma, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    return (U * evaluate(polynomials, sigma)[:, None]) @ Vh


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "polynomials",
    [resolve("quintic", 3), polar_express(0.1, 2, 9), ((1.5, -0.5), (1.5, -0.5))],
    ids=["degree 5", "degree 9", "degree 3"],
)
def test_iterate(device: torch.device, name: str, polynomials: tuple[Polynomial, ...]) -> None:
    X = matrices(name, device)
    got = ops_of(device).iterate(X, polynomials)
    assert got.dtype == torch.float16
    assert got.stride() == X.stride()
    assert torch.allclose(got.double(), on_singular_values(polynomials, X), atol=4e-3)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_first_step(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """φ(Y/‖Y‖_F), for Y that was not normalized."""
    (polynomial,), Y = resolve("quintic", 1), 30 * matrices(name, device)
    got = ops_of(device).first_step(Y, polynomial, dtype)
    assert got.dtype == dtype
    Y = Y.double()
    want = on_singular_values((polynomial,), Y / torch.linalg.matrix_norm(Y, keepdim=True))
    assert torch.allclose(got.double(), want, atol=4e-3)


def test_half_of_a_symmetric_product_is_counted_as_half(device: torch.device) -> None:
    ops = ops_of(device)
    least = ops.symmetric_from
    assert ops.symmetric_flops(least, 7, torch.float16) == least * least * 7
    assert ops.symmetric_flops(least - 1, 7, torch.float16) == 2 * (least - 1) ** 2 * 7
