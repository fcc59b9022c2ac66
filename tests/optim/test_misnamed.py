"""Arguments of other optimizers are refused with what to write instead."""

from __future__ import annotations

import pytest
import torch
from tests.routing.sample_models import mlp
from torch.nn import Parameter

import polarstep
from polarstep import SGD, AdamW, Exact, Muon, muon_for
from polarstep.ranks.distribution import Distribution


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ({"foreach": True}, r"foreach=True is no argument of \w+: leave it out"),
        ({"capturable": True}, r"capturable=True .*: leave it out"),
        ({"maximize": True}, r"negate the loss"),
        ({"ns_steps": 5}, r"give polar=polarstep\.NewtonSchulz\(steps, coefficients\)"),
        ({"adjust_lr_fn": "match_rms_adamw"}, r'shape_scale="spectral" .* "rms" for'),
        ({"adjust_lr": "rms_norm"}, r'shape_scale="fan-ratio" for "spectral_norm", "rms" for'),
        ({"distributed_mesh": None}, r"leave it out, as a DTensor brings its mesh"),
        ({"use_triton": True}, r"leave it out.* fused=False is without"),
        ({"cautious_wd": True}, r"weight decay here is without it"),
        ({"adamw_params": []}, r'"algorithm": "adamw"'),
        ({"use_polar_express": True}, r"leave it out, as polarstep\.NewtonSchulz"),
        ({"wd": 0.1}, r"give weight_decay$"),
        ({"learning_rate": 0.1}, r"give lr$"),
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
        (AdamW, {"wd": 0.1}, r"give weight_decay$"),
        (AdamW, {"epsilon": 1e-10}, r"give eps$"),
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


@pytest.mark.parametrize("build", [lambda net, **o: Muon([net[0].weight], **o), muon_for])
def test_options_of_torch_that_ask_for_nothing_may_be_passed_on(build):
    torchs = dict.fromkeys(("foreach", "maximize", "differentiable", "capturable"), False)
    net = mlp(8, 8, 8, 2)
    group = build(net, **torchs).param_groups[0]
    assert not torchs.keys() & group.keys()
    assert build(net, foreach=None, fused=None).param_groups[0]["fused"] is True
    for option in torchs:
        with pytest.raises(TypeError, match=rf"{option}=True is no argument of \w+: leave it out"):
            build(net, **{option: True})


ADAMW = torch.optim.AdamW([Parameter(torch.ones(2))], lr=0.004, weight_decay=0.1)
SAYS_ADAMW = (
    r"write polarstep\.AdamW\(lr=0\.004, betas=\(0\.9, 0\.999\), eps=1e-08, weight_decay=0\.1\)$"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"others": ADAMW}, rf"others=a AdamW: .*{SAYS_ADAMW}"),
        ({"heads": torch.optim.AdamW}, r"write polarstep\.AdamW\(lr=1e-3\)$"),
        ({"rules": [("0.*", ADAMW)]}, rf"has the target a AdamW: .*{SAYS_ADAMW}"),
        ({"others": torch.optim.RMSprop([Parameter(torch.ones(2))])}, r"others=a RMSprop: .*AdamW"),
    ],
)
def test_an_optimizer_in_the_place_of_a_rule(options, message):
    with pytest.raises(TypeError, match=message):
        muon_for(mlp(8, 8, 8, 2), **options)


@pytest.mark.parametrize(
    ("polar", "message"),
    [
        (Exact, r"polar=<class .*Exact'>: .*give an instance, as Exact\(\)"),
        (None, r"polar=None: .*leave the key out"),
        ("exact", r"polar='exact': expected a polar map"),
    ],
)
def test_what_is_no_map_in_a_group(polar, message):
    with pytest.raises(TypeError, match=message):
        Muon([{"params": [Parameter(torch.ones(3, 3))], "polar": polar}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay": 100}, r"weight_decay=100 with lr=0\.02: .*= -1, .*0\.05 is usual.*50"),
        ({"others": AdamW(weight_decay=60)}, r"weight_decay=60 with lr=0\.02"),
        ({"others": AdamW(lr=1e-3, weight_decay=2000)}, r"weight_decay=100 with lr=0\.02"),
    ],
)
def test_a_weight_decay_that_turns_every_sign(options, message):
    with pytest.raises(ValueError, match=message):
        muon_for(mlp(8, 8, 8, 2), **options)
    muon_for(mlp(8, 8, 8, 2), weight_decay=50, others=AdamW(lr=1e-3, weight_decay=1000))


def test_a_weight_decay_that_a_schedule_makes_too_large():
    optimizer = Muon([Parameter(torch.ones(3, 3))], lr=0.02, weight_decay=40)
    optimizer.param_groups[0]["lr"] = 0.03
    with pytest.raises(ValueError, match=r"weight_decay=40 with lr=0\.03"):
        optimizer.step()


def test_a_checkpoint_of_adamw_says_how_to_go_over():
    model = mlp(8, 8, 8, 2)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8)).square().mean().backward()
    theirs.step()
    optimizer = muon_for(model)
    with pytest.raises(
        ValueError, match=r"the checkpoint is AdamW's.*warm up again.*convert"
    ) as told:
        optimizer.load_state_dict(theirs.state_dict())
    code = str(told.value).partition("goes on updating: ")[2]
    with pytest.warns(UserWarning, match="had another rule in the checkpoint"):
        exec(
            code,
            {"optimizer": optimizer, "polarstep": polarstep, "model": model}
            | {"theirs": theirs.state_dict()},
        )
    for name, p in model.named_parameters():
        kept = optimizer.routes[name].algorithm == "AdamW"
        assert ("exp_avg" in optimizer.state[p]) == kept
        assert not kept or torch.equal(optimizer.state[p]["exp_avg"], theirs.state[p]["exp_avg"])
