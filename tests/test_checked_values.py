"""What counts as a number, and what the errors for other values say."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import polarstep as ps
from polarstep.checked_values import (
    check_at_least_zero,
    check_bool,
    check_fraction,
    check_integer,
    check_number,
    check_positive,
    is_integer,
    is_number,
)
from polarstep.maps.subspace import Fresh

NUMBERS = (0, -3, 10**400, 0.5, math.nan, math.inf, Fraction(1, 3), np.float32(2), np.int64(7))
INTEGERS = (0, -3, 10**400, np.int64(7), np.uint8(1))
OTHERS = (True, False, np.bool_(True), "1", None, (1,), 1j, torch.tensor(1.0))


def test_a_number_is_real_and_no_bool():
    assert all(map(is_number, NUMBERS))
    assert not any(map(is_number, OTHERS))


def test_an_integer_is_whole_by_its_type():
    assert all(map(is_integer, INTEGERS))
    assert not any(map(is_integer, (*OTHERS, 3.0, math.inf, Fraction(3))))


CHECKS = {
    "at least zero": (check_at_least_zero, (0, 0.5, 10**400, 1e308), (-1e-300, -1)),
    "positive": (check_positive, (1e-300, 10**400), (0, 0.0, -1)),
    "fraction": (check_fraction, (0, 0.5, math.nextafter(1, 0)), (1, 1.0, -1e-300, 10**400)),
    "integer": (lambda *told: check_integer(*told[:2], 2, told[2]), (2, 3, 10**400), (1, -2)),
}


@pytest.mark.parametrize(("check", "inside", "outside"), CHECKS.values(), ids=CHECKS)
def test_a_range_has_its_ends(check, inside, outside):
    for value in inside:
        check("x", value, "give 2")
    unending = () if check is CHECKS["integer"][0] else (math.nan, math.inf, -math.inf)
    for value in (*outside, *unending):
        with pytest.raises(ValueError, match=r"^x=.*: expected .*; give 2$") as raised:
            check("x", value, "give 2")
        assert f"x={value!r}:" in str(raised.value)
    for value in OTHERS:
        with pytest.raises(TypeError, match=r"^x=.*: expected .*; give 2$"):
            check("x", value, "give 2")


def test_a_range_of_ones_own():
    def check(value: object) -> None:
        check_number("x", value, lambda x: 1 <= x < 2, "1 ≤ x < 2", "give 1")

    check(1)
    with pytest.raises(ValueError, match=r"^x=2: expected 1 ≤ x < 2; give 1$"):
        check(2)
    with pytest.raises(TypeError, match=r"^x='2': expected a number, 1 ≤ x < 2; give 1$"):
        check("2")


def test_only_true_and_false_are_bools():
    check_bool("x", True, "give True")
    check_bool("x", False, "give True")
    for value in (1, 0, None, "no", np.bool_(True)):
        with pytest.raises(TypeError, match=r"^x=.*: expected True or False; give True$"):
            check_bool("x", value, "give True")


@pytest.mark.parametrize(
    "build",
    [
        lambda value: ps.NewtonSchulz(steps=value),
        lambda value: ps.Exact(rtol=value),
        lambda value: ps.LowRank(rank=value),
        lambda value: ps.LowRank(rank=8, oversample=value),
        lambda value: ps.LowRank(rank=8, power=value),
        lambda value: Fresh(power=value),
        lambda value: ps.Warm(noise=value),
        lambda value: ps.NormalizedRows(beta2=value),
        lambda value: ps.AdamW(lr=value),
        lambda value: ps.AdamW(eps=value),
        lambda value: ps.AdamW(betas=(0.9, value)),
        lambda value: ps.AdamW(weight_decay=value),
        lambda value: ps.SGD(momentum=value),
        lambda value: ps.Muon([torch.zeros(4, 3)], momentum=value),
        lambda value: ps.Muon([torch.zeros(4, 3)], weight_decay=value),
        lambda value: ps.Muon([torch.zeros(4, 3)], seed=value),
        lambda value: ps.Muon([{"params": [torch.zeros(4, 3)], "lr_factor": value}]),
        lambda value: ps.Muon([{"params": [torch.zeros(4, 3)], "split_repeats": value}]),
        lambda value: ps.Muon([{"params": [torch.zeros(4, 3)], "split_sizes": (3, value)}]),
        lambda value: ps.maps.polar_express(1e-3, value),
        lambda value: ps.maps.polar_express(1e-3, 5, cushion=value),
        lambda value: ps.maps.polar_express(1e-3, 5, safety=value),
    ],
)
@pytest.mark.parametrize("value", [True, False, "1", 1j])
def test_every_option_that_is_a_number_refuses_what_is_none(build, value):
    with pytest.raises(TypeError, match="expected"):
        build(value)


def test_integers_of_numpy_become_pythons_in_maps():
    three = np.int64(3)
    polar = ps.LowRank(rank=three, oversample=three, inner=ps.NewtonSchulz(three, "quintic"))
    known = (polar.rank, polar.oversample, polar.inner.steps)
    assert [type(each) for each in known] == [int] * 3
    assert polar == ps.LowRank(rank=3, oversample=3, inner=ps.NewtonSchulz(3, "quintic"))
    assert repr(polar) == repr(
        ps.LowRank(rank=3, oversample=3, inner=ps.NewtonSchulz(3, "quintic"))
    )
