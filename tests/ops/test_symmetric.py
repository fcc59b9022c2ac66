from __future__ import annotations

import pytest
import torch
from tests.spectra import gaussian
from torch.utils.flop_counter import FlopCounterMode

from polarstep.ops.cpu import Cpu

symmetric_product = Cpu().symmetric


def symmetric_flops(m: int, k: int) -> int:
    return Cpu().symmetric_flops(m, k, torch.float32)


@pytest.mark.parametrize("m", [1, 7, 511, 512, 700])
def test_is_the_product_and_costs_what_it_says(m):
    X = gaussian(2, m, 13)
    counter = FlopCounterMode(display=False)
    with counter:
        G = symmetric_product(X, X)
    torch.testing.assert_close(G, X @ X.mT)
    assert counter.get_total_flops() == 2 * symmetric_flops(m, 13)
    assert symmetric_flops(m, 13) <= 2 * m * m * 13 * (1 if m < 512 else 0.7)
    if m >= 512:
        assert torch.equal(G, G.mT)
    plus = symmetric_product(X, X, plus=G, alpha=0.5, beta=-2.0)
    torch.testing.assert_close(plus, -1.5 * G)
    torch.testing.assert_close(symmetric_product(X, X, alpha=0.5), 0.5 * G)


@pytest.mark.parametrize("m", [1, 7, 511, 512, 700])
def test_a_product_of_commuting_matrices_costs_what_it_says(m):
    X = gaussian(2, m, m) / m
    G = symmetric_product(X, X)
    H = G @ G
    counter = FlopCounterMode(display=False)
    with counter:
        C = Cpu().commuting(G, H, plus=G, alpha=0.5, beta=-2.0, identity=3.0)
    torch.testing.assert_close(C, 0.5 * G @ H - 2 * G + 3 * torch.eye(m, dtype=G.dtype))
    assert counter.get_total_flops() == 2 * symmetric_flops(m, m)
    torch.testing.assert_close(Cpu().commuting(G, H, alpha=0.5), 0.5 * G @ H)
    squared = Cpu().commuting(G, G, plus=G)
    assert torch.equal(squared, squared.mT) or m < 512


def test_gradients_go_through():
    X = gaussian(1, 520, 30)
    X = (X / torch.linalg.matrix_norm(X)).requires_grad_()
    G = symmetric_product(X, X)
    Cpu().commuting(G, G, plus=G).square().sum().backward()
    Y = X.detach().requires_grad_()
    H = Y @ Y.mT
    (H @ H + H).square().sum().backward()
    torch.testing.assert_close(X.grad, Y.grad)


def test_strides_do_not_matter():
    X = gaussian(3, 40, 600).mT[::2]
    torch.testing.assert_close(symmetric_product(X, X), X @ X.mT)


@pytest.mark.parametrize("has", [False, True])
def test_tiles_compute_the_whole_product(has, monkeypatch):
    monkeypatch.setattr("polarstep.ops.cpu.has_tiles", lambda: has)
    X = gaussian(1, 520, 13).bfloat16()
    for dtype, halved in ((torch.bfloat16, not has), (torch.float32, True)):
        counter = FlopCounterMode(display=False)
        with counter:
            G = symmetric_product(X.to(dtype), X.to(dtype))
        flops = Cpu().symmetric_flops(520, 13, dtype)
        assert counter.get_total_flops() == flops
        assert (flops < 0.7 * 2 * 520 * 520 * 13) == halved
        torch.testing.assert_close(G, (X.double() @ X.double().mT).to(dtype), atol=0.05, rtol=0.01)
