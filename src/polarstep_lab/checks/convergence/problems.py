"""Smooth, non-convex matrix problems with known gradient, smoothness constant L and minimum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep import rng

__all__ = ["Ripples"]


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
