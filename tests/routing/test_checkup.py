"""Did Muon run? Routes inside wrappers, and the page on what some steps did."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from tests.routing.sample_models import SmallGPT, mlp
from torch import nn

import polarstep as ps


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, schedule=None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.ones(4, 8, dtype=next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def accelerated(optimizer: ps.Muon) -> object:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def in_lightning(optimizer: ps.Muon) -> object:
    pytest.importorskip("lightning")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    return LightningOptimizer(optimizer)


def in_a_scheduler(optimizer: ps.Muon) -> object:
    first, second = (torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5) for _ in range(2))
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [3])


WRAPPED = {
    "itself": lambda optimizer: optimizer,
    "Accelerate": accelerated,
    "Lightning": in_lightning,
    "scheduler": in_a_scheduler,
    "list": lambda optimizer: [optimizer],
    "torchtitan's container": lambda optimizer: Container([optimizer]),
}


class Container:
    """As torchtitan's, which holds an optimizer for each part of the model."""

    def __init__(self, optimizers: list[object]) -> None:
        self.optimizers = optimizers


@pytest.mark.parametrize("wrap", WRAPPED)
def test_the_routes_of_a_wrapped_optimizer(wrap):
    optimizer = ps.muon_for(mlp(8, 8, 8, 2))
    wrapped = WRAPPED[wrap](optimizer)
    assert ps.routes(wrapped) == optimizer.routes
    assert ps.routes(Container([wrapped])) == optimizer.routes


def test_the_routes_of_two_optimizers_follow_each_other():
    first, second = (ps.muon_for(mlp(8, 8, 8, 2)) for _ in range(2))
    assert ps.routes([first, second]).rows == (*first.routes, *second.routes)
    with pytest.raises(ValueError, match="list holds 2 Muon optimizers: expected one; check each"):
        ps.check([first, second])


def test_an_optimizer_without_muon_is_said_to_have_none():
    adamw = torch.optim.AdamW(mlp(8, 8, 2).parameters())
    with pytest.raises(TypeError, match=r"AdamW holds no polarstep\.Muon: expected an optimizer"):
        ps.routes(adamw)
    with pytest.raises(TypeError, match=r"LambdaLR holds no polarstep\.Muon"):
        ps.check(torch.optim.lr_scheduler.LambdaLR(adamw, lambda k: 1.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda model, o: (model,), r"optimizer is missing: expected check\(model, optimizer\)"),
        (lambda model, o: (o, model), "model is a Muon: expected a torch.nn.Module and then its"),
    ],
)
def test_arguments_of_check(arguments, words):
    model = mlp(8, 8, 8, 2)
    with pytest.raises(TypeError, match=words):
        ps.check(*arguments(model, ps.muon_for(model)))


def test_the_page_shows_the_size_of_a_step_by_role():
    """Muon's T has orthonormal rows, so a step has the norm lr·√rows, and a zero has no size."""
    model = mlp(8, 8, 8, 2).double()
    with torch.no_grad():
        model[0].bias.zero_()
    optimizer = ps.muon_for(
        model, lr=0.02, polar=ps.Exact(), transform=None, weight_decay=0.0, shape_scale="none"
    )
    norms = [torch.linalg.norm(model[i].weight).item() for i in (0, 2)]
    seen = ps.check(model, optimizer, steps=1)
    assert str(seen).startswith("No step with a gradient was watched yet")
    train(model, optimizer, 3)
    assert seen.steps == 1
    (hidden,) = [row for row in seen._rows() if row.role == "hidden"]
    assert hidden.rule == "Muon"
    for share, norm in zip(hidden.shares.values(), norms, strict=True):
        assert share <= 0.02 * 8**0.5 / norm * (1 + 1e-6)
        assert share >= 0.02 / norm * (1 - 1e-6)  # at least one direction
    lines = str(seen).splitlines()
    assert [line.split()[:2] for line in lines[3:6]] == [
        ["hidden", "Muon"],
        ["head", "AdamW"],
        ["vector", "AdamW"],
    ]
    assert lines[-1] == "Nothing looks wrong."


def test_watching_changes_no_step_and_ends():
    models = [SmallGPT("untied") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [ps.muon_for(model, polar=ps.LowRank(4, 2)) for model in models]
    seen = ps.check(models[0], optimizers[0], steps=2)
    tokens = torch.arange(8).reshape(1, 8)
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
    assert seen.steps == 2
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)
    assert not optimizers[0]._optimizer_step_pre_hooks
    assert not optimizers[0]._optimizer_step_post_hooks


def unused(model):
    model.spare = nn.Linear(8, 8)


def frozen(model):
    model[0].requires_grad_(False)


def new(model):
    model.register_module("late", nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("before", "options", "after", "words"),
    [
        (unused, {}, None, "without a gradient: spare.weight, spare.bias"),
        (frozen, {}, None, "frozen: 0.weight, 0.bias"),
        (
            None,
            {},
            new,
            "late.weight, late.bias: trainable, and in no group of this optimizer; add",
        ),
        (None, {"lr": 1e-7}, None, "(hidden by Muon) moves by less than 1e-05 of its norm a step"),
        (None, {"lr": 5.0, "weight_decay": 0.0}, None, "moves by more than 0.5 of its norm a step"),
        (None, {"lr": 0.0}, None, "does not move: lr is 0 now"),
        (None, {"lr": 3e-4}, None, "Muon's learning rate is 0.0003: expected 0.005 to 0.05"),
    ],
)
def test_what_looks_wrong_is_said(before, options, after, words):
    model = mlp(8, 8, 8, 2)
    layers = nn.Sequential(*model)
    if before is not None:
        before(model)
    optimizer = ps.muon_for(model, **options)
    if after is not None:
        after(model)
    seen = ps.check(model, optimizer)
    train(layers, optimizer, 3)
    assert words in str(seen)
    meant = words.startswith(("frozen", "without"))
    assert bool(seen.problems) != meant


def test_a_short_step_in_a_warm_up_is_no_low_rate():
    model = mlp(8, 8, 8, 2)
    optimizer = ps.muon_for(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: (k + 1) / 1_000_000)
    seen = ps.check(model, schedule, steps=3)
    train(model, optimizer, 3, schedule)
    assert seen.problems == ()
    assert "0.02, now" in str(seen)


def test_an_entry_that_is_not_finite_is_said():
    model = mlp(8, 8, 8, 2)
    optimizer = ps.muon_for(model)
    seen = ps.check(optimizer, steps=1)
    model(torch.ones(4, 8)).square().mean().backward()
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert any("0.weight (hidden by Muon) has entries that are not" in p for p in seen.problems)


def test_arguments_of_a_trainer_that_reach_no_optimizer_are_told_of():
    @dataclass
    class TrainingArguments:
        learning_rate: float = 5e-5
        weight_decay: float = 0.0

    held = SimpleNamespace(optimizer=ps.muon_for(mlp(4, 4, 4, 2)), args=TrainingArguments())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.routes(held)
    held.args.learning_rate = 1e-3
    with pytest.warns(
        UserWarning, match=r"^learning_rate=0\.001 of TrainingArguments does not reach"
    ):
        ps.routes(held)
