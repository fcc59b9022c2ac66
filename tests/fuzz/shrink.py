"""Make a case that breaks a promise smaller, as long as it still breaks the same promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["smallest"]

Case = TypeVar("Case")
ATTEMPTS = 300


def smallest(
    case: Case,
    smaller: Callable[[Case], Iterable[Case]],
    still_broken: Callable[[Case], bool],
    attempts: int = ATTEMPTS,
) -> Case:
    """The last of a chain of smaller cases that all break the promise.

    A smaller case that raises is not taken: it shows something else.

    >>> smallest(40, lambda n: [n // 2, n - 1], lambda n: n >= 7)
    7
    """
    while attempts > 0:
        for candidate in smaller(case):
            attempts -= 1
            if attempts <= 0 or _holds(still_broken, candidate):
                break
        else:
            return case
        if attempts > 0:
            case = candidate
    return case


def _holds(still_broken: Callable[[Case], bool], candidate: Case) -> bool:
    try:
        return still_broken(candidate)
    except Exception:
        return False
