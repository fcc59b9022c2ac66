"""The step size and momentum that the theorems prescribe, from a horizon and a tail index.

A schedule here is one pair (η, β) for a whole run of K steps:

    from_tail_index   η = K^{−(2α−1)/(3α−2)}   β = 1 − K^{−α/(3α−2)}   rate (α−1)/(3α−2)
    universal         η = K^{−3/4}             β = 1 − K^{−1/2}        rate (α−1)/(2α)

At α = 2 the two are the same and the rate is ¼. A schedule unpacks into the optimizer::

    opt = polarstep.Muon(params, **from_tail_index(K=10_000, alpha=1.6))

Curves for practice (warm-up, cool-down, momentum that rises and falls) are in
:mod:`polarstep.theory.annealing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polarstep.theory import checks as check

__all__ = ["Schedule", "from_tail_index", "iterations_for", "rate", "rate_table", "universal"]


@dataclass(frozen=True)
class Schedule(Mapping[str, Any]):
    """η and β for a run of K steps; a mapping of :class:`polarstep.Muon`'s arguments.

    ``shape_scale`` is ``"none"`` because the update of the theorems is η·T(M), without a factor for the
    shape. The theorems are stated for Nesterov momentum, hence the default of ``nesterov``.
    """

    K: int
    lr: float
    momentum: float
    nesterov: bool = True

    def __getitem__(self, key: str) -> Any:
        return self._arguments()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments())

    def __len__(self) -> int:
        return len(self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "shape_scale": "none",
        }

    @property
    def window(self) -> float:
        """1/(1−β), the number of steps that the momentum averages over."""
        return 1 / (1 - self.momentum)


def from_tail_index(K: int, alpha: float, *, nesterov: bool = True) -> Schedule:
    """η and β of the exact-polar theorem, which also serve the inexact-polar theorem.

    They do not depend on the smoothness constant. For σ₁ > 0 the batch must also exceed
    :func:`polarstep.theory.bounds.batch_threshold`.

    >>> schedule = from_tail_index(K=10_000, alpha=2)
    >>> round(schedule.lr, 6), round(schedule.momentum, 6)
    (0.001, 0.99)
    """
    K, alpha = check.horizon(K), check.tail_index(alpha)
    span = 3 * alpha - 2
    return Schedule(K, K ** (-(2 * alpha - 1) / span), 1 - K ** (-alpha / span), nesterov)


def universal(K: int, *, nesterov: bool = True) -> Schedule:
    """η = K^{−3/4}, β = 1 − K^{−1/2}: no α needed, for σ₁ = 0 (the corollary without α)."""
    K = check.horizon(K)
    return Schedule(K, K**-0.75, 1 - K**-0.5, nesterov)


def rate(alpha: float, *, knows_alpha: bool = True) -> float:
    """The exponent r of min E‖∇f‖ = O(K^{−r}): (α−1)/(3α−2), or (α−1)/(2α) when α is not known.

    >>> rate(2.0), round(rate(1.5), 3), round(rate(1.5, knows_alpha=False), 3)
    (0.25, 0.2, 0.167)
    """
    alpha = check.tail_index(alpha)
    return (alpha - 1) / (3 * alpha - 2 if knows_alpha else 2 * alpha)


def iterations_for(epsilon: float, alpha: float, *, knows_alpha: bool = True) -> float:
    """ε^{−1/rate}, the order of the number of steps to an ε-stationary point; constants left out.

    Infinity where the number is beyond float64.

    >>> round(iterations_for(0.1, alpha=2.0)), round(iterations_for(0.1, alpha=1.5))
    (10000, 100000)
    """
    epsilon = check.positive("epsilon", epsilon)
    exponent = -1 / rate(alpha, knows_alpha=knows_alpha)
    try:
        return float(epsilon**exponent)
    except OverflowError:
        return math.inf


def rate_table(alphas: tuple[float, ...] = (1.1, 1.2, 1.4, 1.6, 1.8, 2.0)) -> str:
    """Rates and complexities with and without knowledge of α, as a Markdown table."""
    lines = [
        "| α | rate, α known: (α−1)/(3α−2) | steps to ε | rate, α unknown: (α−1)/(2α) | steps to ε |",
        "|---|---|---|---|---|",
    ]
    for alpha in alphas:
        known, unknown = rate(alpha), rate(alpha, knows_alpha=False)
        lines.append(
            f"| {alpha:g} | {known:.4f} | ε^−{1 / known:.2f} | {unknown:.4f} | ε^−{1 / unknown:.2f} |"
        )
    return "\n".join(lines)
