"""Means over seeds, and how far two of them are apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

__all__ = ["Difference", "Estimate", "paired"]


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation (n − 1 in the denominator) of ``n`` finite values."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate | None:
        """The estimate of the finite ones among ``values``; ``None`` where there are none.

        The standard library rounds both correctly, so the digits are the same on every machine.

        >>> Estimate.of([1.0, 2.0, 3.0])
        Estimate(mean=2.0, std=1.0, n=3)
        """
        finite = [float(value) for value in values if math.isfinite(value)]
        if not finite:
            return None
        std = statistics.stdev(finite) if len(finite) > 1 else None
        return cls(statistics.fmean(finite), std, len(finite))

    def minus(self, other: Estimate) -> Difference:
        """The difference of two means with its standard error, (s₁²/n₁ + s₂²/n₂)^½.

        >>> Estimate(3.0, 0.6, 9).minus(Estimate(2.0, 0.8, 16)).error
        0.28284271247461906
        """
        error = None
        if self.std is not None and other.std is not None:
            error = math.sqrt(self.std**2 / self.n + other.std**2 / other.n)
        return Difference(self.mean - other.mean, error)


@dataclass(frozen=True)
class Difference:
    """A difference of means; its standard error is unknown where it rests on a single value.

    ``pairs`` counts the pairs of runs with a common seed; ``None`` for a difference of two means.
    """

    value: float
    error: float | None
    pairs: int | None = None

    @property
    def clear(self) -> bool:
        """Whether the difference is more than two standard errors."""
        return self.error is not None and abs(self.value) > 2 * self.error


def paired(ours: pd.Series, theirs: pd.Series) -> Difference | None:
    """The mean difference of two series by seed; ``None`` where they have no seed in common.

    A seed fixes the initial weights and the order of the data, so that a lucky seed is lucky on both
    sides. The standard error is that of the differences, s/√n.

    >>> paired(pd.Series({1: 3.0, 2: 5.0, 9: 0.0}), pd.Series({1: 2.0, 2: 3.0}))
    Difference(value=1.5, error=0.5, pairs=2)
    """
    found = Estimate.of((ours - theirs).dropna())
    if found is None:
        return None
    error = None if found.std is None else found.std / math.sqrt(found.n)
    return Difference(found.mean, error, found.n)
