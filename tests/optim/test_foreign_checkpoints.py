"""``load_state_dict`` of something else than this optimizer's checkpoint says what it is."""

from __future__ import annotations

import pytest
import torch
from tests.routing.sample_models import mlp
from torch.nn import Parameter

from polarstep import Muon, muon_for


def test_the_checkpoint_of_a_whole_run():
    optimizer = muon_for(mlp(8, 8, 8, 2))
    with pytest.raises(
        TypeError, match=r"a dict without 'state'.*only 'model', 'optimizer'.*checkp"
    ):
        optimizer.load_state_dict({"model": {}, "optimizer": optimizer.state_dict()})
    with pytest.raises(TypeError, match=r"state_dict is a list without 'state' and 'param_groups'"):
        optimizer.load_state_dict([1])


def test_the_checkpoint_of_another_muon_names_the_converter():
    W = Parameter(torch.eye(3))
    with pytest.raises(
        ValueError, match=r"load_state_dict\(polarstep\.convert\.state_dict\(theirs"
    ):
        Muon([W]).load_state_dict(torch.optim.Muon([W]).state_dict())


def test_the_checkpoint_of_one_adamw_for_the_whole_model_is_told_from_another_model():
    model = mlp(8, 8, 8, 2)
    with pytest.raises(
        ValueError, match=r"the checkpoint is AdamW's: expected the state_dict\(\) of"
    ):
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
