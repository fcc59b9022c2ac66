"""No kernel is launched on more matrices than the second dimension of CUDA's grid takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polarstep as ps
from polarstep import kernels

triton = pytest.importorskip("triton")

MOST = 3
MAPS = [
    ps.NewtonSchulz(2, "quintic"),
    ps.LowRank(4, 2, sketch=ps.Warm(), always_sketch=True),
    ps.Deflated(ps.LowRank(4, 2, always_sketch=True), rest=ps.NewtonSchulz(1, "flat")),
]


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grid of every launch from here on."""
    found: list[tuple[int, ...]] = []
    # Of compiled kernels, and of interpreted ones.
    for kind in {triton.runtime.KernelInterface, type(_some_kernel())}:
        launch = kind.__getitem__

        def recorded(self: Any, grid: tuple[int, ...], launch: Any = launch) -> Any:
            found.append(grid)
            return launch(self, grid)

        monkeypatch.setattr(kind, "__getitem__", recorded)
    return found


def _some_kernel() -> Any:
    from polarstep.kernels.momentum import _momentum_kernel

    return _momentum_kernel


def most_at_a_time(grids: list[tuple[int, ...]]) -> int:
    return max((grid[1] for grid in grids if len(grid) > 1), default=0)


@pytest.mark.parametrize("polar", MAPS, ids=["full space", "warm", "deflated"])
@pytest.mark.parametrize("shape_scale", ["spectral", "rms"])
@pytest.mark.parametrize(
    "shapes", [[(16, 32)] * 7, [(7, 16, 32), (16, 32)]], ids=["many parameters", "a stack"]
)
def test_a_step_on_many_matrices_is_made_in_parts(
    device: torch.device,
    grids: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    polar: ps.PolarMap,
    shape_scale: Any,
    shapes: list[tuple[int, ...]],
) -> None:
    ends = []
    for most in (kernels.MOST_MATRICES, MOST):
        monkeypatch.setattr(kernels, "MOST_MATRICES", most)
        g = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, generator=g).to(device)) for s in shapes]
        optimizer = ps.Muon(params, lr=0.1, polar=polar, shape_scale=shape_scale, nonfinite="skip")
        grids.clear()
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape, generator=g).to(device)
            optimizer.step()
        assert (most_at_a_time(grids) > MOST) == (most > MOST)
        ends.append([p.detach() for p in params])
    tolerance = 1e-5 if device.type == "cpu" else 0.05
    for one, other in zip(*ends, strict=True):
        assert (one - other).norm() <= tolerance * one.norm()


@pytest.mark.parametrize("polar", MAPS, ids=["full space", "warm", "deflated"])
def test_a_map_of_many_matrices_is_made_in_parts(
    device: torch.device,
    grids: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    polar: ps.PolarMap,
) -> None:
    M = torch.randn(7, 16, 32, generator=torch.Generator().manual_seed(0)).to(device)
    whole = polar(M, generator=torch.Generator(device).manual_seed(0))
    launched = most_at_a_time(grids)
    assert launched == 7 or polar != MAPS[-1]  # the others need no kernel in the interpreter
    grids.clear()
    monkeypatch.setattr(kernels, "MOST_MATRICES", MOST)
    parts = polar(M, generator=torch.Generator(device).manual_seed(0))
    assert most_at_a_time(grids) == min(launched, MOST)
    torch.testing.assert_close(parts, whole)


def test_a_matrix_whose_entries_32_bits_cannot_count_is_refused(device, monkeypatch):
    """A stack may have more entries in all: kernels count its matrices in 64 bits."""
    large, stack = (
        torch.nn.Parameter(torch.ones(shape, device=device)) for shape in ((16, 32), (9, 8, 16))
    )
    optimizer = ps.Muon([("large", large), ("stack", stack)], lr=0.1)
    large.grad, stack.grad = torch.ones_like(large), torch.ones_like(stack)
    monkeypatch.setattr(kernels, "MOST_ENTRIES", 511)
    with pytest.raises(
        ValueError, match="large has 16×32 entries: expected less than 2³¹ on a GPU"
    ):
        optimizer.step()
    assert torch.equal(stack, torch.ones_like(stack))
    monkeypatch.setattr(kernels, "MOST_ENTRIES", 512)
    optimizer.step()
    assert not torch.equal(stack, torch.ones_like(stack))
