"""Errors say the value, what was expected and what to do, and change nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.captures import as_if_captured
from tests.routing.sample_models import mlp
from tests.spectra import gaussian
from torch import nn
from torch.nn import Parameter

import polarstep
from polarstep import SGD, AdamW, Exact, LowRank, Muon, muon_for
from polarstep.ranks.distribution import Distribution


def matrix():
    return Parameter(gaussian(4, 6))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -0.1}, ValueError, r"lr=-0\.1: expected a finite number ≥ 0; 0\.02 is usual"),
        ({"lr": math.nan}, ValueError, r"lr=nan: expected a finite number ≥ 0"),
        ({"lr": torch.ones(2)}, ValueError, r"lr has shape \(2,\): expected a number or one"),
        (
            {"momentum": 1.2},
            ValueError,
            r"momentum=1\.2: expected 0 ≤ momentum < 1; the paper's schedule for K=10,000 gives",
        ),
        ({"momentum": 1.0}, ValueError, r"momentum=1\.0: expected 0 ≤ momentum < 1"),
        ({"momentum": -0.1}, ValueError, r"momentum=-0\.1"),
        ({"lr": torch.tensor(-1.0)}, ValueError, r"lr=-1\.0: expected a finite number ≥ 0; 0\.02"),
        ({"lr": None}, TypeError, r"lr=None: expected a finite number ≥ 0, or a tensor with one"),
        ({"lr": "0.1"}, TypeError, r"lr='0\.1': expected a finite number ≥ 0, or a tensor with"),
        ({"momentum": None}, TypeError, r"momentum=None: expected a number, 0 ≤ momentum < 1; the"),
        ({"weight_decay": "0"}, TypeError, r"weight_decay='0': expected a finite number ≥ 0"),
        ({"nesterov": "no"}, TypeError, r"nesterov='no': expected True or False"),
        ({"fused": 1}, TypeError, r"fused=1: expected True or False"),
        ({"split_sizes": 2}, TypeError, r"split_sizes=2: expected the rows of each matrix, integ"),
        (
            {"split_sizes": (2.0, 2.0)},
            TypeError,
            r"split_sizes=\(2\.0, 2\.0\): expected the rows of",
        ),
        ({"weight_decay": -1}, ValueError, r"weight_decay=-1: expected a finite number ≥ 0"),
        ({"polar": "exact"}, TypeError, r"polar='exact': expected a polar map such as"),
        ({"polar": Exact}, TypeError, r"expected a polar map such as polarstep.NewtonSchulz\(\)"),
        (
            {"shape_scale": "muP"},
            ValueError,
            r"shape_scale='muP': expected one of none, spectral, fan-ratio, rms",
        ),
        (
            {"shape_scale": 0.75},
            ValueError,
            r"shape_scale=0\.75: .* for a group is lr_factor=0\.75",
        ),
        ({"layout": "rows"}, ValueError, r"layout='rows': expected one of auto, conv, stack"),
        ({"nonfinite": "raise"}, ValueError, r"nonfinite='raise': expected one of propagate, skip"),
        ({"seed": "a"}, TypeError, r"seed='a': expected an integer"),
        (
            {"split_sizes": (3, 3)},
            ValueError,
            r"sum to 6, but the weight has 4 rows; give positive",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_hyperparameters(options, error, message):
    with pytest.raises(error, match=message):
        Muon([matrix()], **options)
    optimizer = Muon([matrix()])  # and in a later group, which then is not added
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [matrix()], **options})
    assert len(optimizer.param_groups) == 1
    assert not optimizer.state


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (
            [torch.zeros(3, 4, dtype=torch.int64)],
            TypeError,
            r"parameter 0 is int64: expected parameters in float32",
        ),
        ([torch.zeros(3, 4, dtype=torch.complex64)], TypeError, r"is complex.*torch.view_as_real"),
        (
            [torch.zeros(3, 4).to(torch.float8_e4m3fn)],
            TypeError,
            r"is float8_e4m3fn: expected parameters in float32.*train a copy in a wider precision",
        ),
        (
            [torch.zeros(3, 4).to_sparse()],
            TypeError,
            r"has layout torch.sparse_coo: expected a dense",
        ),
        (["weight"], TypeError, r"is a str: expected a tensor"),
        ({torch.zeros(3, 4)}, TypeError, r"in a set have no order.*give a list"),
        (
            [nn.LazyLinear(3).weight],
            ValueError,
            r"parameter 0 has no shape yet, its module is lazy: run one batch through the model",
        ),
    ],
    ids=["integer", "complex", "eight bits", "sparse", "string", "set", "lazy"],
)
def test_bad_parameters(params, error, message):
    with pytest.raises(error, match=message):
        Muon([{"params": params}])
    optimizer = Muon([matrix()])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"algorithm": "adam"}, r"algorithm='adam': expected one of muon, adamw, sgd"),
        (
            {"betas": (0.9, 0.99)},
            r"option 'betas' in a group with .*'muon': it is an option of adamw",
        ),
        ({"momentun": 0.9}, r"option 'momentun'.*did you mean 'momentum'\?"),
        ({"learning_rate": 0.1}, r"option 'learning_rate'.*: give lr; expected some of"),
        ({"wd": 0.1}, r"option 'wd'.*: give weight_decay;"),
        ({"LR": 0.1}, r"option 'LR'.*did you mean 'lr'\?"),
        ({"Momentum": 0.9}, r"option 'Momentum'.*did you mean 'momentum'\?"),
        ({"algorithm": "adamw", "wd": 0.1}, r"option 'wd'.*'adamw': give weight_decay;"),
        ({"ns_steps": 5}, r"option 'ns_steps'.*give polar=polarstep\.NewtonSchulz\(steps,"),
        ({"adjust_lr": "rms_norm"}, r"option 'adjust_lr'.*give shape_scale=\"fan-ratio\" for"),
        ({"flatten": True}, r"option 'flatten'.*give layout="),
        ({"cautious_wd": True}, r"option 'cautious_wd'.*weight decay here is without it"),
        ({"algorithm": "adamw", "epsilon": 1e-7}, r"option 'epsilon'.*give eps;"),
        ({"algorithm": "adamw", "beta2": 0.99}, r"option 'beta2'.*did you mean 'betas'\?"),
        (
            {"use_muon": False},
            r'use_muon=False in a group.*\'muon\'.*give "algorithm".*"adamw" for',
        ),
        ({"algorithm": "adamw", "use_muon": True}, r"use_muon=True in a group.*'adamw'"),
        (
            {"algorithm": "adamw", "polar": Exact()},
            r"'polar' in .*'adamw': it is an option of muon;",
        ),
        ({"algorithm": "adamw", "betas": (0.9, 1.0)}, r"betas=.*expected two numbers in \[0, 1\)"),
        ({"algorithm": "adamw", "lr": -1}, r"lr=-1: expected a finite number ≥ 0.* 3e-4 for AdamW"),
        ({"algorithm": "adamw", "nonfinite": "no"}, r"nonfinite='no': expected one of"),
        ({"maximize": True}, r"option 'maximize' in a group.*'muon': leave it out, and negate"),
        ({"algorithm": "adamw", "amsgrad": True}, r"option 'amsgrad'.*AdamW here is without it"),
        ({"differentiable": True}, r"option 'differentiable'.*no gradient flows through"),
        ({"plan": "ownr"}, r"plan='ownr': expected one of auto, local, owner, replicated, gather"),
        ({"algorithm": "sgd", "momentum": 1}, r"momentum=1: expected 0 ≤ momentum < 1"),
        ({"algorithm": "sgd", "momentum": 0}, r"nesterov=True needs momentum > 0; set nesterov"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_groups(group, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [matrix()], **group}])
    optimizer = Muon([matrix()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [matrix()], **group})
    assert len(optimizer.param_groups) == 1


NET, W = mlp(8, 8, 8, 2), matrix()
ADAMW = torch.optim.AdamW([Parameter(torch.ones(2))], lr=0.004, weight_decay=0.1)
SAYS_ADAMW = (
    r"write polarstep\.AdamW\(lr=0\.004, betas=\(0\.9, 0\.999\), eps=1e-08, weight_decay=0\.1\)$"
)
IN_INFERENCE = torch.inference_mode()(lambda: Parameter(torch.eye(3)))()
TWICE = r"is in its group twice: .*leave one"
NO_RULE = {"algorithm": "adamw"}


def later(group):
    """Add ``group`` to an optimizer that holds W."""
    optimizer = Muon([W])
    try:
        optimizer.add_param_group(group)
    finally:
        assert len(optimizer.param_groups) == 1


# What is called, the error, and its words.
CALLS = [
    # parameters
    (lambda: Muon([]), ValueError, r"params is empty: expected at least one .* make it anew"),
    (lambda: Muon(W), TypeError, "params is a Parameter: expected parameters or groups"),
    (lambda: Muon(None), TypeError, "params is a NoneType: expected parameters or groups of them"),
    (lambda: Muon(NET), TypeError, r"a whole model: let polarstep\.muon_for\(model\)"),
    (lambda: Muon(NET.parameters), TypeError, r"is a method: .*model\.parameters\(\) with its"),
    (lambda: Muon(NET.state_dict()), TypeError, r"parameter 0 is a str: .*give the items\(\)"),
    (
        lambda: Muon({"params": [W], "lr": 0.1}),
        TypeError,
        r"a single parameter group.*a list of gro",
    ),
    (
        lambda: Muon([NET]),
        TypeError,
        r"parameter 0 is a Sequential: .*give the parameters\(\) of a",
    ),
    (lambda: Muon([[W]]), TypeError, "parameter 0 is a list: .*give one flat list"),
    (lambda: Muon([{"params": NET[0]}]), TypeError, r"params is a Linear: .*list\(module\.par"),
    (lambda: Muon([W, matrix(), W]), ValueError, f"^parameter 2 {TWICE}"),
    (lambda: Muon([("a", W), ("b", W)]), ValueError, f"^b {TWICE}"),
    (lambda: Muon([{"params": [W, W], **NO_RULE}]), ValueError, f"^parameter 1 {TWICE}"),
    (lambda: Muon([IN_INFERENCE]), TypeError, r"was made inside torch\.inference_mode"),
    (
        lambda: Muon([{"params": [W]}, {"params": [Parameter(torch.ones(4))]}]),
        ValueError,
        r"^group 1, parameter 0 has shape \(4,\): Muon updates",
    ),
    (lambda: later([W]), TypeError, r'group is a list: expected a dict, as \{"params"'),
    (
        lambda: later({"params": [W]}),
        ValueError,
        r"^group 1, parameter 0 is in another .* leave it",
    ),
    (lambda: later({"params": [matrix()] * 2}), ValueError, r"^group 1, parameter 1 is in its"),
    (lambda: later({"lr": 0.1}), ValueError, "no 'params'"),
    # options of Muon
    (lambda: Muon([W], lr=False), TypeError, "lr=False: expected a"),
    (lambda: Muon([W], momentum=False), TypeError, "momentum=False: expected a"),
    (lambda: Muon([W], weight_decay=False), TypeError, "weight_decay=False: expected a"),
    (lambda: Muon([W], lr_factor=False), TypeError, "lr_factor=False: expected a"),
    (lambda: Muon([W], rounding="up"), ValueError, "rounding='up': expected one of nearest, comp"),
    (
        lambda: Muon([W], momentum_dtype="int8"),
        ValueError,
        "momentum_dtype='int8': expected one of",
    ),
    (
        lambda: Muon([W], momentum_dtype=torch.float64),
        ValueError,
        "=torch.float64: expected one of N",
    ),
    (
        lambda: Muon([W], eps=1e-10),
        TypeError,
        r'\{"params": …, "algorithm": "adamw", "eps": 1e-10\}',
    ),
    (
        lambda: Muon([W], 0.02, 0.1),
        TypeError,
        r"0\.1 has no name in the call of Muon: expected names",
    ),
    (
        lambda: later({"params": [matrix()], "polar": None}),
        TypeError,
        "polar=None: .*leave the key out",
    ),
    (
        lambda: LowRank(2, 1, always_sketch=True)(torch.zeros(8, 9, device="meta")),
        TypeError,
        r"meta device has no random numbers.*to_empty",
    ),
    # rules for other parameters
    (lambda: AdamW(lr=-1), ValueError, r"lr=-1: expected a finite number ≥ 0"),
    (lambda: SGD(lr=-1), ValueError, r"lr=-1: expected a finite number ≥ 0"),
    (lambda: SGD(lr=None), TypeError, "lr=None: expected a finite number ≥ 0"),
    (lambda: SGD(lr=True), TypeError, "lr=True: expected a"),
    (lambda: SGD(momentum=True), TypeError, "momentum=True: expected a"),
    (
        lambda: SGD(momentum="0.9"),
        TypeError,
        r"momentum='0\.9': expected a number, 0 ≤ momentum < 1",
    ),
    (lambda: SGD(nesterov="no"), TypeError, "nesterov='no': expected True or False"),
    (lambda: SGD(weight_decay=math.inf), ValueError, r"weight_decay=inf: expected a finite number"),
    (
        lambda: AdamW(weight_decay=math.inf),
        ValueError,
        r"weight_decay=inf: expected a finite number",
    ),
    (lambda: AdamW(betas=(0.9,)), ValueError, "betas=.*expected two numbers in"),
    (lambda: AdamW(betas=("a", "b")), TypeError, "betas=.*expected two numbers in"),
    (lambda: AdamW(betas=None), TypeError, "betas=.*expected two numbers in"),
    (lambda: AdamW(lr=torch.ones(())), TypeError, r'got a Tensor as its lr: .* group\["lr"\] = lr'),
    (lambda: AdamW(fused=True), TypeError, "fused=True is no argument of AdamW: leave it out"),
    (lambda: AdamW(amsgrad=True), TypeError, "AdamW here is without it"),
    (lambda: AdamW(wd=0.1), TypeError, "give weight_decay$"),
    (lambda: AdamW(epsilon=1e-10), TypeError, "give eps$"),
    (lambda: AdamW(beta2=0.99), TypeError, r"did you mean betas\?"),
    (lambda: SGD(dampening=0.1), TypeError, "SGD here is without it"),
    (lambda: SGD(zebra=1), TypeError, "expected some of lr, momentum, nesterov, weight_decay"),
    # muon_for
    (lambda: muon_for([*NET]), TypeError, r"^model is a list: .*torch\.nn\.ModuleList\("),
    (lambda: muon_for([]), TypeError, r"^model is a list: .*go to polarstep\.Muon\(params\)"),
    (lambda: muon_for({"g": NET}), TypeError, r"^model is a dict: .*torch\.nn\.ModuleDict\("),
    (lambda: muon_for(nn.Transformer), TypeError, r"^model is a type: .*as Transformer\("),
    (
        lambda: muon_for(NET.parameters()),
        TypeError,
        r"^model is a generator: .*polarstep\.Muon\(par",
    ),
    (lambda: muon_for(NET, splits=3), TypeError, r"splits=3: expected a dict by patterns of par"),
    (lambda: muon_for(NET, layouts="conv"), TypeError, r"layouts='conv': expected a dict by pat"),
    (
        lambda: muon_for(NET, rules={"0.*": "muon"}),
        TypeError,
        r"rules=\{.*\}: expected a list of pairs",
    ),
    (lambda: muon_for(NET, rules="0.weight"), TypeError, r"rules='0\.weight': expected a list of"),
    (lambda: muon_for(NET, split_sizes=(4, 4)), TypeError, r"split_sizes=.*did you mean splits\?"),
    (lambda: muon_for(NET, layout="conv"), TypeError, r"layout='conv'.*did you mean layouts\?"),
    (
        lambda: muon_for(NET, process_group="nccl"),
        TypeError,
        r"='nccl': expected the ranks.*\.WORLD",
    ),
    (
        lambda: muon_for(NET, betas=(0.9, 0.9)),
        TypeError,
        r"others=polarstep\.AdamW\(betas=\(0\.9, 0\.9",
    ),
    (
        lambda: muon_for(NET, adamw_lr=3e-4),
        TypeError,
        r"give others=polarstep\.AdamW\(lr=0\.0003\)",
    ),
    (lambda: muon_for(NET, adam_betas=(0, 0)), TypeError, r"polarstep\.AdamW\(betas=\(0, 0\)\)"),
    (lambda: muon_for(NET, adamw_eps=1e-10), TypeError, r"polarstep\.AdamW\(eps=1e-10\)"),
    (lambda: muon_for(NET, epsilon=1e-10), TypeError, r"polarstep\.AdamW\(eps=1e-10\)"),
    (lambda: muon_for(NET, adamw_wd=0.1), TypeError, r"polarstep\.AdamW\(weight_decay=0\.1\)"),
    (lambda: muon_for(NET, others=ADAMW), TypeError, f"others=a AdamW: .*{SAYS_ADAMW}"),
    (
        lambda: muon_for(NET, heads=torch.optim.AdamW),
        TypeError,
        r"write polarstep\.AdamW\(lr=1e-3\)$",
    ),
    (lambda: muon_for(NET, rules=[("0.*", ADAMW)]), TypeError, f"target a AdamW: .*{SAYS_ADAMW}"),
    (
        lambda: muon_for(NET, others=torch.optim.RMSprop([Parameter(torch.ones(2))])),
        TypeError,
        "others=a RMSprop: .*AdamW",
    ),
    # a weight decay that turns every sign
    (
        lambda: muon_for(NET, weight_decay=100),
        ValueError,
        r"=100 with lr=0\.02: .*= -1, .*usual.*50",
    ),
    (lambda: muon_for(NET, others=AdamW(weight_decay=60)), ValueError, r"=60 with lr=0\.02"),
    (
        lambda: muon_for(NET, others=AdamW(lr=1e-3, weight_decay=2000)),
        ValueError,
        r"weight_decay=100 with lr=0\.02",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS, ids=[words for _, _, words in CALLS])
def test_calls_that_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_what_looks_like_a_mistake_and_is_none():
    muon_for(NET, weight_decay=50, others=AdamW(lr=1e-3, weight_decay=1000))
    torch.optim.Muon([matrix()], 0.02, 0.1)  # where torch has weight_decay
    Muon([{"params": [matrix()], "maximize": False, "foreach": True, "capturable": True}])
    assert Distribution(process_group=None).process_group is None
    with pytest.raises(ValueError, match=r"expected some of .*split_sizes, ") as told:
        Muon([{"params": [matrix()], "wd": 0.1}])
    assert "step," not in str(told.value)  # the count of steps is no option to give


@pytest.mark.parametrize(
    ("algorithm", "option", "value", "message"),
    [
        ("muon", "nonfinite", "zzz", "nonfinite='zzz': expected one of propagate, skip"),
        ("muon", "momentum", 2, "momentum=2: expected 0 ≤ momentum < 1"),
        ("muon", "lr", -0.1, r"lr=-0\.1: expected a finite number ≥ 0"),
        ("muon", "split_sizes", (2.0, 2.0), "expected the rows of each matrix, integers"),
        ("muon", "split_sizes", (3, 3), "sum to 6, but the weight has 4 rows"),
        ("muon", "algorithm", "adam", "algorithm='adam': expected one of muon, adamw, sgd"),
        ("muon", "plan", "ownr", "plan='ownr': expected one of auto, local"),
        ("muon", "algorithm", "adamw", "algorithm='adamw' has no 'betas': expected all options of"),
        ("adamw", "algorithm", "sgd", "algorithm='sgd' has no 'momentum': expected all options"),
        ("adamw", "betas", (0.9, 1.0), "expected two numbers in"),
        ("sgd", "momentum", 1.5, r"momentum=1\.5: expected 0 ≤ momentum < 1"),
    ],
    ids=str,
)
def test_bad_options_between_steps_change_nothing(algorithm, option, value, message):
    good, bad = (Parameter(gaussian(4, 6).float()) for _ in range(2))
    optimizer = Muon([{"params": [good]}, {"params": [bad], "algorithm": algorithm}])
    for p in (good, bad):
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(([good, bad], optimizer.state))
    optimizer.param_groups[1][option] = value
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.step()
    assert str(([good, bad], optimizer.state)) == str(before)


def bad_gradients():
    yield (
        "another shape",
        torch.zeros(6, 4),
        ValueError,
        (r"parameter 0 has shape \(4, 6\), but its gradient has shape \(6, 4\); call zero_grad"),
    )
    yield (
        "sparse",
        torch.ones(4, 6).to_sparse(),
        TypeError,
        (r"gradient of layout torch.sparse_coo: expected a dense gradient; build its module with"),
    )


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [case[1:] for case in bad_gradients()],
    ids=[case[0] for case in bad_gradients()],
)
@pytest.mark.parametrize("algorithm", ["muon", "adamw", "sgd"])
def test_a_bad_gradient_changes_nothing(gradient, error, message, algorithm):
    """The bad one comes last, in the last group: the others must not have been updated by then."""
    good, vector, bad = Parameter(gaussian(4, 6).float()), Parameter(gaussian(5).float()), None
    bad = Parameter(gaussian(4, 6).float())
    groups = [
        {"params": [good]},
        {"params": [vector], "algorithm": "adamw"},
        {"params": [bad], "algorithm": algorithm},
    ]
    optimizer = Muon(groups, weight_decay=0.1)
    for p in (good, vector, bad):
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(([good, vector, bad], optimizer.state_dict()))
    bad.grad = None
    # torch itself checks an assignment, so a shape that changed later is what can go wrong.
    if gradient.shape != bad.shape:
        data = bad.data
        bad.data = torch.zeros(6, 4)
        bad.grad = gradient
        bad.data = data
    else:
        bad.grad = gradient
    with pytest.raises(error, match=message):
        optimizer.step()
    assert str(([good, vector, bad], optimizer.state_dict())) == str(before)


@pytest.mark.parametrize("algorithm", ["muon", "adamw", "sgd"])
def test_a_first_step_is_not_captured(algorithm):
    """Every replay would make the state anew."""
    W, late = matrix(), matrix()
    optimizer = Muon([{"params": [("W", W), ("late", late)], "algorithm": algorithm}])
    W.grad = torch.ones_like(W)
    optimizer.step()
    late.grad = torch.ones_like(late)
    before = copy.deepcopy(([W, late], optimizer.state_dict()))
    with (
        as_if_captured(),
        pytest.raises(RuntimeError, match="first step of late is being captured"),
    ):
        optimizer.step()
    assert str(([W, late], optimizer.state_dict())) == str(before)
    optimizer.step()
    with as_if_captured():
        optimizer.step()
    assert not torch.equal(W, before[0][0])


@pytest.mark.parametrize(
    "buffer", [torch.zeros(3, 2), torch.zeros(4), 7], ids=["other", "vector", "number"]
)
def test_momentum_that_cannot_be_the_parameters_is_refused(buffer):
    W = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = Muon([W])
    W.grad = torch.ones(2, 3)
    optimizer.step()
    before = optimizer.state[W]["momentum_buffer"].clone()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["momentum_buffer"] = buffer
    with pytest.raises(ValueError, match=r"momentum_buffer of parameter 0 is .*shape \(2, 3\)"):
        optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[W]["momentum_buffer"], before)


@pytest.mark.parametrize("algorithm", ["muon", "adamw", "sgd"])
@pytest.mark.parametrize("option", ["algorithm", "lr", "nonfinite", "weight_decay"])
def test_an_option_that_was_taken_out_of_a_group_is_named(algorithm, option):
    W = matrix()
    optimizer = Muon([{"params": [W], "algorithm": algorithm}])
    W.grad = torch.ones_like(W)
    del optimizer.param_groups[0][option]
    with pytest.raises(ValueError, match=f"has no '{option}': expected all options"):
        optimizer.step()


def test_the_state_of_another_rule_is_refused_before_anything_changes():
    X, Y = matrix(), matrix()
    optimizer = Muon([{"params": [X]}, {"params": [Y], "algorithm": "sgd"}])
    for p in (X, Y):
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(([X, Y], optimizer.state))
    optimizer.param_groups[1].update(algorithm="adamw", betas=(0.9, 0.95), eps=1e-8)
    told = r"state of parameter 0 has no 'exp_avg', only 'momentum_buffer': expected AdamW's state"
    with pytest.raises(ValueError, match=told):
        optimizer.step()
    assert str(([X, Y], optimizer.state)) == str(before)
    with pytest.raises(ValueError, match=told):
        Muon([{"params": [X]}, {"params": [Y]}]).load_state_dict(optimizer.state_dict())
    optimizer.state.pop(Y)  # the remedy
    optimizer.step()
    assert set(optimizer.state[Y]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_parameter_whose_entries_share_memory_is_refused(algorithm):
    shared = Parameter(torch.zeros(1, 3).expand(4, 3))
    with pytest.raises(ValueError, match=r"strides \(0, 1\) for its shape \(4, 3\).*\.clone\(\)"):
        Muon([{"params": [shared], "algorithm": algorithm}])
    one_row = Parameter(torch.zeros(3).as_strided((1, 3), (0, 1)))
    assert one_row.stride() == (0, 1)  # the row has no neighbour to share memory with
    Muon([{"params": [one_row], "algorithm": algorithm}])


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
