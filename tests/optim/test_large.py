"""A large parameter is updated in the memory of its M: the same step, with half the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import polarstep as ps
from polarstep.optim.stepping.collect import momentum_dtype
from polarstep.optim.stepping.large import peak
from polarstep.products.in_place import LARGE


def stepped(shape: tuple[int, ...], **options: Any) -> tuple[Tensor, ps.Muon]:
    g = torch.Generator().manual_seed(0)
    X = torch.nn.Parameter(torch.zeros(shape))
    optimizer = ps.Muon([X], **{"lr": 0.1} | options)
    for _ in range(2):
        X.grad = torch.randn(shape, generator=g)
        optimizer.step()
    return X.detach(), optimizer


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("shape", [(200, 260), (260, 200), (2, 60, 300), (8, 5, 3, 3)], ids=str)
@pytest.mark.parametrize("options", [
    {},
    {"nesterov": False},
    {"polar": ps.NewtonSchulz(4, "cubic"), "nonfinite": "skip"},
    {"polar": ps.NewtonSchulz(3, ((2.0, -1.5, 0.4, 0.1),))},
    {"polar": ps.NewtonSchulz(4, delta=100.0), "weight_decay": 0.1},
], ids=str)  # fmt: skip
def test_a_step_in_place_is_the_same_step(shape, options, monkeypatch) -> None:
    expected, usual = stepped(shape, **options)
    monkeypatch.setattr("polarstep.optim.stepping.large.LARGE", 1)
    X, optimizer = stepped(shape, **options)
    torch.testing.assert_close(X, expected, atol=2e-4, rtol=0)
    (C,), (D,) = ([s["momentum_buffer"] for s in o.state.values()] for o in (optimizer, usual))
    assert torch.equal(C, D)  # M without Nesterov is C itself, which T must not overwrite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_parameter_in_sixteen_bits_is_multiplied_in_float32(dtype, nesterov, monkeypatch) -> None:
    """A CPU multiplies bfloat16 hundreds of times slower, and with fewer digits."""
    ends = []
    for large in (LARGE, 1):
        monkeypatch.setattr("polarstep.optim.stepping.large.LARGE", large)
        X = torch.nn.Parameter(torch.zeros(64, 96, dtype=dtype))
        optimizer = ps.Muon([X], polar=ps.NewtonSchulz(7), nesterov=nesterov)
        for seed in range(2):
            X.grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)).to(dtype)
            optimizer.step()
        assert optimizer.state[X]["momentum_buffer"].dtype == momentum_dtype(dtype)
        ends.append(X.detach().float())
    assert (ends[1] - ends[0]).norm() < 1e-3 * ends[0].norm()


def test_hooks_see_m_and_change_nothing(monkeypatch) -> None:
    monkeypatch.setattr("polarstep.optim.stepping.large.LARGE", 1)
    without, _ = stepped((40, 60), momentum=0.0)
    X = torch.nn.Parameter(torch.zeros(40, 60))
    optimizer = ps.Muon([X], lr=0.1, momentum=0.0)
    seen: list[Tensor] = []
    optimizer.register_polar_hook(lambda bucket: seen.append(bucket.M[0].clone()))
    g = torch.Generator().manual_seed(0)
    for _ in range(2):
        X.grad = torch.randn(40, 60, generator=g)
        optimizer.step()
        assert torch.equal(seen[-1], X.grad)
    assert torch.equal(X.detach(), without)


@pytest.mark.parametrize("scale", [1e-44, 1e38])
def test_the_ends_of_the_range(scale: float) -> None:
    M = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)).sign()
    T, scaled = M.clone(), M * scale
    for X in (T, scaled):
        ps.NewtonSchulz(5).overwrite(X)
    torch.testing.assert_close(scaled, T, atol=1e-5, rtol=0)
    zero = torch.zeros(3, 4)
    ps.NewtonSchulz(5).overwrite(zero)
    assert not zero.any()


def peak_of_a_step(m: int, n: int) -> float:
    """The most bytes that torch has allocated during a step, relative to the parameter."""
    X = torch.nn.Parameter(torch.zeros(m, n))
    optimizer = ps.Muon([X], polar=ps.NewtonSchulz(2, "polar-express"))
    X.grad = torch.randn(m, n, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        optimizer.step()
    total = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    assert most > 0
    return most / (m * n * X.element_size())


@pytest.mark.parametrize("shape", [(512, 2048), (2048, 512), (1024, 1024)], ids=str)
def test_a_step_in_place_takes_half_the_memory(shape: tuple[int, int], monkeypatch) -> None:
    assert peak_of_a_step(*shape) > 2.5
    monkeypatch.setattr("polarstep.optim.stepping.large.LARGE", 1)
    assert peak_of_a_step(*shape) <= peak(*shape) + 1e-3


def test_the_bound_for_large_parameters() -> None:
    """Of 1 GiB, and of 256 MiB, from which parameters are updated in place."""
    assert LARGE == 4 * 8192**2
    assert peak(16384, 16384) < 1.51
    assert peak(8192, 8192) < 1.515
    assert peak(8192, 32768) < 1.14
