"""What 16-bit parameters keep in float32 is kept in float32 with every plan, and on the way too."""

from __future__ import annotations

import pytest
import torch
from tests.ranks import narrow
from tests.ranks.launch import launched, needs_gloo

from polarstep.ranks import collectives

RANKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank ended with."""
    return launched(narrow.__name__, RANKS, tmp_path_factory.mktemp("narrow"))


@needs_gloo
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", narrow.CASES)
def test_steps_and_state_are_those_of_one_process(name, dtype, found):
    alone = narrow.stepped(dtype)
    for there in found:
        for ours, theirs in zip(alone, there[name, dtype], strict=True):
            assert ours.keys() == theirs.keys()
            # 16-bit products, and T after them, may differ in last digits with the size of the batch.
            off = {"rtol": 0.01, "atol": 0.01} if "rows" in ours else {"rtol": 1e-3, "atol": 0.0}
            for key, expected in ours.items():
                torch.testing.assert_close(theirs[key], expected, **off)
            if "rows" in ours:
                low, v = 0.999**2, theirs["rows"]
                assert v.dtype == torch.float32
                assert torch.all((v > low) & (v < low + 5e-4))  # a mean of T² is below 1/4 here


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,)], ids=str)
def test_words_are_numbers_bit_for_bit(wide, dtype, shape):
    X = torch.randn(shape, dtype=wide)
    flat = collectives.words(X, wide, dtype)
    assert flat.dtype == dtype
    assert flat.numel() == X.numel() * wide.itemsize // dtype.itemsize
    beside = torch.cat([torch.zeros(1, dtype=dtype), flat])[1:]  # at an odd place in memory
    assert torch.equal(collectives.from_words(beside, wide).view(shape), X)
