"""The numbers of the pages, by name: README.md in pages/ says how a page uses them."""

from __future__ import annotations

from functools import cache

from pages.numbers import cost, paper, quality, ranks, theory
from pages.numbers.number import Number

__all__ = ["Number", "made"]

SUBJECTS = (cost, quality, paper, theory, ranks)


@cache
def made() -> dict[str, Number]:
    """All numbers, sorted by name. Raises ``ValueError`` where two have one name."""
    found: dict[str, Number] = {}
    for subject in SUBJECTS:
        for name, number in subject.numbers():
            if name in found:
                raise ValueError(f"two numbers are {name!r}: rename one of them in pages/numbers")
            found[name] = number
    return dict(sorted(found.items()))
