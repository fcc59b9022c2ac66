"""The vectors from which norms are estimated have no pattern."""

from __future__ import annotations

import math

import pytest
import torch

from polarstep.numerics import SIGNS, signs, start_vectors


@pytest.mark.parametrize("rows", [16, 100, 768, 4096])
@pytest.mark.parametrize(("made", "variance"), [(signs, 1), (start_vectors, 1 / 3)])
def test_entries_have_no_pattern(made, variance, rows):
    V = made(rows, torch.device("cpu"))
    assert V.shape == (1, rows, SIGNS)
    assert torch.equal(V, made(rows, torch.device("cpu")))
    assert V.abs().max() <= 1
    assert made is start_vectors or set(V.flatten().tolist()) == {-1, 1}
    sigma = torch.linalg.svdvals(V[0].double() / math.sqrt(variance * rows))
    if rows >= 768:
        assert sigma[0] < 1.25
        assert sigma[-1] > 0.75
    assert abs(float(V.double().mean())) < 4 * math.sqrt(variance / (rows * SIGNS))


def test_sums_and_differences_of_two_rows_are_seen():
    """Start vectors of signs would have no part at all in some of them."""
    m = 768
    seen = {}
    for name, V in (("signs", signs), ("numbers", start_vectors)):
        V = V(m, torch.device("cpu"))[0].double()
        V = V / torch.linalg.vector_norm(V, dim=0)
        K = V.abs().mT  # of e_i alone
        parts = [K.amax(0).square().min()]
        for sign in (1, -1):
            pairs = (V[:, None, :] + sign * V[None, :, :]).abs().amax(-1).square() / 2
            pairs.fill_diagonal_(1)
            parts.append(pairs.min())
        seen[name] = m * float(min(parts))  # κ·m
    assert seen["signs"] == 0
    assert seen["numbers"] > 0.05
