"""Bad input states value, expectation and remedy, and changes no state."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.spectra import gaussian
from torch.nn import Parameter

from polarstep import SGD, AdamW, Exact, Muon


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
        ({"weight_decay": -1}, ValueError, r"weight_decay=-1: expected a finite number ≥ 0"),
        ({"polar": "exact"}, TypeError, r"polar='exact': expected a polar map such as"),
        ({"polar": Exact}, TypeError, r"expected a polar map such as polarstep.NewtonSchulz\(\)"),
        ({"lr_scale": "muP"}, ValueError, r"lr_scale='muP': expected one of none, spectral, rms"),
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
        ([torch.zeros(3, 4, dtype=torch.int64)], TypeError, r"parameter 0 is int64: expected real"),
        ([torch.zeros(3, 4, dtype=torch.complex64)], TypeError, r"is complex.*torch.view_as_real"),
        (
            [torch.zeros(3, 4).to_sparse()],
            TypeError,
            r"has layout torch.sparse_coo: expected a dense",
        ),
        ([torch.zeros(3)], ValueError, r"shape \(3,\): Muon updates matrices.*give it to AdamW"),
        (["weight"], TypeError, r"is a str: expected a tensor"),
        ({torch.zeros(3, 4)}, TypeError, r"in a set have no order.*give a list"),
        ([("w", torch.zeros(3))], ValueError, r"w has shape \(3,\)"),
    ],
    ids=["integer", "complex", "sparse", "vector", "string", "set", "named"],
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
        ({"betas": (0.9, 0.99)}, r"option 'betas' in a group with algorithm='muon'"),
        ({"momentun": 0.9}, r"option 'momentun'.*did you mean 'momentum'\?"),
        ({"algorithm": "adamw", "polar": Exact()}, r"option 'polar' in a group with algorithm='ad"),
        ({"algorithm": "adamw", "betas": (0.9, 1.0)}, r"betas=.*expected two numbers in \[0, 1\)"),
        ({"algorithm": "adamw", "lr": -1}, r"lr=-1: expected a finite number ≥ 0"),
        ({"algorithm": "adamw", "nonfinite": "no"}, r"nonfinite='no': expected one of"),
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


def test_bad_calls():
    W = matrix()
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])
    optimizer = Muon([W])
    with pytest.raises(TypeError, match="a parameter group is a dict, got list"):
        optimizer.add_param_group([W])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [W]})
    with pytest.raises(ValueError, match="no 'params'"):
        optimizer.add_param_group({"lr": 0.1})
    assert len(optimizer.param_groups) == 1


def test_rules_check_their_own():
    for rule in (AdamW, SGD):
        with pytest.raises(ValueError, match=r"lr=-1: expected a finite number ≥ 0"):
            rule(lr=-1)
        with pytest.raises(ValueError, match=r"weight_decay=inf: expected a finite number ≥ 0"):
            rule(weight_decay=math.inf)
    with pytest.raises(ValueError, match="betas"):
        AdamW(betas=(0.9,))


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
        (r"gradient of layout torch.sparse_coo: expected a dense one; build its module with"),
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
