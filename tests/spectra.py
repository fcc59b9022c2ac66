"""Matrices that the tests run over: one spectrum per way a momentum matrix can be hard."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from polarstep import rng

# Singular values of length k, largest first, as a function of k.
SPECTRA: dict[str, Callable[[int], Tensor]] = {
    "flat": lambda k: torch.ones(k, dtype=torch.float64),
    "power-law": lambda k: torch.arange(1, k + 1, dtype=torch.float64) ** -0.7,
    # One direction towers over a long flat tail: momentum early in training.
    "one-dominant": lambda k: torch.cat([torch.ones(1), torch.full((k - 1,), 1e-2)]).double(),
    "rank-deficient": lambda k: (
        torch.linspace(1, 0.2, k).double() * (torch.arange(k) < (k + 2) // 3)
    ),
    "low-rank-and-noise": lambda k: torch.where(torch.arange(k) < (k + 3) // 4, 1.0, 1e-3).double(),
    "exponential": lambda k: 10.0 ** -torch.linspace(0, 6, k, dtype=torch.float64),
    # As float32 this is of full rank, with all but one singular value at rounding level.
    "rank-one-within-rounding": lambda k: (torch.arange(k) == 0).double(),
    "zero": lambda k: torch.zeros(k, dtype=torch.float64),
}


def orthogonal(n: int, seed: int = 0, columns: int | None = None) -> Tensor:
    """A random n×n orthogonal matrix, or its first ``columns``, float64."""
    return _orthogonal(n, seed, columns).clone()


@functools.lru_cache(1000)  # tests ask for few different ones, and often
def _orthogonal(n: int, seed: int, columns: int | None) -> Tensor:
    g = rng.generator("tests", "orthogonal", n, seed)
    return torch.linalg.qr(torch.randn(n, columns or n, generator=g, dtype=torch.float64)).Q


def with_singular_values(sigma: Tensor, m: int, n: int, seed: int = 0) -> Tensor:
    """U diag(σ) Vᵀ with random orthogonal U and V, float64."""
    U = orthogonal(m, 2 * seed, min(m, n))
    V = orthogonal(n, 2 * seed + 1, min(m, n))
    return (U * sigma) @ V.mT


def matrix(spectrum: str, m: int, n: int, *, seed: int = 0) -> Tensor:
    """An m×n matrix of the named spectrum, float64."""
    return with_singular_values(SPECTRA[spectrum](min(m, n)), m, n, seed)


def batch(spectrum: str, *shape: int) -> Tensor:
    """Different matrices of the named spectrum, of shape (..., m, n), float64."""
    *leading, m, n = shape
    count = int(torch.tensor(leading).prod()) if leading else 1
    stacked = torch.stack([matrix(spectrum, m, n, seed=seed) for seed in range(count)])
    return stacked.reshape(shape)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Independent normal entries."""
    return torch.randn(*shape, generator=rng.generator("tests", seed), dtype=dtype)


def operator_norm(X: Tensor) -> Tensor:
    """The largest singular value of each matrix, in float64, by the eigenvalues of a Gram matrix.

    It agrees with ``torch.linalg.matrix_norm(X, 2)`` to fifteen digits, in half of the time.
    """
    X = X.double()
    G = X @ X.mT if X.shape[-2] <= X.shape[-1] else X.mT @ X
    return torch.linalg.eigvalsh(G)[..., -1].clamp(min=0).sqrt()
