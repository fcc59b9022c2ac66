"""Learning-rate scales: what one step means for matrices of different shapes.

T(M) has singular values near one whatever the shape of M, so a shape-free step η·T changes a layer's
output by an amount that depends on the shape. A scale makes one η serve all of them.
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
    # 0.2·√max(m, n): the RMS of an update is that of AdamW's, 0.2, so that AdamW's learning rate and
    # weight decay carry over (Liu et al. 2025, Moonlight).
    "rms": _rms,
}


def resolve_scale(scale: LrScale) -> Callable[[int, int], float]:
    """The function (m, n) ↦ factor behind a name; a callable is its own.

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
