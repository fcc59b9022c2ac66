"""Heavy-tailed gradient noise that satisfies the paper's assumption with known (α, σ₀, σ₁).

A :class:`Law` describes a random vector in d dimensions: d = mn for an m×n matrix, d = 1 for
independent entries. Its moments are known in closed form. Its *tail index* a says that P(‖ξ‖ > t)
falls like t^{−a}, so E‖ξ‖^α is finite **only** for α < a. Noise that satisfies the paper's assumption
at α therefore needs a > α: at a = α the moment is infinite. (The Gaussian, the α-stable law with
a = 2, has all moments.)

:class:`GradientNoise` scales a law to given σ₀ and σ₁ and adds it to gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from polarstep.theory import checks as check

__all__ = [
    "AlphaStable",
    "Attached",
    "GradientNoise",
    "Law",
    "RareCorrection",
    "SkewedPareto",
    "StudentT",
    "SymmetricPareto",
]

CHUNK = 1 << 22
"""Most numbers drawn at once for a mini-batch; larger batches are summed in parts."""


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
    if not check.is_scalar(index):
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


@dataclass(frozen=True)
class GradientNoise:
    """G^i = ∇f + ξ^i with E‖ξ^i‖_F^α = σ₀^α + σ₁^α‖∇f‖_F^α: generalized heavy-tailed noise.

    ξ^i is one draw from ``law`` for all entries of a matrix, scaled so that the assumption holds
    with equality. With ``independent=True`` every entry is a one-dimensional draw of its own; since
    ‖ξ‖_F^α ≤ Σ|ξ_jk|^α, the assumption then holds with "≤", with equality only at α = 2.

    Args:
        law: the shape of the noise; its tail index must exceed α.
        alpha: the order of the moment that σ₀ and σ₁ are about.
        sigma0: the part that does not depend on the gradient.
        sigma1: the part that grows with the gradient.
        independent: draw every entry by itself instead of the whole matrix at once.

    >>> noise = GradientNoise(StudentT(1.7), alpha=1.5, sigma0=1.0, sigma1=0.1)
    >>> noise(torch.ones(4, 3), generator=torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3])
    """

    law: Law
    alpha: float
    sigma0: float
    sigma1: float = 0.0
    independent: bool = False

    def __post_init__(self) -> None:
        check.tail_index(self.alpha)
        check.nonnegative("sigma0", self.sigma0)
        check.nonnegative("sigma1", self.sigma1)
        self.law.moment(self.alpha)  # raises if this moment is infinite

    def scale(self, gradient: Tensor) -> Tensor:
        """(σ₀^α + σ₁^α‖∇f‖_F^α)^{1/α}, with the norm over the last two dimensions, or a whole vector."""
        norm = _norm(_wide(gradient))
        return (self.sigma0**self.alpha + (self.sigma1 * norm) ** self.alpha) ** (1 / self.alpha)

    def __call__(self, gradient: Tensor, batch: int = 1, *, generator: torch.Generator) -> Tensor:
        """The mean of ``batch`` noisy samples of ``gradient``, of shape ``(..., m, n)``.

        Leading dimensions are replicas, whose noise is independent.
        """
        batch = check.at_least_one_sample(batch)
        matrix = gradient.shape[-2:] if gradient.ndim > 1 else gradient.shape
        replicas, d = gradient.shape[: gradient.ndim - len(matrix)], matrix.numel()
        unit = (
            d * self.law.moment(self.alpha) if self.independent else self.law.moment(self.alpha, d)
        )
        exact = _wide(gradient)
        total = torch.zeros((), dtype=exact.dtype, device=generator.device)
        part = max(1, CHUNK // max(1, gradient.numel()))
        for start in range(0, batch, part):
            shape = (min(part, batch - start), *replicas)
            if self.independent:
                xi = self.law.sample((*shape, d), 1, generator, exact.dtype)
            else:
                xi = self.law.sample(shape, d, generator, exact.dtype)
            total = total + xi.reshape(*shape, *matrix).sum(0)
        xi = (total / batch).to(gradient.device) * unit ** (-1 / self.alpha)
        return (exact + xi * self.scale(exact)).to(gradient.dtype)

    def attach(self, params: Iterable[Tensor], generator: torch.Generator) -> Attached:
        """Add this noise to every gradient of ``params`` from now on.

        Each ``backward`` adds the noise of one sample to the gradient that reaches a parameter. For
        a mini-batch of B, accumulate B backward passes of the loss and divide the gradients by B;
        dividing the loss instead would not scale σ₀. The result is also a context manager::

            with noise.attach(model.parameters(), generator):
                loss(model(x), y).backward()
        """
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"params is a {type(params).__name__}: expected parameters; give its parameters()"
            )
        handles = [
            p.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self(gradient, generator=generator)
            )
            for p in params
            if p.requires_grad
        ]
        return Attached(handles)


class Attached:
    """The hooks that add noise; ``remove()`` or the end of a ``with`` block takes them off."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take the noise off."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@dataclass(frozen=True)
class RareCorrection:
    """G^i = (1 + ζ^i)∇f with ζ = −c most of the time and c(1−π)/π with probability π.

    This noise is purely multiplicative (σ₀ = 0) and unbiased. Yet for c > 1 a normalized step goes
    the wrong way unless it averages over about 1/π samples. The batch-size threshold of the theorems
    excludes such noise.
    """

    c: float = 2.0
    probability: float = 0.01

    def __post_init__(self) -> None:
        check.positive("c", self.c)
        check.share("probability", self.probability, "0 < π < 1, the share of corrections, as 0.1")

    def sigma1(self, alpha: float) -> float:
        """σ₁ = (E|ζ|^α)^{1/α} = c·(1 − π + π((1−π)/π)^α)^{1/α}; all moments are finite."""
        pi = self.probability
        moment = 1 - pi + pi * ((1 - pi) / pi) ** check.tail_index(alpha)
        return float(self.c * moment ** (1 / alpha))

    def __call__(self, gradient: Tensor, batch: int = 1, *, generator: torch.Generator) -> Tensor:
        """The mean of ``batch`` samples; the number of corrections among them is binomial."""
        batch = check.at_least_one_sample(batch)
        replicas = gradient.shape[:-2] if gradient.ndim > 1 else ()
        count = torch.full(replicas, float(batch), dtype=torch.float64, device=generator.device)
        hits = torch.binomial(count, torch.full_like(count, self.probability), generator)
        zeta = -self.c + self.c / self.probability * hits / batch
        zeta = zeta.to(gradient.device, gradient.dtype)
        return gradient * (1 + zeta.reshape(*replicas, 1, 1) if replicas else 1 + zeta)


def _wide(gradient: Tensor) -> Tensor:
    """The gradient, in float32 if it has 16 bits, whose range powers of norms and rare draws leave."""
    return gradient.float() if gradient.dtype.itemsize < 4 else gradient


def _norm(gradient: Tensor) -> Tensor:
    if gradient.ndim > 1:
        return torch.linalg.vector_norm(gradient, dim=(-2, -1), keepdim=True)
    return torch.linalg.vector_norm(gradient)
