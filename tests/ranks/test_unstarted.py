"""Entries of a checkpoint for a state that does not exist yet are like those of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.ranks.launch import needs_gloo
from tests.ranks.twins import WARM, distributed, given, mesh_of, placed_as
from tests.spectra import gaussian
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard

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


class Compensated(nn.Module):
    """A matrix, experts and an AdamW matrix in bfloat16, of which the last rank has no part; and twins.

    The twins, whose names begin with "late", get a gradient from the second step on.
    """

    def __init__(self, plan: str) -> None:
        super().__init__()
        rows = dist.get_world_size() - 1
        shapes = {"matrix": (rows, 12), "experts": (rows, 9, 12), "table": (rows, 4)}
        for late in ("", "late_"):
            for name, shape in shapes.items():
                X = distributed(given(name, shape).bfloat16(), mesh_of(), [Shard(0)])
                self.register_parameter(late + name, nn.Parameter(X))
        groups = [
            {"params": [self.matrix, self.experts, self.late_matrix, self.late_experts]},
            {"params": [self.table, self.late_table], "algorithm": "adamw"},
        ]
        self.optimizer = ps.Muon(groups, lr=0.01, polar=WARM, plan=plan, rounding="compensated")

    def go(self, step: int, *, zeros: bool = False) -> None:
        for name, p in self.named_parameters():
            G = given(name, tuple(p.shape), step + 1).bfloat16()
            p.grad = placed_as(p, G)
            if step == 0 and name.startswith("late"):
                p.grad = 0 * p.grad if zeros and "table" not in name else None
        self.optimizer.step()


def compensated(plan: str, path: Path) -> dict[str, Any]:
    """The keys of the state on all ranks, and how far a run ends that was saved and loaded."""
    one, ours, known = (Compensated(plan) for _ in range(3))
    one.go(0)
    known.go(0, zeros=True)
    keys: list[Any] = [None] * dist.get_world_size()
    names = {name: sorted(one.optimizer.state.get(p, {})) for name, p in one.named_parameters()}
    dist.all_gather_object(keys, names)
    found: dict[str, Any] = {"keys": keys}
    if any(each != keys[0] for each in keys):
        return found  # to gather this state would abort the process
    whole = get_optimizer_state_dict(
        one, one.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    found["gathered"] = {name: sorted(its) for name, its in whole["state"].items()}
    dcp.save({"its": get_optimizer_state_dict(one, one.optimizer)}, checkpoint_id=path)
    fresh = {"its": get_optimizer_state_dict(ours, ours.optimizer)}
    try:
        dcp.load(fresh, checkpoint_id=path)
    except Exception as error:
        return found | {"loaded": str(error)}
    set_optimizer_state_dict(ours, ours.optimizer, fresh["its"])
    for p, q in zip(ours.parameters(), known.parameters(), strict=True):
        p.data.copy_(q.data)
        error = ours.optimizer.state[p]["rounding_error"]
        assert (error.shape, error.dtype, error.placements) == (p.shape, p.dtype, p.placements)
    for step in (1, 2):
        known.go(step)
        ours.go(step)
    ends = zip(ours.parameters(), known.parameters(), strict=True)
    off = [(p.full_tensor() - q.full_tensor()).abs().max() for p, q in ends]
    return found | {"loaded": float(torch.stack(off).max())}


@needs_gloo
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("plan", ["auto", "owner", "gather"])
def test_ranks_without_rows_and_layers_without_a_gradient(ranks, plan, ranks_of, tmp_path) -> None:
    """Otherwise ranks gather different tensors, and the process is aborted."""
    for its in ranks_of(ranks)(compensated, plan, tmp_path):
        assert all(each == its["keys"][0] for each in its["keys"])
        for name in ("matrix", "experts", "table"):
            assert "rounding_error" in its["keys"][0][name]
            assert "rounding_error" in its["gathered"][f"late_{name}"]
        assert its["loaded"] == 0
