from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

from polarstep import rng
from polarstep.theory import tail_index
from polarstep.theory.noise import AlphaStable, StudentT, SymmetricPareto

N = 100_000


def draw(law, seed, count=N):
    return law.sample((count,), 1, rng.generator("tail", seed), torch.float64).flatten()


@pytest.mark.parametrize("index", [1.2, 1.5, 1.9])
@pytest.mark.parametrize("family", [SymmetricPareto, StudentT])
def test_hill_recovers_the_index_within_a_tenth(family, index):
    estimates = [tail_index.hill(draw(family(index), seed)) for seed in range(5)]
    assert all(abs(e.alpha - index) < 0.1 for e in estimates), [str(e) for e in estimates]
    assert sum(index in e for e in estimates) >= 4
    assert all(e.low < e.alpha < e.high for e in estimates)


@pytest.mark.parametrize("index", [1.2, 1.5, 1.8, 2.0])
def test_stable_recovers_the_index_far_within_a_tenth(index):
    estimates = [tail_index.stable(draw(AlphaStable(index), seed)) for seed in range(4)]
    assert all(abs(e.alpha - index) < 0.03 for e in estimates), [str(e) for e in estimates]
    assert sum(index in e for e in estimates) >= 3
    assert all(e.high - e.low < 0.06 for e in estimates)


def test_intervals_cover_and_narrow():
    """Nominal 95%; 30 draws of 20,000 cover at least 24 times for either estimator."""
    hill = [tail_index.hill(draw(StudentT(1.5), s, 20_000)) for s in range(30)]
    stable = [tail_index.stable(draw(AlphaStable(1.5), s, 20_000)) for s in range(30)]
    assert sum(1.5 in e for e in hill) >= 24
    assert sum(1.5 in e for e in stable) >= 26
    wide = tail_index.stable(draw(AlphaStable(1.5), 0, 2_000))
    assert wide.high - wide.low > 2 * (stable[0].high - stable[0].low)
    loose = tail_index.hill(draw(StudentT(1.5), 0, 20_000), confidence=0.5)
    assert loose.high - loose.low < hill[0].high - hill[0].low


def test_scale_location_and_sign_do_not_matter():
    x = draw(AlphaStable(1.6), 1, 20_000)
    assert tail_index.stable(3e5 * x + 7e5).alpha == pytest.approx(
        tail_index.stable(x).alpha, abs=1e-6
    )
    assert tail_index.hill(-1e-8 * x).alpha == pytest.approx(tail_index.hill(x).alpha, abs=1e-9)


def test_light_tails_are_not_called_heavy():
    x = torch.randn(N, generator=rng.generator("normal"), dtype=torch.float64)
    assert tail_index.hill(x).alpha > 3
    assert tail_index.stable(x).alpha == pytest.approx(2.0, abs=0.02)


def test_hill_takes_a_k():
    x = draw(SymmetricPareto(1.5), 0)
    estimate = tail_index.hill(x, k=500)
    assert estimate.used == 500
    assert estimate.high - estimate.low > 0.2


# Seven entries of ten are zero, as in the gradient of an embedding of which few rows were used.
SPARSE = torch.randn(9999, generator=rng.generator("sparse")) * (torch.arange(9999) % 10 > 6)
SPARSE = SPARSE[torch.randperm(9999, generator=rng.generator("order"))]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tail_index.hill(torch.ones(50)), "gather more"),
        (lambda: tail_index.hill(torch.zeros(5000)), "0 nonzero samples"),
        (lambda: tail_index.hill(torch.full((500,), float("nan"))), "overflowed"),
        (lambda: tail_index.hill(torch.rand(500), k=1), "2 ≤ k"),
        (lambda: tail_index.hill(torch.rand(500), k=2.5), r"k=2\.5: expected a whole number"),
        (lambda: tail_index.hill(torch.ones(500)), "the largest 101 of 500 samples are one number"),
        (lambda: tail_index.hill(torch.randn(5000).clamp(-1, 1)), "are one number.*clipped"),
        (lambda: tail_index.hill(torch.rand(500), confidence=95), "0.95"),
        (lambda: tail_index.stable(torch.rand(50)), "at least 200"),
        (lambda: tail_index.stable(torch.ones(500)), "no continuous law"),
        (lambda: tail_index.stable(SPARSE), "no continuous law.*leave out"),
    ],
)
def test_errors_say_what_would_do(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("estimate", [tail_index.hill, tail_index.stable])
def test_samples_that_are_no_real_numbers_are_refused(estimate):
    with pytest.raises(
        TypeError, match=r"torch\.complex64 on cpu: expected a tensor of real numbers"
    ):
        estimate(torch.ones(500) + 1j * torch.rand(500))
    with pytest.raises(TypeError, match="the samples are no tensor"):
        estimate([1.0] * 500)


def test_growth_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at least 8 sums"):
        tail_index.growth(torch.ones(28), torch.ones(7))
    with pytest.raises(ValueError, match="same number of parts each"):
        tail_index.growth(torch.ones(33), torch.ones(8))
    with pytest.raises(ValueError, match="norm is zero"):
        tail_index.growth(torch.zeros(32), torch.ones(8))


@pytest.mark.parametrize("index", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("d", [1, 40])
def test_growth_recovers_the_index_of_a_stable_law(index, d):
    """Nominal 95%: of 40 samples, at least 34 intervals hold the index."""
    found = []
    for seed in range(40):
        x = AlphaStable(index).sample((512,), d, rng.generator("growth", seed), torch.float64)
        sums = x.reshape(128, 4, d).sum(1)
        found.append(tail_index.growth(x.norm(dim=1), sums.norm(dim=1)))
    assert sum(index in estimate for estimate in found) >= 34
    mean = sum(1 / estimate.alpha for estimate in found) / 40
    assert mean == pytest.approx(1 / index, abs=0.02)
    assert all(math.isfinite(estimate.high) for estimate in found)


def test_the_interval_of_growth_is_students():
    """Eight sums, so that the normal quantile would be off by a fifth."""
    parts = torch.ones(32, dtype=torch.float64)
    sums = torch.exp(torch.linspace(0.5, 1.5, 8, dtype=torch.float64))
    found = tail_index.growth(parts, sums)
    assert found.used == 8
    assert 1 / found.alpha == pytest.approx(1 / math.log(4))
    half = float(sums.log().std()) / math.sqrt(8) / math.log(4)
    t = scipy.stats.t(7).ppf(0.975)
    assert 1 / found.low - 1 / found.alpha == pytest.approx(t * half, rel=0.04)
    assert 1 / found.alpha - 1 / found.high == pytest.approx(t * half, rel=0.04)


def test_growth_has_no_upper_end_where_sums_may_not_grow():
    sums = torch.exp(torch.linspace(-1.0, 1.1, 8, dtype=torch.float64))
    found = tail_index.growth(torch.ones(16), sums)
    assert found.high == math.inf
    assert math.isfinite(found.low)


def test_the_fewest_samples_that_an_index_is_read_from():
    """More than 100 that are not zero for Hill's estimate, and 100 pairs for a stable law."""
    samples = draw(StudentT(2.0), 0, 200)
    assert tail_index.hill(torch.cat([samples[:101], torch.zeros(50)])).used <= 100
    with pytest.raises(ValueError, match="100 nonzero samples: expected more than 100"):
        tail_index.hill(torch.cat([samples[:100], torch.zeros(50)]))
    assert tail_index.stable(samples).alpha > 0
    with pytest.raises(ValueError, match="198 samples: expected at least 200"):
        tail_index.stable(samples[:198])
