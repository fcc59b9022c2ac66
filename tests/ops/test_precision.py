"""Which precision a device multiplies in, and at which scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.spectra import gaussian

from polarstep.numerics import unit_scaled
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


def test_product_dtype_on_a_cpu():
    expected = {
        torch.float64: torch.float64,
        torch.float32: torch.float32,
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
    }
    for dtype, products in expected.items():
        assert CPU.dtype(dtype) == products


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
