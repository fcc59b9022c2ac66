"""Many small shapes: padded to a few batches, with the steps that each matrix would take alone."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import polarstep as ps
from polarstep.optim.stepping.collect import in_parts
from polarstep.optim.stepping.padded import MANY
from polarstep.optim.stepping.step import Bucket

SHAPES = list(itertools.product((5, 8, 12, 17, 24, 31), (6, 9, 16, 20, 25, 33)))
OTHERS = [(3, 7, 10), (4, 6, 3, 3), (140, 30), (2, 200), (31, 33)]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (
            torch.ops.aten.bmm,
            torch.ops.aten.baddbmm,
            torch.ops.aten.mm,
        )
        return func(*args, **(kwargs or {}))


def model(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in shapes]


def stepped(params: list[Tensor], steps: int = 3, **options: Any) -> ps.Muon:
    optimizer = ps.Muon(params, **{"lr": 0.1} | options)
    g = torch.Generator().manual_seed(1)
    for step in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
            if options.get("nonfinite") == "skip" and step == 1 and len(p) == 12:
                p.grad[0] = torch.nan
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("options", [
    {},
    {"nesterov": False, "weight_decay": 0.1},
    {"nonfinite": "skip", "weight_decay": 0.1},
    {"polar": ps.NewtonSchulz(7)},
    {"polar": ps.NewtonSchulz(6, "cubic", "spectral")},
    {"polar": ps.NewtonSchulz(6, "cubic", 40.0)},
    {"polar": ps.LowRank(40)},
    {"lr_scale": "rms"},
], ids=str)  # fmt: skip
def test_padded_steps_are_the_steps_of_each_matrix(options: dict[str, Any], monkeypatch) -> None:
    padded, alone = model([*SHAPES, *OTHERS]), model([*SHAPES, *OTHERS])
    stepped(padded, **options)
    monkeypatch.setattr("polarstep.optim.stepping.padded.MANY", 10**6)
    stepped(alone, **options)
    for X, Y in zip(padded, alone, strict=True):
        assert X.isfinite().all()
        torch.testing.assert_close(X, Y, atol=1e-4, rtol=0)


@pytest.mark.parametrize("nesterov", [True, False])
def test_padded_steps_of_fused_projections(nesterov: bool, monkeypatch) -> None:
    shapes = [(3 * rows, columns) for rows, columns in SHAPES]

    def cut(params: list[Tensor]) -> Any:
        return [{"params": [p], "split_sizes": (len(p) // 3,) * 3} for p in params]

    def trained() -> list[Tensor]:
        params = model(shapes)
        optimizer = ps.Muon(cut(params), lr=0.1, nesterov=nesterov)
        for _ in range(2):
            for p, X in zip(params, model(shapes), strict=True):
                p.grad = X.detach()
            optimizer.step()
        return params

    padded = trained()
    monkeypatch.setattr("polarstep.optim.stepping.padded.MANY", 10**6)
    for X, Y in zip(padded, trained(), strict=True):
        torch.testing.assert_close(X, Y, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_padded_steps_in_other_precisions(dtype: torch.dtype, monkeypatch) -> None:
    padded, alone = model(SHAPES, dtype), model(SHAPES, dtype)
    stepped(padded)
    monkeypatch.setattr("polarstep.optim.stepping.padded.MANY", 10**6)
    stepped(alone)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-3
    for X, Y in zip(padded, alone, strict=True):
        torch.testing.assert_close(X, Y, atol=tolerance, rtol=0)


def test_many_shapes_take_the_products_of_a_few() -> None:
    params = model(SHAPES)
    stepped(params, 1)
    with Products() as padded:
        stepped(params, 1)
    with Products() as alone:
        for p in params:
            stepped([p], 1)
    assert padded.count < alone.count / 1.5


def test_fewer_shapes_are_not_padded() -> None:
    """So that steps of ordinary models do not change in their last bits."""
    together, alone = model(SHAPES[: MANY - 1]), model(SHAPES[: MANY - 1])
    g = torch.Generator().manual_seed(1)
    optimizers = [ps.Muon(together), *(ps.Muon([p]) for p in alone)]
    for p, q in zip(together, alone, strict=True):
        p.grad = torch.randn(p.shape, generator=g)
        q.grad = p.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(together, alone, strict=True))


def test_hooks_see_every_shape_without_padding() -> None:
    params = model([*SHAPES, *OTHERS])
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    optimizer = ps.Muon([(f"w{i}", p) for i, p in enumerate(params)], momentum=0.0)
    g = torch.Generator().manual_seed(1)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)

    def hook(bucket: Bucket) -> None:
        for name, M, T in zip(bucket.names, bucket.M, bucket.T, strict=True):
            seen.setdefault(name, (M.clone(), T.clone()))

    optimizer.register_polar_hook(hook)
    optimizer.step()
    assert len(seen) == len(params)
    for i, p in enumerate(params[: len(SHAPES)]):
        M, T = seen[f"w{i}"]
        assert torch.equal(M, p.grad)
        torch.testing.assert_close(T, optimizer.defaults["polar"](M), atol=1e-4, rtol=0)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 8))
def test_parts_are_as_few_as_their_order_allows(counts, most):
    parts = list(in_parts(counts, lambda count: count, most))
    assert [count for part in parts for count in part] == counts
    for part, following in pairwise(parts):
        assert sum(part) + following[0] > most  # it would not have had room
    assert all(sum(part) <= most or len(part) == 1 for part in parts)
