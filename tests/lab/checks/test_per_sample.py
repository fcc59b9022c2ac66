"""Gradients of single examples are those of a loop, and their noise has the tail of the data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polarstep import rng
from polarstep.theory import tail_index
from polarstep.theory.noise import GradientNoise, StudentT, SymmetricPareto
from polarstep_lab.checks.per_sample import noise_norms, per_sample_gradients


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def test_per_sample_gradients_are_those_of_a_loop():
    model, g = _model(), rng.generator("data")
    x, y = torch.randn(7, 6, generator=g), torch.randint(0, 3, (7,), generator=g)
    batched = per_sample_gradients(model, nn.functional.cross_entropy, x, y, chunk_size=3)
    assert set(batched) == {name for name, _ in model.named_parameters()}
    for i in range(7):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(batched[name][i], p.grad)


def test_tail_index_of_a_models_gradient_noise():
    """Hill finds the index of a linear model's per-sample gradients, whose inputs are Student's."""
    model = nn.Linear(5, 4, bias=False)
    x = StudentT(1.5).sample((20_000,), 5, rng.generator("inputs"), torch.float32)
    y = torch.zeros(20_000, 4)

    def loss(output, target):
        return (output - target).abs().mean()  # gradient ∝ input

    gradients = per_sample_gradients(model, loss, x, y)["weight"]
    estimate = tail_index.hill(noise_norms(gradients))
    assert abs(estimate.alpha - 1.5) < 0.15


def test_noise_norms_are_about_the_mean():
    noise = GradientNoise(SymmetricPareto(1.7), 1.5, sigma0=1.0)
    gradients = noise(torch.full((50_000, 3, 2), 100.0), generator=rng.generator("n"))
    assert abs(tail_index.hill(noise_norms(gradients)).alpha - 1.7) < 0.1


def test_batch_normalization_has_no_gradient_for_each_example():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    data = torch.ones(5, 4), torch.zeros(5, 3)
    with pytest.raises(ValueError, match=r"1 is a BatchNorm1d in training mode.*model\.eval"):
        per_sample_gradients(model, nn.functional.mse_loss, *data)
    found = per_sample_gradients(model.eval(), nn.functional.mse_loss, *data)
    assert found["0.weight"].shape == (5, 3, 4)


@pytest.mark.parametrize(
    ("shape", "words"),
    [((1, 3), "at least two examples"), ((3,), r"shape \(3,\): expected \(N, ...\)")],
)
def test_noise_needs_examples(shape, words):
    with pytest.raises(ValueError, match=words):
        noise_norms(torch.ones(shape))


def test_noise_norms_of_sixteen_bits_are_in_float32():
    """The norm of a gradient that float16 holds may be beyond float16."""
    gradients = (1e4 * torch.randn(8, 1000, generator=rng.generator("half"))).half()
    expected = noise_norms(gradients.double())
    torch.testing.assert_close(noise_norms(gradients).double(), expected)
