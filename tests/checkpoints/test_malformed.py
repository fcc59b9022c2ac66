"""What is not this optimizer's checkpoint, or does not fit it, is refused and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.routing.sample_models import mlp
from tests.spectra import gaussian
from torch import nn
from torch.nn import Parameter

from polarstep import SGD, AdamW, Muon, muon_for

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
        (group_has(0, momentum=7), "momentum=7: expected 0 ≤ momentum < 1"),
        (group_has(0, algorithm="adam"), "algorithm='adam': expected one of muon, adamw, sgd"),
        (group_has(0, polar="exact"), "polar='exact': expected a polar map"),
        (group_has(0, split_sizes=(4, 5)), "sum to 9, but the weight has 4 rows"),
        (lambda c: c[GROUPS].reverse(), "both have W and 1 more, but b is number 0 there"),
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


def test_the_checkpoint_of_a_whole_run():
    optimizer = muon_for(mlp(8, 8, 8, 2))
    with pytest.raises(
        TypeError, match=r"a dict without 'state'.*only 'model', 'optimizer'.*checkp"
    ):
        optimizer.load_state_dict({"model": {}, "optimizer": optimizer.state_dict()})
    with pytest.raises(TypeError, match=r"state_dict is a list without 'state' and 'param_groups'"):
        optimizer.load_state_dict([1])


CONVERTER = r"load_state_dict\(polarstep\.convert\.state_dict\(theirs"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.optim.Muon, CONVERTER),
        (torch.optim.SGD, CONVERTER),
        (torch.optim.AdamW, r"the checkpoint is AdamW's: expected the state_dict\(\) of"),
    ],
)
@pytest.mark.parametrize("names", ["ab", "bc", ""])
def test_the_checkpoint_of_another_optimizer(other, message, names):
    """Also where some names are the same."""
    theirs, ours = ([Parameter(torch.eye(3)) for _ in range(2)] for _ in range(2))
    given = list(zip(names, theirs, strict=True)) if names else theirs
    with pytest.raises(ValueError, match=message):
        Muon(list(zip("ab", ours, strict=True))).load_state_dict(other(given).state_dict())


def test_the_checkpoint_of_one_adamw_for_the_whole_model_is_told_from_another_model():
    model = mlp(8, 8, 8, 2)
    with pytest.raises(ValueError, match="the checkpoint is AdamW's"):
        muon_for(model).load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


def test_a_checkpoint_with_other_layers_frozen_names_the_parameters():
    frozen = mlp(8, 8, 8, 2)
    frozen[0].requires_grad_(False)
    saved = muon_for(frozen).state_dict()
    optimizer = muon_for(mlp(8, 8, 8, 2))
    with pytest.raises(
        ValueError, match=r"groups of 1, 1, 2 par.*groups of 2, 1, 3; the optimizer "
    ):
        optimizer.load_state_dict(saved)
    with pytest.raises(
        ValueError, match=r"alone has 0\.weight and 1 more.*freeze and unfreeze the"
    ):
        optimizer.load_state_dict(saved)


def test_a_hook_may_put_the_groups_right():
    two, one = (
        Muon([Parameter(torch.eye(3)), Parameter(torch.eye(3))]),
        Muon([Parameter(torch.eye(3))]),
    )

    def first_alone(_, content):
        group = content["param_groups"][0] | {"params": content["param_groups"][0]["params"][:1]}
        return content | {"param_groups": [group]}

    one.register_load_state_dict_pre_hook(first_alone)
    one.load_state_dict(two.state_dict())
    assert len(one.param_groups[0]["params"]) == 1


def with_vocabulary(size):
    return nn.Sequential(nn.Embedding(size, 8), *mlp(8, 8, 8, 2))


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("others", [AdamW(), SGD()])
def test_an_embedding_that_was_resized_after_a_step(others):
    model = with_vocabulary(10)
    optimizer = muon_for(model, others=others)
    step(model, optimizer)
    table = model[0].weight
    table.data = torch.zeros(4000, 8)  # as resize_token_embeddings does; no read beyond it succeeds
    table.grad = None
    before = model[1].weight.detach().clone()
    with pytest.raises(
        ValueError, match=r"of 0\.weight is \(10, 8\), and the param.*\(4000, 8\): exp"
    ):
        step(model, optimizer)
    assert torch.equal(before, model[1].weight)  # nothing has been updated
    optimizer.state.pop(table)
    step(model, optimizer)
    assert not torch.equal(before, model[1].weight)


def test_a_hidden_matrix_that_was_resized_after_a_step():
    model = with_vocabulary(10)
    optimizer = muon_for(model)
    step(model, optimizer)
    model[1].weight.data, model[1].bias.data = torch.ones(9, 8), torch.ones(9)
    model[3].weight.data = torch.ones(8, 9)
    with pytest.raises(ValueError, match=r"momentum_buffer of 1\.weight is \(8, 8\).*\(9, 8\)"):
        step(model, optimizer)


@pytest.mark.parametrize("others", [AdamW(), SGD()])
def test_the_checkpoint_of_a_model_with_another_vocabulary(others):
    model = with_vocabulary(10)
    saved = muon_for(model, others=others)
    step(model, saved)
    optimizer = muon_for(with_vocabulary(4000), others=others)
    with pytest.raises(
        ValueError, match=r"of 0\.weight is \(10, 8\).*checkpoint is of another model"
    ):
        optimizer.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("others", [AdamW(), SGD(), None])
def test_a_parameter_that_was_transposed_after_a_step(others):
    """It has as many entries as its state, so that only the shapes tell them apart."""
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False))
    rules = [("1.*", "muon"), ("0.*", "muon" if others is None else others)]
    optimizer = muon_for(model, rules=rules)
    table = model[0].weight

    def step_on_ones():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    step_on_ones()
    table.data = table.data.t().contiguous()
    table.grad = None
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        ValueError, match=r"of 0\.weight is \(4, 8\), and the param.*\(8, 4\): expected the same"
    ):
        step_on_ones()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.state.pop(table)
    step_on_ones()
    assert not torch.equal(table, before[0])
