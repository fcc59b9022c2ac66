"""Means over seeds, and how far two of them are apart.

Intervals are 95% t-intervals: over three seeds they reach 4.3 standard errors to either side, not two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polarstep_lab.wording import plural

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Difference", "Estimate", "paired", "student"]


def student(freedom: float) -> float:
    """The two-sided 95% point of Student's t.

    >>> round(student(2), 3)
    4.303
    """
    from scipy import special  # takes a while, and means alone can be shown without it

    return float(special.stdtrit(freedom, 0.975))


@dataclass(frozen=True)
class Difference:
    """A difference of means, its standard error, and the degrees of freedom of that error.

    A difference that rests on a single value has no error. ``pairs`` counts the pairs of runs with a
    common seed; ``None`` for a difference of two means.
    """

    value: float
    error: float | None = None
    freedom: float = math.nan
    pairs: int | None = None

    @property
    def interval(self) -> float | None:
        """Half the width of the 95% t-interval.

        >>> Difference(1.0, 1.0, freedom=2).interval
        4.302652729...
        """
        return None if self.error is None else self.error * student(self.freedom)

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.interval is not None and abs(self.value) > self.interval

    def text(self, decimals: int) -> str:
        """The signed difference ± its interval; a difference that rounds to zero has no sign.

        >>> Difference(-0.00123, 0.0004, math.inf).text(4), Difference(-1e-5).text(4)
        ('−0.0012 ± 0.0008', '0.0000')
        """
        size = _with_spread(abs(self.value), self.interval, decimals)
        return size if float(size.split()[0]) == 0 else f"{'−' if self.value < 0 else '+'}{size}"

    def sentence(self, decimals: int) -> str:
        """The size of the difference, its direction, its interval and what it rests on.

        >>> Difference(-0.5, 0.1, 9, pairs=10).sentence(2)
        '0.50 ± 0.23 lower (95% t-interval, 10 common seeds)'
        """
        size = _with_spread(abs(self.value), self.interval, decimals)
        seeds = plural(self.pairs, "common seed") if self.pairs else "of the means"
        told = seeds if self.error is None else f"95% t-interval, {seeds}"
        if self.error is not None and not self.clear:
            told += ", zero within it"
        return f"{size} {'lower' if self.value < 0 else 'higher'} ({told})"


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation (n − 1 in the denominator) of ``n`` finite values."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate | None:
        """The estimate from the finite values; ``None`` where no value is finite.

        The standard library rounds both correctly, so the digits are the same on every machine.

        >>> Estimate.of([1.0, 2.0, 3.0])
        Estimate(mean=2.0, std=1.0, n=3)
        """
        finite = [float(value) for value in values if math.isfinite(value)]
        if not finite:
            return None
        std = statistics.stdev(finite) if len(finite) > 1 else None
        return cls(statistics.fmean(finite), std, len(finite))

    @property
    def from_zero(self) -> Difference:
        """The mean with its standard error, s/√n."""
        error = None if self.std is None else self.std / math.sqrt(self.n)
        return Difference(self.mean, error, self.n - 1, self.n)

    def minus(self, other: Estimate) -> Difference:
        """The difference of two means; its error is (s₁²/n₁ + s₂²/n₂)^½, its freedom Welch's.

        >>> Estimate(3.0, 0.6, 9).minus(Estimate(2.0, 0.8, 16))
        Difference(value=1.0, error=0.28284271247461906, freedom=20.8695652..., pairs=None)
        """
        value = self.mean - other.mean
        if self.std is None or other.std is None:
            return Difference(value)
        ours, theirs = self.std**2 / self.n, other.std**2 / other.n
        weights = ours**2 / (self.n - 1) + theirs**2 / (other.n - 1)
        freedom = (ours + theirs) ** 2 / weights if weights else math.inf
        return Difference(value, math.sqrt(ours + theirs), freedom)

    def text(self, decimals: int) -> str:
        """Mean ± standard deviation, or the mean alone for a single seed."""
        return _with_spread(self.mean, self.std, decimals)


def paired(ours: pd.Series, theirs: pd.Series) -> Difference | None:
    """The mean difference of two series by seed; ``None`` where they have no seed in common.

    A seed fixes the initial weights and the order of the data, so that a lucky seed is lucky on both
    sides.

    >>> import pandas as pd
    >>> paired(pd.Series({1: 3.0, 2: 5.0, 9: 0.0}), pd.Series({1: 2.0, 2: 3.0}))
    Difference(value=1.5, error=0.5, freedom=1, pairs=2)
    """
    found = Estimate.of((ours - theirs).dropna())
    return found.from_zero if found else None


def _with_spread(value: float, spread: float | None, decimals: int) -> str:
    shown = f"{value:.{decimals}f}"
    return shown if spread is None else f"{shown} ± {spread:.{decimals}f}"
