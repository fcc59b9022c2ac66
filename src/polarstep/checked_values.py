"""Checks of the numbers that users give as options.

A check raises a ``TypeError`` for a value of another kind, as a string, and a ``ValueError`` for a
number outside its range. Both say the option, the value, what was expected and what to give instead.
True and False count as no numbers here, although Python computes with them: ``rank=True`` is a
mistake.

>>> check_fraction("momentum", 1.2, "0.95 is usual")
Traceback (most recent call last):
    ...
ValueError: momentum=1.2: expected 0 ≤ momentum < 1; 0.95 is usual
>>> check_integer("rank", True, 1, "the paper takes 128–200")
Traceback (most recent call last):
    ...
TypeError: rank=True: expected an integer ≥ 1; the paper takes 128–200
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, TypeGuard

__all__ = [
    "check_at_least_zero",
    "check_bool",
    "check_fraction",
    "check_integer",
    "check_number",
    "check_positive",
    "is_integer",
    "is_number",
]


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a real number of Python or NumPy, and not True or False."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an integer of Python or NumPy, and not True or False; 3.0 is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_number(
    option: str, value: Any, fits: Callable[[float], bool], expected: str, remedy: str
) -> None:
    """Raise unless ``value`` is a number that ``fits``; ``expected`` says which numbers do."""
    if not is_number(value):
        raise TypeError(_told(option, value, f"a number, {expected}", remedy))
    if not fits(value):
        raise ValueError(_told(option, value, expected, remedy))


def check_at_least_zero(option: str, value: Any, remedy: str) -> None:
    """Raise unless ``value`` is a finite number ≥ 0."""
    if not is_number(value):
        raise TypeError(_told(option, value, "a finite number ≥ 0", remedy))
    if not 0 <= value < math.inf:
        raise ValueError(_told(option, value, "a finite number ≥ 0", remedy))


def check_positive(option: str, value: Any, remedy: str) -> None:
    """Raise unless ``value`` is a finite number > 0."""
    if not is_number(value):
        raise TypeError(_told(option, value, "a finite number > 0", remedy))
    if not 0 < value < math.inf:
        raise ValueError(_told(option, value, "a finite number > 0", remedy))


def check_fraction(option: str, value: Any, remedy: str) -> None:
    """Raise unless ``value`` is in [0, 1)."""
    check_number(option, value, lambda x: 0 <= x < 1, f"0 ≤ {option} < 1", remedy)


def check_integer(option: str, value: Any, least: int, remedy: str) -> None:
    """Raise unless ``value`` is an integer ≥ ``least``."""
    if not is_integer(value):
        raise TypeError(_told(option, value, f"an integer ≥ {least}", remedy))
    if value < least:
        raise ValueError(_told(option, value, f"an integer ≥ {least}", remedy))


def check_bool(option: str, value: Any, remedy: str) -> None:
    """Raise unless ``value`` is True or False: ``"no"`` would count as True."""
    if not isinstance(value, bool):
        raise TypeError(_told(option, value, "True or False", remedy))


def _told(option: str, value: object, expected: str, remedy: str) -> str:
    return f"{option}={value!r}: expected {expected}; {remedy}"
