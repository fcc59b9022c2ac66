from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.spectra import gaussian

from polarstep.matrix import MatrixView

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


@given(
    batch=st.lists(SIZE, max_size=2),
    rows=st.lists(SIZE, min_size=1, max_size=3),
    columns=st.lists(SIZE, min_size=1, max_size=3),
    repeats=st.integers(1, 3),
    transposed=st.booleans(),
)
def test_cuts_along_both_sides_in_turn_and_transposed(batch, rows, columns, repeats, transposed):
    """Every block, written out by hand from the definition."""
    outputs, inputs = repeats * sum(rows), sum(columns)
    stored = (*batch, inputs, outputs) if transposed else (*batch, outputs, inputs)
    view = MatrixView.of(
        stored,
        layout="transposed" if transposed else "stack",
        split_sizes=rows,
        split_columns=columns,
        split_repeats=repeats,
    )
    X = gaussian(*stored)
    W = (X.mT if transposed else X).reshape(-1, outputs, inputs)
    expected = []
    for top, height in zip(itertools.accumulate([0, *rows]), rows, strict=False):
        for left, width in zip(itertools.accumulate([0, *columns]), columns, strict=False):
            pieces = [
                W[:, turn * sum(rows) + top :][:, :height, left : left + width]
                for turn in range(repeats)
            ]
            expected.append(torch.cat(pieces, dim=1))
    blocks = view.blocks(X)
    assert tuple(tuple(block.shape) for block in blocks) == view.shapes
    oriented = [block.mT if transposed else block for block in blocks]
    if len(oriented) == 1:  # equal blocks: all of the first matrix, then all of the second
        assert torch.equal(oriented[0], torch.stack(expected, dim=1).flatten(0, 1))
    else:
        assert all(torch.equal(a, b) for a, b in zip(oriented, expected, strict=True))
    assert torch.equal(view.assemble(blocks, X.shape), X)
    if view.in_turn:  # as addresses in memory are computed from it
        flat = torch.cat([block.reshape(len(block), -1) for block in blocks], dim=1)
        assert torch.equal(flat.reshape(X.shape), X)
        assert [m for _, m, _ in view.shapes] in ([*view.runs], [*view.runs][:1])
        assert sum(view.runs) == view.rows


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
        (
            (6, 4),
            {"layout": "rows"},
            r"layout='rows': expected one of auto, conv, stack, transposed",
        ),
        (
            (192, 8),
            {"split_sizes": (64, 64, 32), "name": "blocks.3.attn.weight"},
            r"blocks.3.attn.weight has split_sizes=\(64, 64, 32\), which sum to 160, "
            r"but the weight has 192 rows; give positive sizes",
        ),
        ((6, 4), {"split_sizes": (6, 0)}, r"positive sizes along the rows that sum to 6"),
        ((6, 4), {"split_sizes": (8, -2)}, r"positive sizes"),
        (
            (768, 2304),
            {"split_sizes": (256, 256, 256), "layout": "transposed"},
            r"sum to 768, but the weight has 2304 outputs \(its columns, as it is stored transposed\); "
            r"give positive sizes along the outputs that sum to 2304",
        ),
        (
            (12, 4),
            {"split_sizes": (2, 2), "split_repeats": 4},
            r"split_sizes=\(2, 2\) 4 times in turn, which sum to 16, but the weight has 12 rows",
        ),
        (
            (12, 4),
            {"split_sizes": (2, 2), "split_repeats": 2},
            r"which sum to 8, but the weight has 12 rows; give positive sizes .* sum to 6$",
        ),
        (
            (8, 4),
            {"split_sizes": (4, 4), "split_repeats": 3},
            r"split_repeats=3, which does not divide its 8 rows: expected how often",
        ),
        ((6, 4), {"split_repeats": 2}, r"split_repeats=2 without split_sizes: expected the sizes"),
        ((6, 4), {"split_columns": (2, 1)}, r"split_columns=\(2, 1\), which sum to 3.*4 inputs"),
    ],
)
def test_bad_views(shape, options, message):
    with pytest.raises(ValueError, match=message):
        MatrixView.of(shape, **options)
