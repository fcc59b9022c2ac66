"""Arguments of other optimizers are refused with what to write instead."""

from __future__ import annotations

import pytest
import torch
from tests.optim.sample_models import mlp
from torch.nn import Parameter

from polarstep import SGD, AdamW, Muon, muon_for
from polarstep.distributed.step import Distribution


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ({"foreach": True}, r"foreach=True is no argument of \w+: leave it out"),
        ({"capturable": True}, r"capturable=True .*: leave it out"),
        ({"maximize": True}, r"negate the loss"),
        ({"ns_steps": 5}, r"give polar=polarstep\.NewtonSchulz\(steps, coefficients\)"),
        ({"adjust_lr_fn": "match_rms_adamw"}, r'lr_scale="spectral" .* "rms" for'),
        ({"adjust_lr": "rms_norm"}, r'lr_scale="fan-ratio" for "spectral_norm", "rms" for'),
        ({"distributed_mesh": None}, r"leave it out, as a DTensor brings its mesh"),
        ({"use_triton": True}, r"leave it out.* fused=False is without"),
        ({"cautious_wd": True}, r"weight decay here is without it"),
        ({"adamw_params": []}, r'"algorithm": "adamw"'),
        ({"use_polar_express": True}, r"did you mean polar\?"),
        ({"wd": 0.1}, r"did you mean weight_decay\?"),
        ({"learning_rate": 0.1}, r"did you mean lr\?"),
        ({"momentun": 0.9}, r"did you mean momentum\?"),
        ({"zebra": 1}, r"zebra=1 is no argument of \w+: expected some of .*lr, momentum, nesterov"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unknown_arguments_of_muon_and_muon_for(option, remedy):
    with pytest.raises(TypeError, match=remedy):
        Muon([Parameter(torch.eye(3))], **option)
    with pytest.raises(TypeError, match=remedy):
        muon_for(mlp(8, 8, 8, 2), **option)
    with pytest.raises(TypeError, match=remedy):  # before there is a model
        muon_for(**option)
    with pytest.raises(TypeError, match=remedy):  # with the model
        muon_for(lr=0.1)(mlp(8, 8, 8, 2), **option)


def test_the_options_of_adamw_are_sent_to_its_rule():
    with pytest.raises(TypeError, match=r"others=polarstep\.AdamW\(betas=\(0\.9, 0\.99\)\)"):
        muon_for(mlp(8, 8, 8, 2), betas=(0.9, 0.99))
    with pytest.raises(
        TypeError, match=r'a group \{"params": …, "algorithm": "adamw", "eps": 1e-10\}'
    ):
        Muon([Parameter(torch.eye(3))], eps=1e-10)


@pytest.mark.parametrize(
    ("rule", "option", "remedy"),
    [
        (AdamW, {"fused": True}, r"fused=True is no argument of AdamW: leave it out"),
        (AdamW, {"foreach": False}, r"foreach=False is no argument of AdamW: leave it out"),
        (AdamW, {"amsgrad": True}, r"AdamW here is without it"),
        (AdamW, {"wd": 0.1}, r"did you mean weight_decay\?"),
        (AdamW, {"epsilon": 1e-10}, r"did you mean eps\?"),
        (AdamW, {"beta2": 0.99}, r"did you mean betas\?"),
        (SGD, {"dampening": 0.1}, r"SGD here is without it"),
        (SGD, {"zebra": 1}, r"expected some of lr, momentum, nesterov, weight_decay"),
    ],
    ids=str,
)
def test_unknown_options_of_the_rules_for_other_parameters(rule, option, remedy):
    with pytest.raises(TypeError, match=remedy):
        rule(lr=0.1, **option)


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"adamw_lr": 3e-4}, r"AdamW\(lr=0\.0003\)"),
        ({"adam_betas": (0.9, 0.99)}, r"AdamW\(betas=\(0\.9, 0\.99\)\)"),
        ({"adamw_eps": 1e-10}, r"AdamW\(eps=1e-10\)"),
        ({"epsilon": 1e-10}, r"AdamW\(eps=1e-10\)"),
        ({"adamw_wd": 0.1}, r"AdamW\(weight_decay=0\.1\)"),
    ],
)
def test_other_libraries_names_for_the_options_of_adamw(option, rule):
    with pytest.raises(TypeError, match=f"it is AdamW's; give others=polarstep.{rule}"):
        muon_for(mlp(8, 8, 8, 2), **option)


def test_muon_for_has_its_own_names_for_cuts_and_layouts():
    with pytest.raises(TypeError, match=r"split_sizes=.*did you mean splits\?"):
        muon_for(mlp(8, 8, 8, 2), split_sizes=(4, 4))
    with pytest.raises(TypeError, match=r"layout='conv'.*did you mean layouts\?"):
        muon_for(mlp(8, 8, 8, 2), layout="conv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"splits": 3}, r"splits=3: expected a dict by patterns of parameter names"),
        ({"layouts": "conv"}, r"layouts='conv': expected a dict by patterns"),
        ({"rules": {"0.weight": "muon"}}, r"rules=\{.*\}: expected a list of pairs"),
        ({"rules": "0.weight"}, r"rules='0\.weight': expected a list of pairs"),
    ],
)
def test_arguments_of_muon_for_of_another_type(options, message):
    with pytest.raises(TypeError, match=message):
        muon_for(mlp(8, 8, 8, 2), **options)


def test_a_process_group_that_is_none():
    with pytest.raises(TypeError, match=r"process_group='nccl': expected the ranks.*group\.WORLD"):
        muon_for(mlp(8, 8, 8, 2), process_group="nccl")
    assert Distribution(process_group=None).process_group is None


def test_a_weight_decay_in_torchs_place_is_not_taken_for_momentum():
    W = Parameter(torch.eye(3))
    torch.optim.Muon([W], 0.02, 0.1)
    with pytest.raises(TypeError, match=r"0\.1 has no name in the call of Muon: expected names"):
        Muon([W], 0.02, 0.1)
