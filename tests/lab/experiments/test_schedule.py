"""The lab's schedule is made of the core's curves, and gives the numbers it always gave."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import pytest
import torch

from polarstep import Muon
from polarstep.theory import annealing
from polarstep_lab.config import ScheduleConfig, TextData
from polarstep_lab.methods import find_method
from polarstep_lab.optimizers.schedule import RunSchedule, place_in_stages
from polarstep_lab.recipes import resolve

RECORDED = {
    ("cifar10", "adamw"): "84c7e45f48d966cf",
    ("cifar10", "sgd"): "b2ec410a255f7bf8",
    ("cifar10", "muon"): "8a37f0ee4c98a599",
    ("cifar10-tiny", "adamw"): "84c7e45f48d966cf",
    ("cifar10-tiny", "sgd"): "b2ec410a255f7bf8",
    ("cifar10-tiny", "muon"): "8a37f0ee4c98a599",
    ("nanogpt-toy", "adamw"): "63b5597085a622e0",
    ("nanogpt-toy", "sgd"): "63b5597085a622e0",
    ("nanogpt-toy", "muon"): "bdb651e44556ec43",
    ("nanogpt-small", "adamw"): "9a7dd3f01e52bb61",
    ("nanogpt-small", "sgd"): "e2f8251da9d61fb1",
    ("nanogpt-small", "muon"): "95bdf13205c654ff",
    ("nanogpt", "adamw"): "f0797f3c9b295a2d",
    ("nanogpt", "sgd"): "f0797f3c9b295a2d",
    ("nanogpt", "muon"): "ec25bd1382230121",
    ("nanogpt-wiki", "adamw"): "e8317cbac7dc30a7",
    ("nanogpt-wiki", "sgd"): "e8317cbac7dc30a7",
    ("nanogpt-wiki", "muon"): "5fa2d639f99e2de2",
}
"""Digests of all multipliers and momenta, recorded when the lab had formulas of its own.

``nanogpt-25m`` is newer; its losses are compared with those of a plain loop in test_studies.
"""


def multipliers(config):
    """Every number that the schedule of a run hands to an optimizer, step by step."""
    data = config.data
    steps = data.steps if isinstance(data, TextData) else 720
    schedule = RunSchedule(config.schedule, steps)
    for step in range(steps):
        peak = 1.0
        if isinstance(data, TextData):
            peak = place_in_stages(data.stages, config.model.context, step).stage.lr
        yield schedule.lr(step, peak)
        yield schedule.lr(step, peak, 3 / 8)
        yield schedule.momentum(step, config.optimizer.momentum)


def digest(numbers):
    return hashlib.sha256(b"".join(struct.pack("<d", x) for x in numbers)).hexdigest()[:16]


@pytest.mark.parametrize(("recipe", "method"), RECORDED)
def test_multipliers_are_bit_for_bit_those_of_the_records(recipe, method):
    config = resolve(recipe, method)
    if method == "sgd" and recipe in WARMED:
        config = replace(config, schedule=replace(config.schedule, warmup=0))
    assert digest(multipliers(config)) == RECORDED[recipe, method]


WARMED = {"nanogpt": 200, "nanogpt-wiki": 150}
"""Warm-up steps of SGD where the digests are of schedules without; no run was recorded with these."""


@pytest.mark.parametrize(("recipe", "steps"), WARMED.items())
def test_sgd_warms_up_as_in_the_authors_script(recipe, steps):
    schedule = RunSchedule(resolve(recipe, "sgd").schedule, 1000)
    assert [schedule.lr(step) for step in (0, steps // 2 - 1, steps - 1, steps)] == [
        1 / steps,
        0.5,
        1.0,
        1.0,
    ]
    assert resolve(recipe, "adamw").schedule.warmup == resolve(recipe, "muon").schedule.warmup == 0


@pytest.mark.parametrize("config", [
    ScheduleConfig(),
    ScheduleConfig(warmup=30, cooldown=0.9, final=1.5, extension=7),
    ScheduleConfig(momentum_start=0.5, momentum_warmup=0.0, momentum_cooldown=200),
    ScheduleConfig(momentum_start=0.99, momentum_warmup=1.0),
], ids=str)  # fmt: skip
def test_unusual_settings_have_their_old_numbers(config):
    """Ramps that overlap, a rate that rises at the end, momentum that starts above its target."""
    schedule = RunSchedule(config, 100)
    for step in range(100):
        done = min(1.0, step / (100 - config.extension))
        left = min(1.0, (1 - done) / config.cooldown)
        rate = left * 1.3 + (1 - left) * config.final
        assert schedule.lr(step, 1.3) == rate * (
            (step + 1) / config.warmup if step < config.warmup else 1.0
        )
        start, rise, fall = (
            config.momentum_start, config.momentum_warmup * 100, config.momentum_cooldown
        )  # fmt: skip
        expected = 0.95
        if start is not None and start < 0.95:
            up = min(1.0, step / rise) if rise else 1.0
            down = min(1.0, (100 - step) / fall) if fall else 1.0
            expected = start + (0.95 - start) * min(up, down)
        assert schedule.momentum(step, 0.95) == expected


def test_the_core_scheduler_for_nanogpt_is_the_recipe():
    """At all steps but 966: the recipe's thirds are 1450 // 3 steps, so its last stage begins there,
    a step before two thirds of 1450 rounded.
    """
    config = resolve("nanogpt", find_method("muon"))
    own = config.optimizer.momentum
    weight = torch.nn.Parameter(torch.eye(2))
    optimizer = Muon([weight], lr=1.0, momentum=own)
    scheduler = annealing.nanogpt(optimizer)
    schedule = RunSchedule(config.schedule, config.data.steps)
    for step in range(config.data.steps):
        stage = place_in_stages(config.data.stages, config.model.context, step).stage
        (group,) = optimizer.param_groups
        assert (group["lr"] == schedule.lr(step, stage.lr)) == (step != 966), step
        assert group["momentum"] == schedule.momentum(step, own), step
        optimizer.step()
        scheduler.step()
