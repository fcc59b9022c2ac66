"""A deflated step in eight bits against the same step in float64.

In float16 elsewhere, whose three bits more than bfloat16's show smaller errors.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polarstep.bucket import Observed
from polarstep.maps.coefficients import evaluate, resolve
from polarstep.maps.deflated import MARGIN_OF_SCALE, rest_size
from polarstep.ops import ops_of
from polarstep.ops.base import Products
from polarstep.ops.lazy import Head, RowProduct

FLAT = resolve("flat", 1)[0]
EPS = 2.0**-4
"""The largest relative error of rounding to three bits of mantissa."""


@pytest.fixture(autouse=True)
def _descriptors_for_small_matrices(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from polarstep.kernels import product
    from polarstep.ops import triton as eight_bits

    if device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no tensor descriptors on this GPU")
    for module in (product, eight_bits):
        monkeypatch.setattr(module, "DESCRIPTORS_FROM", 64)


def randn(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def float8(X: Tensor, unit: float) -> Tensor:
    return (unit * X).clamp(-448, 448).to(torch.float8_e4m3fn)


def flat_step(A: Tensor, Q: Tensor, Z: Tensor, *, float8: bool = True) -> tuple[Tensor, Tensor]:
    """T of float16 matrices ``A`` with a head of basis ``Q`` and factor ``Z``, and ‖T‖²_F."""
    ops, B = ops_of(A.device), (Q.mT.float() @ A.float()).half()
    left, factor, floor = rest_size(A.shape[-2], Q.shape[-1], 2.0**-10)
    inverse = Products().inverse_rest_size(A, B, left, factor, floor).float()
    T, squared = ops.flat_step(
        A, Head(Q, B, Z), inverse, FLAT, MARGIN_OF_SCALE,
        most=1.5 * Q.shape[-1] + left / factor**2, float8=float8,
    )  # fmt: skip
    return T if isinstance(T, Tensor) else T.multiplied_out(), squared()


def deflated(
    batch: int, m: int, n: int, device: torch.device, leading: float = 20.0
) -> tuple[Tensor, Tensor, Tensor]:
    """A random matrix with 16 leading directions, their basis Q and the polar factor of QᵀA."""
    Q = torch.linalg.qr(randn(batch, m, 16, device=device))[0]
    V = torch.linalg.qr(randn(batch, n, 16, device=device, seed=1))[0]
    rest = randn(batch, m, n, device=device, seed=2) / math.sqrt(n)
    rest = rest - Q @ (Q.mT @ rest)
    return (leading * Q @ V.mT + rest).half(), Q.half(), V.mT.half()


@pytest.mark.parametrize("layout", ["wide", "transposed"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(80, 144, 24), (128, 256, 64), (64, 128, 96)], ids=["odd", "full", "short"]
)
def test_a_flattened_matrix_is_stored_in_both_layouts(
    device: torch.device, m: int, n: int, k: int, layout: str
) -> None:
    from polarstep.kernels.float8 import flattened

    A, Q, H = (randn(2, *shape, device=device).half() for shape in [(m, n), (m, k), (k, n)])
    if layout == "transposed":
        A = A.mT.contiguous().mT
    inverse = torch.tensor([0.5, 2.0], device=device)
    X, Xt = flattened(A, Q, H, inverse, 64.0)
    want = 64 * (inverse[:, None, None] * A.float() + Q.float() @ H.float())
    assert torch.equal(X.float(), Xt.float().mT)
    assert torch.allclose(X.float(), want.clamp(-448, 448), rtol=EPS, atol=2e-3)
    assert float(X.float().abs().max()) == 448  # what is too large is cut off


def test_a_nan_stays_a_nan(device: torch.device) -> None:
    from polarstep.kernels.float8 import flattened

    if device.type == "cpu":
        pytest.skip("Triton's interpreter makes a number of it")
    A, Q, H = (randn(1, *shape, device=device).half() for shape in [(32, 64), (32, 16), (16, 64)])
    A[0, 3, 5] = math.nan
    X, _ = flattened(A, Q, H, torch.ones(1, device=device), 1.0)
    assert X.float().isnan().nonzero().tolist() == [[0, 3, 5]]


@pytest.mark.parametrize(("M", "N", "K"), [(144, 80, 96), (128, 128, 256)])
def test_a_product_of_rows(device: torch.device, M: int, N: int, K: int) -> None:
    from polarstep.kernels.float8 import product_of_rows

    A, B = (
        float8(randn(2, M, K, device=device), 4),
        float8(randn(2, N, K, device=device, seed=1), 2),
    )
    s = torch.tensor([0.5, 3.0], device=device)
    got = product_of_rows(A, B, s, 0.125, torch.float32)
    want = 0.125 * s[:, None, None].double() * (A.double() @ B.double().mT)
    # A GPU adds products of eight bits with some 14 bits.
    assert float((got - want).abs().max()) < 2.0**-10 * float(want.abs().max())


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("m", "n", "k", "is_long"),
    [(144, 80, 96, False), (144, 80, 96, True), (128, 256, 128, False)],
    ids=["small", "as long rows", "larger"],
)
def test_an_update_by_a_product_of_rows(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    n: int,
    k: int,
    is_long: bool,
    skip: bool,
) -> None:
    """``X ← decay·X − step·T`` without T, in parts of wider matrices too."""
    from polarstep.kernels import update as module

    if is_long:  # with the tiles for sums of 2,048 numbers
        monkeypatch.setattr(module, "_LONG_ROWS", k)
    A = float8(randn(2, m, k, device=device), 4)
    B = float8(randn(2, n, k, device=device, seed=1), 2)
    T = RowProduct(A, B, torch.tensor([0.5, 3.0], device=device), 0.125)
    decay = torch.tensor([0.9, 0.5], device=device)
    step = torch.tensor([0.0 if skip else 0.1, 2.0], device=device)  # a skipped matrix has T = 0
    finite = torch.tensor([0.0, 1.0], device=device) if skip else None
    for wider in (0, 16):
        whole = [randn(m, n + wider, device=device, seed=5 + i) for i in range(2)]
        X = [W[:, :n] for W in whole]
        before = [W.double() for W in whole]
        module.update_from_rows(
            torch.tensor([x.data_ptr() for x in X], device=device),
            T.A, T.B, T.scale, T.alpha, decay, step,
            element=torch.float32, finite=finite,
            strides=torch.tensor([n + wider] * 2, device=device) if wider else None,
        )  # fmt: skip
        exact = 0.125 * T.scale[:, None, None].double() * (A.double() @ B.double().mT)
        for i, (W, old) in enumerate(zip(whole, before, strict=True)):
            assert torch.equal(W[:, n:].double(), old[:, n:])
            if skip and i == 0:
                assert torch.equal(W.double(), old)
                continue
            want = float(decay[i]) * old[:, :n] - float(step[i]) * exact[i]
            off = float((W[:, :n] - want).abs().max())
            assert off < 2.0**-10 * float(step[i]) * float(exact[i].abs().max()) + 1e-6


def test_a_product_of_rows_transposed(device: torch.device) -> None:
    A = float8(randn(2, 80, 96, device=device), 4)
    B = float8(randn(2, 144, 96, device=device, seed=1), 2)
    T = RowProduct(A, B, torch.ones(2, device=device), 0.125)
    assert torch.equal(T.mT.multiplied_out(), T.multiplied_out().mT)


@pytest.mark.parametrize("k", [144, 384])  # fewer columns than rows, and more
@pytest.mark.parametrize("m", [80, 256, 272])  # one tile; several full ones; several
def test_a_symmetric_product_is_rounded_once(device: torch.device, m: int, k: int) -> None:
    from polarstep.kernels.product import product

    X = float8(randn(2, m, k, device=device), 4)
    G = product(X, X.mT, alpha=0.01, D=None, symmetric=True)
    want = 0.01 * X.double() @ X.double().mT
    assert G.dtype == torch.float8_e4m3fn
    assert torch.equal(G.float(), G.float().mT)
    # A GPU adds products of eight bits with some 14 bits.
    atol = 2e-3 + 2.0**-13 * float(want.abs().max())
    assert torch.allclose(G.double(), want, rtol=EPS, atol=atol)


def test_a_symmetric_product_of_full_tiles_is_that_of_masked_ones(device: torch.device) -> None:
    from polarstep.kernels.product import product

    D = randn(2, 272, 272, device=device, seed=1)
    X, D = float8(randn(2, 272, 384, device=device), 4), float8(D + D.mT, 1)
    scale = torch.tensor([0.5, 1.5], device=device)

    def made(m: int) -> Tensor:
        part = X[:, :m].contiguous()
        return product(
            part, part.mT, alpha=0.05, D=D[:, :m, :m], beta=3.0, identity=400.0,
            scale=scale, powers=(2, 1, 0), symmetric=True,
        ).float()  # fmt: skip

    full, masked = made(256), made(272)
    assert torch.equal(full, masked[:, :256, :256])
    assert torch.equal(full, full.mT)
    assert float(full.abs().max()) == 448  # what is too large is cut off


def test_a_nan_of_a_symmetric_product_stays_in_its_row_and_column(device: torch.device) -> None:
    from polarstep.kernels.product import product

    X = torch.ones(1, 128, 256, device=device)
    X[0, 5, 7] = math.nan
    G = product(float8(X, 1), float8(X, 1).mT, symmetric=True).float()
    finite = torch.arange(128, device=device) != 5
    assert torch.equal(G[0][finite][:, finite], torch.full((127, 127), 256.0, device=device))


@pytest.mark.parametrize("layout", ["wide", "transposed"])
def test_the_step_is_near_the_polar_factor(device: torch.device, layout: str) -> None:
    A, Q, Z = deflated(2, 96, 144, device)
    if layout == "transposed":
        A = A.mT.contiguous().mT
    T, squared = flat_step(A, Q, Z)
    assert T.dtype == torch.float16
    T, sigma = T.double(), torch.linalg.svdvals(A.double())
    assert float(torch.linalg.matrix_norm(T, 2).max()) < 1.45
    gamma = 1 - (A.double() * T).sum((-2, -1)) / sigma.sum(-1)
    assert float(gamma.abs().max()) < 0.14  # how far "flat" is from one
    assert torch.allclose(squared.double(), T.square().sum((-2, -1)), rtol=0.05)


def test_the_step_is_that_of_sixteen_bits_but_for_rounding(device: torch.device) -> None:
    A, Q, Z = deflated(1, 96, 144, device)
    in_eight, _ = flat_step(A, Q, Z)
    in_sixteen, _ = flat_step(A, Q, Z, float8=False)
    off = torch.linalg.matrix_norm((in_eight - in_sixteen).float())
    assert not torch.equal(in_eight, in_sixteen)
    assert float(off / torch.linalg.matrix_norm(in_sixteen.float())) < 0.2


def test_a_large_direction_that_the_head_missed_makes_the_step_small(device: torch.device) -> None:
    """All of the rest is in one row, so that the diagonal of G is cut off."""
    A, Q, Z = deflated(2, 96, 144, device)
    A[1] = 0
    A[1, 7] = 1
    T, _ = flat_step(A, Q, Z)
    norms = torch.linalg.matrix_norm(T.double(), 2)
    assert float(norms[0]) > 0.9
    assert 0 < float(norms[1]) <= 1.1


def test_units_keep_every_square_in_range() -> None:
    from polarstep.ops import triton as eight_bits

    chain = eight_bits.squarings(FLAT)
    assert chain is not None
    units = eight_bits.units(FLAT)
    y = torch.linspace(0, 1, 1001, dtype=torch.float64)
    S = [y]
    for each, unit in zip(chain, units, strict=True):
        S.append(each.square * S[-1] ** 2 + each.plus * S[each.earlier] + each.identity)
        assert 448 / 8 < unit * float(S[-1].abs().max()) <= 448
    assert torch.allclose(y.sqrt() * S[-1], evaluate((FLAT,), y.sqrt()))


def test_small_odd_and_wide_numbers_do_not_suit(device: torch.device) -> None:
    from polarstep.ops import triton as eight_bits

    def suits(m: int, n: int, dtype: torch.dtype = torch.float16) -> bool:
        return eight_bits.suits_eight_bits(torch.empty(1, m, n, dtype=dtype, device=device), FLAT)

    assert suits(64, 80)
    assert not suits(48, 80)
    assert not suits(72, 80)
    assert not suits(64, 72)
    assert not suits(64, 80, torch.float32)
    A = torch.empty(1, 64, 64, dtype=torch.float16, device=device)
    assert not eight_bits.suits_eight_bits(A, (1.0,) * 4)


@pytest.mark.parametrize("shape", [(512, 640), (768, 512), (512, 512)])
def test_an_optimizer_applies_the_step_that_its_hooks_see(
    device: torch.device, shape: tuple[int, int]
) -> None:
    """T is multiplied out for hooks only; X must have moved by it, also when replayed as a graph."""
    if device.type == "cpu":
        pytest.skip("through Triton's interpreter an optimizer multiplies in float32")
    import polarstep as ps

    polar = ps.Deflated(ps.LowRank(16, 8, inner=ps.NewtonSchulz(4, "polar-express-sketch")),
                        ps.NewtonSchulz(1, "flat"))  # fmt: skip
    X = [torch.nn.Parameter(randn(*shape, device=device, seed=i)) for i in range(3)]
    twins = [torch.nn.Parameter(x.detach().clone()) for x in X]
    seen, other = (
        ps.Muon(each, lr=0.5, weight_decay=0.1, polar=polar, shape_scale="none")
        for each in (X, twins)
    )
    applied: list[Observed] = []
    seen.register_polar_hook(applied.append)
    for step in range(5):
        for i, (x, twin) in enumerate(zip(X, twins, strict=True)):
            x.grad = twin.grad = randn(*shape, device=device, seed=10 * step + i)
        before = torch.stack([x.detach().double() for x in X])
        seen.step()
        other.step()
        after = torch.stack([x.detach().double() for x in X])
        T = applied.pop().T.double()
        assert float(torch.linalg.matrix_norm(T, 2).max()) < 1.5
        assert torch.allclose(after, (1 - 0.05) * before - 0.5 * T, atol=2e-3)
        assert torch.equal(after, torch.stack([twin.detach().double() for twin in twins]))
    assert other._replayed.graphs
