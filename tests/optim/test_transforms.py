"""What comes after T: normalized rows, a transform of a user's own, and their state."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.spectra import gaussian
from torch import Tensor
from torch.nn import Parameter

import polarstep as ps
from polarstep.maps import MapState

MAPS = [
    ps.NewtonSchulz(5, "polar-express"),
    ps.LowRank(3, 2, always_sketch=True),
    ps.LowRank(3, 2, sketch=ps.Warm(), always_sketch=True),
    ps.Deflated(ps.LowRank(3, 2, always_sketch=True), ps.NewtonSchulz(2, "quintic")),
    ps.Deflated(ps.LowRank(3, 2, sketch=ps.Warm(), always_sketch=True), ps.NewtonSchulz(1, "flat")),
    ps.Deflated(ps.LowRank(3, 2, sketch=ps.Warm(), always_sketch=True)),
    ps.Deflated(ps.LowRank(3, 2, sketch=ps.Kaczmarz(), always_sketch=True)),
]


def written_out(T: Tensor, v: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """NorMuon's formula, row by row."""
    v = beta2 * v + (1 - beta2) * T.square().mean(-1)
    N = T / v.sqrt()[:, None]
    return N * (T.norm() / N.norm()), v


@pytest.mark.parametrize("polar", MAPS, ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_rows_are_normalized_as_written(polar: ps.PolarMap, shape: tuple[int, int]) -> None:
    plain, normal = (Parameter(torch.zeros(shape, dtype=torch.float64)) for _ in range(2))
    options = {"lr": 0.1, "polar": polar, "shape_scale": "none"}
    optimizers = [
        ps.Muon([plain], **options),
        ps.Muon([normal], transform=ps.NormalizedRows(0.9), **options),
    ]
    v = torch.zeros(shape[0], dtype=torch.float64)
    for k in range(6):
        before = [p.detach().clone() for p in (plain, normal)]
        for p, optimizer in zip((plain, normal), optimizers, strict=True):
            p.grad = gaussian(*shape, seed=k)
            optimizer.step()
        T = (before[0] - plain.detach()) / 0.1
        expected, v = written_out(T, v, 0.9)
        torch.testing.assert_close((before[1] - normal.detach()) / 0.1, expected)
    torch.testing.assert_close(optimizers[1].state[normal]["rows"][0], v)


def test_zero_rows_and_zero_matrices_stay_zero() -> None:
    T = torch.ones(2, 3, 4)
    T[0, 1], T[1] = 0, 0
    out, left = ps.NormalizedRows().step(T, T, MapState())
    assert bool(out.isfinite().all())
    assert not out[0, 1].any()
    assert not out[1].any()
    assert left["rows"].shape == (2, 3)


def test_the_update_keeps_the_norm_of_t_and_is_certified_after_it() -> None:
    W = Parameter(torch.zeros(16, 24))
    optimizer = ps.Muon([W], transform=ps.NormalizedRows())
    seen = []
    optimizer.register_polar_hook(seen.append)
    for k in range(3):
        W.grad = gaussian(16, 24, seed=k).float() * torch.logspace(-2, 0, 16)[:, None]
        optimizer.step()
    bucket = seen[-1]
    T = ps.NewtonSchulz(5, "polar-express")(bucket.M)
    torch.testing.assert_close(bucket.T.norm(), T.norm())
    exact = ps.certify(bucket.M, bucket.T)
    cheap = ps.certificate.cheap_certificate(bucket.M, bucket.T, bucket.map, bucket.factors)
    assert bool(cheap.gamma >= exact.gamma - 1e-6)
    assert bool(cheap.nu >= exact.nu - 1e-6)
    assert "rows normalized" in str(optimizer.routes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_second_moment_does_not_stand_still(dtype: torch.dtype) -> None:
    """A GPU has M in bfloat16, whose numbers are further apart than v moves in a step."""
    T = (gaussian(1, 4, 32) * torch.logspace(-2, 0, 4)[:, None]).to(dtype)
    carry = MapState()
    for _ in range(200):
        _, carry = ps.NormalizedRows(0.999).step(T, T, carry)
    exact = (1 - 0.999**200) * T.double().square().mean(-1)
    torch.testing.assert_close(carry["rows"].double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("split", [None, (2, 4)], ids=str)
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_v_of_parameters_in_16_bits_is_that_of_float32(dtype, split, nonfinite) -> None:
    """In bfloat16 v would end at 4/5 of its value, where a step adds less than half its last digit."""
    moments = []
    for each in (dtype, torch.float32):
        W = Parameter(torch.zeros(6, 8, dtype=each))
        options = {
            "split_sizes": split,
            "nonfinite": nonfinite,
            "polar": ps.NewtonSchulz(3, "quintic"),
        }
        optimizer = ps.Muon([W], lr=1e-3, transform=ps.NormalizedRows(0.99), **options)
        for _ in range(300):
            W.grad = gaussian(6, 8, seed=1).to(dtype).to(each)
            optimizer.step()
        keys = ["rows"] if split is None else ["rows", "rows.1"]
        moments.append([optimizer.state[W][key] for key in keys])
    for v, exact in zip(*moments, strict=True):
        assert v.dtype == torch.float32
        # M in bfloat16 has eight bits, and so T is off by some thousandths.
        torch.testing.assert_close(v, exact, rtol=0.03, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_v_of_a_checkpoint_in_any_precision_goes_on(dtype, saved) -> None:
    """v in float32 keeps its digits in a 16-bit model; v in 16 bits, of before, is cast up."""
    W = Parameter(torch.zeros(6, 8, dtype=dtype))
    optimizers = [ps.Muon([W], transform=ps.NormalizedRows(0.999)) for _ in range(2)]
    W.grad = gaussian(6, 8, seed=1).to(dtype)
    optimizers[0].step()
    checkpoint = optimizers[0].state_dict()
    v = (1 + gaussian(1, 6, seed=2).abs()).to(saved)
    checkpoint["state"][0]["rows"] = v
    optimizers[1].load_state_dict(checkpoint)
    W.grad.zero_()
    W.grad[0, 0] = 1e-3
    seen = []
    optimizers[1].register_polar_hook(lambda bucket: seen.append(bucket.M))
    optimizers[1].step()
    found = optimizers[1].state[W]["rows"]
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    T = ps.NewtonSchulz(5, "polar-express")(seen[0].double())
    exact = 0.999 * v.double() + 0.001 * T.square().mean(-1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def test_other_rows_than_those_of_the_last_step_start_anew() -> None:
    """``layout`` may be written to a group; the rows of 8×12 matrices are then the columns."""
    W, fresh = Parameter(torch.zeros(8, 12)), Parameter(torch.zeros(8, 12))
    options = {
        "momentum": 0.0,
        "polar": ps.NewtonSchulz(5, "quintic"),
        "transform": ps.NormalizedRows(),
    }
    optimizer = ps.Muon([W], **options)
    for k in range(2):
        W.grad = gaussian(8, 12, seed=k).float()
        optimizer.step()
    optimizer.param_groups[0]["layout"] = "transposed"
    W.data.zero_()
    for p, its in ((W, optimizer), (fresh, ps.Muon([fresh], layout="transposed", **options))):
        p.grad = gaussian(8, 12, seed=2).float()
        its.step()
    assert torch.equal(W, fresh)
    assert optimizer.state[W]["rows"].shape == (1, 12)


@dataclass(frozen=True)
class Halved(ps.Transform):
    """A transform of a user's own, without state."""

    def step(self, T: Tensor, M: Tensor, carry: MapState) -> tuple[Tensor, MapState]:
        return T / 2, MapState()


def test_a_transform_of_ones_own() -> None:
    whole, half = Parameter(torch.zeros(8, 12)), Parameter(torch.zeros(8, 12))
    for W, transform in ((whole, None), (half, Halved())):
        optimizer = ps.Muon([W], transform=transform)
        W.grad = gaussian(8, 12).float()
        optimizer.step()
    assert torch.equal(half, whole / 2)


def test_what_is_no_transform_is_refused() -> None:
    with pytest.raises(TypeError, match=r"transform='rows': expected None or a transform"):
        ps.Muon([Parameter(torch.zeros(2, 2))], transform="rows")
    with pytest.raises(ValueError, match=r"beta2=1: expected 0 ≤ beta2 < 1"):
        ps.NormalizedRows(1)
