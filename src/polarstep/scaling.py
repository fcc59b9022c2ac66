"""Learning-rate scales, so that one η serves matrices of all shapes.

T(M) has singular values near one whatever the shape of M, so the step η·T changes a layer's output
by an amount that depends on the shape. A scale, a factor on η, makes up for that.

``"fan-ratio"`` is √(m/n), for outputs m and inputs n of a layer. An input x whose entries have a root
mean square (RMS) of one is √n long, and an update η·√(m/n)·T changes the output by at most η√m: by an
RMS of η, whatever the shape. ``"spectral"`` is the same for tall matrices, and 1 for wide matrices.

``"rms"`` is 0.2·√(mn)/‖T‖_F, with which the entries of an update have an RMS of 0.2.

**Sketched maps** compute ‖T‖_F at every step, from small matrices (``Polar.squared_norm``): a low-rank
map ‖T‖_F = ‖Z‖_F up to rounding, a deflated map an estimate. ‖T‖²_F counts as at least ℓ/9
(:func:`polarstep.maps.result.counted_norm`), so ``"rms"`` is::

    0.2·√(mn)/max(‖T‖_F, √ℓ/3) ≤ 3·0.2·√(mn/ℓ)

The RMS is 0.2 on every spectrum with ‖T‖²_F ≥ ℓ/9, and 0.6·‖T‖_F/√ℓ on others: spectra with fewer than
ℓ/9 directions, and spectra on which the inner map leaves most singular values far below one. Without the
bound, momentum of rank one would step √ℓ times as far along its one direction as other momentum steps
along each of its directions. With the bound it steps at most three times as far.

The RMS was, in float32 on a CPU, with ``LowRank(200)`` (ℓ = 210), and with a deflated map of ℓ = 128 and
one step, on 768×768 and on 768×3072 matrices alike::

    flat, or σₖ = 1/k                              0.200    0.200
    four directions a hundred times all others     0.200    0.200
    four directions a thousand times all others    0.086    0.200
    rank one                                       0.041    0.060

On steep spectra the least and the greatest RMS in float32 were, with the same maps, fresh and warm
heads, on 384×384, 384×1536, 768×768 and 768×3072 matrices::

    σₖ = k^-1.5                                    0.20     0.20
    σₖ = k^-2                                      0.13     0.19 to 0.20
    σₖ = k^-2.5                                    0.10     0.18 to 0.21

On momentum recorded from a GPT it was 0.200 with low-rank maps and 0.19 to 0.21 with deflated maps, from
the first step on.

``"rms"`` costs a sketched map about ten launches more on a GPU, most of them on one number for each
matrix. One of them reads Z. Where Z = WX is not formed, as with a warm sketch, it forms XXᵀ by 2ℓ²n
operations: ℓ/(3m) of the products of such a step, or 3% for ℓ = 64 and m = 768. On a CPU it reads Z, or
adds 2ℓ³ operations where the inner map has formed XXᵀ. A deflated map reads the two m×m matrices of its
polynomial once more, in four launches. What that is of a step on an H200 is in docs/speed.md. Other
scales add nothing.

**Full-space maps** are taken to have ‖T‖²_F = min(m, n) (:meth:`polarstep.PolarMap.effective_rank`). So
``"rms"`` is 0.2·√max(m, n) for them, as in torch and Moonlight, whose runs can be continued. The RMS is
0.2 where the map lifts all singular values to one. Where it does not, the RMS was, with five
PolarExpress steps, five of Jordan's and seven of the paper's quintic:

    momentum recorded from a GPT                   0.15 to 0.20, 0.13 to 0.19, 0.11 to 0.19
    four directions a hundred times all others     0.20 to 0.21, 0.21 to 0.23, 0.08 to 0.10
    four directions a thousand times all others    0.10 to 0.12, 0.05 to 0.08, 0.03 to 0.07

A sketched map is a full-space map on shapes that it does not sketch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from polarstep.checked_values import is_number
from polarstep.maps import Polar, PolarMap

__all__ = [
    "RMS",
    "SCALES",
    "ShapeScale",
    "at_assumed_norm",
    "corrected",
    "resolve_scale",
    "to_norm",
]

ShapeScale = Literal["none", "spectral", "fan-ratio", "rms"] | Callable[[int, int], float]

# The root mean square of the entries of an update by "rms", in units of η, about as with AdamW.
RMS = 0.2


def _none(m: int, n: int, rank: int) -> float:
    return 1.0


def _spectral(m: int, n: int, rank: int) -> float:
    return math.sqrt(max(1.0, m / max(n, 1)))


def _fan_ratio(m: int, n: int, rank: int) -> float:
    return math.sqrt(m / max(n, 1))


def _rms(m: int, n: int, rank: int) -> float:
    return RMS * math.sqrt(m * n / max(rank, 1))


SCALES: dict[str, Callable[[int, int, int], float]] = {
    # Equation (1) as it stands.
    "none": _none,
    # √max(1, m/n): tall layers step in proportion to the RMS of their output (Jordan et al. 2024).
    "spectral": _spectral,
    # √(m/n): wide layers as well (Bernstein and Newhouse 2024; dion's "spectral_norm").
    "fan-ratio": _fan_ratio,
    # 0.2·√(mn/‖T‖²_F), in full space 0.2·√max(m, n): the RMS of an update is 0.2, as with AdamW, so
    # AdamW's learning rate and weight decay are a first guess (Liu et al. 2025, Moonlight).
    "rms": _rms,
}


def resolve_scale(scale: ShapeScale) -> Callable[[int, int, int], float]:
    """The function (m, n, effective rank of T) ↦ factor for a name, or for a function of (m, n).

    >>> resolve_scale("spectral")(3072, 768, 768), resolve_scale("spectral")(768, 3072, 768)
    (2.0, 1.0)
    >>> resolve_scale("fan-ratio")(3072, 768, 768), resolve_scale("fan-ratio")(768, 3072, 768)
    (2.0, 0.5)
    >>> resolve_scale("rms")(100, 400, 100), resolve_scale("rms")(100, 400, 25)
    (4.0, 8.0)
    """
    if callable(scale):
        return lambda m, n, rank: _checked(scale, m, n)
    if scale not in SCALES:
        number = f"; a factor for a group is lr_factor={scale}" if is_number(scale) else ""
        raise ValueError(
            f"shape_scale={scale!r}: expected one of {', '.join(SCALES)}, or a function (m, n) → "
            f"factor{number}"
        )
    return SCALES[scale]


def _checked(scale: Callable[[int, int], float], m: int, n: int) -> float:
    """``scale(m, n)``; raises if it is negative, infinite or no number."""
    value = scale(m, n)
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(
            f"shape_scale({m}, {n}) is {value!r}: expected a finite number ≥ 0, the factor on lr for a "
            f"{m}×{n} matrix"
        )
    return value


def corrected(sizes: Tensor, polar: Polar, made_by: PolarMap) -> Tensor:
    """``sizes`` (batch, …), numbers or matrices, times √(effective rank)/‖T‖_F of each matrix.

    ``sizes`` are returned unchanged where the step does not know ‖T‖_F.
    """
    if polar.squared_norm is None:
        return sizes
    factor = _to_assumed(polar.squared_norm(), polar, made_by)
    return sizes * factor.to(sizes.dtype).reshape(-1, *[1] * (sizes.dim() - 1))


def to_norm(rank: int, squared: Tensor) -> Tensor:
    """√rank/‖T‖_F from ``squared`` = ‖T‖²_F, of shape (batch,); one where T is zero."""
    return torch.where(squared > 0, (rank / squared).sqrt(), 1)


def _to_assumed(squared: Tensor, polar: Polar, made_by: PolarMap) -> Tensor:
    """√effective rank / ‖T‖_F of each matrix, from ``squared`` = ‖T‖²_F."""
    return to_norm(made_by.effective_rank(*polar.M.shape[-2:]), squared)


def at_assumed_norm(polar: Polar, made_by: PolarMap) -> Polar:
    """T :func:`corrected` to ‖T‖²_F = the effective rank of its map, which the scale assumes."""
    if polar.squared_norm is None:
        return polar
    if polar.factors is not None:
        factor = _to_assumed(polar.squared_norm(), polar, made_by)
        return replace(polar, factors=polar.factors.times(factor), squared_norm=None)
    return replace(polar, T=corrected(polar.multiplied_out(), polar, made_by), squared_norm=None)
