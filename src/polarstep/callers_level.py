"""Where a warning points: to the line of the user's own code that led to it."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["callers_level"]


def callers_level() -> int:
    """The ``stacklevel`` with which a warning shows the first line outside of this package and torch.

    The number differs from call to call: torch wraps ``step()`` twice, and once more if the optimizer
    has a scheduler.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours_or_torchs(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours_or_torchs(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("polarstep", "torch")
