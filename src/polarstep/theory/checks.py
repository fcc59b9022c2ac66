"""Checks of the arguments of :mod:`polarstep.theory`, one for each symbol of the paper.

A check returns the value, or raises a :class:`ValueError` that says which assumption of the paper
fails and which values satisfy it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polarstep.checked_values import is_number

__all__ = [
    "at_least_one_sample",
    "at_least_one_step",
    "delta_covers",
    "horizon",
    "is_scalar",
    "is_whole",
    "momentum",
    "nonnegative",
    "oversampling",
    "positive",
    "positive_each",
    "power_iterations",
    "share",
    "short_side",
    "sketch_width",
    "spectrum",
    "tail_index",
    "target_rank",
    "whole",
]


ROUNDING = 1e-6
"""The relative amount by which ‖M‖_op from a float32 SVD may exceed a δ that is meant to equal it."""


def is_scalar(value: object) -> bool:
    """Whether ``value`` is one real number, of Python, NumPy or torch, and not True or False."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return is_number(value)


def is_whole(value: Any) -> bool:
    """Whether ``value`` is a whole number, as 3 or 3.0, and not True or False."""
    return is_scalar(value) and math.isfinite(value) and float(value).is_integer()


def tail_index(alpha: float) -> float:
    """α ∈ (1, 2], the order of the moment in the assumption on the noise."""
    expected = (
        "the assumption on the noise (a bounded α-th moment) needs 1 < α ≤ 2; take 2 for bounded "
        "variance, or an estimate from polarstep.theory.tail_index"
    )
    return _number("alpha", alpha, lambda a: 1 < a <= 2, expected)


def momentum(beta: float) -> float:
    """β ∈ (0, 1)."""
    expected = "the theorems hold for 0 < β < 1; the schedule for K=10,000 and α=2 gives 0.99"
    return _number("beta", beta, lambda b: 0 < b < 1, expected)


def share(name: str, value: float, expected: str) -> float:
    """A probability or a share strictly between 0 and 1."""
    return _number(name, value, lambda x: 0 < x < 1, f"expected {expected}")


def nonnegative(name: str, value: float) -> float:
    """A norm, a gap or another finite number ≥ 0."""
    return _number(name, value, lambda x: 0 <= x < math.inf, "expected a finite number ≥ 0")


def positive(name: str, value: float) -> float:
    """A step size, a scale or another finite number > 0."""
    return _number(name, value, lambda x: 0 < x < math.inf, "expected a finite number > 0")


def horizon(K: int) -> int:
    """K ≥ 2 steps."""
    expected = (
        "the schedules need a horizon of K ≥ 2 whole steps (at K = 1 they give η = 1 and β = 0); give "
        "the number of optimizer steps of the run"
    )
    return _integer("K", K, 2, expected)


def at_least_one_step(K: int) -> int:
    """K ≥ 1 steps, for statements with a given η and β."""
    return whole("K", K, 1, "a whole number of steps, at least 1, as 10_000")


def at_least_one_sample(B: int) -> int:
    """B ≥ 1 samples in a mini-batch."""
    return whole("B", B, 1, "a whole number of samples in a mini-batch, at least 1")


def whole(name: str, value: Any, least: int, expected: str) -> int:
    """A whole number ≥ ``least``, as a count of steps or a side of a matrix."""
    return _integer(name, value, least, f"expected {expected}")


def _number(name: str, value: Any, fits: Callable[[float], bool], expected: str) -> float:
    if not is_scalar(value) or not fits(value):
        raise ValueError(f"{name}={value!r}: {expected}")
    return float(value)


def _integer(name: str, value: Any, least: int, expected: str) -> int:
    if not is_whole(value) or value < least:
        raise ValueError(f"{name}={value!r}: {expected}")
    return int(value)


def positive_each(name: str, value: Tensor | float, sigma: Tensor, expected: str) -> Tensor:
    """One finite number > 0, or one per matrix, in float64 and on the device of ``sigma``."""
    found = torch.as_tensor(value, dtype=torch.float64, device=sigma.device)
    if not bool(((found > 0) & found.isfinite()).all()):
        raise ValueError(f"{name}={value}: expected {expected}")
    return found


def spectrum(singular_values: Tensor) -> Tensor:
    """Singular values in float64, largest first, zeros allowed at the end; at least one is not 0."""
    sigma = singular_values
    if not isinstance(sigma, Tensor):  # plain numbers have the precision of float64
        sigma = torch.as_tensor(sigma, dtype=torch.float64)
    if sigma.is_complex():
        raise ValueError(
            "the singular values are complex: pass torch.linalg.svdvals(M), not M itself"
        )
    if sigma.ndim < 1 or sigma.shape[-1] < 1:
        raise ValueError(f"expected singular values of shape (..., r), got {tuple(sigma.shape)}")
    sigma = sigma.detach().to(torch.float64)
    if not bool(torch.isfinite(sigma).all()) or bool((sigma < 0).any()):
        raise ValueError(
            "singular values must be finite and ≥ 0; pass torch.linalg.svdvals(M), not M itself"
        )
    if bool((sigma.amax(-1) == 0).any()):
        raise ValueError(
            "the spectrum is zero: M = 0 has no polar factor, and the bounds are about M ≠ 0; "
            "leave zero matrices out"
        )
    return sigma.sort(dim=-1, descending=True).values


def target_rank(s: int, sigma: Tensor) -> int:
    """1 ≤ s < r, the rank of every matrix of the batch."""
    r = int((sigma > 0).sum(-1).min())
    if not is_whole(s) or not 1 <= s < r:
        remedy = (
            f"take s from 1 to {r - 1}"
            if r > 1
            else "a matrix of rank 1 needs no sketch: use the full-space bound newton_schulz_gamma"
        )
        raise ValueError(
            f"s={s!r}: the target rank must satisfy 1 ≤ s < r = {r} = rank(M); {remedy}"
        )
    return int(s)


def oversampling(p: int, s: int | None = None, d0: int | None = None) -> int:
    """p ≥ 2, and ℓ = s + p ≤ d₀ where s and d₀ are given."""
    if not is_whole(p) or p < 2:
        raise ValueError(
            f"p={p!r}: the Gaussian bounds need an oversampling of p ≥ 2, because E‖Ω₁†‖²_F = s/(p − 1) "
            "is infinite below that; the paper takes p = 10"
        )
    if s is not None and d0 is not None and s + p > d0:
        raise ValueError(
            f"ℓ = s + p = {s} + {p} = {s + p}: the sketch must satisfy ℓ ≤ min(m, n) = {d0}; take "
            f"s + p ≤ {d0}, or the full-space map, which costs no more than so wide a sketch"
        )
    return int(p)


def short_side(d0: int | None, sigma: Tensor) -> int | None:
    """d₀ = min(m, n), at least the number of nonzero singular values; ``None`` if it is not given."""
    if d0 is None:
        return None
    rank = int((sigma > 0).sum(-1).max())
    if not is_whole(d0) or d0 < rank:
        raise ValueError(
            f"d0={d0!r}: expected min(m, n), a whole number not below the {rank} singular values above "
            "zero; leave d0 out if the spectrum has all singular values"
        )
    return int(d0)


def sketch_width(ell: int, sigma: Tensor) -> int:
    """1 ≤ ℓ < rank(M), so that there is a rest."""
    rank = int((sigma > 0).sum(-1).min())
    if not is_whole(ell) or not 1 <= ell < rank:
        raise ValueError(
            f"ell={ell!r}: expected a whole number 1 ≤ ℓ < {rank} = rank(M); with ℓ ≥ rank(M) a sketch "
            "leaves no rest"
        )
    return int(ell)


def power_iterations(h: float) -> float:
    """h ≥ 0; half-integers are the half iterations of :class:`polarstep.LowRank`."""
    if not is_scalar(h) or not is_whole(2 * h) or h < 0:
        raise ValueError(f"h={h!r}: expected 0, ½, 1, 1½, … power iterations")
    return float(h)


def delta_covers(delta: Tensor | float | None, sigma: Tensor) -> Tensor:
    """δ ≥ ‖M‖_op for each matrix, up to rounding; ``None`` means δ = ‖M‖_F."""
    if delta is None:
        return torch.linalg.vector_norm(sigma, dim=-1)
    value = torch.as_tensor(delta, dtype=torch.float64, device=sigma.device)
    value = value.expand(sigma.shape[:-1])
    largest = sigma.amax(-1)
    if not bool((value >= largest * (1 - ROUNDING)).all()):  # true for a NaN as well
        worst = int((value - largest).argmin())
        low, need = float(value.flatten()[worst]), float(largest.flatten()[worst])
        fault = "no number" if math.isnan(low) else f"below ‖M‖_op = {need:g}"
        raise ValueError(
            f"delta={low:g} is {fault}: the polynomials keep singular values in [0, 1] only if "
            "δ ≥ ‖M‖_op; take delta=None for δ = ‖M‖_F, which is always enough"
        )
    return torch.maximum(value, largest)
