"""``shape_scale="rms"`` divides by the same number with every plan, also where it is bounded by ℓ/9."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from tests.ranks import norms
from tests.ranks.launch import launched, needs_gloo

RANKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank ended with."""
    return launched(norms.__name__, RANKS, tmp_path_factory.mktemp("norms"))


@pytest.fixture(scope="module")
def alone():
    """The steps of one process."""
    return {name: norms.moved(name) for name in norms.MAPS}


@needs_gloo
@pytest.mark.parametrize(("plan", "cut", "name"), norms.CASES)
def test_steps_are_those_of_one_process(plan, cut, name, found, alone):
    for there in found:
        for ours, theirs in zip(alone[name], there[plan, cut, name], strict=True):
            torch.testing.assert_close(theirs, ours, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["sketched", "warm"])
def test_the_steps_have_the_length_of_the_formula(name, alone):
    """0.2·√(mn)·T/max(‖T‖_F, √ℓ/3); both sides of the maximum are met."""
    sizes = []
    where = product(norms.SHAPES, norms.SPECTRA)
    unscaled = norms.moved(name, shape_scale="none")
    for (shape, _), step, T in zip(where, alone[name], unscaled, strict=True):
        norm, least = float(T.norm()), math.sqrt(norms.HEAD.width) / 3
        expected = 0.2 * math.sqrt(math.prod(shape)) / max(norm, least) * T
        torch.testing.assert_close(step, expected, atol=1e-9, rtol=0)
        sizes.append(norm / least)
    assert min(sizes) == 0
    assert any(0 < size < 1 for size in sizes)
    assert max(sizes) > 1.1
