"""Mistakes that a step would pass over in silence are told once, with the remedy."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.routing.sample_models import mlp
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from polarstep import Muon, muon_for
from polarstep.mistakes import LOOKS_EVERY


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()


def told(model, optimizer, steps=3, before=lambda k: None):
    """The warnings of a few steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for k in range(steps):
            before(k)
            step(model, optimizer)
    return [each for each in found if issubclass(each.category, UserWarning)]


def test_a_layer_that_is_unfrozen_and_not_added():
    model = mlp(8, 8, 8, 2)
    model[0].requires_grad_(False)
    optimizer = muon_for(model)
    assert not told(model, optimizer)
    model[0].requires_grad_(True)
    LambdaLR(optimizer, lambda k: 1.0)  # wraps step() once more
    (warning,) = told(model, optimizer, 2 * LOOKS_EVERY)  # once
    assert "0.weight and 1 more have a gradient, but no group" in str(warning.message)
    assert 'optimizer.add_param_group({"params": [...]})' in str(warning.message)
    assert warning.filename == __file__  # where step() was called


def test_a_layer_that_was_frozen_with_its_last_gradient_is_not_told_of():
    model = mlp(8, 8, 8, 2)
    model(torch.ones(2, 8)).square().mean().backward()
    model[0].requires_grad_(False)  # its gradient stays, and no backward pass changes it
    optimizer = muon_for(model)
    assert not told(model, optimizer)
    model[0].requires_grad_(True)
    (warning,) = told(model, optimizer, LOOKS_EVERY)
    assert "0.weight and 1 more have a gradient, but no group" in str(warning.message)


def test_a_layer_that_is_unfrozen_and_added():
    model = mlp(8, 8, 8, 2)
    model[0].requires_grad_(False)
    optimizer = muon_for(model)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    before = model[0].weight.detach().clone()
    assert not told(model, optimizer)
    assert not torch.equal(before, model[0].weight)


def test_a_layer_that_a_resumed_run_has_frozen():
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    assert not told(model, optimizer)
    resumed = muon_for(model)
    model[0].requires_grad_(False)
    resumed.load_state_dict(optimizer.state_dict())
    (warning,) = told(model, resumed)  # once in three steps
    assert "0.weight and 1 more have a state in the checkpoint" in str(warning.message)
    assert "module.requires_grad_(True)" in str(warning.message)
    assert warning.filename == __file__


def test_a_layer_that_is_unfrozen_between_the_checkpoint_and_the_first_step():
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    assert not told(model, optimizer)
    resumed = muon_for(model)
    model[0].requires_grad_(False)
    resumed.load_state_dict(optimizer.state_dict())
    model[0].requires_grad_(True)
    assert not told(model, resumed)


@pytest.mark.parametrize("zeros", [False, True], ids=["no gradient", "a gradient of zeros"])
@pytest.mark.parametrize("which", [[4], [0, 2, 4]], ids=["one", "all"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_layer_that_is_replaced_after_the_optimizer_was_made(which, zeros, steps):
    """``zero_grad(set_to_none=False)`` leaves a gradient of zeros in a parameter that nobody uses."""
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    zero_grad = optimizer.zero_grad
    optimizer.zero_grad = lambda: zero_grad(set_to_none=not zeros)
    assert not told(model, optimizer, steps)
    for i in which:
        model[i] = torch.nn.Linear(model[i].in_features, model[i].out_features)
    names = f"{which[0]}.weight and {2 * len(which) - 1} more have been replaced in the model"
    with pytest.raises(RuntimeError, match=rf"{names}.*made after the last of these calls"):
        told(model, optimizer, LOOKS_EVERY)
    anew = muon_for(model)
    assert not told(model, anew, 2 * LOOKS_EVERY)


def test_layers_that_change_places_are_not_told_of():
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    assert not told(model, optimizer)
    model[0], model[2] = model[2], model[0]
    assert not told(model, optimizer, 2 * LOOKS_EVERY)


def test_weights_that_are_tied_after_the_optimizer_was_made():
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    model[0].weight = model[2].weight
    assert not told(model, optimizer, 2 * LOOKS_EVERY)


def write_one_rate(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


@pytest.mark.parametrize(
    "rates",
    [lambda k: 3e-4, lambda k: 6e-6 * k, lambda k: 6e-4 * 0.99**k],
    ids=["constant", "rising", "falling"],
)
def test_a_rate_of_adamw_written_to_all_groups(rates):
    """A script's loop for AdamW gives Muon a rate with which it hardly moves."""
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    assert not told(model, optimizer, 99, lambda k: write_one_rate(optimizer, rates(k)))
    (warning,) = told(model, optimizer, 3, lambda k: write_one_rate(optimizer, rates(99)))
    assert "at most" in str(warning.message)
    assert "try lr=0.02" in str(warning.message)
    assert warning.filename == __file__


def test_a_schedule_with_the_peak_of_adamw():
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    cycle = OneCycleLR(optimizer, 3e-4, total_steps=200)
    (warning,) = told(model, optimizer, 100, lambda k: cycle.step() if k else None)
    assert "at most 0.0003 in the first 100 steps" in str(warning.message)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: LambdaLR(optimizer, lambda k: k / 10_000),
        lambda optimizer: OneCycleLR(optimizer, 0.02, total_steps=10_000),
    ],
)
def test_a_long_warm_up_is_fine(schedule):
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    scheduler = schedule(optimizer)
    assert not told(model, optimizer, 101, lambda k: scheduler.step() if k else None)
    assert optimizer.param_groups[0]["lr"] < 1e-3


def test_a_run_that_is_resumed_at_the_end_of_a_schedule():
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    assert not told(model, optimizer)
    write_one_rate(optimizer, 1e-6)
    resumed = muon_for(model)
    resumed.load_state_dict(optimizer.state_dict())
    assert not told(model, resumed, 101)


@pytest.mark.parametrize("options", [{"lr": 3e-4, "shape_scale": "rms"}, {"lr": 2e-3}, {"lr": 0.0}])
def test_low_rates_that_are_meant(options):
    model = mlp(8, 8, 8, 2)
    assert not told(model, muon_for(model, **options), 101)


def test_an_optimizer_without_parameters_has_nothing_to_miss():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon([{"params": []}]).step()


def put_weight_norm_on(model):
    torch.nn.utils.parametrizations.weight_norm(model[2])


def take_weight_norm_off(model):
    torch.nn.utils.parametrize.remove_parametrizations(model[2], "weight")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (put_weight_norm_on, "2.parametrizations.weight.original0 and 1 more have"),
        (take_weight_norm_off, "2.weight has"),
        (lambda model: model.append(torch.nn.Linear(2, 2)), "5.weight and 1 more have"),
    ],
)
def test_parameters_that_are_added_to_the_model_after_the_optimizer_was_made(change, name):
    model = mlp(8, 8, 8, 2)
    if change is take_weight_norm_off:
        put_weight_norm_on(model)
    optimizer = muon_for(model)
    assert not told(model, optimizer)
    change(model)
    (warning,) = told(model, optimizer, 2 * LOOKS_EVERY)
    assert str(warning.message).startswith(f"{name} a gradient, but no group of this optimizer")
    assert warning.filename == __file__


def test_parameters_that_are_added_to_the_model_and_to_the_optimizer():
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    assert not told(model, optimizer)
    model.append(torch.nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(model[-1].parameters())})
    assert not told(model, optimizer, 2 * LOOKS_EVERY)


def test_parameters_that_another_optimizer_has_may_change_their_names():
    """A wrapper around a layer that a rule leaves out is no new layer."""
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model, rules=[("4.*", None)])
    assert not told(model, optimizer)
    model[4] = torch.nn.Sequential(model[4])
    assert not told(model, optimizer, 2 * LOOKS_EVERY)


def test_a_models_data_may_be_exchanged():
    """torch refuses to exchange the data of a tensor that has a weak reference."""
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    assert not told(model, optimizer)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert not told(model, optimizer)
