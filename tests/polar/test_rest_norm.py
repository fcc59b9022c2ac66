"""The rest of a sketch: how its norm and its size are estimated, and how wrong an estimate may be."""

from __future__ import annotations

import math

import pytest
import torch
from tests.spectra import batch, gaussian, matrix, orthogonal, with_singular_values
from torch.utils._python_dispatch import TorchDispatchMode

from polarstep import rng
from polarstep.polar.rest_norm import rest_energy, rest_norm, rest_size, vectors_shape
from polarstep.products.start_vectors import first_vectors
from polarstep.theory import bounds

M_ROWS, N_COLS, ELL = 24, 40, 6


def operator_norm(X):
    return torch.linalg.matrix_norm(X.double(), 2)


def head(M, ell=ELL, *, power=1, key=0):
    """Q and B = QᵀM of a Gaussian sketch with ``power`` iterations."""
    Omega = torch.randn(M.shape[-1], ell, generator=rng.generator("head", key), dtype=torch.float64)
    A = M.double()
    A = A / A.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
    Q = torch.linalg.qr(A @ Omega).Q
    for _ in range(power):
        Q = torch.linalg.qr(A @ torch.linalg.qr(A.mT @ Q).Q).Q
    Q = Q.to(M.dtype)
    return Q, Q.mT @ M


def norm_of_rest(M, Q, B, **options):
    """1/δ, and what goes with it."""
    precision = max(torch.finfo(X.dtype).eps for X in (M, Q, B))
    return rest_norm(M, Q, B, precision, **options)


def delta(found):
    """δ of each matrix, ∞ where R is nothing but rounding."""
    return 1 / found.inverse.flatten()


def rest(M, Q, B):
    return M - Q @ B


def mixed(dtype=torch.float64):
    names = ["flat", "power-law", "one-dominant", "zero", "low-rank-and-noise", "rank-deficient"]
    return torch.stack([matrix(s, M_ROWS, N_COLS, seed=i) for i, s in enumerate(names)]).to(dtype)


# The norm of the rest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_basis_a_little_too_long_leaves_room_for_a_small_rest(dtype):
    eps = torch.finfo(dtype).eps
    spectrum = torch.cat([torch.ones(ELL), torch.full((M_ROWS - ELL,), eps**0.5)])
    M = with_singular_values(spectrum, M_ROWS, N_COLS).to(dtype)[None]
    Q, _ = head(M)
    Q = Q * (1 + eps**0.5 / 256)
    found = norm_of_rest(M, Q, Q.mT @ M)
    norm = torch.linalg.matrix_norm(M.double() - Q.double() @ (Q.double().mT @ M.double()))
    assert float(delta(found)) <= 1.2 * float(norm)
    assert float(delta(found)) >= 0.8 * eps**0.5


def test_the_rest_is_orthogonal_to_the_basis_and_has_the_energy_left():
    M = mixed()
    Q, B = head(M)
    R = rest(M, Q, B)
    torch.testing.assert_close(Q.mT @ R, torch.zeros_like(B), atol=1e-13, rtol=0)
    found = norm_of_rest(M, Q, B)
    energy = R.square().sum((-2, -1)) * found.inverse.flatten() ** 2
    assert (energy > 0).sum() == 5  # all but zero
    for energies in (found.unheld, rest_energy(found, Q, B, M_ROWS - ELL)):
        torch.testing.assert_close(energies, energy, atol=0, rtol=1e-6)
    assert (found.seen <= energy * (1 + 1e-12)).all()


def spiked(count, leading, m=96, n=160, seeds=50):
    """Matrices with ``count`` directions that are ``leading`` times as long as all others."""
    sigma = torch.ones(m, dtype=torch.float64)
    sigma[:count] = leading
    return torch.stack([with_singular_values(sigma, m, n, seed) for seed in range(seeds)])


def energies(M, Q, B, **options):
    """:func:`rest_energy` and ‖R‖²_F/δ² of R = M − DB, in the precision of D."""
    Gram = Q.mT.double() @ Q.double()
    D = 2 * Q.double() - Q.double() @ Gram
    found = norm_of_rest(M, D.to(torch.promote_types(Q.dtype, torch.float32)), B, **options)
    R = M.double() - D @ B.double()
    left = M.shape[-2] - Q.shape[-1]
    true = R.square().sum((-2, -1)) * found.inverse.flatten().double() ** 2
    return rest_energy(found, Q, B, left).double(), true, found


@pytest.mark.parametrize("error", [0.05, 0.3])
def test_the_energy_of_the_rest_for_a_basis_that_is_not_orthonormal(error):
    """‖M‖²_F − ‖B‖²_F alone is off by more than ‖R‖²_F; columns are too short and too long."""
    M = spiked(4, 100.0, seeds=10)
    Q, _ = head(M, 16)
    g = rng.generator("basis", str(error))
    Q = Q @ (torch.eye(16) + error / 8 * torch.randn(10, 16, 16, generator=g, dtype=torch.float64))
    found, true, numbers = energies(M, Q, Q.mT @ M)
    torch.testing.assert_close(found, true, atol=0, rtol=1e-6)
    assert ((numbers.unheld - true).abs() > true).any()


@pytest.mark.parametrize("leading", [30.0, 100.0])
def test_the_energy_of_the_rest_in_bfloat16(leading):
    """As close as the rounding of B allows: one standard deviation up, at most, and three down."""
    M = spiked(4, leading).bfloat16()
    Q, _ = head(M.double(), 16)
    Q = Q.bfloat16()
    B = (Q.mT.double() @ M.double()).bfloat16()
    found, true, numbers = energies(M, Q, B)
    lengths = B.double().square().sum(-1) * numbers.inverse[..., 0].double() ** 2
    tau = 0.74 * 2.0**-7 * lengths.square().sum(-1).div(160).sqrt()
    assert (found >= true - 3 * tau).all()
    assert (found <= true + 4 * tau).all()
    assert float((found / true).median()) == pytest.approx(1, abs=0.1)
    assert (found >= numbers.seen).all()
    assert (found <= 80 / 16 * numbers.seen * (1 + 1e-6)).all()


def test_the_vectors_bound_an_energy_that_rounding_hides():
    """In bfloat16: four directions of 200 and a flat rest, of which the vectors see their part."""
    M = spiked(4, 200.0).bfloat16()
    Q, _ = head(M.double(), 16)
    Q = Q.bfloat16()
    B = (Q.mT.double() @ M.double()).bfloat16()
    found, true, numbers = energies(M, Q, B)
    assert (found >= numbers.seen).all()
    assert ((numbers.unheld - true).abs() > true).any()
    assert (found < 1.5 * true).all()
    assert (found > true / 3).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("power", [0, 1])
@pytest.mark.parametrize("spectrum", ["flat", "power-law", "one-dominant", "low-rank-and-noise"])
def test_delta_is_the_norm_with_its_margin(spectrum, power, dtype):
    M = batch(spectrum, 4, 96, 160).to(dtype)
    vectors = None
    for step in range(4):
        Q, B = head(M, 12, power=power, key=step)
        found = norm_of_rest(M, Q, B, vectors=vectors)
        vectors = found.vectors
        ratio = delta(found) / operator_norm(rest(M, Q, B))
        # The first vectors know nothing of M; what they miss is within what a scaled rest tolerates.
        assert (ratio > (0.7 if step == 0 else 0.8)).all(), step
        assert (ratio < 1.1 * 16**0.125 + 1e-3).all(), step


def test_delta_on_real_momentum_from_the_first_step_on(momentum):
    """Zero matrices and ranks below ℓ are among these: there δ may be ∞, but never wrong."""
    seen = 0
    for matrices in momentum.values():
        steps = matrices.unflatten(0, (9, -1))
        vectors = None
        for step, M in enumerate(steps):
            M = M if M.shape[-2] <= M.shape[-1] else M.mT
            Q, B = head(M, 8, power=step % 2, key=step)
            found = norm_of_rest(M, Q, B, vectors=vectors)
            vectors = found.vectors
            norm = operator_norm(rest(M, Q, B))
            assert (delta(found) >= 0.8 * norm).all()
            real = norm > 1e-4 * operator_norm(M)
            assert (delta(found)[real] <= 1.4 * norm[real]).all()
            seen += int(real.sum())
    assert seen > 50


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spectrum", ["rank-deficient", "rank-one-within-rounding", "zero"])
def test_where_the_basis_has_it_all_there_is_no_rest(spectrum, dtype):
    M = batch(spectrum, 3, 12, 20).to(dtype)
    Q, B = head(M, 5)
    found = norm_of_rest(M, Q, B)
    assert (found.inverse == 0).all()
    assert (found.unheld == 0).all()
    assert (found.seen == 0).all()
    assert (rest_energy(found, Q, B, 7) == 0).all()
    assert found.vectors.isfinite().all()
    assert (found.vectors.abs().amax((-2, -1)) > 0).all()


class Reads(TorchDispatchMode):
    """Counts the operations that read a tensor; to make a view of it is none."""

    def __init__(self, X):
        super().__init__()
        self.address, self.count = X.data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        reads = any(isinstance(a, torch.Tensor) and a.data_ptr() == self.address for a in args)
        is_view = isinstance(result, torch.Tensor) and result.data_ptr() == self.address
        self.count += reads and not is_view
        return result


def test_the_norm_reads_the_matrix_twice():
    M = gaussian(2, M_ROWS, N_COLS)
    Q, B = head(M)
    squares = M.square().flatten(1)
    with Reads(M) as reads:
        norm_of_rest(M, Q, B, squares=squares)
    assert reads.count == 2


def test_known_squares_are_the_norm_of_the_matrix():
    M = gaussian(2, M_ROWS, N_COLS)
    Q, B = head(M)
    known = norm_of_rest(M, Q, B, squares=M.square().sum(-1))
    torch.testing.assert_close(known.inverse, norm_of_rest(M, Q, B).inverse)
    # A larger norm of M leaves more energy to the rest.
    more = norm_of_rest(M, Q, B, squares=2 * M.square().sum(-1))
    assert (more.unheld > 1.5 * known.unheld).all()


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-5])
def test_delta_is_above_its_floor_for_any_spectrum_and_vectors(spread):
    """The inequality of the docstring, with vectors of which some are ``spread`` times as long."""
    g = rng.generator("floor of the rest", str(spread))
    sigma = torch.rand(200, M_ROWS, generator=g, dtype=torch.float64) ** 4
    M = torch.stack(
        [with_singular_values(each, M_ROWS, N_COLS, seed=i) for i, each in enumerate(sigma)]
    )
    V = torch.randn(200, N_COLS, 16, generator=g, dtype=torch.float64)
    V[..., 4:] *= spread
    D, B = M.new_zeros(200, M_ROWS, 1), M.new_zeros(200, 1, N_COLS)  # R = M
    found = norm_of_rest(M, D, B, vectors=V.mT)
    r = torch.linalg.svd(M).Vh[:, :1].mT
    P = torch.linalg.qr(V).Q
    x = P @ (P.mT @ r)
    kappa, x = x.square().sum(-2)[:, 0], x / x.norm(dim=-2, keepdim=True)
    c = torch.linalg.lstsq(V, x).solution
    Y, Rx = M @ V, (M @ x).square().sum((-2, -1))
    added = 2.0**-20 * Y.square().sum((-2, -1)) * c.square().sum((-2, -1)) / Rx
    floor = bounds.subspace_norm_floor(kappa) / (1 + added).sqrt()
    assert (delta(found) >= floor * operator_norm(M) * (1 - 1e-9)).all()
    # With vectors of one length the Cholesky factor takes nothing, and here the floor says something.
    assert (added.median() < 1e-4) == (spread == 1)
    assert spread < 1 or floor.median() > 0.5


def test_a_nan_does_not_stay_in_the_vectors():
    M = gaussian(3, M_ROWS, N_COLS)
    Q, B = head(M)
    clean = norm_of_rest(M, Q, B)
    bad = M.clone()
    bad[1, 2, 3] = math.nan
    found = norm_of_rest(bad, Q, Q.mT @ bad)
    assert found.inverse[1] == 0
    assert found.vectors.isfinite().all()
    torch.testing.assert_close(found.inverse[[0, 2]], clean.inverse[[0, 2]])
    again = norm_of_rest(M, Q, B, vectors=found.vectors)
    assert (delta(again) >= 0.8 * operator_norm(rest(M, Q, B))).all()


@pytest.mark.parametrize(
    ("dtype", "size", "is_seen"),
    [
        (torch.bfloat16, 1e-2, True),
        (torch.bfloat16, 1e-3, False),
        (torch.float32, 1e-4, True),
        (torch.float32, 1e-6, False),
        (torch.float64, 1e-12, True),
        (torch.float64, 1e-15, False),
    ],
)
def test_a_rest_at_the_level_of_rounding_is_left_out(dtype, size, is_seen):
    """δ = ∞ then, for which M/δ is zero: all that is left of M is what rounding made."""
    sigma = torch.where(torch.arange(M_ROWS) < 1, 1.0, size).double()
    M = with_singular_values(sigma, M_ROWS, N_COLS)[None]
    Q = torch.linalg.svd(M).U[..., :1]
    given, basis = M.to(dtype), Q.to(torch.promote_types(dtype, torch.float32))
    B = basis.mT @ given.to(basis.dtype)
    assert bool(norm_of_rest(given, basis, B).inverse > 0) == is_seen


def test_vectors_carried_in_16_bits_do_not_round_the_estimate():
    M = gaussian(3, M_ROWS, N_COLS, dtype=torch.float32)
    Q, B = head(M)
    vectors = norm_of_rest(M, Q, B).vectors
    fine = norm_of_rest(M, Q, B, vectors=vectors).inverse
    coarse = norm_of_rest(M, Q, B, vectors=vectors.bfloat16()).inverse
    assert coarse.dtype == torch.float32
    torch.testing.assert_close(coarse, fine, rtol=1e-3, atol=0)


def test_vectors_start_without_a_pattern():
    """Columns are nearly orthonormal, so that they span what they are meant to, at every length."""
    for n in (8, 40, 768, 4096):
        V = first_vectors(n // 2, n, torch.device("cpu"))
        assert V.shape == (1, *vectors_shape(n // 2, n)) == (1, min(n // 2, 16), n)
        sigma = torch.linalg.svdvals(V[0].double())
        assert sigma[-1] > 0.3
        assert sigma[0] < 1.8


def test_orthogonal_blocks_cannot_hide_from_the_vectors():
    """A direction that the carried vectors have no part of is found again within a few steps."""
    U, V = orthogonal(M_ROWS, 1), orthogonal(N_COLS, 2, M_ROWS)
    weak = torch.cat([torch.full((16,), 1.0), torch.zeros(8)]).double()
    strong = torch.cat([torch.full((16,), 1.0), torch.full((8,), 5.0)]).double()
    Q = torch.zeros(1, M_ROWS, 1, dtype=torch.float64)
    vectors, deltas = None, []
    for sigma in [weak] * 6 + [strong] * 6:
        M = ((U * sigma) @ V.mT)[None]
        found = norm_of_rest(M, Q, Q.mT @ M, vectors=vectors)
        vectors = found.vectors
        deltas.append(float(delta(found)) / float(sigma.max()))
    assert deltas[5] == pytest.approx(1.1, rel=0.05)
    assert deltas[-1] > 1


# Its size, for polynomial steps


def test_the_size_of_the_rest_is_twice_its_root_mean_square():
    sigma = torch.cat([torch.tensor([50.0, 20.0]), torch.full((M_ROWS - 2,), 0.3)]).double()
    M = with_singular_values(sigma, M_ROWS, N_COLS)
    B = torch.linalg.svd(M).U[:, :2].mT @ M
    left, factor, floor = rest_size(M_ROWS, 2, 2.0**-52)
    assert left == M_ROWS - 2
    energy = M.square().sum() - B.square().sum()
    assert energy > floor * M.square().sum()
    assert float(factor * (energy / left).sqrt()) == pytest.approx(2 * 0.3)


def test_the_size_of_the_rest_has_a_floor_at_rounding_and_a_row_at_least():
    assert rest_size(8, 8, 2.0**-23)[0] == 1
    assert rest_size(64, 8, 2.0**-23)[2] == 64 * 2.0**-23
    assert rest_size(64, 8, 2.0**-8)[2] == rest_size(64, 8, 2.0**-11)[2]
    assert rest_size(64, 8, 2.0**-8)[2] == 2.0**-12
