"""The Gram form of small matrices in one launch, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polarstep.kernels import interpreted
from polarstep.kernels.product import takes_large_tiles
from polarstep.numerics import Polynomial
from polarstep.ops import ops_of
from polarstep.ops.base import Products

QUINTIC = (3.4, -4.7, 2.0)
SEVENTH = (2.8, -3.5, 1.9, -0.34)
NINTH = (2.3, -2.5, 1.8, -0.8, 0.15)  # by squarings
ELEVENTH = (1.9, -1.3, 0.5, -0.2, 0.1, -0.02)

# A GPU multiplies float32 in tf32.
DTYPES = [torch.float16, torch.bfloat16, *([torch.float32] if interpreted() else [])]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}


def gram(batch: int, m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """XXᵀ with singular values of X from 0.05 to 0.98."""
    numbers = torch.Generator().manual_seed(m)
    U = torch.linalg.qr(torch.randn(batch, m, m, generator=numbers, dtype=torch.float64))[0]
    squares = torch.linspace(0.05, 0.98, m, dtype=torch.float64) ** 2
    return ((U * squares) @ U.mT).to(device, dtype)


def in_float64(G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    return Products().accumulated(G.double(), polynomials)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "m", "polynomials"),
    [
        (3, 1, (QUINTIC, SEVENTH)),
        (1, 8, (SEVENTH, SEVENTH, QUINTIC)),
        (2, 16, (NINTH, QUINTIC)),
        (5, 56, (QUINTIC,)),
        (2, 64, (QUINTIC, ELEVENTH, NINTH, SEVENTH)),
        (1, 65, (SEVENTH,)),
        (2, 96, (SEVENTH, SEVENTH, QUINTIC)),
        (2, 128, (QUINTIC, NINTH, QUINTIC)),
    ],
    ids=str,
)
def test_one_launch_is_all_steps(
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    m: int,
    polynomials: tuple[Polynomial, ...],
) -> None:
    from polarstep.kernels.small import accumulated

    # NaN around G and its place in memory: nothing past the end of a matrix is read.
    room = torch.full((batch + 2, m, m), float("nan"), dtype=dtype, device=device)
    room[1:-1] = gram(batch, m, dtype, device)
    G = room[1:-1]
    got, want = accumulated(G, polynomials), in_float64(G, polynomials)
    assert got.dtype == dtype
    error = torch.linalg.matrix_norm(got.double() - want, 2)
    assert (error <= TOLERANCE[dtype] * torch.linalg.matrix_norm(want, 2)).all()


def test_each_matrix_has_a_result_of_its_own(device: torch.device) -> None:
    """P(0) = a·I exactly; what is not finite stays in its matrix."""
    from polarstep.kernels.small import accumulated

    G = gram(4, 24, torch.float16, device)
    G[1], G[2, 3, 4] = 0, float("nan")
    W = accumulated(G, ((3.5, -4.7, 2.0), (2.0, -1.5, 0.5, -0.1)))
    assert torch.equal(W[1], 7 * torch.eye(24, dtype=W.dtype, device=device))
    assert W[2].isnan().any()
    assert W[[0, 3]].isfinite().all()


@pytest.mark.parametrize("skip", [True, False])
def test_the_square_of_w_is_stored_as_well(device: torch.device, skip: bool) -> None:
    from polarstep.kernels.small import accumulated

    G = gram(3, 40, torch.float16, device)
    V = torch.full_like(G, 0.5, dtype=torch.float32)
    finite = torch.tensor([1.0, 0.0, 1.0], device=device) if skip else None
    if skip:
        G[1] = float("nan")
    W = accumulated(G, (SEVENTH, QUINTIC), V, finite)
    want = W.double() @ W.double()
    if skip:
        assert W[1].isnan().all()
        want[1] = 0.5
    assert torch.allclose(V.double(), want, rtol=1e-5, atol=1e-4)


def test_rounds_as_separate_launches_do(device: torch.device) -> None:
    ops, polynomials = ops_of(device), (SEVENTH, SEVENTH, QUINTIC)
    G = gram(2, 40, torch.float16, device)
    want = in_float64(G, polynomials)
    errors = [
        torch.linalg.matrix_norm(W.double() - want).max()
        for W in (ops.accumulated(G, polynomials), ops._in_two_launches(G, polynomials))
    ]
    assert 0.5 * errors[1] < errors[0] < 2 * errors[1]


def test_what_one_launch_takes(device: torch.device) -> None:
    from polarstep.kernels.small import MOST_GRAM_ROWS as MOST_ROWS
    from polarstep.kernels.small import suits_accumulated as suits

    def G(m: int) -> Tensor:
        return torch.zeros(2, m, m, dtype=torch.float16, device=device)

    if not takes_large_tiles(device):
        assert not suits(G(8), (QUINTIC,))
        return
    assert suits(G(MOST_ROWS), (QUINTIC, SEVENTH, NINTH, ELEVENTH))
    assert not suits(G(MOST_ROWS + 1), (QUINTIC,))
    assert not suits(G(8), (QUINTIC, (1.5, -0.5)))
    assert not suits(G(8), ((1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),))  # three squarings
    assert not suits(G(8)[:, :4, :4], (QUINTIC,))
    assert not suits(G(8).double(), (QUINTIC,))
    assert suits(G(8).float(), (QUINTIC,)) == interpreted()
