"""Learning-rate scales, so that one η serves matrices of all shapes.

T(M) has singular values near one whatever the shape of M, so the step η·T changes a layer's output
by an amount that depends on the shape. A scale, a factor on η, makes up for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["SCALES", "LrScale", "resolve_scale"]

LrScale = str | Callable[[int, int], float]


def _none(m: int, n: int) -> float:
    return 1.0


def _spectral(m: int, n: int) -> float:
    return math.sqrt(max(1.0, m / max(n, 1)))


def _rms(m: int, n: int) -> float:
    return 0.2 * math.sqrt(max(m, n))


SCALES: dict[str, Callable[[int, int], float]] = {
    # Equation (1) as it stands.
    "none": _none,
    # √max(1, m/n): tall layers step in proportion to the RMS of their output (Jordan et al. 2024).
    "spectral": _spectral,
    # 0.2·√max(m, n): the RMS of an update is 0.2, as with AdamW, so AdamW's learning rate and
    # weight decay carry over (Liu et al. 2025, Moonlight).
    "rms": _rms,
}


def resolve_scale(scale: LrScale) -> Callable[[int, int], float]:
    """The function (m, n) ↦ factor that a name stands for; a callable is returned as it is.

    >>> resolve_scale("spectral")(3072, 768), resolve_scale("spectral")(768, 3072)
    (2.0, 1.0)
    """
    if callable(scale):
        return scale
    if scale not in SCALES:
        raise ValueError(
            f"lr_scale={scale!r}: expected one of {', '.join(SCALES)}, or a function (m, n) → factor"
        )
    return SCALES[scale]
