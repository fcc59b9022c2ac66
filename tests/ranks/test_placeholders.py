"""Entries of a checkpoint for a state that does not exist yet are like those of a step."""

from __future__ import annotations

import pytest
import torch
from tests.spectra import gaussian

import polarstep as ps
from polarstep.checkpoints.unstarted import with_all_entries

STEPS = 65  # the peak of a momentum is first taken at step 64


@pytest.mark.parametrize("kept", [None, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (3, 64, 128)], ids=str)
@pytest.mark.parametrize("transform", [None, ps.NormalizedRows()], ids=["T", "rows"])
@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
def test_placeholders_are_like_the_state_after_training(kept, given, shape, transform, rounding):
    p = torch.nn.Parameter(gaussian(*shape).to(given))
    options = {"transform": transform, "momentum_dtype": kept, "rounding": rounding}
    optimizer = ps.Muon([p], polar=ps.NewtonSchulz(1, "quintic"), **options)
    (group,) = optimizer.param_groups
    expected = with_all_entries(group, p, {})
    p.grad = torch.ones_like(p)
    for _ in range(STEPS):
        optimizer.step()
    state = {name: X for name, X in optimizer.state[p].items() if isinstance(X, torch.Tensor)}
    assert {name: (X.dtype, X.shape) for name, X in state.items()} == {
        name: (X.dtype, X.shape) for name, X in expected.items() if isinstance(X, torch.Tensor)
    }


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
def test_placeholders_of_element_wise_rules_are_like_the_state_of_a_step(
    given, algorithm, rounding
):
    p = torch.nn.Parameter(gaussian(64).to(given))
    optimizer = ps.Muon([{"params": [p], "algorithm": algorithm, "rounding": rounding}])
    (group,) = optimizer.param_groups
    expected = with_all_entries(group, p, {})
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert {name: (X.dtype, X.shape) for name, X in optimizer.state[p].items()} == {
        name: (X.dtype, X.shape) for name, X in expected.items()
    }


@pytest.mark.parametrize("shape", [(24, 32), (3, 24, 32)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"polar": ps.LowRank(4, 2, sketch=ps.Warm(), always_sketch=True)},
        {"polar": ps.Deflated(ps.LowRank(4, 2, sketch=ps.Warm(), always_sketch=True))},
        {"transform": ps.NormalizedRows()},
    ],
    ids=["warm", "deflated", "rows"],
)
def test_placeholders_are_what_a_gradient_of_zero_leaves(shape, options):
    p = torch.nn.Parameter(gaussian(*shape))
    optimizer = ps.Muon([p], **options)
    expected = with_all_entries(optimizer.param_groups[0], p, {})
    p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, X in optimizer.state[p].items():
        torch.testing.assert_close(expected[name], X, atol=0, rtol=0)
