"""How numbers, differences and counts are written, in every table and sentence.

They are rounded the way the paper's Table 2 is.
"""

from __future__ import annotations

from collections.abc import Sequence

from polarstep_lab.report.estimates import Difference, Estimate
from polarstep_lab.report.rows import Row

__all__ = [
    "MISSING",
    "OFF",
    "difference_text",
    "listed",
    "metric_text",
    "number",
    "paper_text",
    "plural",
    "seeds_text",
    "share_text",
    "size_text",
]

MISSING = "—"
OFF = "‡"
"""The mark of a published figure that ours is more than two standard errors away from."""


def number(value: float | None, digits: int = 4) -> str:
    """``value`` with about ``digits`` significant digits and no exponent where it can be read.

    >>> number(2135.7551), number(0.0118), number(3.0), number(None)
    ('2136', '0.01180', '3.000', '—')
    """
    if value is None or value != value:
        return MISSING
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    decimals = 0
    while decimals < digits + 3 and abs(value) * 10**decimals < 10 ** (digits - 1):
        decimals += 1
    return f"{value:.{decimals if value else digits - 1}f}"


def metric_text(estimate: Estimate | None, decimals: int) -> str:
    """Mean ± standard deviation, or the mean alone for a single seed."""
    if estimate is None:
        return MISSING
    mean = f"{estimate.mean:.{decimals}f}"
    return mean if estimate.std is None else f"{mean} ± {estimate.std:.{decimals}f}"


def difference_text(difference: Difference | None, decimals: int) -> str:
    """A signed difference ± its standard error; a difference that rounds to zero has no sign.

    >>> difference_text(Difference(-0.00123, 0.0004), 4), difference_text(Difference(-1e-5, None), 4)
    ('−0.0012 ± 0.0004', '0.0000')
    """
    if difference is None:
        return MISSING
    size = f"{abs(difference.value):.{decimals}f}"
    sign = "" if float(size) == 0 else "−" if difference.value < 0 else "+"
    text = f"{sign}{size}"
    return text if difference.error is None else f"{text} ± {difference.error:.{decimals}f}"


def size_text(difference: Difference, decimals: int) -> str:
    """The size of a difference ± its standard error, and its direction.

    >>> size_text(Difference(-0.00123, 0.0004), 4)
    '0.0012 ± 0.0004 lower'
    """
    size = difference_text(Difference(abs(difference.value), difference.error), decimals)
    return f"{size.removeprefix('+')} {'lower' if difference.value < 0 else 'higher'}"


def share_text(share: float | None) -> str:
    """A share in per cent.

    >>> share_text(0.1175), share_text(None)
    ('11.75%', '—')
    """
    return MISSING if share is None else f"{share:.2%}"


def seeds_text(row: Row) -> str:
    """How many seeds the metric rests on, and how many runs of the row are not in it."""
    counts = row.counts
    finished = counts.pop("finished", 0)
    if not counts:
        return str(finished)
    others = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{finished} of {len(row.runs)} ({others})"


def paper_text(row: Row) -> str:
    """The published figure for a row, with a mark where ours is clearly another."""
    if not row.paper:
        return MISSING
    mark = OFF if row.differs else ""
    return f"{row.paper.mean:.4f} ± {row.paper.std:.4f}{mark}"


def listed(names: Sequence[str]) -> str:
    """``A``, ``A and B``, ``A, B and C``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def plural(count: int, noun: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{count} {noun}{'s' * (count != 1)}"
