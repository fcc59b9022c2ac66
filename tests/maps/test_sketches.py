"""What every sketch promises, and the two of the paper in particular."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.solvers import over_sketches
from tests.spectra import gaussian, matrix

from polarstep import Exact, Gaussian, Kaczmarz, LowRank, rng
from polarstep.maps import Warm


def key(seed=0):
    return rng.generator("sketch", seed)


@over_sketches()
@pytest.mark.parametrize("shape", [(1, 1), (6, 9), (9, 6), (3, 6, 9), (2, 2, 6, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_product_is_the_product(sketch, shape, dtype, untouched_rng):
    M = gaussian(*shape).to(dtype)
    before = M.clone()
    Y, Omega = sketch(M, 4, key()), sketch.matrix(M, 4, key())
    assert Y.shape == (*shape[:-1], 4)
    assert Y.dtype == Omega.dtype == dtype
    assert Omega.shape[-2:] == (shape[-1], 4)
    torch.testing.assert_close(Y, M @ Omega)
    assert torch.equal(M, before)


@over_sketches()
def test_a_batch_shares_the_random_numbers(sketch):
    M = gaussian(5, 6, 9)
    together = sketch(M, 4, key())
    torch.testing.assert_close(together, torch.stack([sketch(m, 4, key()) for m in M]))
    assert not torch.allclose(together, sketch(M, 4, key(1)))
    assert torch.equal(sketch(M, 4), sketch(M, 4))  # without a generator: a fixed one


@over_sketches()
def test_sketches_are_values(sketch):
    for twin in (copy.deepcopy(sketch), pickle.loads(pickle.dumps(sketch))):
        assert (twin, hash(twin), repr(twin)) == (sketch, hash(sketch), repr(sketch))
    assert sketch.flops(6, 9, 4) > 0


@over_sketches()
def test_second_moment_is_the_identity(sketch):
    """E[ΩΩᵀ] = I, for the Gaussian one ℓ·I: what makes MΩ(MΩ)ᵀ an estimate of MMᵀ."""
    if sketch == Kaczmarz(fill=True):
        pytest.skip("no estimate of MMᵀ")
    M = matrix("power-law", 5, 6)
    draws = torch.stack([sketch.matrix(M, 8, key(seed)) for seed in range(4000)])
    mean = (draws @ draws.mT).mean(0) / (1 if isinstance(sketch, Kaczmarz) else 8)
    torch.testing.assert_close(mean, torch.eye(6).double(), atol=0.12, rtol=0)


def test_gaussian_entries_are_normal():
    Omega = Gaussian().matrix(torch.zeros(3, 200), 300, key())
    assert abs(Omega.mean()) < 0.02
    assert abs(Omega.std() - 1) < 0.02
    correlation = Omega.mT @ Omega / 200
    assert (correlation - torch.eye(300)).abs().max() < 0.5


def test_kaczmarz_draws_columns_by_their_squared_norm():
    M = matrix("power-law", 5, 7)
    M[:, 2] = 0
    expected = M.square().sum(0) / M.square().sum()
    counts = torch.zeros(7).double()
    for seed in range(3000):
        # A column that was drawn c times has the scale √c/√(ℓπ).
        Omega = Kaczmarz().matrix(M, 4, key(seed))
        counts += (Omega.square().sum(-1) * 4 * expected).round()
    assert counts.sum() == 4 * 3000
    torch.testing.assert_close(counts / counts.sum(), expected, atol=0.01, rtol=0)
    assert counts[2] == 0


@given(
    norms=st.lists(st.sampled_from([0.0, 1e-3, 1.0, 30.0]), min_size=1, max_size=9),
    width=st.integers(1, 12),
    seed=st.integers(0, 100),
)
def test_kaczmarz_takes_a_repeated_column_once(norms, width, seed):
    M = gaussian(6, len(norms)) * torch.tensor(norms, dtype=torch.float64)
    Omega = Kaczmarz().matrix(M, width, key(seed))
    assert Omega.isfinite().all()
    assert (Omega.count_nonzero(dim=0) <= 1).all()  # one entry a column
    assert (Omega.count_nonzero(dim=1) <= 1).all()  # a column of M at most once
    used = Omega.any(dim=0)
    assert torch.equal(used, used.sort(descending=True).values)  # zeros are behind all others
    pi = M.square().sum(0) / M.square().sum().clamp_min(1e-300)
    times = Omega.square().sum(-1) * width * pi
    torch.testing.assert_close(times, times.round(), atol=1e-9, rtol=0)
    assert round(float(times.sum())) == (width if M.any() else 0)
    assert (times[pi == 0] == 0).all()


def test_a_filled_sketch_has_every_column_that_was_drawn_and_the_longest_others():
    """ℓ different columns of equal length ‖M‖_F/√ℓ, beside columns of zero length."""
    M = gaussian(20, 7, 12) * torch.linspace(0.1, 3, 12, dtype=torch.float64) ** 2
    M[..., 3] = 0
    numbers = Kaczmarz().draw(12, 6, key())
    plain, filled = (Kaczmarz(fill=fill).omega(M, numbers) for fill in (False, True))
    assert (filled.count_nonzero(dim=-2) == 1).all()
    used, drawn = filled.any(-1), plain.any(-1)
    assert (used.sum(-1) == 6).all()
    assert (used | ~drawn).all()
    length = torch.linalg.vector_norm(M, dim=-2)
    for others, own in zip(
        length * ~used, torch.where(used & ~drawn, length, torch.inf), strict=True
    ):
        assert others.max() <= own.min()
    norm = torch.linalg.matrix_norm(M)[:, None].expand(20, 6) / math.sqrt(6)
    torch.testing.assert_close(torch.linalg.vector_norm(M @ filled, dim=-2), norm)


def test_a_filled_sketch_of_fewer_columns_ends_in_zeros():
    M = gaussian(7, 5)
    M[:, 1:4] = 0
    Omega = Kaczmarz(fill=True).matrix(M, 6, key())
    assert Omega.isfinite().all()
    assert Omega.any(-1).tolist() == [True, False, False, False, True]


def test_a_filled_sketch_captures_as_much_as_a_gaussian_one():
    """Where column lengths differ, half of the paper's draws are repeats; the basis is 32 wide."""
    M = matrix("power-law", 96, 96) * torch.randn(96, generator=key()).double().exp()
    nuclear = torch.linalg.matrix_norm(M, "nuc")

    def captured(sketch):
        polar = LowRank(32, 0, power=0, sketch=sketch, inner=Exact(), always_sketch=True)
        found = [(M * polar(M.float(), generator=key(seed))).sum() / nuclear for seed in range(8)]
        return float(torch.stack(found).mean())

    paper, filled, dense = map(captured, (Kaczmarz(), Kaczmarz(fill=True), Gaussian()))
    assert filled > paper + 0.02
    assert filled > dense - 0.01


def test_kaczmarz_of_a_zero_matrix_is_zero():
    assert not Kaczmarz()(torch.zeros(2, 4, 5), 3, key()).any()
    assert not Kaczmarz().matrix(torch.zeros(4, 5), 3, key()).any()


def test_kaczmarz_passes_empty_columns_at_the_border_of_two():
    """Variates lie in [0, 1): each picks the column whose share begins at it, not the one that ends."""
    M = torch.tensor([[0.0, 3.0, 0.0, 3.0, 0.0]])
    numbers = torch.tensor([0.0, 0.5], dtype=torch.float64)
    indices, scales = Kaczmarz().columns(M, numbers)
    assert indices.tolist() == [1, 3]
    assert (scales > 0).all()


def test_kaczmarz_misplaces_no_rare_column():
    """With many columns the levels of a float32 sum would run together."""
    M = torch.ones(1, 60_000)
    M[0, -1] = 1e-2
    indices = Kaczmarz().matrix(M, 3000, key()).nonzero()[:, 0]
    assert len(indices) > 2500
    assert abs(indices.double().mean() / 60_000 - 0.5) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(48, 96), (37, 70), (17, 33)], ids=str)
def test_kaczmarz_draws_the_same_of_equal_columns_in_every_memory_layout(shape, dtype):
    """Also where a random number is on the border between two columns, up to rounding."""
    m, n = shape
    M = gaussian(m, 1).expand(m, n).to(dtype)
    padded = torch.nn.functional.pad(M, (0, 3, 0, 3))[:m, :n]
    numbers = torch.arange(n, dtype=torch.float64) / n
    indices, scales = Kaczmarz().columns(M.contiguous(), numbers)
    for same in (M.mT.contiguous().mT, padded, M):
        again, factors = Kaczmarz().columns(same, numbers)
        assert torch.equal(again, indices)
        assert torch.equal(factors, scales)


def test_kaczmarz_draws_the_same_of_other_columns_in_every_memory_layout():
    """Sums of squares by rows and by columns differ in their last bits."""
    M = gaussian(2001, 8)
    laid = M.mT.contiguous().mT
    assert not torch.equal(
        torch.linalg.vector_norm(M, dim=0), torch.linalg.vector_norm(laid, dim=0)
    )
    numbers = torch.linspace(0, 0.99, 5, dtype=torch.float64)
    indices, scales = Kaczmarz().columns(M, numbers)
    again, factors = Kaczmarz().columns(laid, numbers)
    assert torch.equal(again, indices)
    assert torch.equal(factors, scales)


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e200, 1e300])
def test_kaczmarz_draws_the_same_at_every_scale(scale):
    M = gaussian(6, 9)
    scale = 2.0 ** round(math.log2(scale))
    if scale < 1e-308:
        M = M.sign()  # denormals have few digits
    expected, _ = Kaczmarz().columns(M, torch.linspace(0, 0.99, 5, dtype=torch.float64))
    indices, scales = Kaczmarz().columns(scale * M, torch.linspace(0, 0.99, 5, dtype=torch.float64))
    assert torch.equal(indices, expected)
    assert scales.isfinite().all()


def test_warm_needs_noise():
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(
            ValueError, match=r"noise=.*expected a finite number > 0.*missed for ever"
        ):
            Warm(noise=bad)
    with pytest.raises(TypeError, match=r"noise='0\.1': expected a finite number > 0"):
        Warm(noise="0.1")


def test_a_seed_is_no_generator():
    with pytest.raises(TypeError, match=r"generator=3: expected a torch\.Generator"):
        Gaussian()(torch.eye(4), 2, generator=3)


def test_only_a_gaussian_is_dense():
    assert Gaussian().is_dense
    assert not Kaczmarz().is_dense


def test_the_cost_is_that_of_an_m_by_n_matrix():
    m, n, width = 10, 30, 4
    assert Gaussian().flops(m, n, width) == 2 * m * n * width
    assert Kaczmarz().flops(m, n, width) == 2 * m * n + m * width  # column norms, and the rescaling
