"""The kernels of a polynomial step on X₀ against the same operations in plain torch.

In float16, whose three bits more than bfloat16's show smaller errors.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polarstep.kernels import norms
from polarstep.kernels.norms import lifted_norm
from polarstep.kernels.product import takes_large_tiles
from polarstep.maps.coefficients import polar_express, resolve
from polarstep.ops import ops_of
from polarstep.ops.base import Products, squared_norm
from polarstep.ops.lazy import Head

PLAIN = Products()


def randn(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def gram(batch: int, m: int, device: torch.device) -> Tensor:
    """XXᵀ in float16 with norms of one or below, another one for each matrix."""
    X = randn(batch, m, 2 * m, device=device)
    sizes = torch.linspace(0.2, 1, batch, device=device)[:, None, None]
    X = X * sizes / torch.linalg.matrix_norm(X, 2, keepdim=True)
    return (X @ X.mT).half()


@pytest.mark.parametrize(
    ("m", "n"), [(16, 16), (70, 33), (130, 257)], ids=["small", "odd", "larger"]
)
@pytest.mark.parametrize("powers", [(0, 0, 0), (1, 1, 0), (5, 3, 1)], ids=str)
def test_a_product_with_a_number_for_each_matrix(
    device: torch.device, m: int, n: int, powers: tuple[int, int, int]
) -> None:
    from polarstep.kernels.product import product

    A, B, D = (randn(3, *shape, device=device).half() for shape in [(m, 40), (40, n), (m, n)])
    s = torch.tensor([0.5, 1.0, 1.3], device=device)
    got = product(
        A, B, alpha=0.5, D=D, beta=-2.0, identity=3.0, scale=s, powers=powers,
        out_dtype=torch.float32,
    )  # fmt: skip
    a, b, c = (s.double()[:, None, None] ** power for power in powers)
    eye = torch.eye(m, n, device=device, dtype=torch.float64)
    want = 0.5 * a * (A.double() @ B.double()) - 2 * b * D.double() + 3 * c * eye
    assert torch.allclose(got.double(), want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("m", [72, 576])  # without descriptors, and with
@pytest.mark.parametrize("powers", [(5, 3, 1), (0, 2, 0)], ids=str)
def test_a_symmetric_product_with_a_number_for_each_matrix(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, m: int, powers: tuple[int, int, int]
) -> None:
    from polarstep.kernels import product as module

    monkeypatch.setattr(module, "FEWEST_TILES", 0)
    G = gram(2, m, device)
    if takes_large_tiles(device):
        assert module._suits_descriptors(G, G) == (m == 576)
    s = torch.tensor([0.7, 1.3], device=device)
    got = module.product(
        G, G, alpha=4.0, D=G, beta=-3.0, identity=2.0, symmetric=True, scale=s, powers=powers
    )
    a, b, c = (s.double()[:, None, None] ** power for power in powers)
    eye = torch.eye(m, device=device, dtype=torch.float64)
    want = 4 * a * (G.double() @ G.double()) - 3 * b * G.double() + 2 * c * eye
    assert torch.equal(got, got.mT)
    assert torch.allclose(got.double(), want, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("products", "norm"),
    [*((5, norm) for norm in (1e-3, 7.0, 900.0, 4e5, 3e7)), (7, 1e-3), (7, 3e6)],
)
def test_the_scale_of_a_leading_direction_that_the_head_has_missed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, products: int, norm: float
) -> None:
    """Squares of Gᵖv are up to 1e90 here. A scale of zero would be a step of zero.

    Matrices of 1024 rows or more take seven products, and smaller ones five.
    """
    for module in ("kernels.norms", "ops.base"):
        monkeypatch.setattr(f"polarstep.{module}.norm_products", lambda _: products)
    m = 96
    U = torch.linalg.qr(randn(m, m, device=device).double())[0]
    values = torch.linspace(0.2, 1, m, device=device, dtype=torch.float64)
    values[-1] = norm
    G = ((U * values) @ U.mT).to(torch.bfloat16)[None]
    got = ops_of(device).scale_to_one(G, 1.08)
    assert torch.allclose(got.double(), PLAIN.scale_to_one(G.double(), 1.08), rtol=2e-2)
    assert got > 0


@pytest.mark.parametrize("m", [16, 72, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_scale_to_one(device: torch.device, m: int, dtype: torch.dtype) -> None:
    G = gram(4, m, device).to(dtype)
    G[1] = 0
    got = ops_of(device).scale_to_one(G, 1.08)
    want = PLAIN.scale_to_one(G, 1.08)
    assert got.shape == want.shape == (4, 1, 1)
    assert got[1] == want[1] == 0
    # In bfloat16 for 16 bits, and on a GPU in tf32 for float32.
    tolerance = 2e-2 if device.type == "cuda" or dtype == torch.float16 else 1e-4
    assert torch.allclose(got.double(), want.double(), rtol=tolerance, atol=0)
    norm = torch.linalg.matrix_norm(G.double(), 2)
    reach = 1.08 * got.double().flatten() * norm.sqrt()
    assert (reach[[0, 2, 3]] >= 1 - tolerance).all()
    assert (reach[[0, 2, 3]] <= 1.25).all()


@pytest.mark.parametrize("m", [16, 72, 200])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_the_norm_of_a_lifted_matrix(device: torch.device, m: int, dtype: torch.dtype) -> None:
    """Of PX for G = XXᵀ, each as it is stored, against the same estimate in float64."""
    A = randn(3, m, m, device=device)
    G, P = (X.to(dtype) for X in (gram(3, m, device), (A + A.mT) / 4))
    scale = torch.tensor([1.0, 0.5, 3.0], device=device)
    want = squared_norm(P.double(), G.double())
    # The columns of PV are stored in bfloat16 for 16 and 8 bits.
    rtol = 1e-2 if device.type == "cuda" or dtype.itemsize <= 2 else 1e-5
    for got, factor in (
        (lifted_norm(P, G), torch.ones_like(scale)),
        (lifted_norm(P, G, scale, 0.25), 0.25 * scale),
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want * factor.double() ** 2, rtol=rtol, atol=0)
    if dtype == torch.float32:
        ours = ops_of(device).lifted_norm(P, G)
        torch.testing.assert_close(ours.double(), want, rtol=rtol, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter's NumPy
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_has_a_scale_of_zero(device: torch.device, bad: float) -> None:
    G = gram(3, 72, device)
    G[1, 5, 5] = bad
    scale = ops_of(device).scale_to_one(G, 1.08).flatten()
    assert scale[1] == 0
    assert (scale[[0, 2]] > 0).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["wide", "transposed"])
def test_the_flattened_matrix(device: torch.device, layout: str, weighted: bool) -> None:
    m, n, ell = 72, 136, 16
    A = randn(2, m, n, device=device) / 10
    A[:, 0] *= 30  # a head that towers over the rest
    Q = torch.linalg.qr(A @ randn(2, n, ell, device=device, seed=1)).Q
    B = Q.mT @ A
    X = torch.linalg.qr(B.mT).Q.mT.contiguous()
    W = (torch.eye(ell, device=device) * 0.9).expand(2, ell, ell).half() if weighted else None
    inverse = torch.tensor([0.5, 0.8], device=device)[:, None, None]
    A, Q, B, X = (Y.half() for Y in (A, Q, B, X))
    given = A if layout == "wide" else A.mT.contiguous().mT
    got = ops_of(device).flattened(given, Head(Q, B, X, W), inverse)
    fine = Head(Q.double(), B.double(), X.double(), None if W is None else W.double())
    want = PLAIN.flattened(A.double(), fine, inverse)
    assert got.dtype == torch.float16
    assert (got.mT if layout == "transposed" else got).is_contiguous()
    assert torch.linalg.matrix_norm(got.double() - want, 2).max() < 2e-2


# The one of the highest degree also by descriptors, which do every product of all of them.
@pytest.mark.parametrize(
    ("polynomial", "m"),
    [
        (resolve("jordan", 1)[0], 72),
        (polar_express(0.15, 1, 9)[0], 72),
        (resolve("flat", 1)[0], 72),
        (resolve("flat", 1)[0], 576),
    ],
    ids=["degree 5", "degree 9", "degree 17", "degree 17, large"],
)
def test_a_scaled_polynomial(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, m: int, polynomial: tuple[float, ...]
) -> None:
    monkeypatch.setattr("polarstep.kernels.product.FEWEST_TILES", 0)
    G = gram(2 if m < 100 else 1, m, device)
    norm = torch.linalg.matrix_norm(G.double(), 2)
    s = 0.95 / norm.sqrt()[:, None, None]
    got = ops_of(device).scaled_polynomial(G, polynomial, s.float())
    want = PLAIN.scaled_polynomial(G.double(), polynomial, s)
    assert got.dtype == torch.float16
    error = torch.linalg.matrix_norm(got.double() - want, 2)
    assert (error <= 1e-2 * torch.linalg.matrix_norm(want, 2)).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_the_dual_of_a_head_is_its_plain_twin(device: torch.device, weighted: bool) -> None:
    m, n, ell = 72, 136, 16
    Q = torch.linalg.qr(randn(2, m, ell, device=device).double()).Q * (1 - 2**-7)
    Q[..., -2:] = 0  # padding
    X = torch.linalg.qr(randn(2, n, ell, device=device, seed=1)).Q.mT.contiguous().half()
    W = randn(2, ell, ell, device=device, seed=2).half() if weighted else None
    head = Head(Q.half(), X, X, W)
    got = ops_of(device).dual(head)
    fine = Head(*(None if Y is None else Y.double() for Y in (head.Q, X, X, W)))
    want = PLAIN.dual(fine)
    assert got.Q.dtype == torch.float16
    assert got.W is not None
    assert want.W is not None
    assert torch.allclose(got.Q.double(), want.Q, atol=3e-4)
    assert torch.allclose(got.W.double(), want.W, atol=3e-3)
    assert (got.Q[..., -2:] == 0).all()
    assert torch.allclose((got.Q.double().mT @ fine.Q)[:, :-2, :-2],
                          torch.eye(ell - 2, device=device).double(), atol=2e-3)  # fmt: skip


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


@pytest.mark.parametrize("largest", [2.0**101, 2.0**60, 1.0], ids="largest {:.0e}".format)
def test_small_entries_keep_their_ratio_to_the_norm(device: torch.device, largest: float) -> None:
    """As far as bfloat16 has numbers so small: from 2⁻¹²⁶ on."""
    Y = torch.zeros(1, 8, 16, device=device)
    ratios = torch.tensor([1.0, 1.5 * 2.0**-60, 1.75 * 2.0**-125], device=device)
    Y[0, 0, :3] = largest * ratios
    assert torch.equal(norms.normalized(Y)[0, 0, :3].float(), ratios)
