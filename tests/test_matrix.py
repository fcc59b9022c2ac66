from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.spectra import gaussian

from polarstep.matrix import (
    MatrixView,
    has_tiles,
    normalized,
    product_dtype,
    product_like,
    sketch_dtype,
    unit_scaled,
)

SIZE = st.integers(1, 5)


@given(
    shape=st.lists(SIZE, min_size=2, max_size=5),
    layout=st.sampled_from(["auto", "conv", "stack"]),
    data=st.data(),
)
def test_blocks_and_assemble_are_inverse(shape, layout, data):
    rows = shape[0] if layout == "conv" or (layout == "auto" and len(shape) >= 4) else shape[-2]
    cuts = data.draw(st.sets(st.integers(1, rows - 1)) if rows > 1 else st.just(set()), "cuts")
    edges = [0, *sorted(cuts), rows]
    split = [b - a for a, b in itertools.pairwise(edges)]
    view = MatrixView.of(shape, layout=layout, split_sizes=split)
    X = gaussian(*shape)
    blocks = view.blocks(X)
    assert tuple(tuple(block.shape) for block in blocks) == view.shapes
    assert torch.equal(view.assemble(blocks, X.shape), X)
    assert sum(math.prod(s) for s in view.shapes) == X.numel()


def test_what_the_matrices_are():
    conv = gaussian(8, 3, 5, 5)
    assert torch.equal(MatrixView.of(conv.shape).blocks(conv)[0][0], conv.reshape(8, 75))
    experts = gaussian(4, 6, 7)
    assert torch.equal(MatrixView.of(experts.shape).blocks(experts)[0], experts)
    one_d = MatrixView.of((8, 3, 5), layout="conv")
    assert one_d.shapes == ((1, 8, 15),)
    fused = gaussian(10, 4)
    blocks = MatrixView.of(fused.shape, split_sizes=(4, 3, 3)).blocks(fused)
    assert torch.equal(blocks[1][0], fused[4:7])
    equal = MatrixView.of((9, 4), split_sizes=(3, 3, 3))
    assert equal.shapes == ((3, 3, 4),)  # equal blocks are one batch
    assert str(equal) == "3·(3×4)"
    assert str(MatrixView.of((10, 4), split_sizes=(4, 6))) == "4×4 + 6×4"


def test_blocks_are_views():
    X = gaussian(4, 6, 7)
    MatrixView.of(X.shape, split_sizes=(4, 2)).blocks(X)[1].zero_()
    assert not X[:, 4:].any()


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((7,), {}, r"shape \(7,\).*fewer than two dimensions; give it to AdamW or SGD"),
        ((), {}, r"fewer than two dimensions"),
        ((6, 4), {"layout": "rows"}, r"layout='rows': expected one of auto, conv, stack"),
        (
            (192, 8),
            {"split_sizes": (64, 64, 32), "name": "blocks.3.attn.weight"},
            r"blocks.3.attn.weight has split_sizes=\(64, 64, 32\), which sum to 160, "
            r"but the weight has 192 rows; give positive sizes",
        ),
        ((6, 4), {"split_sizes": (6, 0)}, r"positive sizes along the rows that sum to 6"),
        ((6, 4), {"split_sizes": (8, -2)}, r"positive sizes"),
    ],
)
def test_bad_views(shape, options, message):
    with pytest.raises(ValueError, match=message):
        MatrixView.of(shape, **options)


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
    N = normalized(X, torch.float32)
    norms = torch.linalg.matrix_norm(N)
    torch.testing.assert_close(norms, torch.tensor([1.0, 0, 1]), atol=1e-6, rtol=0)
    assert normalized(X, torch.bfloat16).dtype == torch.bfloat16


def test_product_dtype_on_a_cpu():
    expected = {
        torch.float64: torch.float64,
        torch.float32: torch.float32,
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
    }
    for dtype, products in expected.items():
        assert product_dtype(torch.zeros(1, dtype=dtype)) == products


def test_directions_are_found_in_bfloat16_where_a_cpu_has_tiles(monkeypatch):
    cpu, half = torch.device("cpu"), torch.bfloat16
    monkeypatch.setattr("polarstep.matrix.has_tiles", lambda: True)
    assert sketch_dtype(512, 2048, torch.float32, cpu) == half
    assert sketch_dtype(511, 2048, torch.float32, cpu) == torch.float32  # the casts cost as much
    assert sketch_dtype(512, 2048, torch.float64, cpu) == torch.float64
    assert sketch_dtype(512, 2048, torch.float32, torch.device("cuda")) == torch.float32
    monkeypatch.setattr("polarstep.matrix.has_tiles", lambda: False)
    assert sketch_dtype(512, 2048, torch.float32, cpu) == torch.float32


@pytest.mark.filterwarnings("ignore:TF32")  # torch says it of flags that do not concern this
def test_tiles_are_for_the_library_that_uses_them(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    available = torch.backends.mkldnn.is_available()
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
