"""Statistics of drawn gradients are right, and known laws are recognized."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from polarstep import rng
from polarstep.theory.noise import AlphaStable, StudentT
from polarstep.theory.tail_index import hill
from polarstep_lab.checks.noise import (
    draw_noise,
    gaussian_reference,
    held_still,
    mean_gradient,
)

GRADIENT = {"a": torch.full((4, 5), 0.3), "b": torch.linspace(-1, 1, 24).reshape(4, 6)}


CHUNK = 1000


@cache
def chunk_of(law, number):
    """The noise of ``CHUNK`` batches, drawn at once: one draw at a time takes ten times as long."""
    return law.sample((CHUNK,), 44, rng.generator("drawn", number), torch.float64).float()


class Drawn(nn.Module):
    """Two matrices whose gradients are ∇f plus noise of one law, drawn from the batch's number."""

    def __init__(self, law, scale=1.0):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros_like(g)) for g in GRADIENT.values())
        self.law, self.scale = law, scale

    def backward(self, i):
        xi = chunk_of(self.law, i // CHUNK)[i % CHUNK]
        self.a.grad = (GRADIENT["a"] + xi[:20].reshape(4, 5)) * self.scale
        self.b.grad = (GRADIENT["b"] + xi[20:].reshape(4, 6)) * self.scale


def draw(law, draws=512, reference=6_000):
    model = Drawn(law)
    mean = mean_gradient(model, model.backward, range(reference), 1)
    return draw_noise(model, model.backward, range(reference, reference + draws), 1, mean)


@pytest.fixture(scope="module")
def gaussian():
    return draw(AlphaStable(2.0))


def test_what_is_kept_is_what_was_drawn():
    model = Drawn(StudentT(3.0), scale=7.0)  # a backward that sums over seven examples
    batches = range(100, 180)
    mean = mean_gradient(model, model.backward, range(100), size=7, scale=1 / 7)
    kept = draw_noise(model, model.backward, batches, size=7, mean=mean, scale=1 / 7)

    def gradient(i):
        model.backward(i)
        return torch.cat([model.a.grad.flatten(), model.b.grad.flatten()]).double() / 7

    center = torch.stack([gradient(i) for i in range(100)]).mean(0)
    xi = torch.stack([gradient(i) for i in batches]) - center
    assert kept.names == ("a", "b")
    assert (kept.count, kept.size, kept.reference) == (80, 7, 700)
    for x, columns in ((xi[:, :20], ["a"]), (xi[:, 20:], ["b"]), (xi, ["a", "b"])):
        where = [kept.names.index(name) for name in columns]
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(kept.squares[:, where].sum(1), x.square().sum(1), **close)
        norms = x.square().sum(1).div(1 + 7 / 700).sqrt()
        torch.testing.assert_close(kept.norms(columns), norms, **close)
    torch.testing.assert_close(kept.along.sum(1), xi @ center, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept.pairs.sum(1), (xi[1:] * xi[:-1]).sum(1), rtol=1e-4, atol=1e-3)
    assert set(kept.sums) == {4}  # 80 draws make 20 sums of 4, and only 5 of 16
    fours = xi.reshape(20, 4, 44).sum(1)
    torch.testing.assert_close(kept.sums[4].sum(1), fours.square().sum(1), rtol=1e-5, atol=1e-5)


def test_sums_of_sums_are_sums():
    kept = draw(StudentT(3.0), draws=140, reference=50)
    assert {level: len(rows) for level, rows in kept.sums.items()} == {4: 35, 16: 8}
    model = Drawn(StudentT(3.0))
    mean = mean_gradient(model, model.backward, range(50), 1)
    by_hand = torch.zeros(4, 5)
    for i in range(50 + 16, 50 + 32):
        model.backward(i)
        by_hand += model.a.grad - mean.values["a"]
    assert float(kept.sums[16][1, 0]) == pytest.approx(float(by_hand.square().sum()), rel=1e-4)


def test_gaussian_noise_looks_gaussian_to_every_estimate(gaussian):
    found = gaussian.summary(["a", "b"])
    assert found["dimension"] == pytest.approx(44, rel=0.25)
    low, middle, high = found["tail"]["gaussian"]
    assert low < found["tail"]["alpha"] < high
    assert middle > 10
    assert found["along"]["low"] < 2 < found["along"]["high"] + 0.05
    assert [entry["examples"] for entry in found["growth"]] == [4, 16, 64]
    for entry in found["growth"]:
        assert entry["alpha"] == pytest.approx(2.0, abs=0.1)
    norm = float(torch.cat([g.flatten() for g in GRADIENT.values()]).norm())
    assert found["gradient"] == pytest.approx(norm, rel=0.05)
    assert found["moments"]["2"] == pytest.approx(
        float(gaussian.norms(["a", "b"]).square().mean().sqrt())
    )
    assert sorted(found["moments"].values()) == list(found["moments"].values())


@pytest.mark.parametrize("law", [StudentT(1.5), AlphaStable(1.5)], ids=str)
def test_noise_without_a_variance_is_seen_by_every_estimate(law):
    found = draw(law, draws=2048).summary(["a", "b"])
    assert found["tail"]["low"] < 2
    assert found["tail"]["high"] < found["tail"]["gaussian"][0]
    assert found["along"]["high"] < 1.9
    assert [entry["examples"] for entry in found["growth"]] == [4, 16, 64, 256]
    # The last entry is of eight sums, too few for an interval so narrow.
    assert all(entry["high"] < 1.9 for entry in found["growth"][:-1])
    assert found["growth"][-1]["alpha"] < 1.9


def test_noise_with_a_variance_grows_like_a_gaussian_in_the_end():
    """Student's law with index 3: heavy-tailed, a stable index below 2, and yet growth α = 2."""
    found = draw(StudentT(3.0), draws=2048).summary(["a", "b"])
    assert 2 < found["tail"]["low"] < 3 < found["tail"]["high"] < 5
    assert found["along"]["high"] < 1.95
    grown = [entry["alpha"] for entry in found["growth"]]
    assert [entry["examples"] for entry in found["growth"]] == [4, 16, 64, 256]
    assert grown[0] < 1.7
    assert grown[-1] > 1.85


def test_the_mean_of_more_draws_is_less_noisy(gaussian):
    one, four = (float(gaussian.norms(["a"], level).square().mean()) for level in (1, 4))
    assert four == pytest.approx(one / 4, rel=0.05)


def test_the_error_of_the_mean_is_taken_out():
    """Around a mean of 16 draws E‖ξ‖² of one draw is 1/16 too large, and is corrected."""
    exact, rough = (draw(AlphaStable(2.0), 2048, n).norms(["a", "b"]) for n in (6_000, 16))
    ratio = rough.square().mean() / exact.square().mean()
    assert float(ratio) == pytest.approx(1.0, abs=0.04)


def test_few_draws_and_no_noise_leave_estimates_out():
    found = draw(AlphaStable(2.0), draws=60, reference=10).summary(["a"])
    assert "tail" not in found
    assert "along" not in found
    assert [entry["examples"] for entry in found["growth"]] == [4]

    class Silent(AlphaStable):
        def sample(self, shape, d, generator, dtype):
            return torch.zeros(*shape, d, dtype=dtype)

    found = draw(Silent(2.0), draws=150, reference=1).summary(["a", "b"])
    assert found["noise"] == 0
    assert set(found) == {"gradient", "noise", "moments"}


def test_a_few_batches_over_and_over_have_no_tail_index():
    model = Drawn(AlphaStable(2.0))
    mean = mean_gradient(model, model.backward, range(100), 1)
    found = draw_noise(model, model.backward, [100, 101, 102] * 120, 1, mean).summary(["a", "b"])
    assert "tail" not in found
    assert found["noise"] > 0


def test_the_gaussian_reference_is_what_hill_says_of_gaussian_norms():
    low, _, high = gaussian_reference(400, 30.0)
    seeds = [rng.generator("reference", seed) for seed in range(20)]
    found = [hill(torch.randn(400, 30, generator=g).norm(dim=1)).alpha for g in seeds]
    assert sum(low <= alpha <= high for alpha in found) >= 17
    assert gaussian_reference(400, 30.0) == gaussian_reference(400, 30.5)
    assert gaussian_reference(400, 300.0)[1] > 2 * gaussian_reference(400, 30.0)[1]


def test_a_model_held_still_is_as_before():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model[2].eval()
    model(torch.randn(8, 4)).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    values = [p.grad.clone() for p in model.parameters()]
    stream = torch.get_rng_state()

    def look():
        with held_still(model):
            assert all(p.grad is None for p in model.parameters())
            model.eval()
            model.train()
            model(torch.randn(8, 4)).square().sum().backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(gradients, values, strict=True))
    assert torch.equal(torch.get_rng_state(), stream)
    assert model.training
    assert model[0].training
    assert not model[2].training


def test_noise_around_the_gradient_of_another_model_is_refused():
    """All draws would be −∇f, without an error."""
    model, other = Drawn(StudentT(3.0)), Drawn(StudentT(3.0))
    mean = mean_gradient(model, model.backward, range(4), 1)
    with pytest.raises(ValueError, match=r"backward left no gradient of batch 7 .*of this model"):
        draw_noise(other, model.backward, [7], 1, mean)
    renamed = torch.nn.Sequential(model)
    with pytest.raises(
        ValueError, match=r"has gradients of 0\..* expected the mean_gradient of the"
    ):
        draw_noise(renamed, model.backward, [7], 1, mean)


def test_draws_and_names_that_cannot_be_are_refused(gaussian):
    model = Drawn(StudentT(3.0))
    mean = mean_gradient(model, model.backward, range(4), 1)
    for batches, size in (([], 1), (range(4), 0)):
        with pytest.raises(ValueError, match=f"{len(batches)} batches of size={size}: expected"):
            mean_gradient(model, model.backward, batches, size)
        with pytest.raises(ValueError, match="at least one batch"):
            draw_noise(model, model.backward, batches, size, mean)
    with pytest.raises(ValueError, match="backward left no gradient"):
        mean_gradient(model, lambda i: None, range(4), 1)
    for names, told in (("a", "names='a'"), ([], r"names=\[\]"), (["a", "c"], "'c'")):
        with pytest.raises(ValueError, match=f"{told}: expected a list .* some of a, b$"):
            gaussian.summary(names)
