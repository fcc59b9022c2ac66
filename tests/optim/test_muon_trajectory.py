"""Equation (1), against ten lines of numpy and against torch's own optimizers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.spectra import gaussian

from polarstep import Exact, Gaussian, LowRank, Muon, NewtonSchulz
from polarstep.maps import Warm

SCALES = {
    "none": lambda m, n: 1.0,
    "spectral": lambda m, n: math.sqrt(max(1, m / n)),
    "fan-ratio": lambda m, n: math.sqrt(m / n),
    "rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


def problem(m, n, dtype=torch.float64):
    """A gradient that depends on where one is, so that any error shows in all later steps."""
    A, B, D = gaussian(m, m, seed=1), gaussian(n, n, seed=2), gaussian(m, n, seed=3)
    A, B, D = (A @ A.mT / m).to(dtype), (B @ B.mT / n).to(dtype), D.to(dtype)
    return lambda X: A @ X @ B - D


def numpy_muon(X, gradient, steps, lr, beta, nesterov, decay, scale):
    C = np.zeros_like(X)
    for _ in range(steps):
        G = gradient(X)
        C = beta * C + G
        M = beta * C + G if nesterov else C
        U, _, Vt = np.linalg.svd(M, full_matrices=False)
        X = (1 - lr * decay) * X - lr * scale(*X.shape) * (U @ Vt)
    return X


def train(optimizer, gradients, steps):
    for _ in range(steps):
        for X, gradient in gradients.items():
            X.grad = gradient(X.detach())
        optimizer.step()


@pytest.mark.parametrize("shape", [(7, 11), (11, 7), (6, 6), (1, 5)], ids=str)
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "polyak"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("scale", [*SCALES, "callable"])
def test_is_equation_1(shape, nesterov, decay, scale):
    function = SCALES.get(scale, lambda m, n: m + 2.0 * n)
    X = torch.nn.Parameter(gaussian(*shape))
    gradient = problem(*shape)
    optimizer = Muon(
        [X],
        0.05,
        momentum=0.9,
        nesterov=nesterov,
        polar=Exact(),
        weight_decay=decay,
        shape_scale=scale if scale in SCALES else function,
    )
    start = X.detach().numpy().copy()
    train(optimizer, {X: gradient}, 8)
    expected = numpy_muon(
        start,
        lambda x: gradient(torch.from_numpy(x)).numpy(),
        *(8, 0.05, 0.9, nesterov, decay, function),
    )
    np.testing.assert_allclose(X.detach().numpy(), expected, atol=1e-10, rtol=0)


def test_the_buffer_is_a_sum():
    X = torch.nn.Parameter(gaussian(4, 6))
    optimizer, total = Muon([X], momentum=0.9), torch.zeros(4, 6).double()
    for step in range(4):
        X.grad = gaussian(4, 6, seed=step)
        optimizer.step()
        total = 0.9 * total + X.grad
        torch.testing.assert_close(optimizer.state[X]["momentum_buffer"], total)


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (8, 8)], ids=str)
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "polyak"])
@pytest.mark.parametrize(
    ("adjust", "scale"), [("original", "spectral"), ("match_rms_adamw", "rms")]
)
def test_follows_torchs_muon(shape, nesterov, adjust, scale):
    """torch keeps a moving average where we keep a sum; T does not see the factor between them.

    Its iteration runs in bfloat16, of which a single step keeps two to three digits.
    """
    options = {"lr": 0.01, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    jordan = NewtonSchulz(5, "jordan")

    def trained(optimizer_class, **more):
        X = torch.nn.Parameter(gaussian(*shape).float())
        optimizer = optimizer_class([X], **(options | more))
        for step in range(8):
            X.grad = gaussian(*shape, seed=step).float()
            optimizer.step()
        return X.detach()

    start = gaussian(*shape).float()
    theirs = trained(torch.optim.Muon, adjust_lr_fn=adjust)
    ours = trained(Muon, polar=jordan, shape_scale=scale)
    error = (ours - theirs).norm() / (theirs - start).norm()
    assert error < 0.02
    # The tolerance means something: any other setting is further away.
    for wrong in (
        {"nesterov": not nesterov},
        {"momentum": 0.8},
        {"weight_decay": 0.0},
        {"shape_scale": "none"},
        {"polar": NewtonSchulz(5, "quintic")},
    ):
        if wrong == {"shape_scale": "none"} and scale == "spectral" and shape[0] <= shape[1]:
            continue  # where the two scales agree
        other = trained(Muon, **({"polar": jordan, "shape_scale": scale} | wrong))
        assert (other - theirs).norm() / (theirs - start).norm() > 1.5 * error, wrong


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adamw_groups_are_torchs_adamw(nonfinite, dtype):
    options = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    ours, theirs = (
        [torch.nn.Parameter(gaussian(*shape).to(dtype)) for shape in [(5,), (3, 4)]]
        for _ in range(2)
    )
    mine = Muon([{"params": ours, "algorithm": "adamw", **options}], nonfinite=nonfinite)
    reference = torch.optim.AdamW(theirs, **options)
    for step in range(6):
        for params, optimizer in ((ours, mine), (theirs, reference)):
            for i, p in enumerate(params):
                p.grad = p.detach() ** 3 - gaussian(*p.shape, seed=7 * step + i).to(dtype)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)
        assert mine.state[a].keys() == reference.state[b].keys()


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": False},
        {"momentum": 0.0, "nesterov": False, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_sgd_groups_are_torchs_sgd(nonfinite, options):
    ours, theirs = (torch.nn.Parameter(gaussian(3, 4)) for _ in range(2))
    mine = Muon([{"params": [ours], "algorithm": "sgd", "lr": 0.1, **options}], nonfinite=nonfinite)
    reference = torch.optim.SGD([theirs], lr=0.1, **options)
    for step in range(6):
        for p, optimizer in ((ours, mine), (theirs, reference)):
            p.grad = p.detach() ** 3 - gaussian(3, 4, seed=step)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "polar",
    [
        NewtonSchulz(5, "quintic"),
        LowRank(4, 2, always_sketch=True),
        LowRank(4, 2, sketch=Warm(), always_sketch=True),
    ],
    ids=lambda polar: polar.describe(12, 18),
)
def test_a_large_bucket_is_worked_off_in_parts_with_one_sketch(polar, monkeypatch):
    draw, draws = Gaussian.draw, []
    monkeypatch.setattr(Gaussian, "draw", lambda *a, **k: draws.append(a) or draw(*a, **k))
    ends, counts = [], []
    for largest in (2**30, 1):  # bytes: all at a time, one at a time
        monkeypatch.setattr("polarstep.muon.LARGEST_ON_A_CPU", largest)
        params = [torch.nn.Parameter(gaussian(12, 18, seed=i)) for i in range(3)]
        params.append(torch.nn.Parameter(gaussian(2, 12, 18, seed=4)))
        optimizer, buckets = Muon(params, lr=0.1, polar=polar), []
        optimizer.register_polar_hook(lambda bucket: buckets.append(len(bucket.M)))  # noqa: B023
        draws.clear()
        for step in range(4):
            for i, p in enumerate(params):
                p.grad = gaussian(*p.shape, seed=10 * step + i)
            optimizer.step()
        ends.append(params)
        counts.append((len(draws), len(buckets)))
    for whole, part in zip(*ends, strict=True):
        torch.testing.assert_close(part, whole, atol=1e-10, rtol=0)
    assert [buckets for _, buckets in counts] == [4, 16]
    assert counts[0][0] == counts[1][0]


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [5, 64, 100])
def test_elementwise_groups_in_16_bits_are_those_of_float64(size, dtype, algorithm, nonfinite):
    """torch's own fused SGD leaves whole vectors of 16-bit parameters where they are on a CPU."""
    group = {"algorithm": algorithm, "lr": 0.1, "nonfinite": nonfinite}
    X = torch.nn.Parameter(gaussian(size).to(dtype))
    exact = torch.nn.Parameter(X.detach().double())
    optimizer = Muon([{"params": [X], **group}, {"params": [exact], **group}])
    for step in range(4):
        X.grad = gaussian(size, seed=step).to(dtype)
        exact.grad = X.grad.double()
        if nonfinite == "skip" and step == 2:
            X.grad[0] = exact.grad[0] = math.nan
        optimizer.step()
    torch.testing.assert_close(X.double(), exact, atol=0.05, rtol=0)
    name = "exp_avg" if algorithm == "adamw" else "momentum_buffer"
    held, expected = (optimizer.state[p][name].double() for p in (X, exact))
    torch.testing.assert_close(held, expected, atol=0.05, rtol=0)
