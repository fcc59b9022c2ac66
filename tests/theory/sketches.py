"""Sketched bases and polynomial steps that the tests of bounds on deflated maps run over."""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep import rng
from polarstep.polar.coefficients import polar_express, resolve

STEPS = {
    "cubic": resolve("cubic", 1),
    "quintic x2": resolve("quintic", 2),
    "jordan x2": resolve("jordan", 2),
    "minimax": polar_express(0.2, 1),
    "flat": resolve("flat", 1),
}


def sketched_basis(M: Tensor, ell: int, h: float, *key: int | str | float) -> Tensor:
    """Q of Algorithm 1 with h power iterations; for half-integers the sketch is on the short side."""
    half = int(2 * h) % 2
    side = M.shape[-2 if half else -1]
    Q = torch.randn(side, ell, generator=rng.generator(*key), dtype=M.dtype)
    for step in range(int(2 * h) + 1):
        turned = (step + half) % 2
        Q = torch.linalg.qr((M.mT if turned else M) @ Q).Q
    return Q
