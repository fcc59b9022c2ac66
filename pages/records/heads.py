"""How near deflated maps with heads of three widths come to full space, in runs of two lengths."""

from __future__ import annotations

from collections.abc import Iterator

from differences import Change, percent
from frontier import reported
from pages.records import best_rates
from pages.records import long_run as study
from pages.records.quality import BASE, VALIDATION, million_tokens, perplexities, quality

HEADS = (
    ("a sixth", ("lift-120-warm", 0.014), study.MAP_OF_AUTO),
    ("an eighth", ("lift-88-warm", 0.014), "deflated-88"),
    ("a twelfth", ("lift-56-warm", 0.014), "deflated"),
)
"""A head's part of the width, its runs of the frontier, and its row in the long run."""


def within(test: Change, validation: Change, goal: float = 1.0) -> str:
    """Whether a map is so near full space, in percent: with its interval, by its mean, or not.

    Both texts must say so: on three seeds an interval of one of them may be short by chance.
    """
    if max(test.value, validation.value) > goal:
        return "no"
    intervals = max(test.ends[1], validation.ends[1]) <= goal
    return "with its interval" if intervals else "by its mean"


def on_validation(slug: str) -> Change:
    """A row of the long run against full space, both at the rates of its table, by validation text."""
    return percent(study.validations(slug), study.validations(study.BASE))


def rows() -> Iterator[list[str]]:
    """Each head after both lengths: rates, test, validation, and whether it is within a hundredth."""
    seen = perplexities(VALIDATION)
    for part, trained, slug in HEADS:
        short = quality(trained), percent(reported(seen[trained]), seen[BASE])
        yield _row(part, f"{million_tokens():.1f}M", f"both at {BASE[1]:g}", *short)
        if best_rates.has_several(slug):
            rates, test = "each at its best", best_rates.gap(slug)
            validation = best_rates.gap_on_validation(slug)
        else:
            found = study.gap(slug)
            assert found is not None
            rates, test = f"both at {study.rate(slug):g}", found
            validation = on_validation(slug)
        yield _row("", f"{study.million_tokens():.1f}M", rates, test, validation)


def _row(part: str, tokens: str, rates: str, test: Change, validation: Change) -> list[str]:
    told = (each.told(unit="%") for each in (test, validation))
    return [part, tokens, rates, *told, within(test, validation)]
