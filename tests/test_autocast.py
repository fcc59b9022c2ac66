"""torch.autocast and torch.inference_mode around a step, a map or a certificate change nothing."""

from __future__ import annotations

import pytest
import torch
from tests.solvers import over_solvers
from tests.spectra import gaussian, matrix
from torch import nn

import polarstep as ps
from polarstep.autocast import autocast_off, autocast_off_on, inference_mode_off
from polarstep.diagnostics import certified, cheap_certificate


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@over_solvers()
def test_a_map_keeps_its_precision(solver):
    M = matrix("power-law", 24, 40).float()
    expected = solver.map(M)
    with autocast():
        assert torch.equal(solver.map(M), expected)


@over_solvers()
def test_a_step_keeps_its_precision(solver):
    ends = []
    for context in (autocast(), autocast_off()):
        W = nn.Parameter(gaussian(24, 40, seed=1).float())
        optimizer = ps.Muon([W], lr=0.1, polar=solver.map)
        with context:
            for step in range(3):
                W.grad = 0.01 * gaussian(24, 40, seed=step + 2).float()
                optimizer.step()
        ends.append(W.detach())
    assert torch.equal(*ends)


def test_a_closure_keeps_the_callers_autocast():
    W = nn.Parameter(gaussian(8, 8).float())
    optimizer, seen = ps.Muon([W]), []

    def closure():
        product = W @ W
        seen.append(product.dtype)
        product.float().square().sum().backward()
        return 0.0

    with autocast():
        optimizer.step(closure)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [torch.bfloat16]


def test_a_certificate_keeps_its_precision():
    polar, M = ps.LowRank(8, 4, always_sketch=True), matrix("power-law", 60, 64).float()
    T, bound = certified(polar, M)
    plain = cheap_certificate(M, T)
    with autocast():
        again, bound_again = certified(polar, M)
        plain_again = cheap_certificate(M, T)
    assert torch.equal(T, again)
    assert (bound.worst, plain.worst) == (bound_again.worst, plain_again.worst)


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_no_autocast_is_no_context(kind):
    device = torch.device(kind)
    with autocast(), autocast_off_on(device):
        assert torch.is_autocast_enabled("cpu") == (kind == "meta")
    with autocast_off_on(device):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_tensors_are_ordinary_and_the_gradients_as_the_caller_has_them(around):
    with around():
        given = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with inference_mode_off():
            made = torch.zeros(3)
            assert not torch.is_inference_mode_enabled()
            assert torch.is_grad_enabled() == (around is torch.enable_grad)
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == given
    assert not made.is_inference()
    made.requires_grad_().sum().backward()  # refused for a tensor of inference mode
