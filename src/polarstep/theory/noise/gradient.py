"""Gradients with noise that satisfies the paper's assumption with known (α, σ₀, σ₁)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from polarstep.theory import checks as check
from polarstep.theory.noise.laws import Law

__all__ = ["Attached", "GradientNoise", "RareCorrection"]

CHUNK = 1 << 22
"""Most numbers drawn at once for a mini-batch; larger batches are summed in parts."""


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

    >>> from polarstep.theory.noise import StudentT
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
