"""Which precision a device multiplies in, and at which scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.spectra import gaussian

from polarstep.numerics import product_like, unit_scaled
from polarstep.ops.cpu import Cpu, has_tiles
from polarstep.ops.cuda import Cuda

CPU = Cpu()


@given(exponent=st.integers(-140, 120), data=st.data())
def test_unit_scaled_is_an_exact_scaling(exponent, data):
    X = gaussian(2, 3, 4, seed=data.draw(st.integers(0, 9))).float() * 2.0**exponent
    before = X.clone()
    scaled, s = unit_scaled(X)
    assert torch.equal(X, before)
    assert (torch.frexp(s).mantissa == 0.5).all()  # powers of two
    assert torch.equal(scaled / s, X)
    if exponent > -120:
        largest = scaled.abs().amax((-2, -1))
        assert ((largest >= 0.5) & (largest < 1)).all()


def test_unit_scaled_of_zero_and_nan():
    zero, s = unit_scaled(torch.zeros(2, 3, 4))
    assert not zero.any()
    assert (s == 1).all()
    X = torch.ones(2, 3, 4)
    X[0, 0, 0] = math.nan
    scaled, _ = unit_scaled(X)
    assert scaled[0].isnan().any()
    assert torch.equal(scaled[1], torch.full((3, 4), 0.5))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_normalized_has_norm_one_at_any_scale(scale):
    X = scale * gaussian(3, 5, 7).float()
    X[1] = 0
    N = CPU.normalized(X, torch.float32)
    norms = torch.linalg.matrix_norm(N)
    torch.testing.assert_close(norms, torch.tensor([1.0, 0, 1]), atol=1e-6, rtol=0)
    assert CPU.normalized(X, torch.bfloat16).dtype == torch.bfloat16


def test_product_dtype_on_a_cpu():
    expected = {
        torch.float64: torch.float64,
        torch.float32: torch.float32,
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
    }
    for dtype, products in expected.items():
        assert CPU.dtype(dtype) == products


def test_full_space_is_in_bfloat16_where_a_cpu_has_tiles(monkeypatch):
    monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda: True)
    for each in (torch.float32, torch.bfloat16, torch.float16):
        assert CPU.full_dtype(192, 700, each) == torch.bfloat16
        assert CPU.full_dtype(700, 192, each) == torch.bfloat16
        assert CPU.full_dtype(191, 700, each) == torch.float32  # the casts cost as much
    assert CPU.full_dtype(512, 700, torch.float64) == torch.float64
    assert CPU.full_dtype(8192, 8192, torch.float32) == torch.bfloat16
    monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda: False)
    assert CPU.full_dtype(512, 700, torch.float32) == torch.float32


def test_directions_are_found_in_bfloat16_where_a_cpu_has_tiles(monkeypatch):
    monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda: True)
    assert CPU.sketch_dtype(512, 2048, torch.float32) == torch.bfloat16
    assert CPU.sketch_dtype(511, 2048, torch.float32) == torch.float32  # the casts cost as much
    assert CPU.sketch_dtype(512, 2048, torch.float64) == torch.float64
    assert Cuda().sketch_dtype(512, 2048, torch.float32) == torch.float32
    monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda: False)
    assert CPU.sketch_dtype(512, 2048, torch.float32) == torch.float32


@pytest.mark.filterwarnings("ignore:TF32")  # torch says it of flags that do not concern this
def test_tiles_are_for_the_library_that_uses_them(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    available = torch.backends.mkldnn.is_available()
    with torch.backends.mkldnn.flags(enabled=True):
        assert has_tiles() == available
    with torch.backends.mkldnn.flags(enabled=False):
        assert not has_tiles()
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert not has_tiles()


def test_product_like_keeps_the_layout():
    A, B, X = gaussian(2, 3, 4), gaussian(2, 4, 5), gaussian(2, 3, 5)
    for like in (X, X.mT.contiguous().mT):
        product = product_like(like, A, B)
        torch.testing.assert_close(product, A @ B)
        assert product.stride() == like.stride()
