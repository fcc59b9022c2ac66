"""The records under ``results/``, and means over seeds with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from scipy import special

from pages import ROOT
from polarstep_lab import records

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


@dataclass(frozen=True)
class Change:
    """A mean over seeds, half of its 95% t-interval, and the number of seeds; one seed has no half."""

    value: float
    half: float | None
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.half is not None and abs(self.value) > self.half


def change(values: Iterable[float]) -> Change:
    """The mean of a few numbers, with its t-interval."""
    found = [*values]
    if len(found) == 1:
        return Change(found[0], None, 1)
    error = statistics.stdev(found) / math.sqrt(len(found))
    half = error * float(special.stdtrit(len(found) - 1, 0.975))
    return Change(statistics.fmean(found), half, len(found))


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> Change:
    """The mean difference on the seeds that both have."""
    return change(values[seed] - base[seed] for seed in sorted(values.keys() & base.keys()))


def percent(values: Mapping[int, float], base: Mapping[int, float]) -> Change:
    """The mean relative difference on the seeds that both have, in percent."""
    return change(
        100 * (values[seed] / base[seed] - 1) for seed in sorted(values.keys() & base.keys())
    )


def welch(ours: tuple[float, float, int], theirs: tuple[float, float, int]) -> Change:
    """The difference of two means, each given as mean, standard deviation and n; Welch's interval."""
    (mean, std, n), (other, spread, m) = ours, theirs
    a, b = std**2 / n, spread**2 / m
    freedom = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1))
    return Change(
        mean - other, math.sqrt(a + b) * float(special.stdtrit(freedom, 0.975)), min(n, m)
    )
