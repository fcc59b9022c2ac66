"""The studies of ``polarstep rates``: their cases, and the predictions for them.

:func:`rate_study` runs every solver with both kinds of momentum over a range of tail indices. Its
noise is α-stable with an index just above α, so that the α-th moment is finite and an average over W
steps is smaller by W^{−(α−1)/α} for every W; at α = 2 the noise is Gaussian.

:func:`tuning_study` and :func:`batch_study` are examples in which a condition of a theorem is
violated: tuning for bounded variance under heavy tails, and a batch below the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from polarstep.maps import Exact, LowRank, NewtonSchulz, PolarMap
from polarstep.maps.sketches import Kaczmarz
from polarstep.theory import bounds, schedules
from polarstep.theory.bounds import Setting
from polarstep.theory.noise import AlphaStable, GradientNoise, RareCorrection, SkewedPareto
from polarstep_lab.checks.convergence import Case, Setup, measured_rates

__all__ = [
    "MARGIN",
    "SOLVERS",
    "StudyRow",
    "batch_study",
    "rate_study",
    "study_cases",
    "tuning_study",
]

MARGIN = 0.02
"""How far the tail index of the noise lies above α: at α itself the α-th moment is infinite."""

SOLVERS: dict[str, PolarMap] = {
    "exact": Exact(),
    "newton-schulz": NewtonSchulz(5, "quintic"),
    "gaussian": LowRank(3, 2, 1, always_sketch=True),
    "kaczmarz": LowRank(3, 2, 1, Kaczmarz(), always_sketch=True),
}

Tick = Callable[[int], object]


@dataclass(frozen=True)
class StudyRow:
    """One measured case beside its prediction, ready for JSON."""

    name: str
    alpha: float
    predicted: float
    """The slope that theory promises: −(α−1)/(3α−2) or −(α−1)/(2α)."""
    details: dict[str, Any]
    fit: dict[str, Any]


def study_cases(
    alphas: tuple[float, ...], solvers: tuple[str, ...], scale: float, shape: tuple[int, int]
) -> list[tuple[Case, StudyRow]]:
    """Every α, solver and momentum, with the theorem's schedule."""
    unknown = [name for name in solvers if name not in SOLVERS]
    if unknown:
        raise ValueError(f"solver {unknown[0]!r}: expected some of {', '.join(SOLVERS)}")
    cases = []
    for alpha in alphas:
        predicted = -schedules.rate(alpha)
        law = AlphaStable(min(2.0, alpha + MARGIN))
        sigma0 = scale * law.moment(alpha, shape[0] * shape[1]) ** (1 / alpha)
        noise = GradientNoise(law, alpha, sigma0)
        for solver in solvers:
            for nesterov in (True, False):
                schedule = partial(schedules.from_tail_index, alpha=alpha, nesterov=nesterov)
                momentum = "nesterov" if nesterov else "polyak"
                details = {
                    "solver": solver,
                    "momentum": momentum,
                    "sigma0": sigma0,
                    "noise": str(law),
                }
                name = f"{solver}, {momentum}, α={alpha:g}"
                row = StudyRow(name, alpha, predicted, details, {})
                cases.append((Case(name, SOLVERS[solver], noise, schedule), row))
    return cases


def rate_study(
    setup: Setup,
    alphas: tuple[float, ...] = (1.2, 1.4, 1.6, 1.8, 2.0),
    solvers: tuple[str, ...] = tuple(SOLVERS),
    scale: float = 0.1,
    tick: Tick = lambda _: None,
) -> list[StudyRow]:
    """Measured slopes of every solver and momentum against −(α−1)/(3α−2).

    Each row also says whether the measured minimum is below the theorem's bound with all its
    constants, since the theorem asserts this bound and not a slope.
    """
    planned = study_cases(alphas, solvers, scale, setup.shape)
    fits = measured_rates([case for case, _ in planned], setup, tick)
    rows = []
    for (case, row), found in zip(planned, fits, strict=True):
        limits = [_bound(case, row, setup, K) for K in setup.horizons]
        details = row.details | {
            "attains": found.attains(-row.predicted),
            "bound": limits,
            "below_bound": all(
                limit is None or value <= limit
                for value, limit in zip(found.minimum.values, limits, strict=True)
            ),
        }
        rows.append(replace(row, details=details, fit=asdict(found)))
    return rows


def tuning_study(setup: Setup, tick: Tick = lambda _: None) -> list[StudyRow]:
    """η and β for bounded variance (α = 2) and for the true α, under one-sided heavy tails.

    The schedule for α = 2 averages the momentum over √K steps only, where this noise needs
    K^{α/(3α−2)}, and takes longer steps. For bounded variance theory promises K^{−1/4}. The measured
    quantity is the average gradient norm of the run, which the proofs bound.
    """
    alpha = 1.25
    law = SkewedPareto(alpha + MARGIN)
    noise = GradientNoise(law, alpha, 2.0 * law.moment(alpha) ** (1 / alpha))
    plans = [
        ("theorem", alpha, -schedules.rate(alpha)),
        ("bounded variance", 2.0, -schedules.rate(2.0)),
    ]
    cases = [
        Case(name, Exact(), noise, partial(schedules.from_tail_index, alpha=tuned))
        for name, tuned, _ in plans
    ]
    fits = measured_rates(cases, setup, tick)
    return [
        StudyRow(name, alpha, promised, {"tuned_for": tuned, "noise": str(law)}, asdict(found))
        for (name, tuned, promised), found in zip(plans, fits, strict=True)
    ]


def batch_study(setup: Setup, tick: Tick = lambda _: None) -> list[StudyRow]:
    """Multiplicative noise, σ₀ = 0 and σ₁ > 0, at batch sizes from 1 to above the threshold.

    The noise is :class:`~polarstep.theory.noise.RareCorrection`: unbiased, yet 995 of 1000 samples
    point against the gradient. Below its threshold the theorem promises nothing. The threshold is
    larger than necessary, since for this term the proof does not use the averaging over steps.
    """
    alpha, noise = 2.0, RareCorrection(c=2.0, probability=0.005)
    threshold = bounds.smallest_batch(
        alpha, noise.sigma1(alpha), min(setup.shape), C_alpha=bounds.hilbert_constant(alpha)
    )
    batches = (1, 4, 16, 64, 256, 1024, threshold)
    schedule = partial(schedules.from_tail_index, alpha=alpha)
    cases = [Case(f"B = {B:,}", Exact(), noise, schedule, B) for B in batches]
    fits = measured_rates(cases, setup, tick)
    details = {"sigma1": noise.sigma1(alpha), "threshold": threshold}
    return [
        StudyRow(
            case.name, alpha, -schedules.rate(alpha), details | {"batch": case.batch}, asdict(found)
        )
        for case, found in zip(cases, fits, strict=True)
    ]


def _bound(case: Case, row: StudyRow, setup: Setup, K: int) -> float | None:
    """The bound of the inexact-polar theorem with its constants; None where it does not apply.

    The theorem needs a γ̄ that holds for every M. The paper's polynomials have p(x) ≥ x, so that with
    δ = ‖M‖_F Newton–Schulz keeps ⟨M, T⟩ ≥ ‖M‖_F ≥ ‖M‖_*/√d₀. A Gaussian sketch captures on average at
    least the share ℓ/d₀ of ‖M‖²_F, hence ⟨M, T⟩ ≥ (ℓ/d₀)‖M‖_F. The paper proves nothing for the
    Kaczmarz sketch and for Polyak momentum.
    """
    if row.details["momentum"] == "polyak" or row.details["solver"] == "kaczmarz":
        return None
    assert isinstance(case.noise, GradientNoise)
    d0 = min(setup.shape)
    gamma = 0.0 if isinstance(case.polar, Exact) else 1 - 1 / math.sqrt(d0)
    if isinstance(case.polar, LowRank):
        gamma = 1 - case.polar.width / d0 / math.sqrt(d0)
    start = setup.problem.start(setup.replicas, *setup.shape, setup.distance, setup.seed)
    setting = Setting(
        gap=float(setup.problem.value(start).mean()),
        L=setup.problem.L,
        d0=d0,
        alpha=row.alpha,
        sigma0=case.noise.sigma0,
        gamma=gamma,
    )
    schedule = case.schedule(K)
    return float(bounds.inexact_polar_bound(setting, K, schedule.lr, schedule.momentum))
