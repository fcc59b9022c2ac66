"""Learning-rate scales, so that one η serves matrices of all shapes.

T(M) has singular values near one whatever the shape of M, so the step η·T changes a layer's output
by an amount that depends on the shape. A scale, a factor on η, makes up for that.

``"rms"`` also depends on the polar map, because ‖T‖²_F is the number of singular values near one: all
min(m, n) in full space, ℓ of a low-rank map (:meth:`polarstep.PolarMap.effective_rank`). Momentum of
low rank, or singular values that are too small for the map to lift, leave ‖T‖_F below that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polarstep.polar import Polar

__all__ = ["RMS", "SCALES", "LrScale", "norm_correction", "resolve_scale", "scale_of"]

LrScale = str | Callable[[int, int], float]

# The root mean square of the entries of an update by "rms", in units of η: that of AdamW's updates.
RMS = 0.2


def _none(m: int, n: int, rank: int) -> float:
    return 1.0


def _spectral(m: int, n: int, rank: int) -> float:
    return math.sqrt(max(1.0, m / max(n, 1)))


def _rms(m: int, n: int, rank: int) -> float:
    return RMS * math.sqrt(m * n / max(rank, 1))


SCALES: dict[str, Callable[[int, int, int], float]] = {
    # Equation (1) as it stands.
    "none": _none,
    # √max(1, m/n): tall layers step in proportion to the RMS of their output (Jordan et al. 2024).
    "spectral": _spectral,
    # 0.2·√(mn/‖T‖²_F), in full space 0.2·√max(m, n): the RMS of an update is 0.2, as with AdamW, so
    # AdamW's learning rate and weight decay carry over (Liu et al. 2025, Moonlight).
    "rms": _rms,
}


def resolve_scale(scale: LrScale) -> Callable[[int, int, int], float]:
    """The function (m, n, effective rank of T) ↦ factor for a name, or for a function of (m, n).

    >>> resolve_scale("spectral")(3072, 768, 768), resolve_scale("spectral")(768, 3072, 768)
    (2.0, 1.0)
    >>> resolve_scale("rms")(100, 400, 100), resolve_scale("rms")(100, 400, 25)
    (4.0, 8.0)
    """
    if callable(scale):
        return lambda m, n, rank: scale(m, n)
    if scale not in SCALES:
        raise ValueError(
            f"lr_scale={scale!r}: expected one of {', '.join(SCALES)}, or a function (m, n) → factor"
        )
    return SCALES[scale]


def scale_of(group: dict[str, Any], m: int, n: int, device: torch.device) -> tuple[float, float]:
    """The factor on η for m×n matrices of a group, and the ‖T‖²_F that it assumes.

    The second number is zero for scales that do not depend on ‖T‖_F.
    """
    scale = group["lr_scale"]
    depends = scale == "rms"
    rank = group["polar"].on(m, n, device).effective_rank(m, n) if depends else min(m, n)
    return resolve_scale(scale)(m, n, rank), float(rank) if depends else 0.0


def norm_correction(polar: Polar, assumed: Tensor) -> Tensor | None:
    """A factor per matrix for a T whose ‖T‖²_F the step knows; ``None`` where it does not.

    ``assumed`` has the second number of :func:`scale_of` for each matrix, and the factor is one where
    it is zero.
    """
    if polar.squared_norm is None:
        return None
    known = polar.squared_norm.to(assumed.dtype)
    return torch.where(assumed > 0, (assumed / known).sqrt(), 1)
