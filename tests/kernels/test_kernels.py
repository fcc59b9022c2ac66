"""Every kernel against its formula in float64 or in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def randn(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], device=tensors[0].device)


@pytest.mark.parametrize(("M", "N", "K"), [(16, 16, 16), (70, 33, 50), (130, 257, 64), (1, 5, 3)])
def test_product_with_its_extras(device: torch.device, M: int, N: int, K: int) -> None:
    from polarstep.kernels.product import product

    A, B, D = (randn(2, *s, device=device) for s in [(M, K), (K, N), (M, N)])
    got = product(A, B, alpha=0.5, D=D, beta=-2.0, identity=3.0)
    eye = torch.eye(M, N, device=device, dtype=torch.float64)
    want = 0.5 * A.double() @ B.double() - 2 * D.double() + 3 * eye
    tolerance = 2e-2 if device.type == "cuda" else 1e-5  # tf32 there
    assert torch.allclose(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("m", [1, 64, 65, 200, 300])
def test_symmetric_product_computes_half_and_stores_both(device: torch.device, m: int) -> None:
    from polarstep.kernels.product import product

    X = randn(2, m, 40, device=device)
    got = product(X, X.mT, symmetric=True)
    assert torch.equal(got, got.mT)
    tolerance = 2e-2 if device.type == "cuda" else 1e-5
    assert torch.allclose(got, X @ X.mT, atol=tolerance * 40, rtol=tolerance)


def test_products_take_transposed_operands(device: torch.device) -> None:
    from polarstep.kernels.product import product

    A, B = randn(2, 50, 30, device=device).mT, randn(2, 20, 50, device=device).mT
    assert torch.allclose(product(A, B), A @ B, atol=0.1 if device.type == "cuda" else 1e-4)


def test_normalized_at_every_scale(device: torch.device) -> None:
    from polarstep.kernels.normalize import normalized

    scales = torch.tensor([1e-30, 1e-8, 0.0, 1.0, 1e30], device=device)[:, None, None]
    Y = randn(5, 30, 70, device=device) * scales
    norms = normalized(Y).float().norm(dim=(1, 2))
    want = (scales.flatten() > 0).float()
    assert torch.allclose(norms, want, atol=4e-3)  # bfloat16 truncates in the interpreter
    transposed = normalized(Y.mT)
    assert transposed.stride() == Y.mT.stride()
    assert torch.equal(transposed.mT, normalized(Y))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_momentum(device: torch.device, nesterov: bool, skip: bool) -> None:
    from polarstep.kernels.momentum import momentum

    G = [randn(20, 36, device=device, seed=i) for i in range(3)]
    C = [randn(20, 36, device=device, seed=9 + i) for i in range(3)]
    G[1][3, 4] = float("nan") if skip else 1.0
    before = [c.clone() for c in C]
    beta = torch.tensor([0.9, 0.5, 0.0], device=device)
    finite = torch.tensor([1.0, 0.0, 1.0], device=device) if skip else None
    M = torch.empty(3, 20, 36, device=device)
    momentum(
        addresses(G), addresses(C), beta, M, element=torch.float32, nesterov=nesterov, finite=finite
    )
    for i in range(3):
        if skip and i == 1:
            assert torch.equal(C[i], before[i])
            assert (M[i] == 0).all()
            continue
        c = beta[i] * before[i] + G[i]
        assert torch.allclose(C[i], c)
        assert torch.allclose(M[i], beta[i] * c + G[i] if nesterov else c)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("m", "n", "ell"), [(64, 128, 16), (20, 36, 5), (130, 40, 70)])
def test_both_updates(device: torch.device, m: int, n: int, ell: int, skip: bool) -> None:
    from polarstep.kernels.update import update, update_from_factors

    L, R = randn(2, m, ell, device=device), randn(2, n, ell, device=device, seed=1).mT
    decay = torch.tensor([0.9, 0.5], device=device)
    step = torch.tensor([0.1, 2.0], device=device)
    finite = torch.tensor([0.0, 1.0], device=device) if skip else None
    L = L * finite[:, None, None] if skip else L  # T(0) = 0 is what a skipped matrix gets
    for how in ("dense", "factors"):
        X = [randn(m, n, device=device, seed=5 + i) for i in range(2)]
        before = [x.clone() for x in X]
        rest = (decay, step)
        if how == "dense":
            update(addresses(X), L @ R, *rest, element=torch.float32, finite=finite)
        else:
            update_from_factors(addresses(X), L, R, *rest, element=torch.float32, finite=finite)
        for i in range(2):
            if skip and i == 0:
                assert torch.equal(X[i], before[i])
                continue
            want = decay[i] * before[i] - step[i] * (L[i] @ R[i])
            tolerance = 0.2 if device.type == "cuda" else 1e-4
            assert torch.allclose(X[i], want, atol=tolerance)


def test_blend_keeps_the_start_of_a_skipped_matrix(device: torch.device) -> None:
    from polarstep.kernels.blend import blend

    Z, N, start = (randn(*s, device=device) for s in [(2, 5, 30), (30, 5), (2, 5, 30)])
    before = start.clone()
    blend(Z, N, 0.25, start, torch.tensor([1.0, 0.0], device=device))
    assert torch.allclose(start[0], Z[0] + 0.25 * N.mT)
    assert torch.equal(start[1], before[1])


@pytest.mark.parametrize("degree", [3, 5, 7, 9])
def test_the_polynomial_of_a_gram_matrix(device: torch.device, degree: int) -> None:
    from polarstep.polar.iterate import _polynomial_of

    polynomial = tuple(torch.linspace(2, -1, (degree + 1) // 2).tolist())
    X = randn(2, 20, 40, device=device)
    G = X @ X.mT / 60
    want = sum(c * torch.linalg.matrix_power(G.double(), i) for i, c in enumerate(polynomial))
    tolerance = 2e-2 if device.type == "cuda" else 1e-5
    assert torch.allclose(_polynomial_of(G, polynomial).double(), want, atol=tolerance)


def test_a_table_keeps_its_place(device: torch.device) -> None:
    from polarstep.kernels.pointers import refreshed

    table = refreshed(torch.empty(0, device=device), [[1, 2, 2**62]], torch.int64)
    assert table.tolist() == [[1, 2, 2**62]]
    assert table.device.type == device.type
    again = refreshed(table, [[4, 5, 6]], torch.int64)
    assert again.tolist() == [[4, 5, 6]]
    assert again.data_ptr() == table.data_ptr()  # a captured graph reads it there
    assert refreshed(table, [[1, 2], [3, 4]], torch.int64).tolist() == [[1, 2], [3, 4]]
