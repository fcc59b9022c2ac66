"""Spectra, matrices, bases and polynomial steps that the tests of the theory run over."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polarstep import Exact, rng
from polarstep.maps.coefficients import polar_express, resolve

ROWS, COLS = 20, 28

STEPS = {
    "cubic": resolve("cubic", 1),
    "quintic x2": resolve("quintic", 2),
    "jordan x2": resolve("jordan", 2),
    "minimax": polar_express(0.2, 1),
    "flat": resolve("flat", 1),
}


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


def sketched_basis(M: Tensor, ell: int, h: float, *key: int | str | float) -> Tensor:
    """Q of Algorithm 1 with h power iterations; for half-integers the sketch is on the short side."""
    half = int(2 * h) % 2
    side = M.shape[-2 if half else -1]
    Q = torch.randn(side, ell, generator=rng.generator(*key), dtype=M.dtype)
    for step in range(int(2 * h) + 1):
        turned = (step + half) % 2
        Q = torch.linalg.qr((M.mT if turned else M) @ Q).Q
    return Q


def basis(M: Tensor, kind: str, ell: int) -> Tensor:
    """An orthonormal Q: some have rows of head and rest overlap as much as they can."""
    U = torch.linalg.svd(M).U
    if kind == "leading":
        return U[..., :ell]
    if kind == "trailing":
        return U[..., -ell:]
    if kind == "between":  # half a leading direction each, and half a trailing one
        return (U[..., :ell] + U[..., -ell:].flip(-1)) / math.sqrt(2)
    if kind == "sketch":
        return sketched_basis(M, ell, 0, "basis", ell)
    random = torch.randn(M.shape[0], M.shape[1], ell, generator=rng.generator("random", ell))
    return torch.linalg.qr(random.double()).Q


def parts(M: Tensor, Q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """B, its polar factor Z, and R."""
    B = Q.mT @ M
    return B, Exact()(B), M - Q @ B


def flattened(M: Tensor, Q: Tensor, B: Tensor, Z: Tensor, delta: Tensor) -> Tensor:
    """X₀ = QZ + R/δ."""
    return Q @ Z + (M - Q @ B) / delta[:, None, None]


def any_positive(count: int, *key: int | str | float) -> Tensor:
    """Factors from 0.1 to 10, for a δ or a scale that no bound may depend on."""
    return 10 ** (2 * torch.rand(count, generator=rng.generator("any", *key)).double() - 1)


def below(found: Tensor, bound: Tensor) -> bool:
    """Whether the mean over draws is below, up to four standard errors and rounding."""
    error = found.std(0) / math.sqrt(len(found))
    return bool((found.mean(0) <= bound * (1 + 1e-9) + 4 * error + 1e-12).all())


def alignment(M: Tensor, T: Tensor) -> Tensor:
    """⟨M, T⟩ of every matrix."""
    return (M * T).sum((-2, -1))


HARD = torch.stack(
    [
        torch.cat([torch.full((2,), 50.0), torch.ones(18)]),
        torch.cat([torch.full((6,), 5.0), torch.linspace(1, 0.5, 14)]),
        torch.ones(20),
        torch.linspace(1, 0.9, 20),
    ]
).double()
OVER = torch.cat([random_spectra(12, ROWS), HARD / HARD[:, :1]])
