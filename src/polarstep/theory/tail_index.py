"""Estimates of the tail index of given noise, each with a confidence interval.

:func:`hill` assumes only a tail like t^{−α}. :func:`stable` assumes an α-stable law and is then far
more precise, because it uses every sample and not just the largest. On α-stable data with α near 2
the power tail begins so far out that Hill needs millions of samples: use :func:`stable` there, and
:func:`hill` everywhere else. :func:`growth` measures how sums of noise grow with their number of
terms, which is how α enters the theorems. For long sums it gives 2 for every law with a variance,
and less than 2 for α-stable laws without one.

The paper's assumption is about norms of the gradient noise of single examples, ‖G^i − ∇f‖_F.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from polarstep.numerics import in_float64
from polarstep.theory.checks import is_whole, share

__all__ = ["TailIndex", "growth", "hill", "stable"]

SMALLEST = 100
"""The least number of samples, and of order statistics, for an estimate."""

NO_LAW = (
    "no continuous law, and so no α-stable one; leave out samples that are exactly zero, as entries of "
    "parameters without a gradient"
)


@dataclass(frozen=True)
class TailIndex:
    """An estimate of α with its confidence interval."""

    alpha: float
    low: float
    high: float
    used: int
    """Order statistics (Hill), samples (stable) or sums (growth) behind the estimate."""
    method: str

    def __float__(self) -> float:
        return self.alpha

    def __contains__(self, alpha: float) -> bool:
        return self.low <= alpha <= self.high

    def __str__(self) -> str:
        return f"{self.alpha:.2f} ({self.low:.2f} to {self.high:.2f}, {self.method}, {self.used:,})"


def hill(samples: Tensor, k: int | None = None, confidence: float = 0.95) -> TailIndex:
    """The tail index from the largest |samples|: Hill's estimator, less its leading bias.

    For a power tail the scaled log-spacings Z_j = j·log(X_(j)/X_(j+1)) of the k largest values are
    independent and exponential with mean 1/α + b·j/k, where b measures how far the tail is from a
    pure power (Beirlant et al. 1999, with second-order index −1, exact for α-stable laws and close
    for Student's). Hill's estimator is 1/mean(Z). This function takes the intercept of a straight
    line through Z, which does not depend on b; its standard error 2α/√k is twice Hill's.

    By default k is half of the largest k on a geometric grid for which a line explains the Z_j (the
    quadratic and the cubic Legendre coefficient are together insignificant at 10%). Halving keeps
    the bias small beside the standard error, so that the interval is valid. If the line holds for
    all samples, all are used.

    Raises:
        ValueError: if there are too few samples, or if the k + 1 largest are one number, as after
            clipping.
    """
    z_score = _z_score(confidence)
    values = _clean(samples).abs()
    logs = values[values > 0].sort(descending=True).values.log()
    n = len(logs)
    if n <= SMALLEST:
        raise ValueError(
            f"{n} nonzero samples: expected more than {SMALLEST}, since a tail index is read off the "
            "few largest values; gather more gradients"
        )
    Z = torch.arange(1, n, dtype=torch.float64, device=logs.device) * (logs[:-1] - logs[1:])
    if k is None:
        k = _choose_k(Z)
    elif not is_whole(k) or not 2 <= k <= n - 1:
        raise ValueError(
            f"k={k!r}: expected a whole number, 2 ≤ k ≤ {n - 1}, one less than the nonzero samples"
        )
    k = int(k)
    c = _legendre(Z[:k], 2)
    if not c[0] > 0:
        raise ValueError(
            f"the largest {k + 1} of {n} samples are one number, which says nothing of a tail: expected "
            "a continuous law; leave out samples that were rounded or clipped"
        )
    slope = max(c[0] - c[1], 1e-6 * c[0], 1e-12)  # 1/α̂, the line at j = 0
    alpha = 1 / slope
    # In 1/α the error is normal: 2/√k relative to the mean of Z.
    half = z_score * 2 * c[0] / math.sqrt(k)
    high = 1 / (slope - half) if slope > half else math.inf
    return TailIndex(alpha, 1 / (slope + half), high, k, "hill")


def stable(samples: Tensor, confidence: float = 0.95) -> TailIndex:
    """The index of an α-stable law from its empirical characteristic function.

    Differences of neighbouring samples are symmetric α-stable with the same α whatever the location
    and skewness were, so φ(t) = e^{−(ct)^α} is real and log(−log φ) is a line in log t of slope α.
    The line is fitted by least squares at ten frequencies between φ = 0.9 and φ = 0.3; the interval
    comes from the known covariance of cos(tX) by the delta method. Samples must be independent and
    in random order.
    """
    z_score = _z_score(confidence)
    x = _clean(samples)
    pairs = len(x) // 2
    if pairs < SMALLEST:
        raise ValueError(
            f"{len(x)} samples: expected at least {2 * SMALLEST}; gather more gradients"
        )
    x = x[: 2 * pairs : 2] - x[1 : 2 * pairs : 2]
    scale = x.abs().median()
    if not scale > 0:
        raise ValueError(f"more than half of the samples are equal: {NO_LAW}")
    x = x / scale
    low, high = (_frequency(x, level) for level in (0.9, 0.3))
    t = torch.logspace(math.log10(low), math.log10(high), 10, dtype=torch.float64, device=x.device)
    phi = torch.cos(torch.outer(t, x)).mean(1)
    Y = torch.log(-torch.log(phi))
    T = t.log() - t.log().mean()
    weights = T / T.square().sum()
    alpha = float(weights @ Y)
    sums, gaps = t[:, None] + t, (t[:, None] - t).abs()
    both = _characteristic(x, torch.cat([sums.flatten(), gaps.flatten()]))
    plus, minus = both.reshape(2, len(t), len(t))
    covariance = ((plus + minus) / 2 - phi[:, None] * phi) / pairs
    J = weights / (phi * torch.log(phi))
    error = math.sqrt(max(0.0, float(J @ covariance @ J)))
    return TailIndex(alpha, alpha - z_score * error, alpha + z_score * error, 2 * pairs, "stable")


def growth(parts: Tensor, sums: Tensor, confidence: float = 0.95) -> TailIndex:
    """The index from how the norm of a sum grows with its number of terms.

    ``sums[i]`` is the norm of the sum of r independent terms of mean zero whose own norms are
    ``parts[i·r], …, parts[i·r + r − 1]``. For a strictly α-stable law, in any dimension, the sum is
    distributed as r^{1/α} times a term, so E log‖sum‖ − E log‖term‖ = (log r)/α. For other laws the
    result depends on the terms. With a variance it tends to 2 as the terms become long sums
    themselves, from below if the norms of the terms vary widely. The interval is Student's over the
    sums.
    """
    n = len(sums)
    r = len(parts) // max(1, n)
    if n < 8 or r < 2 or len(parts) != r * n:
        raise ValueError(
            f"{len(sums)} sums of {len(parts)} parts: expected at least 8 sums with the same number "
            "of parts each, two or more"
        )
    logs = [_clean(x).log() for x in (parts, sums)]
    if not all(bool(torch.isfinite(x).all()) for x in logs):
        raise ValueError("a norm is zero: leave out parameters without noise")
    gained = logs[1] - logs[0].reshape(n, r).mean(1)
    inverse = float(gained.mean()) / math.log(r)
    z = _z_score(confidence)
    t = z + (z**3 + z) / (4 * (n - 1))  # Student's quantile, to first order in 1/n
    half = t * float(gained.std()) / math.sqrt(n) / math.log(r)
    return TailIndex(
        _reciprocal(inverse), _reciprocal(inverse + half), _reciprocal(inverse - half), n, "growth"
    )


def _reciprocal(value: float) -> float:
    return 1 / value if value > 0 else math.inf


def _choose_k(Z: Tensor) -> int:
    """Half of the largest k at which a straight line explains Z_1, …, Z_k."""
    n = len(Z)
    grid = torch.logspace(
        math.log10(SMALLEST), math.log10(n), 60, dtype=torch.float64, device="cpu"
    )
    k = torch.tensor(sorted({min(n, round(value)) for value in grid.tolist()}), device=Z.device)
    # The Legendre coefficients of Z_1, …, Z_k for all k of the grid at once: with t = 2j/(k+1) − 1
    # they are combinations of the means of Z_j·(j/(k+1))^i, which are running sums.
    j = torch.arange(1, n + 1, dtype=Z.dtype, device=Z.device)
    powers = torch.stack([Z * (j / n) ** i for i in range(4)]).cumsum(1)[:, k - 1]
    m = [powers[i] / k * (n / (k + 1)) ** i for i in range(4)]
    c0 = m[0]
    c2 = 5 * (6 * m[2] - 6 * m[1] + m[0])
    c3 = 7 * (20 * m[3] - 30 * m[2] + 12 * m[1] - m[0])
    chi2 = k / c0**2 * (c2**2 / 5 + c3**2 / 7)
    straight = k[(c0 > 0) & (chi2 < 4.605)]  # the 90% point of χ² with two degrees of freedom
    chosen = int(straight.max()) if len(straight) else SMALLEST
    return n if chosen == n else max(SMALLEST, chosen // 2)


def _legendre(Z: Tensor, count: int) -> list[float]:
    """The first coefficients of Z over j/(k + 1) in Legendre polynomials on [0, 1]."""
    k = len(Z)
    t = torch.linspace(-(k - 1) / (k + 1), (k - 1) / (k + 1), k, dtype=Z.dtype, device=Z.device)
    basis = (torch.ones_like(t), t, (3 * t**2 - 1) / 2, (5 * t**3 - 3 * t) / 2)[:count]
    return [(2 * i + 1) * float((Z * P).mean()) for i, P in enumerate(basis)]


def _characteristic(x: Tensor, t: Tensor) -> Tensor:
    """E cos(tX) at many t, a few at a time to limit memory."""
    return torch.cat([torch.cos(torch.outer(part, x)).mean(1) for part in torch.split(t, 20)])


def _frequency(x: Tensor, level: float) -> float:
    """The frequency at which the empirical characteristic function first falls to ``level``."""
    low, high = 0.0, 1e-3
    while float(torch.cos(high * x).mean()) > level:
        low, high = high, 2 * high
        if high > 1e6:  # the median of |x| is 1, so that a continuous law has long been there
            raise ValueError(f"many of the samples are equal: {NO_LAW}")
    for _ in range(30):
        middle = (low + high) / 2
        if float(torch.cos(middle * x).mean()) > level:
            low = middle
        else:
            high = middle
    return high


def _clean(samples: Tensor) -> Tensor:
    if not isinstance(samples, Tensor) or samples.is_complex() or samples.is_meta:
        what = (
            f"{samples.dtype} on {samples.device}" if isinstance(samples, Tensor) else "no tensor"
        )
        raise TypeError(f"the samples are {what}: expected a tensor of real numbers")
    x = in_float64(samples.detach().flatten())
    if not bool(torch.isfinite(x).all()):
        raise ValueError(
            "the samples hold NaN or infinity: a tail index is about finite values; leave out the "
            "steps whose gradient overflowed"
        )
    return x


def _z_score(confidence: float) -> float:
    confidence = share("confidence", confidence, "a probability such as 0.95")
    return NormalDist().inv_cdf((1 + confidence) / 2)
