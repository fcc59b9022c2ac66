"""Paired differences over seeds, as the benchmarks and the pages write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polarstep_lab.estimates import Difference, Estimate

__all__ = ["Change", "change", "paired", "percent"]


@dataclass(frozen=True)
class Change(Difference):
    """A mean over seeds as the pages write it; ``pairs`` is the number of seeds."""

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the 95% t-interval; there is none for one seed."""
        assert self.interval is not None
        return self.value - self.interval, self.value + self.interval

    def told(self, digits: int = 1, unit: str = "") -> str:
        """As ``+0.8% ± 0.6 (n = 4)``, or ``+0.5% (one seed)``, with spaces that do not break."""
        sign = "−" if round(self.value, digits) < 0 else "+"
        mean = f"{sign}{abs(self.value):.{digits}f}{unit}"
        if self.interval is None:
            return f"{mean} (one\N{NO-BREAK SPACE}seed)"
        interval = f"±\N{NO-BREAK SPACE}{self.interval:.{digits}f}"
        seeds = f"(n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{self.pairs})"
        return f"{mean}\N{NO-BREAK SPACE}{interval} {seeds}"


def change(values: Iterable[float]) -> Change:
    """The mean of a few numbers, with its t-interval."""
    found = Estimate.of(values)
    assert found is not None, "no values"
    return Change(**vars(found.from_zero))


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> Change:
    """The mean difference on the seeds that both have."""
    return change(values[seed] - base[seed] for seed in values.keys() & base.keys())


def percent(values: Mapping[int, float], base: Mapping[int, float]) -> Change:
    """The mean relative difference on the seeds that both have, in percent."""
    return change(100 * (values[seed] / base[seed] - 1) for seed in values.keys() & base.keys())
