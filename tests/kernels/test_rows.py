"""Rows normalized on a GPU: their lengths, the numbers they are scaled by, and the update by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polarstep as ps
from polarstep.maps import MapState
from polarstep.ops import ops_of
from polarstep.ops.base import Products
from polarstep.ops.lazy import RowProduct, ScaledRows

SHAPES = [(8, 16), (130, 600), (1, 5)]


def matrices(device: torch.device, m: int, n: int) -> Tensor:
    """Two matrices with rows of very different lengths, one of them zero."""
    g = torch.Generator().manual_seed(m)
    T = torch.randn(2, m, n, generator=g) * torch.logspace(0, -3, m)[:, None]
    T[1, m // 2] = 0
    return T.to(device)


def reference(T: Tensor, beta2: float, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """In float64 and in plain torch."""
    known = None if known is None else known.double()
    scaled, v = Products().normalized_rows(T.double(), beta2, known, torch.float64)
    assert isinstance(scaled, Tensor)
    return scaled, v


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_are_scaled_as_in_plain_torch(
    device: torch.device, m: int, n: int, dtype: torch.dtype
) -> None:
    T = matrices(device, m, n).to(dtype)
    known = None
    for step in range(2):
        got, v = ops_of(device).normalized_rows(T + step, 0.9, known, torch.float32)
        want, moments = reference(T + step, 0.9, known)
        assert isinstance(got, ScaledRows)
        assert torch.allclose(v.double(), moments, rtol=1e-5)
        exact = got.T.double() * (got.factors * got.sizes[:, None])[..., None].double()
        assert torch.allclose(exact, want, rtol=1e-4, atol=1e-6)
        assert got.multiplied_out().dtype == dtype
        # ‖T'‖_F = ‖T‖_F, which a step of that size relies on.
        norms = [torch.linalg.matrix_norm(each.double()) for each in (exact, T + step)]
        assert torch.allclose(*norms, rtol=1e-5)
        known = v


def test_a_zero_matrix_stays_zero_beside_others(device: torch.device) -> None:
    T = torch.cat([torch.zeros(1, 16, 32), torch.ones(1, 16, 32)]).to(device)
    got, v = ops_of(device).normalized_rows(T, 0.95, None, torch.float32)
    assert isinstance(got, ScaledRows)
    assert not got.multiplied_out()[0].any()
    assert not v[0].any()
    assert torch.allclose(got.multiplied_out()[1], T[1])  # rows of one length stay as they are


def test_one_launch_multiplies_out_and_finds_the_lengths(device: torch.device) -> None:
    """Also where a tile reads past the end of a matrix, into the next one."""
    g = torch.Generator().manual_seed(0)
    A, B = (
        torch.randn(2, rows, 96, generator=g).to(device).to(torch.float8_e4m3fn)
        for rows in (144, 80)
    )
    T = RowProduct(A, B, torch.tensor([0.5, 3.0], device=device), 0.125)
    for each in (T, T.mT):
        got, _ = ops_of(device).normalized_rows(each, 0.9, None, torch.float32)
        exact = each.alpha * each.scale[:, None, None].double() * (
            each.A.double() @ each.B.double().mT
        )  # fmt: skip
        want, _ = reference(exact, 0.9, None)
        assert isinstance(got, ScaledRows)
        assert torch.equal(got.T, each.multiplied_out())
        off = (got.multiplied_out().double() - want).abs().max()
        assert float(off) < 2e-3 * float(want.abs().max())


def test_float64_keeps_its_digits(device: torch.device) -> None:
    T = matrices(device, 12, 20).double()
    got, _ = ops_of(device).normalized_rows(T, 0.9, None, torch.float64)
    assert isinstance(got, Tensor)
    assert torch.equal(got, reference(T, 0.9, None)[0])


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(
    "polar",
    [
        ps.NewtonSchulz(3, "quintic"),
        ps.LowRank(4, 2, always_sketch=True),
        ps.Deflated(ps.LowRank(4, 2, always_sketch=True), ps.NewtonSchulz(1, "flat")),
        ps.Deflated(
            ps.LowRank(4, 2, sketch=ps.Warm(), always_sketch=True), ps.NewtonSchulz(1, "flat")
        ),
    ],
    ids=str,
)
def test_a_fused_step_is_the_plain_one(
    device: torch.device, polar: ps.PolarMap, skips: bool
) -> None:
    """Tall and wide matrices, and parts of a stored row; v is the same in the optimizer's state."""
    options = {"nonfinite": "skip"} if skips else {}
    ends, moments = [], []
    for fused in (True, False):
        g = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=g).to(device))
            for shape in ((32, 16), (16, 32), (48, 16))
        ]
        groups = [{"params": params[:2]}, {"params": params[2:], "split_columns": (8, 8)}]
        opt = ps.Muon(
            groups, lr=0.1, weight_decay=0.01, polar=polar, fused=fused,
            transform=ps.NormalizedRows(0.9), **options,
        )  # fmt: skip
        for step in range(6 if device.type == "cuda" else 3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=g).to(device)
            if skips and step == 1:
                params[0].grad[0, 0] = float("inf")  # type: ignore[index]
            opt.step()
        ends.append([p.detach() for p in params])
        moments.append([opt.state[p]["rows"] for p in params[:2]])
        assert bool(opt._replayed.buckets) == fused
    tolerance = 1e-4 if device.type == "cpu" else 0.05
    for one, other in zip((*ends[0], *moments[0]), (*ends[1], *moments[1]), strict=True):
        assert float((one - other).norm()) < tolerance * float(other.norm())


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16], ids=str)
def test_v_of_bfloat16_parameters_is_kept_in_float32(
    device: torch.device, saved: torch.dtype, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """v = 1 goes to 0.999, which is 1 in bfloat16; other code may have cast it to bfloat16."""
    ops = type(ops_of(device))
    monkeypatch.setattr(ops, "dtype", lambda self, given: torch.bfloat16)  # M, as on a GPU
    p = torch.nn.Parameter(torch.zeros(16, 32, dtype=torch.bfloat16, device=device))
    options = {"transform": ps.NormalizedRows(0.999), "nonfinite": "skip" if skips else "propagate"}
    first, opt = (ps.Muon([p], polar=ps.NewtonSchulz(3, "quintic"), **options) for _ in range(2))
    steps = 6 if device.type == "cuda" else 3
    g = torch.Generator().manual_seed(0)
    G = torch.randn(p.shape, generator=g).to(device).bfloat16()
    p.grad = G.clone()
    first.step()
    assert first.state[p]["rows"].dtype == torch.float32
    checkpoint = first.state_dict()
    checkpoint["state"][0]["rows"] = torch.ones(1, 16, dtype=saved, device=device)
    opt.load_state_dict(checkpoint)
    for _ in range(steps):
        p.grad = G.clone()
        opt.step()
    assert bool(opt._replayed.buckets)
    v = opt.state[p]["rows"]
    assert v.dtype == torch.float32
    # A row of T has at most length one, and so a mean square of at most 1/32; some maps pass one.
    low = 0.999**steps
    assert bool(((v > low) & (v < low + steps * 0.001 * 1.5 / 32)).all())


def test_a_transform_of_ones_own_has_only_a_step(device: torch.device) -> None:
    T = matrices(device, 8, 16)
    out, left = ps.NormalizedRows().step(T, T, MapState())
    want, v = reference(T, 0.95, None)
    assert isinstance(out, Tensor)
    assert torch.allclose(out.double(), want, atol=1e-5)
    assert torch.allclose(left["rows"].double(), v, rtol=1e-5)
