from __future__ import annotations

import math

import pytest
import torch

from polarstep import rng
from polarstep.theory.noise import (
    AlphaStable,
    GradientNoise,
    RareCorrection,
    SkewedPareto,
    StudentT,
    SymmetricPareto,
)

LAWS = [
    SymmetricPareto(2.6),
    SymmetricPareto(1.5),
    StudentT(2.8),
    StudentT(1.6),
    AlphaStable(1.9),
    AlphaStable(1.5),
    AlphaStable(2.0),
    SkewedPareto(2.5),
    SkewedPareto(1.5),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("d", [1, 12])
def test_moments_are_what_sampling_gives(law, d):
    """At half the tail index the sample mean of ‖ξ‖^α has a finite variance (just)."""
    alpha = 0.45 * min(law.tail, 4.0)
    x = law.sample((200_000,), d, rng.generator("moment", d), torch.float64)
    norms = torch.linalg.vector_norm(x, dim=-1) ** alpha
    error = float(norms.std()) / math.sqrt(len(norms))
    assert float(norms.mean()) == pytest.approx(law.moment(alpha, d), abs=5 * error)
    assert error < 0.02 * law.moment(alpha, d)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_mean_is_zero_and_the_tail_has_its_index(law):
    x = law.sample((400_000,), 1, rng.generator("mean"), torch.float64).flatten()
    # The mean of heavy-tailed samples converges like n^{1/a − 1}.
    a = min(law.tail, 2.0)
    assert abs(float(x.mean())) < 30 * len(x) ** (1 / a - 1)
    if math.isfinite(law.tail):
        far, near = (x.abs().quantile(1 - q) for q in (2e-4, 4e-3))
        measured = math.log(20) / math.log(float(far / near))
        assert measured == pytest.approx(law.tail, rel=0.15)


@pytest.mark.parametrize("index", [1.3, 1.7, 2.0])
def test_alpha_stable_has_its_characteristic_function(index):
    x = AlphaStable(index).sample((200_000,), 1, rng.generator("cf"), torch.float64).flatten()
    for t in (0.3, 1.0, 2.5):
        expected = math.exp(-((t**2 / 2) ** (index / 2)))
        assert float(torch.cos(t * x).mean()) == pytest.approx(expected, abs=0.006)


def test_alpha_stable_is_stable_under_averaging():
    """The sum of 16 copies is distributed as 16^{1/a} times one copy, so batches help little."""
    law = AlphaStable(1.4)
    x = law.sample((100_000, 16), 1, rng.generator("sum"), torch.float64)[..., 0]
    one, sixteen = x[:, 0].abs().median(), x.sum(1).abs().median()
    assert float(sixteen / one) == pytest.approx(16 ** (1 / 1.4), rel=0.03)


@pytest.mark.parametrize("law", [SymmetricPareto(3.5), StudentT(3.6), AlphaStable(1.9)], ids=str)
@pytest.mark.parametrize("sigma1", [0.0, 0.5])
@pytest.mark.parametrize("independent", [False, True])
def test_noise_satisfies_the_assumption_with_its_constants(law, sigma1, independent):
    alpha = min(1.8, law.tail - 0.1)
    noise = GradientNoise(law, alpha, sigma0=0.7, sigma1=sigma1, independent=independent)
    gradient = torch.randn(3, 4, generator=rng.generator("g"), dtype=torch.float64)
    replicas = gradient.expand(60_000, 3, 4)
    G = noise(replicas, generator=rng.generator("noise"))
    measured = torch.linalg.matrix_norm(G - gradient) ** alpha
    norm = float(torch.linalg.matrix_norm(gradient))
    bound = 0.7**alpha + (sigma1 * norm) ** alpha
    slack = 6 * float(measured.std()) / math.sqrt(len(measured))
    assert float(measured.mean()) <= bound + slack
    if not independent and law.tail > 2 * alpha - 0.3:
        assert float(measured.mean()) == pytest.approx(bound, rel=0.06)
    per_entry = (G - gradient).mean(0).abs().max()
    assert float(per_entry) < 0.15


def test_a_batch_averages_and_is_chunked_consistently(monkeypatch):
    noise = GradientNoise(StudentT(5.0), 2.0, sigma0=1.0)
    gradient = torch.zeros(2000, 2, 3, dtype=torch.float64)
    G = noise(gradient, batch=25, generator=rng.generator("b"))
    power = float(torch.linalg.matrix_norm(G).square().mean())
    assert power == pytest.approx(1 / 25, rel=0.1)
    monkeypatch.setattr("polarstep.theory.noise.CHUNK", gradient.numel() * 4)
    G = noise(gradient, batch=25, generator=rng.generator("b"))
    assert float(torch.linalg.matrix_norm(G).square().mean()) == pytest.approx(1 / 25, rel=0.1)


def test_same_generator_same_noise_and_no_global_randomness():
    noise = GradientNoise(AlphaStable(1.5), 1.3, 1.0)
    before = torch.get_rng_state()
    first = noise(torch.zeros(5, 4, 3), 3, generator=rng.generator(1))
    second = noise(torch.zeros(5, 4, 3), 3, generator=rng.generator(1))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(first[0], first[1])


def test_any_loss_can_be_given_noise():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.ones(2, 3)

    def gradients():
        model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    clean = gradients()
    noise = GradientNoise(SymmetricPareto(1.8), 1.5, sigma0=1.0)
    with noise.attach(model.parameters(), rng.generator("attach")):
        noisy = gradients()
    assert all(not torch.equal(a, b) for a, b in zip(clean, noisy, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(clean, gradients(), strict=True))


def test_rare_correction_is_unbiased_with_its_sigma1_and_points_the_wrong_way():
    noise = RareCorrection(c=2.0, probability=0.05)
    gradient = torch.ones(200_000, 2, 2, dtype=torch.float64)
    zeta = noise(gradient, generator=rng.generator("rare"))[:, 0, 0] - 1
    assert float(zeta.mean()) == pytest.approx(0, abs=0.06)
    for alpha in (1.3, 2.0):
        measured = float((zeta.abs() ** alpha).mean()) ** (1 / alpha)
        assert measured == pytest.approx(noise.sigma1(alpha), rel=0.02)
    assert float((1 + zeta < 0).double().mean()) > 0.94
    many = noise(gradient[:2000], batch=10_000, generator=rng.generator("rare"))
    assert (many > 0).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SymmetricPareto(1.0), "no mean"),
        (lambda: AlphaStable(2.1), "1 < index ≤ 2"),
        (lambda: SkewedPareto(0.5), "no mean"),
        (lambda: SymmetricPareto(math.inf), r"index=inf.*AlphaStable\(2\.0\)"),
        (lambda: StudentT(math.inf), r"=inf.*AlphaStable\(2\.0\)"),
        (lambda: SkewedPareto(math.inf), r"index=inf.*AlphaStable\(2\.0\)"),
        (lambda: StudentT(1.5).moment(1.5), "infinite.*tail index is 1.5"),
        (lambda: GradientNoise(AlphaStable(1.5), 1.5, 1.0), "only moments of order below"),
        (lambda: GradientNoise(StudentT(3.0), 2.5, 1.0), "1 < α ≤ 2"),
        (lambda: GradientNoise(StudentT(3.0), 2.0, -1.0), "sigma0=-1"),
        (lambda: RareCorrection(probability=1.0), "0 < π < 1"),
    ],
)
def test_errors_name_the_assumption(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_noise_is_attached_to_parameters_and_not_to_a_module():
    noise = GradientNoise(StudentT(3.0), alpha=1.5, sigma0=0.1)
    with pytest.raises(TypeError, match=r"params is a Linear: expected parameters; give its param"):
        noise.attach(torch.nn.Linear(2, 2), rng.generator("noise"))


@pytest.mark.parametrize("dof", [1e3, 1e6, 1e9, 1e12, 1e15, 1e300])
@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
def test_students_law_with_many_degrees_of_freedom_is_nearly_normal(dof, alpha):
    """E(ν/χ²_ν)^{α/2} = 1 + α(α + 2)/(4ν) + O(1/ν²), times the moment of the normal law."""
    normal = AlphaStable(2.0).moment(alpha, 3)
    expected = normal * (1 + alpha * (alpha + 2) / (4 * dof))
    assert StudentT(dof).moment(alpha, 3) == pytest.approx(
        expected, rel=2e-5 if dof < 1e6 else 1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("independent", [True, False])
def test_noise_of_sixteen_bits_is_that_of_float32_rounded(dtype, independent):
    """σ₁^α‖∇f‖^α of a gradient that float16 holds may be beyond float16, and a mean is a long sum."""
    noise = GradientNoise(
        SymmetricPareto(1.7), 1.5, sigma0=1.0, sigma1=1.0, independent=independent
    )
    gradient = torch.full((20, 300), 100.0, dtype=dtype)
    assert noise.scale(gradient).isfinite().all()
    found = noise(gradient, 50, generator=rng.generator("sixteen"))
    expected = noise(gradient.float(), 50, generator=rng.generator("sixteen"))
    assert torch.equal(found, expected.to(dtype))
