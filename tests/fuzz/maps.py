"""Random polar maps, and what is known about each without running it.

A polynomial map is known completely: T = U p(Σ/δ) Vᵀ, here from an SVD in float64. Of a sketched map
the norm is known, and that it does not point against M.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from tests.fuzz.cases import Choices
from tests.solvers import SOLVERS
from torch import Tensor

import polarstep as ps
from polarstep import Deflated, Exact, LowRank, NewtonSchulz, PolarMap
from polarstep.maps import Warm, coefficients

__all__ = [
    "Facts",
    "facts_of",
    "largest_norm",
    "may_use_gram",
    "most_steps",
    "random_map",
    "reference",
    "settles",
    "works_in",
]

PAPER = ("cubic", "quintic")
NAMES = coefficients.names()
TABLE = [solver.map for solver in SOLVERS]


def random_map(choose: Choices) -> PolarMap:
    """A map of the tests' table, or one with settings of its own."""
    if choose.whether(0.4):
        return choose.random.choice(TABLE)
    kind = choose.one_of("newton-schulz", "low-rank", "low-rank", "deflated", "exact")
    if kind == "exact":
        return Exact(choose.one_of(None, None, 1e-6))
    if kind == "newton-schulz":
        return _newton_schulz(choose)
    return _low_rank(choose) if kind == "low-rank" else _deflated(choose)


def _newton_schulz(choose: Choices) -> NewtonSchulz:
    custom = (
        (1.5, -0.5),
        (1.875, -1.25, 0.375),
        (2.0, -1.5, 0.5),
        (35 / 16, -35 / 16, 21 / 16, -5 / 16),
    )
    rows = tuple(choose.random.choices(custom, k=choose.random.randint(1, 3)))
    return NewtonSchulz(
        max(1, choose.random.randint(0, 9)),
        choose.one_of(*NAMES, rows),
        choose.one_of("frobenius", "frobenius", "spectral", "operator"),
        choose.one_of(None, None, torch.float32, torch.float64),
        choose.one_of("auto", "plain", "gram"),
    )


def _inner(choose: Choices) -> PolarMap:
    # LowRank(inner=Exact()) lifts the rounding errors of rank-deficient float32 matrices.
    return replace(_newton_schulz(choose), steps=choose.random.randint(3, 9))


def _low_rank(choose: Choices) -> LowRank:
    sketch = choose.one_of(
        ps.Gaussian(), ps.Gaussian(), ps.Kaczmarz(), Warm(choose.one_of(0.1, 0.01, 1.0))
    )
    power = choose.one_of(0, 1, 2) if isinstance(sketch, Warm) else choose.one_of(0, 0.5, 1, 1.5, 2)
    found = LowRank(
        choose.random.randint(1, 8),
        choose.random.randint(0, 4),
        power,
        sketch,
        _inner(choose),
        choose.one_of("auto", "auto", "householder", "cholesky", "products"),
        choose.whether(0.9),
    )
    # The draw of an option that has gone: without it the cases that tests name would be others.
    if not isinstance(sketch, Warm):
        choose.one_of(1, 1, 2, 3)
    return found


def _deflated(choose: Choices) -> Deflated:
    rest = choose.one_of(
        NewtonSchulz(1, "flat"),
        NewtonSchulz(1, "cubic"),
        NewtonSchulz(2, ((1.5, -0.5), (1.875, -1.25, 0.375))),
        NewtonSchulz(2, "quintic"),
        NewtonSchulz(2, "jordan"),
    )
    return Deflated(_low_rank(choose), rest, _inner(choose))


@dataclass(frozen=True)
class Facts:
    """What a map promises on matrices with ‖M‖_op ≤ δ."""

    largest: float  # ‖T‖_op in exact arithmetic
    slope: float  # p'(0): how much a rounding error of a small singular value may grow
    sensitivity: float  # max x·|p'(x)|: how much a relative error of any may grow


def largest_norm(polar: PolarMap) -> float:
    """The δ of a map that was given a number for it: ‖M‖_op must not exceed it."""
    inner = polar.inner if isinstance(polar, LowRank) else polar
    assert isinstance(inner, NewtonSchulz)
    assert not isinstance(inner.delta, str)
    return inner.delta


def works_in(polar: PolarMap, given: torch.dtype) -> torch.dtype:
    """The lowest precision that a map computes in, for matrices in the precision ``given``."""
    asked = [part.dtype for part in _iterations(polar) if part.dtype]
    return min([given, *asked], key=lambda dtype: dtype.itemsize)


def may_use_gram(polar: PolarMap) -> bool:
    """Whether polynomials may be evaluated on a Gram matrix."""
    return any(part.form != "plain" for part in _iterations(polar))


def settles(polar: PolarMap) -> bool:
    """Whether each iteration ends with φ(1) = 1 and φ'(1) = 0, which squares errors near one."""

    def is_flat_at_one(polynomial: tuple[float, ...]) -> bool:
        slope = sum((2 * k + 1) * c for k, c in enumerate(polynomial))
        return abs(sum(polynomial) - 1) < 1e-12 and abs(slope) < 1e-12

    ends = [part.polynomials[-1] for part in _iterations(polar) if part.polynomials]
    return all(is_flat_at_one(polynomial) for polynomial in ends)


def most_steps(polar: PolarMap) -> int:
    """The number of polynomials of the longest iteration inside a map."""
    return max((len(part.polynomials) for part in _iterations(polar)), default=0)


def _iterations(polar: PolarMap) -> list[NewtonSchulz]:
    """The Newton–Schulz iterations inside a map."""
    parts = [polar]
    if isinstance(polar, LowRank):
        parts = [polar.inner]
    if isinstance(polar, Deflated):
        parts = [polar.head.inner, polar.full, polar.rest]
    return [part for part in parts if isinstance(part, NewtonSchulz)]


def facts_of(polar: PolarMap, eps: float) -> Facts:
    """The promises of a map that computes with this rounding."""
    if isinstance(polar, NewtonSchulz):
        return _facts_of_polynomials(polar.polynomials, eps)
    if isinstance(polar, LowRank):
        return facts_of(polar.inner, eps)
    if isinstance(polar, Deflated):
        return _facts_of_deflated(polar, eps)
    assert isinstance(polar, Exact)
    return Facts(1.0, 1.0, 1.0)


def _facts_of_deflated(polar: Deflated, eps: float) -> Facts:
    head, full, rest = (facts_of(part, eps) for part in (polar.head, polar.full, polar.rest))
    # ‖QZ + R/δ‖_op ≤ √(‖Z‖² + 1) for δ ≥ ‖R‖_op; the estimate of δ may be smaller by some percent.
    largest = 1.1 * (head.largest**2 + 1) ** 0.5
    x = torch.linspace(0, largest, 10_001, dtype=torch.float64)
    largest = max(largest, float(_composed(polar.rest.polynomials, x).abs().max()))
    sensitivity = max(head.sensitivity, full.sensitivity) * rest.sensitivity
    return Facts(max(largest, full.largest), max(head.slope, full.slope) * rest.slope, sensitivity)


@cache
def _facts_of_polynomials(polynomials: tuple[tuple[float, ...], ...], eps: float) -> Facts:
    # Rounding may lift σ/δ over one, where polynomials without a safety factor are steep.
    beyond = 1 + torch.linspace(0, 32 * eps, 33, dtype=torch.float64)
    grids = torch.logspace(-9, 0, 40_001), torch.linspace(0, 1, 40_001), beyond
    x = torch.cat([grid.double() for grid in grids])
    slope = 1.0
    for polynomial in polynomials:
        slope *= max(1.0, abs(polynomial[0]))
    p = _composed(polynomials, x)
    # Where ∏aₜ is large, rounding reaches the other singular values, in float64 too.
    highest = max(float(p.max()), _peak(polynomials, x, p)) * (1 + 1e-8)
    relative = (_composed(polynomials, x * (1 + 1e-7)) - p).abs() / 1e-7
    return Facts(max(1.0, highest), slope, max(1.0, float(relative.max())))


def _peak(polynomials: tuple[tuple[float, ...], ...], x: Tensor, p: Tensor) -> float:
    """The highest value of the polynomials around the highest points of a grid, by finer grids."""
    x, order = x.sort()
    top = p[order].topk(16).indices
    fine = torch.linspace(0, 1, 2001, dtype=torch.float64)
    left, right = x[(top - 1).clamp_min(0)], x[(top + 1).clamp_max(len(x) - 1)]
    between = left[:, None] + (right - left)[:, None] * fine
    return float(_composed(polynomials, between).max())


def _composed(polynomials: tuple[tuple[float, ...], ...], x: Tensor) -> Tensor:
    for polynomial in polynomials:
        x = sum((c * x ** (2 * k + 1) for k, c in enumerate(polynomial)), torch.zeros_like(x))
    return x


def reference(polar: PolarMap, M: Tensor) -> Tensor | None:
    """T of float64 matrices from an SVD; ``None`` for maps that are not a function of σ alone."""
    if not isinstance(polar, NewtonSchulz):
        return None
    largest = M.abs().amax((-2, -1), keepdim=True)
    scaled = M / torch.where(largest > 0, largest, 1)
    U, S, Vh = torch.linalg.svd(scaled, full_matrices=False)
    if polar.delta == "frobenius":
        delta = S.square().sum(-1, keepdim=True).sqrt()
    elif polar.delta == "spectral":
        delta = (S**8).sum(-1, keepdim=True) ** 0.125
    elif polar.delta == "operator":
        delta = S[..., :1] * (S / S[..., :1].clamp_min(1e-300)).pow(4096).sum(-1, keepdim=True).pow(
            1 / 4096
        )
    else:
        delta = polar.delta / largest.squeeze(-1)
    x = S / torch.where(delta > 0, delta, 1)
    return (U * _composed(polar.polynomials, x).unsqueeze(-2)) @ Vh
