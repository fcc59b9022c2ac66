"""A step in a CUDA graph of the user's own: sketches are fresh and the state goes on at every replay.

Without a GPU a "replay" is the step again, as it runs while something is captured.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.captures import as_if_captured
from torch import Tensor, nn

import polarstep as ps

SHAPES = [(48, 96), (96, 48), (48, 96), (64, 64)]  # three buckets, side by side on a GPU
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="captures nothing without a GPU")

Capture = Callable[[Callable[[], None]], Callable[[], object]]


@pytest.fixture
def capture(device: torch.device) -> Capture:
    """Run a function a few times, capture it, return the replay."""

    def on_gpu(function: Callable[[], None]) -> Callable[[], object]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):  # after four the optimizer has captured a graph for itself
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        # Whoever gets memory that the capture was done with, on either side, may write into it.
        for size in [2**k for k in range(16)] * 4:
            torch.full((size,), 7, dtype=torch.uint8).pin_memory()
            torch.full((size,), 7, dtype=torch.uint8, device=device)
        return graph.replay

    def on_cpu(function: Callable[[], None]) -> Callable[[], object]:
        for _ in range(2):  # from nothing, and from a state
            function()

        def replay() -> None:
            with as_if_captured():
                function()

        return replay

    return on_gpu if device.type == "cuda" else on_cpu


def gradients(device: torch.device, seed: int) -> list[Tensor]:
    """With singular values 1, 2^-½, 3^-½, …: a sketch finds some and misses others."""
    g, found = torch.Generator().manual_seed(seed), []
    for m, n in SHAPES:
        U, _, Vh = torch.linalg.svd(torch.randn(m, n, generator=g), full_matrices=False)
        found.append((U * torch.arange(1, min(m, n) + 1) ** -0.5 @ Vh).to(device))
    return found


def start(device: torch.device, polar: ps.LowRank, fused: bool) -> tuple[list[Tensor], ps.Muon]:
    """Parameters whose steps are T of their gradient: no momentum, lr = 1, no scale."""
    params = [nn.Parameter(torch.zeros(shape, device=device)) for shape in SHAPES]
    for p, G in zip(params, gradients(device, 0), strict=True):
        p.grad = G
    options = {"lr": 1.0, "momentum": 0.0, "shape_scale": "none"}
    return params, ps.Muon(params, polar=polar, fused=fused, **options)


def steps(params: list[Tensor], replay: Callable[[], object]) -> list[Tensor]:
    """T of every parameter, from what one replay does to it."""
    before = [p.detach().clone() for p in params]
    replay()
    return [b - p.detach() for b, p in zip(before, params, strict=True)]


def alignments(params: list[Tensor], T: list[Tensor], width: int) -> list[float]:
    """⟨G, T⟩ as a part of what the best T of this rank has, the sum of G's largest singular values."""
    best = [float(torch.linalg.svdvals(p.grad)[:width].sum()) for p in params]
    return [float((p.grad * t).sum()) / b for p, t, b in zip(params, T, best, strict=True)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("sketch", "least"), [(ps.Gaussian(), 0.9), (ps.Kaczmarz(), 0.7)], ids=str)
def test_every_replay_draws_a_fresh_sketch(
    device: torch.device, capture: Capture, sketch: ps.Sketch, least: float, fused: bool
) -> None:
    polar = ps.LowRank(12, 4, sketch=sketch, always_sketch=True)
    params, opt = start(device, polar, fused)
    replay = capture(opt.step)
    found = [steps(params, replay) for _ in range(3)]
    for T in found:
        assert min(alignments(params, T, polar.width)) > least
        assert all(torch.linalg.matrix_norm(t, 2) < 1.02 for t in T)
    for a, b in ((0, 1), (1, 2), (0, 2)):
        for s, t in zip(found[a], found[b], strict=True):
            assert (s - t).norm() > 0.1 * s.norm()


@ON_GPU
@pytest.mark.parametrize("fused", [True, False])
def test_the_seed_of_a_replay_is_torchs(
    device: torch.device, capture: Capture, fused: bool
) -> None:
    params, opt = start(device, ps.LowRank(12, 4, always_sketch=True), fused)
    replay = capture(opt.step)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(steps(params, replay))
    for same, again, other in zip(*found, strict=True):
        assert (same - again).norm() < 0.01 * same.norm()  # X is not where it was: it rounds
        assert (same - other).norm() > 0.1 * same.norm()


# With the second Z is never made, and the state has two parts.
@pytest.mark.parametrize(
    "inner",
    [ps.NewtonSchulz(7, "quintic"), ps.NewtonSchulz(4, "polar-express-sketch")],
    ids=["with Z", "without Z"],
)
@pytest.mark.parametrize("fused", [True, False])
def test_a_warm_sketch_goes_on_from_replay_to_replay(
    device: torch.device, capture: Capture, fused: bool, inner: ps.NewtonSchulz
) -> None:
    polar = ps.LowRank(12, 4, power=0, sketch=ps.Warm(), inner=inner, always_sketch=True)
    params, opt = start(device, polar, fused)
    replay = capture(opt.step)
    places = [opt.state[p]["basis"].data_ptr() for p in params]
    for p, G in zip(params, gradients(device, 1), strict=True):
        p.grad.copy_(G)
    found = [alignments(params, steps(params, replay), polar.width) for _ in range(12)]
    assert max(found[0]) < 0.9  # it started from where other gradients had led
    assert min(found[-1]) > 0.97
    assert min(alignments(params, steps(params, opt.step), polar.width)) > 0.97  # outside, too
    assert places == [opt.state[p]["basis"].data_ptr() for p in params]
    assert min(alignments(params, steps(params, replay), polar.width)) > 0.97


def test_a_whole_training_step_can_be_captured(device: torch.device, capture: Capture) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)]
    model = nn.Sequential(*layers).to(device)
    x, y = torch.randn(128, 32, device=device), torch.randint(8, (128,), device=device)
    polar = ps.LowRank(12, 4, sketch=ps.Warm(), always_sketch=True)
    opt = ps.muon_for(model, lr=0.05, polar=polar, nonfinite="skip")
    losses = torch.zeros((), device=device)

    def step() -> None:
        opt.zero_grad(set_to_none=True)  # gradients are the graph's own
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.copy_(loss.detach())

    replay = capture(step)
    early = float(losses)
    for _ in range(40):
        replay()
    assert float(losses) < 0.5 * early
    before = [p.detach().clone() for p in model.parameters()]
    x[0, 0] = float("nan")
    replay()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
