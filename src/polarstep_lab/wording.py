"""How numbers and lists are written in tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MISSING", "in_digits", "joined", "listed", "plural"]

MISSING = "—"


def in_digits(value: float | None, digits: int = 4) -> str:
    """``value`` with about ``digits`` significant digits, without an exponent from 1e-4 up to a million.

    >>> in_digits(2135.7551), in_digits(0.0118), in_digits(3.0), in_digits(None)
    ('2136', '0.01180', '3.000', '—')
    >>> in_digits(0.0), in_digits(123456.7), in_digits(9.99996), in_digits(1.23456e-5), in_digits(2e6)
    ('0.000', '123457', '10.00', '1.235e-05', '2.000e+06')
    """
    if value is None or value != value:
        return MISSING
    if 10**digits <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".removesuffix(".")


def listed(names: Sequence[str]) -> str:
    """``A``, ``A and B``, ``A, B and C``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def plural(count: int, noun: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def joined(*sentences: str) -> str:
    """The sentences that are not empty, as one paragraph."""
    return " ".join(filter(None, sentences))
