"""The fused step takes the same trajectory as the plain one, on every layout and with every map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import polarstep as ps

SHAPES = [(32, 16), (16, 32), (32, 16), (8, 8), (3, 16, 32), (12, 4, 2, 2), (48, 16)]
MAPS = [
    ps.NewtonSchulz(3, "quintic"),
    ps.LowRank(4, 2, always_sketch=True),
    ps.LowRank(4, 2, power=0.5, sketch=ps.Kaczmarz(), always_sketch=True),
    ps.LowRank(4, 2, sketch=ps.Warm(), always_sketch=True),
    ps.Deflated(ps.LowRank(4, 2, always_sketch=True)),
]
WITH_STATE = pytest.mark.parametrize("polar", MAPS[3:], ids=["warm", "deflated"])
ON_GPU = torch.cuda.is_available()
STEPS = 6 if ON_GPU else 3  # a GPU captures its steps after the fourth


def parameters(device: torch.device, polar: ps.PolarMap | None = None) -> list[Tensor]:
    """One of each shape; fewer for a deflated map in the interpreter, where a shape takes a second."""
    shapes = SHAPES[:3] + SHAPES[-1:] if polar == MAPS[-1] and not ON_GPU else SHAPES
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(device)) for s in shapes]


def groups(params: list[Tensor]) -> list[dict[str, Any]]:
    """The last parameter is a fused projection with unequal parts, and steps otherwise."""
    return [
        {"params": params[:-1]},
        {"params": params[-1:], "split_sizes": (32, 8, 8), "lr": 0.3, "momentum": 0.5},
    ]


def set_gradients(params: list[Tensor], step: int, poison: int | None = None) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=g).to(p.device)
        if i == poison:
            p.grad.view(-1)[3] = float("inf")


def close(a: list[Tensor], b: list[Tensor], device: torch.device) -> bool:
    """To float32's rounding on a CPU; on a GPU M is rounded to bfloat16, which moves a sketch."""
    if device.type == "cpu":
        return all(torch.allclose(x, y, atol=1e-5) for x, y in zip(a, b, strict=True))
    return all((x - y).norm() < 0.05 * x.norm() for x, y in zip(a, b, strict=True))


# M is made before any map sees it, so one map does for the momentum without Nesterov's step.
@pytest.mark.parametrize(
    ("polar", "nesterov"), [*((polar, True) for polar in MAPS), (MAPS[1], False)], ids=str
)
def test_fused_equals_plain(device: torch.device, polar: ps.PolarMap, nesterov: bool) -> None:
    ends = []
    for fused in (True, False):
        params = parameters(device, polar)
        opt = ps.Muon(
            groups(params), lr=0.1, weight_decay=0.01, polar=polar, nesterov=nesterov, fused=fused
        )
        for step in range(STEPS):
            set_gradients(params, step)
            opt.step()
        ends.append([p.detach() for p in params])
        assert bool(opt._replayed.buckets) == fused
    assert close(*ends, device)
    for end, start in zip(ends[0], parameters(device, polar), strict=True):
        # Decay alone moves a weight by STEPS / 1000 of its norm, and the last one by three times that.
        assert (end - start).norm() > STEPS / 300 * start.norm()


def test_autograd_sees_that_the_weights_have_changed(device: torch.device) -> None:
    params = parameters(device)
    opt = ps.Muon(groups(params), polar=MAPS[0])
    for step in range(STEPS):
        set_gradients(params, step)
        before = [p._version for p in params]
        opt.step()
        assert all(p._version > version for p, version in zip(params, before, strict=True))
    assert opt._replayed.buckets


def test_memory_of_earlier_maps_and_seeds_is_given_back(device: torch.device) -> None:
    params = parameters(device)
    opt = ps.Muon(groups(params), lr=0.1, polar=MAPS[1], fused=True)
    counts = []
    for step, (polar, seed) in enumerate([(MAPS[1], 0), (MAPS[1], 1), (MAPS[0], 1), (MAPS[1], 0)]):
        for group in opt.param_groups:
            group |= {"polar": polar, "seed": seed}
        set_gradients(params, step)
        opt.step()
        counts.append(len(opt._replayed.buckets))
    assert counts[0] > 0
    assert counts == counts[:1] * 4
    assert not opt._replayed._others


# On a GPU the inner map of the last two runs on the Gram matrix, in float16.
@pytest.mark.parametrize("shape", [(192, 256), (256, 192), (144, 512), (512, 144)], ids=str)
@pytest.mark.parametrize("polar", MAPS[1:4], ids=lambda polar: type(polar.sketch).__name__)
def test_a_sketch_as_wide_as_real_ones_moves_the_weights(
    device: torch.device, polar: ps.LowRank, shape: tuple[int, int]
) -> None:
    """X ← X − T, for the T that hooks see: all of it, and not by weight decay."""
    polar = replace(polar, rank=128, oversample=10)
    p = torch.nn.Parameter(torch.zeros(shape, device=device))
    opt = ps.Muon([p], lr=1.0, shape_scale="none", polar=polar)
    seen: list[Tensor] = []
    precisions: set[torch.dtype] = set()

    def look(bucket: Any) -> None:
        seen.append(bucket.T.clone())
        precisions.update((bucket.M.dtype, bucket.factors.Q.dtype, bucket.factors.Z.dtype))

    opt.register_polar_hook(look)
    steps = 2 if polar.traits.carries else 1  # an interpreted step of this width takes seconds
    for step in range(3 if ON_GPU else steps):
        before = p.detach().clone()
        set_gradients([p], step)
        opt.step()
        T = seen[step][0].float()
        assert T.norm() > 5  # of 138 singular values
        assert (before - p.detach() - T).norm() < 1e-2 * T.norm()
    assert opt._replayed.buckets
    assert len(precisions) == 1  # nothing is converted on the way


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_filters_are_fused_in_either_memory_format(
    device: torch.device, memory_format: torch.memory_format
) -> None:
    # Nine times eight columns are a whole number of vector loads; three, the last dimension, are not.
    ends = []
    for fused in (True, False):
        g = torch.Generator().manual_seed(0)
        W = torch.randn(12, 8, 3, 3, generator=g).to(device, memory_format=memory_format)
        p = torch.nn.Parameter(W)
        opt = ps.Muon([p], lr=0.1, polar=ps.NewtonSchulz(3, "quintic"), fused=fused)
        for _ in range(5):
            p.grad = torch.randn(p.shape, generator=g).to(device, memory_format=memory_format)
            opt.step()
        assert bool(opt._replayed.buckets) == fused
        assert p.is_contiguous(memory_format=memory_format)
        ends.append(p.detach())
    assert close([ends[0]], [ends[1]], device)


@WITH_STATE
def test_nonfinite_gradients_are_skipped_alike(device: torch.device, polar: ps.PolarMap) -> None:
    ends = []
    for fused in (True, False):
        params = parameters(device, polar)
        opt = ps.Muon(
            groups(params), lr=0.1, weight_decay=0.1, polar=polar, nonfinite="skip", fused=fused
        )
        poisoned = STEPS // 2
        for step in range(poisoned + 2):
            before = [p.detach().clone() for p in params]
            set_gradients(params, step, poison=2 if step == poisoned else None)
            opt.step()
            if step == poisoned:
                assert torch.equal(params[2], before[2])
                assert not torch.equal(params[0], before[0])
        ends.append([p.detach() for p in params])
    assert close(*ends, device)


@WITH_STATE
def test_a_hook_sees_the_step_and_does_not_change_it(
    device: torch.device, polar: ps.PolarMap
) -> None:
    ends = []
    for watched in (True, False):
        params = parameters(device, polar)
        opt = ps.Muon(groups(params), lr=0.1, polar=polar)
        seen: list[tuple[str, ...]] = []
        if watched:
            opt.register_polar_hook(lambda bucket, seen=seen: seen.append(bucket.names))
        for step in range(STEPS if ON_GPU else 2):  # from nothing, and from a state
            set_gradients(params, step)
            opt.step()
        ends.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_tables_are_written_again_only_when_something_changed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polarstep.engines import replay_plan

    written = []
    table = replay_plan.shared_table
    monkeypatch.setattr(replay_plan, "shared_table", lambda *a: written.append(a[2]) or table(*a))
    params = parameters(device)[:2]
    opt = ps.Muon(params, lr=0.1, momentum=0.5, polar=MAPS[0])
    set_gradients(params, 0)
    opt.step()
    assert written == [torch.int64, torch.float32]  # once for both buckets
    opt.step()
    assert len(written) == 2
    opt.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    opt.step()
    assert written[2:] == [torch.float32]
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    opt.param_groups[0]["lr"] = 0.1
    kept = params[0].grad
    params[0].grad = torch.zeros_like(kept)
    opt.step()
    assert written[3:] == [torch.int64, torch.float32]
    want = 0.5 * (1 + 0.5 * (1 + 0.5 * 1)) * kept  # C after gradients G, G, G and 0
    assert torch.allclose(opt.state[params[0]]["momentum_buffer"], want, atol=1e-5)


def test_a_scale_that_changes_between_steps_is_asked_at_every_step(device: torch.device) -> None:
    factor, ends = {}, []

    def scale(m: int, n: int) -> float:
        return factor["now"] * m / n

    for fused in (True, False):
        params = parameters(device)[:3]
        opt = ps.Muon(params, lr=0.1, polar=MAPS[0], shape_scale=scale, fused=fused)
        for step in range(6):
            factor["now"] = float(step % 3)
            set_gradients(params, step)
            before = [p.detach().clone() for p in params]
            opt.step()
            still = [torch.equal(p, b) for p, b in zip(params, before, strict=True)]
            assert still == [step % 3 == 0] * 3
        ends.append([p.detach() for p in params])
    assert close(*ends, device)


def test_parameters_the_kernels_cannot_reach_are_updated_plainly(device: torch.device) -> None:
    odd = torch.nn.Parameter(torch.randn(8, 7, device=device))  # rows of 28 bytes
    even = torch.nn.Parameter(torch.randn(8, 8, device=device))
    strided = torch.nn.Parameter(torch.randn(8, 8, device=device).t())
    exact = torch.nn.Parameter(torch.randn(8, 8, device=device))  # its M must not be rounded
    opt = ps.Muon(
        [
            {"params": [odd, even, strided]},
            {"params": [exact], "polar": ps.NewtonSchulz(5, "quintic", dtype=torch.float32)},
        ],
        polar=ps.NewtonSchulz(5, "quintic"),
    )
    exact.grad = torch.randn_like(exact)
    before = [p.detach().clone() for p in (odd, even, strided)]
    for p in (odd, even, strided):
        p.grad = torch.randn_like(p)
    opt.step()
    (bucket,) = opt._replayed.buckets.values()
    assert bucket.count == 1
    assert not any(torch.equal(p, b) for p, b in zip((odd, even, strided), before, strict=True))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 8, 8)], ids=str)
def test_an_empty_parameter_is_nothing_to_do(device: torch.device, shape: tuple[int, ...]) -> None:
    """A layer without outputs or inputs, as pruning leaves it; its neighbours move."""
    empty, other = (torch.nn.Parameter(torch.ones(s, device=device)) for s in (shape, (8, 8)))
    opt = ps.Muon([empty, other], weight_decay=0.1)
    for _ in range(2):
        set_gradients([empty, other], 0)
        opt.step()
    assert opt._replayed.buckets
    assert empty.shape == shape
    assert not torch.equal(other, torch.ones_like(other))


def test_a_split_that_changes_between_steps_is_seen_at_the_next_one(device: torch.device) -> None:
    ends = []
    for fused in (True, False):
        (*_, p) = parameters(device)
        opt = ps.Muon([p], lr=0.1, polar=MAPS[0], fused=fused)
        for step, split in enumerate([None, [32, 8, 8], [32, 8, 8], (16, 16, 16), None]):
            opt.param_groups[0]["split_sizes"] = split
            set_gradients([p], step)
            opt.step()
        assert bool(opt._replayed.buckets) == fused
        ends.append(p.detach())
    assert close([ends[0]], [ends[1]], device)
