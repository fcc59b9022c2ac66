"""Convergence rates of Muon, measured on problems with known gradient, smoothness and minimum.

For every horizon K of a geometric range, a new run of K steps uses the schedule for that K. Many
replicas run at once as one stacked parameter, and their mean estimates min_{k<K} E‖∇f(X_k)‖_F. The
slope of its logarithm against log K is the measured rate. The theorems promise a slope of
−(α−1)/(3α−2) or steeper, up to constants that do not appear in a slope.

The optimizer is :class:`polarstep.Muon` as users run it, with one parameter group per case. A sketch
is drawn once per step for all replicas, as in training for all matrices of a shape. The replicas are
independent given the sketches, and the intervals below are over replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polarstep import rng
from polarstep.checked_values import check_integer
from polarstep.maps import PolarMap
from polarstep.optimizer import Muon
from polarstep.theory import checks as check
from polarstep.theory.schedules import Schedule
from polarstep_lab.estimates import student

__all__ = [
    "FEWEST_HORIZONS",
    "Case",
    "Fit",
    "Line",
    "Noise",
    "Ripples",
    "Setup",
    "fit",
    "measured_rates",
    "trajectories",
]


FEWEST_HORIZONS = 3
"""A line through two points would have no scatter."""


@dataclass(frozen=True)
class Ripples:
    """f(X) = ½‖X‖²_F + (a/ω²)·Σ(1 − cos ωX_ij): a paraboloid with waves.

    f''(x) = 1 + a·cos ωx lies in [1 − a, 1 + a] entry by entry, so f is (1 + a)-smooth in the
    Frobenius norm and, for a > 1, not convex; f_⋆ = 0. For a ≤ 2 and ω > 0 its only stationary point
    is X = 0, so a small ‖∇f‖ means that X is close to the minimum.
    """

    a: float = 2.0
    omega: float = 4.0

    def __post_init__(self) -> None:
        if not 0 <= self.a <= 2:
            raise ValueError(
                f"a={self.a}: expected 0 ≤ a ≤ 2, for which X = 0 is the only stationary point"
            )

    @property
    def L(self) -> float:
        """The smoothness constant."""
        return 1 + self.a

    def value(self, X: Tensor) -> Tensor:
        """f of every matrix of a batch."""
        waves = self.a / self.omega**2 * (1 - torch.cos(self.omega * X))
        return (X.square() / 2 + waves).sum((-2, -1))

    def gradient(self, X: Tensor) -> Tensor:
        """∇f(X) = X + (a/ω)·sin ωX."""
        return X + self.a / self.omega * torch.sin(self.omega * X)

    def start(self, replicas: int, m: int, n: int, distance: float, seed: int = 0) -> Tensor:
        """Random X₀ whose singular values are all equal, between ½ and 1 times ``distance``.

        Muon moves by η in every singular direction at once, so the minimum is at most distance/η
        steps away. The replicas start at different distances, so that their oscillations about the
        minimum are not in phase.
        """
        g = rng.generator(seed, "start", m, n)
        U, _, Vh = torch.linalg.svd(torch.randn(replicas, m, n, generator=g), full_matrices=False)
        spread = torch.linspace(0.5, 1.0, replicas)[:, None, None]
        return distance * spread * (U @ Vh)


class Noise(Protocol):
    """Gradient noise, such as :class:`polarstep.theory.noise.GradientNoise`."""

    def __call__(self, gradient: Tensor, batch: int = 1, *, generator: torch.Generator) -> Tensor:
        """The mean of ``batch`` noisy samples of ``gradient``."""


@dataclass(frozen=True)
class Case:
    """One optimizer on one kind of noise, over all horizons."""

    name: str
    polar: PolarMap
    noise: Noise
    schedule: Callable[[int], Schedule]
    batch: int = 1


@dataclass(frozen=True)
class Setup:
    """The problem, the horizons and the number of replicas."""

    problem: Ripples = field(default_factory=Ripples)
    shape: tuple[int, int] = (6, 8)
    distance: float = 2.0
    replicas: int = 24
    horizons: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    seed: int = 0

    def __post_init__(self) -> None:
        for K in self.horizons:
            check.horizon(K)
        if len(set(self.horizons)) < FEWEST_HORIZONS:
            raise ValueError(
                f"horizons={self.horizons}: expected at least {FEWEST_HORIZONS} different horizons to "
                "fit a slope, as (64, 128, 256)"
            )
        check_integer("replicas", self.replicas, 2, "an interval needs two; 24 is the default")
        check.positive("distance", self.distance)

    @property
    def steps(self) -> int:
        """Optimizer steps of one measurement."""
        return sum(self.horizons)


def trajectories(
    cases: Sequence[Case], K: int, setup: Setup, tick: Callable[[int], object] = lambda _: None
) -> Tensor:
    """‖∇f(X_k)‖_F of every case, step and replica: shape ``(cases, K, replicas)``.

    Cases that share a noise object get independent noise from one stream. ``tick`` is called with
    the number of steps done since the last call.
    """
    m, n = setup.shape
    start = setup.problem.start(setup.replicas, m, n, setup.distance, setup.seed)
    X = start.repeat(len(cases), 1, 1, 1)
    params = [nn.Parameter(X[i]) for i in range(len(cases))]  # views: the optimizer moves X
    groups: list[dict[str, Any]] = [
        {"params": [p], "polar": case.polar, **case.schedule(K)}
        for p, case in zip(params, cases, strict=True)
    ]
    optimizer = Muon(groups, seed=setup.seed)
    shared: dict[tuple[int, int], list[int]] = {}
    for i, case in enumerate(cases):
        shared.setdefault((id(case.noise), case.batch), []).append(i)
    streams = [
        (members, rng.generator(setup.seed, "noise", K, order))
        for order, members in enumerate(shared.values())
    ]
    norms = torch.empty(len(cases), K, setup.replicas)
    for k in range(K):
        gradient = setup.problem.gradient(X)
        norms[:, k] = torch.linalg.matrix_norm(gradient)
        for members, generator in streams:
            case = cases[members[0]]
            noisy = case.noise(gradient[members], case.batch, generator=generator)
            for i, G in zip(members, noisy, strict=True):
                params[i].grad = G
        optimizer.step()
        if k % 16 == 15:
            tick(16)
    tick(K % 16)
    return norms


@dataclass(frozen=True)
class Line:
    """A quantity per horizon, and the slope of its logarithm against log K with a 95% interval."""

    values: tuple[float, ...]
    value_low: tuple[float, ...]
    value_high: tuple[float, ...]
    slope: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """The measurements of one case."""

    minimum: Line
    """min over k of the mean of ‖∇f(X_k)‖_F over replicas.

    The theorems bound min over k of the expectation. The minimum of a mean over few replicas is smaller
    than that on average, as it also takes the luckiest noise.
    """
    held_out: Line
    """The same with k chosen on one half of the replicas and the mean taken over the other half.

    This is larger than the theorems' minimum on average, so that the two lie on either side of it.
    """
    average: Line
    """The average over k, which the proofs bound; a single lucky step does not make it small."""

    def attains(self, rate: float) -> bool:
        """Whether the minimum falls like K^{−rate} or faster, within its interval."""
        return self.minimum.low <= -rate


def measured_rates(
    cases: Sequence[Case], setup: Setup, tick: Callable[[int], object] = lambda _: None
) -> list[Fit]:
    """Run all cases over all horizons and fit their slopes."""
    per_horizon = [trajectories(cases, K, setup, tick) for K in setup.horizons]
    return [
        fit(setup.horizons, [norms[i] for norms in per_horizon], setup.seed)
        for i in range(len(cases))
    ]


def fit(
    horizons: Sequence[int], norms: Sequence[Tensor], seed: int = 0, resamples: int = 400
) -> Fit:
    """Slopes from gradient norms ``(K, replicas)``, one tensor per horizon.

    The interval of a slope has two parts, added in quadrature: the bootstrap over replicas, horizon
    by horizon, and the scatter of the points about the line (Student's t, few degrees of freedom).
    """
    generator, of_halves = rng.generator(seed, "bootstrap"), rng.generator(seed, "halves")
    means, resampled, held_out, held_out_resampled = [], [], [], []
    for trajectory in norms:
        trajectory = trajectory.double()
        means.append(trajectory.mean(1))
        resampled.append(_resampled(trajectory, resamples, generator))
        halves = [trajectory[:, first::2] for first in (0, 1)]
        held_out.append(_held_out(*(half.mean(1)[None] for half in halves))[0])
        held_out_resampled.append(
            _held_out(*(_resampled(half, resamples, of_halves) for half in halves))
        )
    return Fit(
        minimum=_fitted(
            horizons, [mean.min() for mean in means], [some.amin(1) for some in resampled]
        ),
        held_out=_fitted(horizons, held_out, held_out_resampled),
        average=_fitted(
            horizons, [mean.mean() for mean in means], [some.mean(1) for some in resampled]
        ),
    )


def _resampled(trajectory: Tensor, resamples: int, generator: torch.Generator) -> Tensor:
    """Means over replicas drawn with replacement: shape ``(resamples, K)`` from ``(K, replicas)``."""
    replicas = trajectory.shape[1]
    picks = torch.randint(replicas, (resamples, replicas), generator=generator)
    weights = torch.zeros(resamples, replicas, dtype=torch.float64)
    weights.scatter_add_(1, picks, torch.full_like(weights, 1 / replicas))
    return weights @ trajectory.mT


def _held_out(first: Tensor, second: Tensor) -> Tensor:
    """The mean of each row of one at the k where the other is smallest, averaged over both orders."""
    chosen = second.gather(1, first.argmin(1, keepdim=True))
    return (chosen + first.gather(1, second.argmin(1, keepdim=True)))[:, 0] / 2


def _fitted(horizons: Sequence[int], values: list[Tensor], resampled: list[Tensor]) -> Line:
    x = torch.tensor(horizons, dtype=torch.float64).log()
    y, z = torch.stack(values), torch.stack(resampled)
    slope, residual = _line(x, y.log())
    spread = float(_line(x, z.log().mT)[0].std())
    freedom = len(x) - 2
    scatter = (residual.square().sum() / freedom / (x - x.mean()).square().sum()).sqrt()
    half = math.hypot(1.96 * spread, student(freedom) * float(scatter))
    low, high = z.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1).tolist()
    at = float(slope)
    return Line(tuple(y.tolist()), tuple(low), tuple(high), at, at - half, at + half)


def _line(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The least-squares slope over the last dimension, and the residuals."""
    x = x - x.mean()
    centred = y - y.mean(-1, keepdim=True)
    slope = (centred * x).sum(-1) / x.square().sum()
    return slope, centred - slope[..., None] * x
