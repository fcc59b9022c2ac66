"""The records under ``results/``, and means over seeds with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from pages import ROOT
from polarstep_lab import records
from polarstep_lab.estimates import Difference, Estimate

Line = dict[str, Any]
"""A line of a record: ``kind``, ``study``, ``part``, ``variant``, ``config``, ``environment``, …"""
BySeed = dict[int, float]


@cache
def study(name: str) -> tuple[Line, ...]:
    """All lines of ``results/NAME``."""
    return tuple(records.read(ROOT / "results" / name))


@cache
def lines(name: str, part: str, kind: str = "run") -> tuple[Line, ...]:
    """The lines of one kind in a part of a study."""
    return tuple(line for line in study(name) if (line["part"], line["kind"]) == (part, kind))


@cache
def rows(name: str, part: str, kind: str = "run") -> tuple[dict[str, Any], ...]:
    """The same lines, each as one flat dictionary (:func:`polarstep_lab.records.flat`)."""
    return tuple(map(records.flat, lines(name, part, kind)))


def by_seed(
    found: Iterable[Line], value: str = "value", where: Callable[[Line], bool] = lambda line: True
) -> BySeed:
    """A figure of finished runs of the laboratory by seed: ``"value"`` is of test data."""
    return {
        line["config"]["seed"]: line["result"][value]
        for line in found
        if line.get("result", {}).get("status") == "finished" and where(line)
    }


def estimate(values: Iterable[float]) -> Estimate:
    """The mean of a few numbers, their standard deviation, and how many they are."""
    found = Estimate.of(values)
    assert found is not None, "no run has finished"
    return found


def change(values: Iterable[float]) -> Difference:
    """The mean of a few numbers, with its standard error."""
    return estimate(values).from_zero


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> Difference:
    """The mean difference on the seeds that both have."""
    return change(values[seed] - base[seed] for seed in sorted(values.keys() & base.keys()))


def percent(values: Mapping[int, float], base: Mapping[int, float]) -> Difference:
    """The mean relative difference on the seeds that both have, in percent."""
    return change(
        100 * (values[seed] / base[seed] - 1) for seed in sorted(values.keys() & base.keys())
    )
