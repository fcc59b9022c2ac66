"""Laws of heavy-tailed noise whose moments are known in closed form.

A law describes a random vector in d dimensions: d = mn for an m×n matrix, d = 1 for independent
entries. Its *tail index* a says that P(‖ξ‖ > t) falls like t^{−a}, so E‖ξ‖^α is finite **only** for
α < a. Noise that satisfies the paper's assumption at α therefore needs a > α: at a = α the moment is
infinite. (The Gaussian, the α-stable law with a = 2, has all moments.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from polarstep.theory.checks import is_scalar

__all__ = ["AlphaStable", "Law", "SkewedPareto", "StudentT", "SymmetricPareto"]


class Law(ABC):
    """A mean-zero random vector. Subclasses are frozen dataclasses."""

    @property
    @abstractmethod
    def tail(self) -> float:
        """The tail index a: exactly the moments of order below a are finite."""

    @abstractmethod
    def sample(
        self, shape: Sequence[int], d: int, generator: torch.Generator, dtype: torch.dtype
    ) -> Tensor:
        """Independent vectors, of shape ``(*shape, d)``, on the generator's device."""

    @abstractmethod
    def _moment(self, alpha: float, d: int) -> float:
        """E‖ξ‖^α for α below the tail index."""

    def moment(self, alpha: float, d: int = 1) -> float:
        """E‖ξ‖^α; a ``ValueError`` where it is infinite."""
        if not 0 < alpha < self.tail:
            raise ValueError(
                f"E‖ξ‖^{alpha:g} is infinite under {self}: its tail index is {self.tail:g}, and only "
                f"moments of order below that are finite; take a law with a larger index, or "
                f"alpha < {self.tail:g}"
            )
        return self._moment(alpha, d)


@dataclass(frozen=True)
class SymmetricPareto(Law):
    """ξ = R·u with P(R > t) = t^{−a} for t ≥ 1 and u uniform on the sphere: E‖ξ‖^α = a/(a − α)."""

    index: float

    def __post_init__(self) -> None:
        _check_index(self.index, math.inf)

    @property
    def tail(self) -> float:
        """The index itself."""
        return self.index

    def sample(
        self, shape: Sequence[int], d: int, generator: torch.Generator, dtype: torch.dtype
    ) -> Tensor:
        """A Pareto length in a uniform direction."""
        u = _normal((*shape, d), generator, dtype)
        return (
            u
            / torch.linalg.vector_norm(u, dim=-1, keepdim=True)
            * _pareto((*shape, 1), self.index, generator).to(dtype)
        )

    def _moment(self, alpha: float, d: int) -> float:
        return self.index / (self.index - alpha)


@dataclass(frozen=True)
class StudentT(Law):
    """The multivariate Student law ξ = g·√(ν/χ²_ν), g standard normal; its tail index is ν.

    E‖ξ‖^α = ν^{α/2}·Γ((d+α)/2)Γ((ν−α)/2)/(Γ(d/2)Γ(ν/2)).
    """

    dof: float

    def __post_init__(self) -> None:
        _check_index(self.dof, math.inf)

    @property
    def tail(self) -> float:
        """ν."""
        return self.dof

    def sample(
        self, shape: Sequence[int], d: int, generator: torch.Generator, dtype: torch.dtype
    ) -> Tensor:
        """A normal vector over the root of an independent χ²."""
        g = _normal((*shape, d), generator, dtype)
        half = torch.full((*shape, 1), self.dof / 2, dtype=torch.float64, device=generator.device)
        chi2 = 2 * torch._standard_gamma(half, generator=generator)
        return g * (self.dof / chi2).sqrt().to(dtype)

    def _moment(self, alpha: float, d: int) -> float:
        nu = self.dof
        log = _log_gamma_ratio(nu / 2, -alpha / 2) + alpha / 2 * math.log(nu / 2)
        return math.exp(log) * _normal_moment(alpha, d)


@dataclass(frozen=True)
class AlphaStable(Law):
    """The isotropic α-stable law: E e^{i⟨t, ξ⟩} = exp(−‖t‖^a/2^{a/2}); the normal law at a = 2.

    ξ = √A·g with A positive (a/2)-stable, E e^{−λA} = e^{−λ^{a/2}}, drawn by the method of Chambers,
    Mallows and Stuck (1976) in Kanter's form for one-sided laws. Its moments of order α < a are
    E‖ξ‖^α = E‖g‖^α·Γ(1 − α/a)/Γ(1 − α/2); **the a-th itself is infinite** for a < 2.
    """

    index: float

    def __post_init__(self) -> None:
        _check_index(self.index, 2.0)

    @property
    def tail(self) -> float:
        """The index, or infinity for the normal law."""
        return self.index if self.index < 2 else math.inf

    def sample(
        self, shape: Sequence[int], d: int, generator: torch.Generator, dtype: torch.dtype
    ) -> Tensor:
        """A normal vector with a random, one-sided stable variance."""
        g = _normal((*shape, d), generator, dtype)
        if self.index == 2:
            return g
        b = self.index / 2
        U = math.pi * _uniform((*shape, 1), generator)
        W = -torch.log(_uniform((*shape, 1), generator))
        A = torch.sin(b * U) / torch.sin(U) ** (1 / b) * (torch.sin((1 - b) * U) / W) ** (1 / b - 1)
        return g * A.sqrt().to(dtype)

    def _moment(self, alpha: float, d: int) -> float:
        if self.index == 2:
            return _normal_moment(alpha, d)
        log = math.lgamma(1 - alpha / self.index) - math.lgamma(1 - alpha / 2)
        return math.exp(log) * _normal_moment(alpha, d)


@dataclass(frozen=True)
class SkewedPareto(Law):
    """ξ = (R − ER)·u₀ with R Pareto of index a and one fixed direction u₀ = 1/√d: mean 0, median not.

    Most draws point slightly against u₀, and a rare draw far along u₀. The average of W draws is
    still asymmetric, by the order of W^{−(a−1)/a}, which is the order of the paper's noise term. Laws
    symmetric about zero disturb a normalized step less than this worst case.
    """

    index: float

    def __post_init__(self) -> None:
        _check_index(self.index, math.inf)

    @property
    def tail(self) -> float:
        """The index itself."""
        return self.index

    @property
    def mean_length(self) -> float:
        """ER = a/(a − 1), which is subtracted from R."""
        return self.index / (self.index - 1)

    def sample(
        self, shape: Sequence[int], d: int, generator: torch.Generator, dtype: torch.dtype
    ) -> Tensor:
        """A centred Pareto variate times the fixed direction."""
        zeta = _pareto((*shape, 1), self.index, generator) - self.mean_length
        return (zeta / math.sqrt(d)).to(dtype).expand(*shape, d)

    def _moment(self, alpha: float, d: int) -> float:
        return _skewed_moment(self.index, alpha)


@lru_cache(maxsize=256)
def _skewed_moment(a: float, alpha: float) -> float:
    """E|R − ER|^α: a Beta function above the mean, the midpoint rule below it."""
    mu = a / (a - 1)
    beta = math.lgamma(a - alpha) + math.lgamma(alpha + 1) - math.lgamma(a + 1)
    above = a * mu ** (alpha - a) * math.exp(beta)
    midpoints = (torch.arange(100_000, dtype=torch.float64, device="cpu") + 0.5) / 100_000
    r = 1 + (mu - 1) * midpoints
    below = (mu - 1) * float(((mu - r) ** alpha * a * r ** (-a - 1)).mean())
    return above + below


def _check_index(index: float, largest: float) -> None:
    if not is_scalar(index):
        raise TypeError(f"index={index!r}: expected a number 1 < index, as 1.5")
    if index == math.inf:
        raise ValueError(
            "index=inf: expected a finite index; the law without a heavy tail is AlphaStable(2.0), the "
            "normal law"
        )
    if not 1 < index <= largest:
        upper = "" if largest == math.inf else f" ≤ {largest:g}"
        raise ValueError(
            f"index={index}: expected 1 < index{upper}; at 1 and below the noise has no mean, so "
            "no gradient could be unbiased"
        )


def _normal_moment(alpha: float, d: int) -> float:
    """E‖g‖^α of a standard normal vector: 2^{α/2}·Γ((d+α)/2)/Γ(d/2)."""
    return math.exp(alpha / 2 * math.log(2) + _log_gamma_ratio(d / 2, alpha / 2))


def _log_gamma_ratio(x: float, a: float) -> float:
    """log(Γ(x + a)/Γ(x)). For a large x the difference of the logarithms would be rounding errors."""
    if x < 1e6:
        return math.lgamma(x + a) - math.lgamma(x)
    return a * math.log(x) + a * (a - 1) / (2 * x)  # Stirling's series; the next term is O(x⁻²)


def _uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Uniform on the open interval (0, 1), in float64, whose last bits decide the tail."""
    u = torch.rand(*shape, generator=generator, dtype=torch.float64, device=generator.device)
    return u.clamp_(2.0**-54, 1 - 2.0**-53)


def _pareto(shape: Sequence[int], index: float, generator: torch.Generator) -> Tensor:
    return _uniform(shape, generator) ** (-1 / index)


def _normal(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=dtype, device=generator.device)
