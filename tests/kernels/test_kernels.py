"""Every kernel against its formula in float64 or in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polarstep.kernels.product import takes_large_tiles
from polarstep.ops import ops_of


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


@pytest.mark.parametrize(("m", "n"), [(16, 16), (70, 33), (144, 256), (208, 80), (256, 96), (1, 5)])
@pytest.mark.parametrize("polynomial", [(3.4, -4.7, 2.0), (3.0, -4.0, 2.5, -0.5)], ids=len)
def test_polynomial_times_a_matrix_in_one_launch(
    device: torch.device, m: int, n: int, polynomial: tuple[float, ...]
) -> None:
    X = randn(2, m, 40, device=device) / (m**0.5 + 40**0.5)
    G, Y = (X @ X.mT).half(), randn(2, m, n, device=device, seed=1).half()
    P = torch.full_like(G, float("nan"))
    got = ops_of(device)._polynomial_times(G, Y, polynomial, P=P)
    of = sum(c * torch.linalg.matrix_power(G.double(), k) for k, c in enumerate(polynomial))
    assert torch.allclose(P.double(), of, atol=1e-2)
    want = P.double() @ Y.double()
    assert torch.allclose(got.double(), want, atol=1e-2, rtol=2e-3)


def test_without_descriptors_a_product_is_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polarstep.kernels.product import describable

    polynomial_times = ops_of(device)._polynomial_times
    G, Y = randn(2, 72, 72, device=device).half() / 9, randn(2, 72, 40, device=device).half()
    expected = polynomial_times(G, Y, (3.4, -4.7, 2.0))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not describable(G, Y)
    assert torch.allclose(polynomial_times(G, Y, (3.4, -4.7, 2.0)), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9, 0.0, 1e25])
def test_polynomial_times_a_matrix_of_any_norm(device: torch.device, scale: float) -> None:
    from polarstep.kernels.small import product_times

    Y = randn(3, 72, 128, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # not half: of its range
    Y[1] *= scale
    Y = Y.to(dtype)
    G = Y @ Y.mT
    got = product_times(G, G, Y, alpha=2.0, D=G, beta=-3.0, identity=4.0, by_trace=True)
    for y, result in zip(Y.double(), got.double(), strict=True):
        norm = y.norm()
        if not 1e-18 < norm < 1e18:
            assert (result == 0).all()
            continue
        x = y / norm
        want = 4 * x - 3 * x @ x.mT @ x + 2 * x @ x.mT @ x @ x.mT @ x
        assert torch.linalg.matrix_norm(result - want, 2) <= 4e-2


# Every size with every number of steps and with both ways.
@pytest.mark.parametrize(
    ("m", "steps", "way"),
    [
        (m, steps, way)
        for steps in range(1, 6)
        for m, way in zip(
            (48, 144) if steps % 2 else (144, 48),
            ("_in_two_launches", "_side_by_side"),
            strict=True,
        )
    ],
)
def test_gram_form_in_few_launches(device: torch.device, m: int, steps: int, way: str) -> None:
    from polarstep.maps.coefficients import polar_express

    ops = ops_of(device)
    polynomials = polar_express(0.3, steps, safety=1.01)
    X = randn(2, m, 3 * m, device=device)
    X /= 1.1 * torch.linalg.matrix_norm(X, 2)[:, None, None]
    G = (X @ X.mT).half()
    got = getattr(ops, way)(G, polynomials).double()
    want = ops.accumulated(G.double(), polynomials)
    assert (
        torch.linalg.matrix_norm(got - want, 2).max()
        <= 4e-3 * torch.linalg.matrix_norm(want, 2).max()
    )


TILES = [(128, 128, 8), (128, 256, 3), (256, 128, 4), (64, 128, 2)]
SIZES = [(2, 520, 64), (1, 520, 72), (2, 640, 520)]


# Every size with all tiles; both layouts with every size and with all tiles.
@pytest.mark.parametrize(
    ("batch", "m", "k", "transposed", "tiles"),
    [
        (*size, (i + j) % 2 == 0, tiles)
        for i, size in enumerate(SIZES)
        for j, tiles in enumerate(TILES)
    ],
    ids=str,
)
def test_symmetric_product_by_descriptors(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    m: int,
    k: int,
    transposed: bool,
    tiles: tuple[int, int, int],
) -> None:
    from polarstep.kernels import product as module

    for name, size in zip(("BM", "BN", "GROUP"), tiles, strict=True):
        monkeypatch.setitem(module.DESCRIPTOR_TILES, name, size)
    monkeypatch.setattr(module, "FEWEST_TILES", 0)
    shape = (batch, k, m) if transposed else (batch, m, k)
    X = randn(*shape, device=device).half()
    X[-1, 0, 0] = float("inf")  # of the next matrix, for all but the last
    X = X.mT if transposed else X
    D = randn(batch, m, m, device=device, seed=1)
    D = (D + D.mT).half()
    suits = module._suits_descriptors(X, X.mT)
    if takes_large_tiles(device):
        assert suits == (not transposed or batch == 1 or k % 64 == 0)
    got = module.product(X, X.mT, alpha=0.5, D=D, beta=-2.0, identity=3.0, symmetric=True)
    want = 0.5 * X.double() @ X.double().mT - 2 * D.double() + 3 * torch.eye(m, device=device)
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert torch.equal(got[finite], got.mT[finite])
    assert torch.allclose(got.double()[finite], want[finite], atol=4e-2, rtol=2e-3)


def test_half_of_few_tiles_is_not_worth_a_kernel(device: torch.device) -> None:
    """Tiles on and under the diagonal: six for 512 rows, twelve for 768, 272 for 4096."""
    from polarstep.kernels.product import _suits_descriptors, halving_pays

    least = {512: 11, 768: 6, 1024: 4, 2048: 1, 4096: 1}
    for m, batch in least.items():
        assert halving_pays(batch, m)
        assert batch == 1 or not halving_pays(batch - 1, m)
    assert not halving_pays(1000, 511)
    X = randn(10, 512, 16, device=device).half()
    assert not _suits_descriptors(X, X.mT)
    got = ops_of(device).symmetric(X, X)
    assert torch.allclose(got.double(), X.double() @ X.double().mT, atol=4e-2)


def test_a_symmetric_product_is_written_to_a_part_of_wider_rows(device: torch.device) -> None:
    from polarstep.kernels.product import product

    X = randn(1, 520, 16, device=device).half()
    room = torch.zeros(1, 520, 1040, device=device, dtype=torch.float16)
    product(X, X.mT, symmetric=True, out=room[..., 520:])
    assert torch.allclose(room[..., 520:].double(), X.double() @ X.double().mT, atol=4e-2)
    assert not room[..., :520].any()


def test_an_unfit_operand_takes_the_kernel_for_all_shapes(device: torch.device) -> None:
    from polarstep.kernels.product import _suits_descriptors, product

    X = randn(2, 520, 66, device=device).half()[:, :, 1:-1]  # rows at odd addresses
    assert not _suits_descriptors(X, X.mT)
    assert not _suits_descriptors(*(randn(1, 256, 64, device=device).half() for _ in range(2)))
    got = product(X, X.mT, symmetric=True).double()
    assert torch.allclose(got, X.double() @ X.double().mT, atol=4e-2, rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "m", "n"), [(1, 3, 5), (1, 64, 2100), (9, 2, 3)])
def test_normalized(device: torch.device, batch: int, m: int, n: int, dtype: torch.dtype) -> None:
    """Y/(2‖Y‖_F) of matrices from one end of float32's range to the other, and of zero."""
    from polarstep.kernels.norms import normalized

    exponents = torch.tensor([-149, -140, -126, -95, 0, 95, 120, 127] * batch)
    signs = randn(len(exponents), m, n, device=device).sign()
    Y = torch.ldexp(signs.double(), exponents.to(device)[:, None, None]).float()
    Y = torch.cat([Y, torch.zeros_like(Y[:1])])
    got = normalized(Y, 0.5, dtype)
    assert got.dtype == dtype
    want = signs.double() / (2 * (m * n) ** 0.5)
    assert torch.allclose(got[:-1].double(), want, rtol=torch.finfo(dtype).eps, atol=0)
    assert not got[-1].any()
    transposed = normalized(Y.mT, 0.5, dtype)
    assert transposed.stride() == Y.mT.stride()
    assert torch.equal(transposed.mT, got)


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


@pytest.mark.parametrize("case", ["whole", "skipped", "parts"])
@pytest.mark.parametrize(
    ("m", "n", "ell"), [(64, 128, 16), (20, 36, 5), (70, 200, 138), (200, 72, 70), (64, 256, 256)]
)
@pytest.mark.parametrize("how", ["dense", "factors", "padded columns"])
def test_an_update(device: torch.device, how: str, m: int, n: int, ell: int, case: str) -> None:
    """``X ← decay·X − step·T``; in parts, X is the left half of a wider matrix."""
    from polarstep.kernels.update import update, update_from_factors

    finite = torch.tensor([1.0, 0.0], device=device) if case == "skipped" else None
    padded = ell + -ell % 16
    L = (randn(2, padded, m, device=device) / ell**0.5).half().mT[..., :ell]
    R = randn(2, padded, n, device=device, seed=1).half()[:, :ell]
    if finite is not None:
        L = L * finite[:, None, None].half()  # T(0) = 0 is what a skipped matrix gets
    if how == "factors":
        L, R = L.contiguous(), R.mT.contiguous().mT
    decay, step = torch.tensor([0.9, 0.5], device=device), torch.tensor([0.1, 2.0], device=device)
    wider = [randn(m, 2 * n, device=device, seed=5 + i) for i in range(2)]
    X = [x[:, :n] if case == "parts" else x[:, :n].contiguous() for x in wider]
    before, beside = [x.clone() for x in X], [x[:, n:].clone() for x in wider]
    T, strides = L.float() @ R.float(), torch.tensor([2 * n, 2 * n], device=device)
    tables = {"finite": finite, "strides": strides if case == "parts" else None}
    if how == "dense":
        update(addresses(X), T, decay, step, element=torch.float32, **tables)
    else:
        update_from_factors(addresses(X), L, R, decay, step, element=torch.float32, **tables)
    for i in range(2):
        skipped = finite is not None and i == 1
        want = before[i] if skipped else decay[i] * before[i] - step[i] * T[i]
        assert torch.allclose(X[i], want, atol=4e-3, rtol=1e-4)
        assert torch.equal(wider[i][:, n:], beside[i])


@pytest.mark.parametrize("degree", [3, 5, 7, 9])
def test_the_polynomial_of_a_gram_matrix(device: torch.device, degree: int) -> None:
    polynomial_of = ops_of(device).polynomial
    polynomial = tuple(torch.linspace(2, -1, (degree + 1) // 2).tolist())
    X = randn(2, 20, 40, device=device)
    G = X @ X.mT / 60
    want = sum(c * torch.linalg.matrix_power(G.double(), i) for i, c in enumerate(polynomial))
    assert torch.allclose(polynomial_of(G, polynomial).double(), want, atol=1e-5)
    halves = polynomial_of(G.half(), polynomial)
    assert halves.dtype == torch.float16
    assert torch.allclose(halves.double(), want, atol=1e-2)


SPECTRA = {
    "k^-0.5": lambda k: k**-0.5,
    "k^-1": lambda k: 1 / k,
    "k^-2": lambda k: k**-2,
    "flat": torch.ones_like,
    "low rank and noise": lambda k: torch.where(k <= 8, 1.0, 1e-3),
    "exponential": lambda k: 10 ** (-4 * k / len(k)),  # half of it drowns in a Gram matrix
    "two over a tail": lambda k: torch.where(k <= 2, 1.0, 3e-3),
    "rank one": lambda k: (k == 1).double(),
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize("tall", [True, False])
@pytest.mark.parametrize(
    ("coefficients", "steps", "overshoot"),
    [("polar-express", 5, 0.145), ("polar-express", 6, 0.008), ("quintic", 7, 0.005)],
)
def test_gram_form_in_float16_is_as_good_as_float64(
    device: torch.device, coefficients: str, steps: int, overshoot: float, tall: bool
) -> None:
    """ν and γ beside those of the polynomial itself, on a batch that mixes all spectra."""
    from polarstep import NewtonSchulz

    m, n = 64, 200
    k = torch.arange(1, m + 1, dtype=torch.float64)
    sigma = torch.stack([spectrum(k).double() for spectrum in SPECTRA.values()])
    U, V = (torch.linalg.qr(randn(s, m, device=device).double().cpu()).Q for s in (m, n))
    M = (U * sigma[:, None]) @ V.mT
    M = M.mT if tall else M
    polar = NewtonSchulz(steps, coefficients, dtype=torch.float16, form="gram")
    T = polar(M.float().to(device)).double().cpu()
    assert T.isfinite().all()
    assert not T[-1].any()
    assert (torch.linalg.matrix_norm(T, 2) <= 1 + overshoot).all()
    exact = NewtonSchulz(steps, coefficients)(M)
    alignments = [(M * each).sum((-2, -1)) / sigma.sum(-1).clamp_min(1e-9) for each in (T, exact)]
    # Where p_q is steepest, near one, rounding moves a singular value from one end of the
    # overshoot to the other: PolarExpress with five steps is good to that.
    tolerance = 0.01 + (overshoot if overshoot > 0.1 else 0)
    assert (alignments[0] >= alignments[1] - tolerance).all()


def test_the_gram_form_rounds_once_to_another_precision(device: torch.device) -> None:
    from polarstep.maps.coefficients import evaluate, resolve
    from polarstep.maps.full_space import apply_polynomials, restarts, rounding

    polynomials = resolve("quintic", 7)
    assert restarts(polynomials, rounding(torch.float16))  # those before the last stay in float16
    X = randn(2, 20, 300, device=device).half()
    X /= 1.01 * torch.linalg.matrix_norm(X.float(), 2, keepdim=True)
    U, sigma, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    want = (U * evaluate(polynomials, sigma)[:, None]) @ Vh
    Z = apply_polynomials(X, polynomials, out_dtype=torch.float32)
    assert (Z - want).norm() < 2e-3 * want.norm()
    assert (Z.half() != Z).any()
    rounded = apply_polynomials(X, polynomials, out_dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert ((rounded.float() - Z).abs() <= 2**-7 * Z.abs()).all()  # truncated in the interpreter


@pytest.mark.parametrize("m", [5, 64, 70, 520])
def test_the_first_polynomial_reads_the_norm_off_the_trace(device: torch.device, m: int) -> None:
    """P(G/t)/√t for t = tr G, and zero where float32 has no square of the norm."""
    from polarstep.kernels.product import product

    scales = torch.tensor([1e-25, 1e-12, 0.0, 1.0, 1e12, 1e25], device=device)[:, None, None]
    Y = (randn(6, m, 20, device=device) * scales).bfloat16()
    G = Y.float() @ Y.float().mT
    H = product(G, G, alpha=2.0, D=G, beta=-3.0, identity=4.0, symmetric=True, by_trace=True)
    known = [1, 3, 4]
    assert not H[[0, 2, 5]].any()
    X = Y.double()[known] / torch.linalg.matrix_norm(Y.double()[known], keepdim=True)
    S, eye = X @ X.mT, torch.eye(m, device=device, dtype=torch.float64)
    got, want = H[known].double() @ Y.double()[known], (2 * S @ S - 3 * S + 4 * eye) @ X
    assert torch.allclose(got, want, atol=2e-2)
    assert (torch.linalg.matrix_norm(got) < torch.linalg.matrix_norm(want)).all()  # a little shrunk


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("n", [24, 96])  # plain steps, and the Gram form
def test_few_rows(
    device: torch.device, steps: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polarstep.maps import full_space
    from polarstep.maps.coefficients import evaluate, polar_express
    from polarstep.maps.full_space import small_polar, suits_small

    polynomials = polar_express(0.03, steps, safety=1.01)
    Y = torch.stack([randn(20, n, device=device), randn(20, n, device=device, seed=1)])
    Y[0, 1:] *= 0.05
    Y = Y.bfloat16()
    assert suits_small(Y, polynomials)
    by_gram = []
    apply = full_space.apply_polynomials
    monkeypatch.setattr(
        full_space,
        "apply_polynomials",
        lambda X, *a, **k: by_gram.append(X.dtype) or apply(X, *a, **k),
    )
    U, sigma, Vh = torch.linalg.svd(Y.double(), full_matrices=False)
    sigma = evaluate(polynomials, sigma / torch.linalg.vector_norm(sigma, dim=-1, keepdim=True))
    got = small_polar(Y, polynomials)
    assert by_gram == ([torch.float16] if n == 96 and steps > 2 else [])
    assert got.dtype == Y.dtype
    assert torch.allclose(got.double(), (U * sigma[:, None]) @ Vh, atol=4e-2)
    if steps == 4:
        assert (torch.linalg.matrix_norm(got.double(), 2) < 1.02).all()


def test_a_table_keeps_its_place(device: torch.device) -> None:
    from polarstep.kernels import refreshed

    table = refreshed(torch.empty(0, device=device), [[1, 2, 2**62]], torch.int64)
    assert table.tolist() == [[1, 2, 2**62]]
    assert table.device.type == device.type
    again = refreshed(table, [[4, 5, 6]], torch.int64)
    assert again.tolist() == [[4, 5, 6]]
    assert again.data_ptr() == table.data_ptr()  # a captured graph reads it there
    assert refreshed(table, [[1, 2], [3, 4]], torch.int64).tolist() == [[1, 2], [3, 4]]


def test_one_table_has_a_part_for_each(device: torch.device) -> None:
    from polarstep.kernels import shared_table

    values = [[[1, 2, 3], [4, 5, 6]], [[7], [8]], [[9] * 5, [10] * 5]]
    table, parts = shared_table(torch.empty(0, device=device), values, torch.int64)
    assert [part.tolist() for part in parts] == values
    # A kernel is compiled for rows that begin at a multiple of 16 bytes.
    assert all(row.data_ptr() % 16 == 0 for part in parts for row in part)
    values[1] = [[70], [80]]
    again, moved = shared_table(table, values, torch.int64)
    assert [part.tolist() for part in parts] == values  # the parts are where they were
    assert again.data_ptr() == table.data_ptr()
    assert [part.data_ptr() for part in moved] == [part.data_ptr() for part in parts]
