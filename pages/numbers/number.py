"""A number of the pages: its value, how it is written, and the record that it is from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from polarstep_lab.estimates import Difference

__all__ = ["Number", "forms", "of", "plain", "setting", "span"]


@dataclass(frozen=True)
class Number:
    """``text`` is what stands on a page; ``low`` and ``high`` are the ends of an interval or a span."""

    value: float
    text: str
    source: str
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The number as docs/numbers.json has it."""
        found = {"value": self.value, "low": self.low, "high": self.high}
        kept = {key: float(f"{x:.6g}") for key, x in found.items() if x is not None}
        return {**kept, "text": self.text, "from": self.source}


def of(
    found: Difference, source: str, unit: str = "%", digits: int = 1, *, sign: bool = True
) -> Number:
    """A mean over seeds, as ``−0.3% ± 0.9 (n = 3)``, or ``+0.5% (one seed)``."""
    mark = ("−" if round(found.value, digits) < 0 else "+") if sign else ""
    text = f"{mark}{abs(found.value):.{digits}f}{unit}"
    half = found.interval
    if half is None:
        return Number(found.value, f"{text} (one seed)", source)
    text += f" ± {half:.{digits}f} (n = {found.pairs})"
    return Number(found.value, text, source, found.value - half, found.value + half)


def plain(value: float, source: str, unit: str = "", digits: int = 1) -> Number:
    """A single number, as ``1.9×`` or ``26,624 KiB``; without digits a large one has commas."""
    text = f"{value:,.{digits}f}{unit}".replace("-", "−")
    return Number(value, text, source)


def span(values: Iterable[float], source: str, unit: str = "", digits: int = 1) -> Number:
    """The smallest and the largest of some numbers, as ``3.6 to 4.1×``; its value is the largest."""
    found = sorted(values)
    ends = list(dict.fromkeys(f"{x:.{digits}f}" for x in (found[0], found[-1])))
    return Number(found[-1], " to ".join(ends) + unit, source, found[0], found[-1])


def setting(value: float, source: str) -> Number:
    """A setting such as a learning rate, with the digits that it was given with."""
    return Number(value, f"{value:g}", source)


def forms(text: str) -> list[str]:
    """The six ways in which a number may be written on a page, the longest first.

    >>> forms("−0.3% ± 0.9 (n = 3)")
    ['−0.3% ± 0.9 (n = 3)', '−0.3% ± 0.9', '−0.3%', '0.3%', '−0.3', '0.3']
    """
    seedless = re.sub(r" \((?:n = \d+|one seed)\)$", "", text)
    mean = seedless.partition(" ± ")[0]
    bare = re.sub(r"(?<=\d)(?:%|×| ms| MiB| s)$", "", mean)
    return [text, seedless, mean, mean.lstrip("+−"), bare, bare.lstrip("+−")]
