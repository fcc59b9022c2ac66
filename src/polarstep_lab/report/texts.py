"""Numbers, differences and counts as every table writes them, the page's and the Markdown's.

They are rounded the way the paper's Table 2 is.
"""

from __future__ import annotations

from collections.abc import Sequence

from polarstep_lab.report.estimates import Difference, Estimate
from polarstep_lab.report.paper import Line
from polarstep_lab.report.rows import AblationSet, Row, Section

__all__ = [
    "MISSING",
    "OFF",
    "base_text",
    "decimals_of",
    "difference_text",
    "listed",
    "metric_text",
    "notes_text",
    "number",
    "paper_text",
    "seeds_text",
    "share_text",
]

MISSING = "—"
OFF = "‡"  # at a published figure that ours is clearly off


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
    """A signed difference ± its standard error; one that rounds to zero has no sign.

    >>> difference_text(Difference(-0.00123, 0.0004), 4), difference_text(Difference(-1e-5, None), 4)
    ('−0.0012 ± 0.0004', '0.0000')
    """
    if difference is None:
        return MISSING
    size = f"{abs(difference.value):.{decimals}f}"
    sign = "" if float(size) == 0 else "−" if difference.value < 0 else "+"
    text = f"{sign}{size}"
    return text if difference.error is None else f"{text} ± {difference.error:.{decimals}f}"


def share_text(share: float | None) -> str:
    """A share in per cent.

    >>> share_text(0.1175), share_text(None)
    ('11.75%', '—')
    """
    return MISSING if share is None else f"{share:.2%}"


def decimals_of(section: Section) -> int:
    """Decimals of the final metric: four for an accuracy, as in Table 2, three for a perplexity."""
    return 4 if section.benchmark == "cifar10" else 3


def seeds_text(row: Row) -> str:
    """How many seeds the metric rests on, with every run that is not in it.

    A reader must not take a mean over survivors for a mean over all.
    """
    counts = row.counts
    finished = counts.pop("finished", 0)
    if not counts:
        return str(finished)
    others = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{finished} of {len(row.runs)} ({others})"


def paper_text(row: Row) -> str:
    """The paper's figure for a row of the paper's recipe, with the digits it is printed with.

    With a mark where ours is clearly another one.
    """
    if not row.paper:
        return MISSING
    mark = OFF if row.differs else ""
    return f"{row.paper.mean:.4f} ± {row.paper.std:.4f}{mark}"


def base_text(ablation: AblationSet, row: Row, decimals: int) -> str:
    """The difference from the recipe's value; a word at that value itself."""
    return "recipe" if row is ablation.base else difference_text(ablation.difference(row), decimals)


def notes_text(line: Line) -> str:
    """The letters of what is known to differ, or that nothing is, or that nothing needs to be."""
    if line.marks:
        return ", ".join(line.marks)
    return "no reason known" if line.differs else ""


def listed(names: Sequence[str]) -> str:
    """``A``, ``A and B``, ``A, B and C``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
