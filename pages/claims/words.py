"""How a claim registers itself, and how numbers are written in it."""

from __future__ import annotations

from collections.abc import Callable

from differences import Change

CLAIMS: dict[str, Callable[[], str]] = {}


def claim(make: Callable[[], str]) -> Callable[[], str]:
    """Register a function under its name, with hyphens."""
    CLAIMS[make.__name__.replace("_", "-")] = make
    return make


def signed(number: float, digits: int = 1) -> str:
    """With a sign, and a minus as wide as a plus."""
    return f"{'−' if number < 0 else '+'}{abs(number):.{digits}f}"


def span(found: Change, digits: int = 1) -> str:
    """As ``−9.5 to +3.7``."""
    return " to ".join(signed(end, digits) for end in found.ends)
