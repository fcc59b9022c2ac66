"""``load_state_dict`` of something malformed says what is wrong, and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.spectra import gaussian
from torch.nn import Parameter

from polarstep import AdamW, Muon

GROUPS = "param_groups"
FORM = r"expected what optimizer\.state_dict\(\) returned; where the file is damaged"
READ = r"which cannot be read: expected what optimizer\.state_dict\(\) wrote"


def stepped() -> Muon:
    """An optimizer with a group of Muon and a group of AdamW after one step."""
    W, b = Parameter(gaussian(4, 6).float()), Parameter(torch.zeros(5))
    optimizer = Muon([("W", W)], lr=0.1)
    optimizer.add_param_group({"params": [("b", b)], "algorithm": "adamw"})
    W.grad, b.grad = torch.ones_like(W), torch.ones_like(b)
    optimizer.step()
    return optimizer


def group_has(index: int, **options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[GROUPS][index].update(options)


def state_has(index: int, entry: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["state"].update({index: entry})


def adamw_has(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["state"][1].update(entries)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.update(param_groups=[{}]), rf"'params' of group 0 .* is None, and not a .*{FORM}"),
        (lambda c: c[GROUPS][1].pop("params"), rf"'params' of group 1 .* is None, and not a .*{FORM}"),
        (lambda c: c.update(param_groups=None), rf"'param_groups' .* is None, and not a list: {FORM}"),
        (lambda c: c.update(param_groups={}), rf"'param_groups' .* is a dict, and not a list: {FORM}"),
        (lambda c: c.update(param_groups=[]), "groups of no parameters, and the optimizer groups of 1"),
        (lambda c: c.update(param_groups=["a"]), rf"group 0 .* is a str, and not a dict: {FORM}"),
        (lambda c: c[GROUPS].append(None), rf"group 2 .* is None, and not a dict: {FORM}"),
        (group_has(0, params=None), rf"'params' of group 0 .* is None, and not a .*{FORM}"),
        (group_has(0, params=[[1]]), rf"one of the 'params' of group 0 .* is a list, and not.*{FORM}"),
        (group_has(1, param_names="b"), rf"'param_names' of group 1 .* is a str, and not.*{FORM}"),
        (group_has(0, algorithm=[3]), r"algorithm=\[3\]: expected one of muon, adamw, sgd"),
        (group_has(0, polar='{"x'), f"polar of the checkpoint is '{{\"x', {READ}"),
        (group_has(0, polar='{"class": "Exact"}'), f"polar of the checkpoint is .*'Exact'}}, {READ}"),
        (group_has(0, momentum_dtype='{"dtype": "no"}'), f"momentum_dtype .* {{'dtype': 'no'}}, {READ}"),
        (lambda c: c.update(state=None), rf"'state' .* is None, and not a dict: {FORM}"),
        (state_has(1, None), rf"the state of parameter 1 .* is None, and not a dict: {FORM}"),
        (state_has(0, torch.ones(2)), rf"state of parameter 0 .* is a Tensor, and not a dict: {FORM}"),
        (lambda c: c["state"][1].pop("step"), "the state of b has no 'step', only .*: expected AdamW"),
        (adamw_has(step="1"), "the state of b has a str at 'step', and no tensor: expected AdamW"),
        (adamw_has(exp_avg=None), "the state of b has a NoneType at 'exp_avg', and no tensor: exp"),
        (adamw_has(step=torch.ones(3)), r"'step' in the state of b has shape \(3,\): expected one num"),
    ],
)  # fmt: skip
def test_a_malformed_checkpoint_is_refused_and_changes_nothing(spoil, message):
    optimizer = stepped()
    content = copy.deepcopy(stepped().state_dict())
    for group in content[GROUPS]:
        group["lr"] = 0.7
    spoil(content)
    before, held = str(optimizer.state_dict()), list(optimizer.param_groups)
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.load_state_dict(content)
    assert str(optimizer.state_dict()) == before
    assert all(now is then for now, then in zip(optimizer.param_groups, held, strict=True))


def test_what_a_hook_has_left_is_checked_too():
    optimizer = stepped()
    optimizer.register_load_state_dict_pre_hook(lambda _, content: content | {"state": 3})
    before = str(optimizer.state_dict())
    with pytest.raises(TypeError, match="'state' of the checkpoint is a int, and not a dict"):
        optimizer.load_state_dict(stepped().state_dict())
    assert str(optimizer.state_dict()) == before


def test_a_hook_may_put_the_state_right():
    optimizer = stepped()
    good = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(
        lambda _, content: content | {"state": good["state"]}
    )
    optimizer.load_state_dict(good | {"state": None})
    assert str(optimizer.state_dict()["state"]) == str(good["state"])


def test_a_count_that_was_taken_out_between_steps_is_named():
    b = Parameter(torch.zeros(5))
    optimizer = Muon([{"params": [b], "algorithm": AdamW.algorithm}])
    b.grad = torch.ones_like(b)
    optimizer.step()
    before = b.detach().clone()
    del optimizer.state[b]["step"]
    with pytest.raises(
        ValueError, match="has no 'step', only 'exp_avg', 'exp_avg_sq': expected AdamW"
    ):
        optimizer.step()
    assert torch.equal(b, before)
