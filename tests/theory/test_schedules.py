"""The schedules of the theorems, with a known α and without."""

from __future__ import annotations

import math

import pytest
import torch

from polarstep.maps import Exact
from polarstep.optimizer import Muon
from polarstep.theory import schedules


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
@pytest.mark.parametrize("K", [2, 1000])
def test_schedule_is_the_theorems(alpha, K):
    s = schedules.from_tail_index(K, alpha)
    assert s.lr == pytest.approx(1 / K ** ((2 * alpha - 1) / (3 * alpha - 2)))
    assert s.momentum == pytest.approx(1 - 1 / K ** (alpha / (3 * alpha - 2)))
    # What makes the rate: descent, drift and noise of the bound all fall at the same speed.
    r = schedules.rate(alpha)
    assert s.lr * K == pytest.approx(K**r)
    assert s.lr * s.window == pytest.approx(K**-r)
    assert (1 - s.momentum) ** ((alpha - 1) / alpha) == pytest.approx(K**-r)


def test_rates_at_two_are_a_quarter_and_the_schedules_meet():
    assert schedules.rate(2.0) == schedules.rate(2.0, knows_alpha=False) == 0.25
    assert dict(schedules.universal(400)) == pytest.approx(dict(schedules.from_tail_index(400, 2)))
    for alpha in (1.1, 1.5, 1.9):
        assert schedules.rate(alpha) > schedules.rate(alpha, knows_alpha=False)
    assert "| 2 | 0.2500 | ε^−4.00 | 0.2500 | ε^−4.00 |" in schedules.rate_table()


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("knows_alpha", [True, False])
def test_after_the_steps_for_epsilon_the_rate_gives_epsilon(alpha, knows_alpha):
    K = schedules.iterations_for(0.1, alpha, knows_alpha=knows_alpha)
    assert K ** -schedules.rate(alpha, knows_alpha=knows_alpha) == pytest.approx(0.1)


def test_more_steps_than_a_number_can_hold_are_infinitely_many():
    assert schedules.iterations_for(1e-300, 1.01) == math.inf


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan"), "0.1", None])
def test_an_epsilon_that_is_no_positive_number_is_named(epsilon):
    with pytest.raises(ValueError, match=f"epsilon={epsilon!r}: expected a finite number > 0"):
        schedules.iterations_for(epsilon, 1.5)


def test_a_schedule_plugs_into_muon_in_one_line():
    X = torch.nn.Parameter(torch.zeros(3, 2))
    opt = Muon([X], polar=Exact(), **schedules.from_tail_index(100, 1.5))
    X.grad = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    opt.step()
    # shape_scale="none": the step is η·UVᵀ itself, for a tall matrix too.
    assert -float(X[0, 0].detach()) == pytest.approx(100 ** (-2.0 / 2.5), rel=1e-5)
    assert opt.param_groups[0]["momentum"] == pytest.approx(1 - 100 ** (-1.5 / 2.5))
    assert opt.param_groups[0]["nesterov"] is True
    assert schedules.universal(10, nesterov=False)["nesterov"] is False


@pytest.mark.parametrize(
    ("K", "alpha"),
    [
        (1, 1.5),
        (2.5, 1.5),
        (math.nan, 1.5),
        (math.inf, 1.5),
        (None, 1.5),
        ("100", 1.5),
        (100, 1.0),
        (100, 2.01),
        (100, "2"),
        (100, torch.tensor([1.5, 1.7])),
    ],
)
def test_bad_horizon_or_tail_index(K, alpha):
    with pytest.raises(ValueError, match=r"K ≥ 2|1 < α ≤ 2"):
        schedules.from_tail_index(K, alpha)
