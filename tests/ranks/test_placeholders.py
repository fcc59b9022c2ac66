"""Entries that stand for a state that does not exist yet: made like the real ones, and dropped alone."""

from __future__ import annotations

import pytest
import torch
from tests.spectra import gaussian

import polarstep as ps
from polarstep import optimizer as muon
from polarstep.ranks import unstarted
from polarstep.ranks.unstarted import drop_placeholders, placeholders

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
    expected = placeholders(group, p, {})
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
    expected = placeholders(group, p, {})
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert {name: (X.dtype, X.shape) for name, X in optimizer.state[p].items()} == {
        name: (X.dtype, X.shape) for name, X in expected.items()
    }


CARRIES = {"polar": ps.LowRank(8, sketch=ps.Warm(), always_sketch=True)}


@pytest.mark.parametrize("kept", [None, torch.int8], ids=str)
def test_a_carry_of_nan_beside_a_momentum_of_nan_stays(kept):
    p = torch.nn.Parameter(gaussian(64, 128).float())
    optimizer = ps.Muon([p], **CARRIES, transform=ps.NormalizedRows(), momentum_dtype=kept)
    for broken in (False, True):
        p.grad = gaussian(64, 128, seed=1).float()
        p.grad[0, 0] = torch.nan if broken else 0.0
        optimizer.step()
    assert optimizer.state[p]["basis"].isnan().all()
    assert optimizer.state[p]["rows"].isnan().any()
    before = set(optimizer.state[p])
    drop_placeholders(optimizer.param_groups, optimizer.state)
    assert set(optimizer.state[p]) == before


@pytest.mark.parametrize("kept", [None, torch.int8], ids=str)
def test_placeholders_are_dropped(kept):
    p = torch.nn.Parameter(gaussian(64, 128).float())
    optimizer = ps.Muon([p], **CARRIES, transform=ps.NormalizedRows(), momentum_dtype=kept)
    (group,) = optimizer.param_groups
    state = {p: placeholders(group, p, {})}
    assert {"basis", "rows"} <= set(state[p])
    drop_placeholders([group], state)
    assert not {"basis", "rows"} & set(state[p])


def test_a_step_reads_a_state_from_outside_once(monkeypatch):
    """To read values at every step, the host would wait for the GPU."""
    p, q = (torch.nn.Parameter(gaussian(64, 128).float()) for _ in range(2))
    optimizer = ps.Muon([p, q], **CARRIES)
    (group,) = optimizer.param_groups
    read = []

    def noted(groups, state):
        read.append(len(state))
        drop_placeholders(groups, state)

    monkeypatch.setattr(unstarted, "drop_placeholders", noted)
    monkeypatch.setattr(muon, "has_ranks", lambda: True)

    def looked(*, late):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q) if late else None
        read.clear()
        optimizer.step()
        return sum(read)

    assert [looked(late=False), looked(late=True), looked(late=True)] == [0, 0, 0]
    optimizer.state[q] = placeholders(group, q, {})
    assert [looked(late=True), looked(late=True)] == [1, 0]
    assert not q.isnan().any()
    optimizer.load_state_dict(optimizer.state_dict())
    assert looked(late=True) == 0
