"""Spectra and matrices that the tests of the theory run over."""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep import rng


def random_spectra(count: int, r: int, seed: int = 0) -> Tensor:
    """``count`` spectra of length r with σ₁ = 1: power laws, exponentials, cliffs, flat tails."""
    g = rng.generator("spectra", seed)
    k = torch.arange(1, r + 1, dtype=torch.float64)
    rows = []
    for i in range(count):
        a = float(torch.rand((), generator=g))
        kind = i % 4
        if kind == 0:
            sigma = k ** -(0.2 + 2 * a)
        elif kind == 1:
            sigma = torch.exp(-(0.05 + 0.4 * a) * k)
        elif kind == 2:  # a cliff somewhere, as momentum early in training
            sigma = torch.where(k <= 1 + int(a * r / 2), 1.0, 0.02 + 0.2 * a)
        else:
            sigma = torch.rand(r, generator=g, dtype=torch.float64) + 0.05
        sigma = sigma.sort(descending=True).values
        rows.append(sigma / sigma[0])
    return torch.stack(rows)


def with_spectrum(sigma: Tensor, m: int, n: int, seed: int = 0) -> Tensor:
    """m×n matrices U diag(σ) Vᵀ with random orthogonal U and V, float64."""
    g = rng.generator("factors", seed)
    batch, r = sigma.shape
    U = torch.linalg.qr(torch.randn(batch, m, r, generator=g, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(batch, n, r, generator=g, dtype=torch.float64)).Q
    return (U * sigma[:, None]) @ V.mT
