"""The kernels for the norm of a sketch's rest against the same estimate in plain torch.

In float16, whose three bits more than bfloat16's show smaller errors.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import polarstep as ps
from polarstep import products
from polarstep.kernels import rest_norm as module
from polarstep.kernels.few_columns import times_few
from polarstep.kernels.rest_norm import rest_norm
from polarstep.products.base import Products
from polarstep.products.flat_product import FlatProduct
from polarstep.products.head import Head
from polarstep.products.rest_norm import RestNorm, RestRules
from polarstep.products.start_vectors import SIGNS

PLAIN = Products()
IN_HALVES = RestRules(margin=1.1, fresh=0.5, room=2.0**-16, least=2.0**-12)
IN_FLOAT32 = RestRules(margin=1.1, fresh=0.5, room=2.0**-17, least=2.0**-17)
SHAPES = [(24, 40, 6), (10, 20, 3), (48, 48, 5), (33, 301, 12)]
DTYPES = [torch.float16, torch.float32]

over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rules_of(dtype: torch.dtype) -> RestRules:
    return IN_HALVES if dtype.itemsize == 2 else IN_FLOAT32


def sketched(
    m: int, n: int, ell: int, dtype: torch.dtype, device: torch.device, top: float = 30.0
) -> tuple[Tensor, Tensor, Tensor]:
    """A with two leading directions, one A of zeros, D and B for a Q that is a little too short."""
    A = randn(4, m, n) / 10
    A[:, :2] *= top
    A[1] = 0
    A = A.to(device, dtype)
    exact = A.double()
    Q = torch.linalg.qr(exact @ randn(4, n, ell, seed=1).double().to(device)).Q * (1 - 2**-8)
    B = Q.mT @ exact
    dual = PLAIN.dual(Head(Q, B, B))
    return A, dual.Q.to(dtype), B.to(dtype)


def plain(A: Tensor, D: Tensor, B: Tensor, rules: RestRules, vectors: Tensor | None) -> RestNorm:
    """The twin in float64."""
    vectors = None if vectors is None else vectors.double()
    return PLAIN.rest_norm(A.double(), D.double(), B.double(), rules, vectors=vectors)


def norm_of_rest(A: Tensor, D: Tensor, B: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(A.double() - D.double() @ B.double(), 2)


def tolerance(device: torch.device) -> float:
    return 1e-3 if device.type == "cuda" else 1e-4


@over_dtypes
@pytest.mark.parametrize(("rows", "K", "few"), [(40, 70, 16), (33, 64, 5), (130, 20, 16)])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_product_with_few_columns(
    device: torch.device, rows: int, K: int, few: int, layout: str, dtype: torch.dtype
) -> None:
    A = randn(2, rows, K).to(device, dtype)
    A = A if layout == "rows" else A.mT.contiguous().mT
    V = randn(2, K, few, seed=1).to(device, dtype)
    out = torch.full((2, rows, SIGNS), math.nan, device=device)
    got = times_few(A, V, out)
    want = A.double() @ V.double()
    assert got is out
    assert torch.allclose(got[..., :few].double(), want, atol=2e-5, rtol=2e-5)
    assert (got[..., few:] == 0).all()
    one = times_few(A, V[:1], torch.empty_like(out))
    assert torch.allclose(one[1, :, :few].double(), A[1].double() @ V[0].double(), atol=2e-5)


# Every size in both layouts and in both precisions; each layout in each precision with two sizes.
@pytest.mark.parametrize(
    ("m", "n", "ell", "layout", "dtype"),
    [
        (*shape, layout, DTYPES[(i + j) % 2])
        for i, shape in enumerate(SHAPES)
        for j, layout in enumerate(["wide", "transposed"])
    ],
    ids=str,
)
def test_it_is_the_plain_estimate(
    device: torch.device, m: int, n: int, ell: int, layout: str, dtype: torch.dtype
) -> None:
    A, D, B = sketched(m, n, ell, dtype, device)
    A = A if layout == "wide" else A.mT.contiguous().mT
    rules, vectors = rules_of(dtype), None
    for _ in range(2):
        want = plain(A, D, B, rules, vectors)
        got = rest_norm(A, D, B, rules, None, vectors, None)
        assert got.inverse.shape == want.inverse.shape == (4, 1, 1)
        assert got.vectors.dtype == dtype
        assert got.vectors.shape == want.vectors.shape == (4, min(m, SIGNS), n)
        assert got.inverse[1] == got.unheld[1] == got.seen[1] == 0
        rtol = tolerance(device)
        assert torch.allclose(got.inverse.double(), want.inverse, rtol=rtol, atol=0)
        assert torch.allclose(got.unheld.double(), want.unheld, rtol=2 * rtol, atol=0)
        # More vectors than R has directions: some of U are rounding, and see a little twice.
        loose = 2e-2 if m - ell < SIGNS else 2 * rtol
        assert torch.allclose(got.seen.double(), want.seen, rtol=loose, atol=0)
        vectors = got.vectors.clone()
    ratio = 1 / (got.inverse.double().flatten() * norm_of_rest(A, D, B))
    assert (ratio[[0, 2, 3]] >= 0.95).all()
    assert (ratio[[0, 2, 3]] <= 1.1 * 16**0.125).all()


@pytest.mark.parametrize(
    ("most", "least", "layout", "dtype"),
    [
        (16, 1, "wide", torch.float16),
        (16, 1, "transposed", torch.float32),
        (3, 1, "transposed", torch.float16),
        (1, 1, "wide", torch.float32),
        (16, 3, "wide", torch.float32),
        (16, 3, "transposed", torch.float16),
    ],
    ids=str,
)
def test_the_estimate_is_the_same_however_products_are_cut(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    least: int,
    layout: str,
    dtype: torch.dtype,
) -> None:
    """Cut into more parts than a step would, and also B and Dᵀ, with a last part that is shorter."""
    A, D, B = (X[:2] for X in sketched(70, 301, 12, dtype, device))
    A = A if layout == "wide" else A.mT.contiguous().mT
    usual = rest_norm(A, D, B, rules_of(dtype), None, None, None)
    parts: set[tuple[int, ...]] = set()
    cut = module._cut
    for name in ("_LEAST_BLOCKS", "_SMALL_BLOCKS"):
        monkeypatch.setattr(module, name, least)
    monkeypatch.setattr(module, "_MOST_PARTS", most)
    monkeypatch.setattr(module, "_PROGRAMS", 10_000)
    monkeypatch.setattr(module, "_ROWS", 32)
    monkeypatch.setattr(module, "_cut", lambda *given: parts.add(cut(*given)) or cut(*given))
    found = rest_norm(A, D, B, rules_of(dtype), None, None, None)
    assert max(count for _, count in parts) <= most
    assert (max(count for _, count in parts) > 1) == (most > 1)
    assert min(blocks for blocks, _ in parts) >= least
    assert torch.allclose(found.inverse, usual.inverse, rtol=1e-5, atol=0)
    assert torch.allclose(found.unheld, usual.unheld, rtol=2e-5, atol=0)
    assert torch.allclose(found.seen, usual.seen, rtol=2e-5, atol=0)
    size = float(usual.vectors.abs().max())
    assert torch.allclose(found.vectors, usual.vectors, atol=2e-3 * size)


@over_dtypes
def test_the_next_vectors_are_those_of_the_plain_estimate(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Where the rest has more directions than there are vectors, so that none of them is rounding."""
    A, D, B = sketched(72, 136, 16, dtype, device)
    got = rest_norm(A, D, B, rules_of(dtype), None, None, None).vectors
    want = plain(A, D, B, rules_of(dtype), None).vectors
    size = float(want.abs().max())
    assert float((got.double() - want).abs().max()) < (2e-3 if dtype.itemsize == 2 else 1e-4) * size


def test_a_tower_over_the_rest_does_not_reach_the_estimate(device: torch.device) -> None:
    """A leading direction of 500 times ‖R‖_op; what is left of it in Y is multiplied by it again."""
    A, D, B = sketched(72, 136, 16, torch.float16, device, top=1500.0)
    found = rest_norm(A, D, B, IN_HALVES, None, None, None)
    ratio = 1 / (found.inverse.double().flatten() * norm_of_rest(A, D, B))
    leading = torch.linalg.matrix_norm(A.double(), 2) / norm_of_rest(A, D, B)
    assert (leading[[0, 2, 3]] > 400).all()
    assert (ratio[[0, 2, 3]] > 0.8).all()
    assert (ratio[[0, 2, 3]] < 1.3).all()


def test_known_squares_spare_the_norm(device: torch.device) -> None:
    """From 3,000 parts, more than a program adds up at a time."""
    A, D, B = sketched(24, 40, 6, torch.float32, device)
    whole = A.double().square().sum((-2, -1))[:, None]
    squares = (whole / 3000).repeat(1, 3000)
    got, want = (rest_norm(A, D, B, IN_FLOAT32, known, None, None) for known in (squares, None))
    assert torch.allclose(got.inverse, want.inverse, rtol=1e-6)
    assert torch.allclose(got.unheld, want.unheld, rtol=1e-5)
    # They are believed: nothing is left of a matrix whose norm is that of its head.
    less = B.double().square().sum((-2, -1))[:, None]
    found = rest_norm(A, D, B, IN_FLOAT32, less, None, None)
    assert (found.unheld <= 0.1 * want.unheld).all()


def test_vectors_are_overwritten_but_for_skipped_matrices(device: torch.device) -> None:
    A, D, B = sketched(24, 40, 6, torch.float32, device)
    vectors = rest_norm(A, D, B, IN_FLOAT32, None, None, None).vectors
    before = vectors.clone()
    finite = torch.tensor([1.0, 1.0, 0.0, 1.0], device=device)
    skipping = rest_norm(A, D, B, IN_FLOAT32, None, vectors, finite)
    assert skipping.vectors.data_ptr() == vectors.data_ptr()
    assert torch.equal(vectors[2], before[2])
    fresh = rest_norm(A, D, B, IN_FLOAT32, None, before.clone(), None).vectors
    assert torch.equal(vectors[[0, 3]], fresh[[0, 3]])
    assert not torch.equal(fresh[2], before[2])
    # Vectors in another precision, as a checkpoint may have them, are left as they are.
    rounded = before.half()
    assert rest_norm(A, D, B, IN_FLOAT32, None, rounded, None).vectors.dtype == torch.float32
    assert torch.equal(rounded, before.half())


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter's NumPy
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_has_no_rest_and_leaves_no_trace(
    device: torch.device, bad: float
) -> None:
    A, D, B = sketched(24, 40, 6, torch.float32, device)
    clean = rest_norm(A, D, B, IN_FLOAT32, None, None, None)
    A, B = A.clone(), B.clone()
    A[2, 3, 4] = B[2, 1, 4] = bad
    found = rest_norm(A, D, B, IN_FLOAT32, None, None, None)
    assert found.inverse[2] == found.unheld[2] == found.seen[2] == 0
    assert found.vectors.isfinite().all()
    assert (found.vectors[2] != 0).any()
    assert torch.equal(found.inverse[[0, 3]], clean.inverse[[0, 3]])
    assert torch.equal(found.vectors[[0, 3]], clean.vectors[[0, 3]])


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_scale_of_the_matrix_is_that_of_delta(device: torch.device, size: float) -> None:
    A, D, B = sketched(24, 40, 6, torch.float32, device)
    power = 2.0 ** round(math.log2(size))
    usual, other = (rest_norm(s * A, D, s * B, IN_FLOAT32, None, None, None) for s in (1.0, power))
    assert torch.allclose(power * other.inverse.double(), usual.inverse.double(), rtol=1e-5)
    assert torch.allclose(other.vectors, usual.vectors, atol=1e-5)


def test_denormal_matrices_have_a_finite_inverse(device: torch.device) -> None:
    A = 1e-44 * randn(2, 24, 40).to(device)
    D = torch.zeros(2, 24, 4, device=device)
    found = rest_norm(A, D, torch.zeros(2, 4, 40, device=device), IN_FLOAT32, None, None, None)
    assert found.inverse.isfinite().all()
    assert found.vectors.isfinite().all()


@over_dtypes
def test_a_rest_that_is_rounding_is_left_out(device: torch.device, dtype: torch.dtype) -> None:
    """A of rank two, whose basis has it all but for what rounding adds."""
    A = (randn(2, 48, 2) @ randn(2, 2, 80, seed=1)).to(device, dtype)
    Q = torch.linalg.svd(A.double(), full_matrices=False).U[..., :4]
    B = (Q.mT @ A.double()).to(dtype)
    rules = RestRules(1.1, 0.5, 2.0**-16, 1e-3 if dtype.itemsize == 2 else 1e-5)
    found = rest_norm(A, Q.to(dtype), B, rules, None, None, None)
    assert (found.inverse == 0).all()
    assert (found.unheld == 0).all()
    assert (found.seen == 0).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_the_dual_of_a_head_is_its_plain_twin(device: torch.device, weighted: bool) -> None:
    m, n, ell = 72, 136, 16
    Q = torch.linalg.qr(randn(2, m, ell).double()).Q * (1 - 2**-7)
    Q[..., -2:] = 0  # padding
    X = torch.linalg.qr(randn(2, n, ell, seed=1)).Q.mT.contiguous().to(device).half()
    W = randn(2, ell, ell, seed=2).to(device).half() if weighted else None
    head = Head(Q.to(device).half(), X, X, W)
    got = products.of(device).dual(head)
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


SHAPES_OF_STEPS = [(40, 56), (56, 40), (44, 44), (20, 72)]


def test_a_fused_step_never_multiplies_its_update_out(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a hook asks for T: then X has moved by that T."""
    polar = ps.Deflated(ps.LowRank(8, 4, always_sketch=True))
    called: list[FlatProduct] = []
    original = FlatProduct.multiplied_out
    monkeypatch.setattr(
        FlatProduct, "multiplied_out", lambda self: called.append(self) or original(self)
    )
    params = [
        torch.nn.Parameter(randn(*s, seed=i).to(device)) for i, s in enumerate(SHAPES_OF_STEPS)
    ]
    optimizer = ps.Muon(params, lr=0.5, lr_scale="none", polar=polar)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = randn(*p.shape, seed=10 * step + i).to(device)
        if step == 2:
            before = {id(p): p.detach().clone() for p in params}
            seen: dict[int, Tensor] = {}
            optimizer.register_polar_hook(
                lambda bucket, seen=seen: seen.update(
                    (id(p), T.clone()) for p, T in zip(bucket.params, bucket.T, strict=True)
                )
            )
        assert not called
        optimizer.step()
    assert optimizer._replayed.buckets
    assert len(called) == len(params) == len(seen)
    for p in params:
        T = seen[id(p)].float()
        off = 5e-3 if device.type == "cuda" else 1e-5
        assert (before[id(p)] - p.detach() - 0.5 * T).norm() < off * T.norm()
