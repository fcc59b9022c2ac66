"""Mistakes that a step would pass over in silence are told once, with the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from tests.routing.sample_models import mlp
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from polarstep import Muon, muon_for
from polarstep.mistakes import LOOKS_EVERY

Change = Callable[[nn.Sequential, Muon], object]


def step(model: nn.Module, optimizer: Muon) -> None:
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


# --- parameters that change after the optimizer was made


def nothing(model: nn.Sequential, optimizer: Muon | None = None) -> None:
    pass


def freeze(model: nn.Sequential, optimizer: Muon | None = None) -> None:
    model[0].requires_grad_(False)


def freeze_with_its_gradient(model: nn.Sequential, optimizer: Muon | None = None) -> None:
    """The last gradient stays, and no backward pass changes it."""
    model(torch.ones(2, 8)).square().mean().backward()
    freeze(model)


def unfreeze(model: nn.Sequential, optimizer: Muon) -> None:
    model[0].requires_grad_(True)


def unfreeze_under_a_scheduler(model: nn.Sequential, optimizer: Muon) -> None:
    """A scheduler wraps ``step()`` once more."""
    unfreeze(model, optimizer)
    LambdaLR(optimizer, lambda k: 1.0)


def unfreeze_and_add(model: nn.Sequential, optimizer: Muon) -> None:
    unfreeze(model, optimizer)
    optimizer.add_param_group({"params": list(model[0].parameters())})


def append_and_add(model: nn.Sequential, optimizer: Muon) -> None:
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(model[-1].parameters())})


def exchange(model: nn.Sequential, optimizer: Muon) -> None:
    model[0], model[2] = model[2], model[0]


def tie(model: nn.Sequential, optimizer: Muon) -> None:
    model[0].weight = model[2].weight


def norm(model: nn.Sequential, optimizer: Muon | None = None) -> None:
    parametrizations.weight_norm(model[2])


def take_norm_off(model: nn.Sequential, optimizer: Muon) -> None:
    parametrize.remove_parametrizations(model[2], "weight")


def wrap(model: nn.Sequential, optimizer: Muon) -> None:
    """A wrapper around a layer that a rule leaves out is no new layer."""
    model[4] = nn.Sequential(model[4])


def exchange_data(model: nn.Sequential, optimizer: Muon) -> None:
    """torch refuses to exchange the data of a tensor that has a weak reference."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


LEFT_OUT = {"rules": [("4.*", None)]}
CHANGES: list[tuple[Callable[[nn.Sequential], None], Change, dict[str, object], str]] = [
    (freeze, nothing, {}, ""),
    (freeze_with_its_gradient, nothing, {}, ""),
    (freeze, unfreeze_under_a_scheduler, {}, "0.weight and 1 more have"),
    (freeze_with_its_gradient, unfreeze, {}, "0.weight and 1 more have"),
    (freeze, unfreeze_and_add, {}, ""),
    (nothing, exchange, {}, ""),
    (nothing, tie, {}, ""),
    (nothing, norm, {}, "2.parametrizations.weight.original0 and 1 more have"),
    (norm, take_norm_off, {}, "2.weight has"),
    (nothing, lambda model, _: model.append(nn.Linear(2, 2)), {}, "5.weight and 1 more have"),
    (nothing, append_and_add, {}, ""),
    (nothing, wrap, LEFT_OUT, ""),
    (nothing, exchange_data, {}, ""),
]


@pytest.mark.parametrize(("before", "change", "options", "names"), CHANGES)
def test_parameters_without_a_group_are_told_of_once(before, change, options, names):
    model = mlp(8, 8, 8, 2)
    before(model)
    optimizer = muon_for(model, **options)
    assert not told(model, optimizer)
    change(model, optimizer)
    start = model[0].weight.detach().clone()
    found = told(model, optimizer, 2 * LOOKS_EVERY)
    assert len(found) == bool(names)
    for warning in found:
        words = f"{names} a gradient, but no group of this optimizer"
        assert str(warning.message).startswith(words)
        assert 'optimizer.add_param_group({"params": [...]})' in str(warning.message)
        assert warning.filename == __file__  # where step() was called
    if change is unfreeze_and_add:
        assert not torch.equal(start, model[0].weight)


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
        model[i] = nn.Linear(model[i].in_features, model[i].out_features)
    names = f"{which[0]}.weight and {2 * len(which) - 1} more have been replaced in the model"
    with pytest.raises(RuntimeError, match=rf"{names}.*made after the last of these calls"):
        told(model, optimizer, LOOKS_EVERY)
    assert not told(model, muon_for(model), 2 * LOOKS_EVERY)


@pytest.mark.parametrize("unfrozen", [False, True])
def test_a_layer_that_a_resumed_run_has_frozen(unfrozen):
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    assert not told(model, optimizer)
    resumed = muon_for(model)
    freeze(model)
    resumed.load_state_dict(optimizer.state_dict())
    if unfrozen:  # before the first step
        unfreeze(model, resumed)
        assert not told(model, resumed)
        return
    (warning,) = told(model, resumed)  # once in three steps
    assert "0.weight and 1 more have a state in the checkpoint" in str(warning.message)
    assert "module.requires_grad_(True)" in str(warning.message)
    assert warning.filename == __file__


def test_an_optimizer_without_parameters_has_nothing_to_miss():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon([{"params": []}]).step()


# --- rates at which nothing trains


def write_one_rate(optimizer: Muon, lr: float) -> None:
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


@pytest.mark.parametrize(
    ("schedule", "low"),
    [
        (lambda optimizer: OneCycleLR(optimizer, 3e-4, total_steps=200), True),
        (lambda optimizer: OneCycleLR(optimizer, 0.02, total_steps=10_000), False),
        (lambda optimizer: LambdaLR(optimizer, lambda k: k / 10_000), False),
    ],
)
def test_the_peak_of_a_schedule_counts(schedule, low):
    model = mlp(8, 8, 8, 2)
    optimizer = muon_for(model)
    scheduler = schedule(optimizer)
    found = told(model, optimizer, 101, lambda k: scheduler.step() if k else None)
    assert optimizer.param_groups[0]["lr"] < 1e-3
    words = [str(warning.message).partition(" in the first 100 steps")[0] for warning in found]
    assert words == ["Muon's learning rate was at most 0.0003"] * low


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
