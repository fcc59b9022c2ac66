"""The best rate of a row over all steps of the long run.

Short runs, a tenth as long, chose the rates of the long run's table. Some rows were then run to the end
at other rates too. Of all rates at which a row has a whole run with :data:`SEED`, its best is the one
with the lowest validation perplexity of that run. Test text, which nothing is chosen on, is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from differences import Change, change, percent
from long_run import SHOWN, Row, row_of, whole_run
from pages import ROOT
from pages.records import long_run as study
from polarstep_lab.records.record import Result, RunRecord, find_runs

OTHER_RATES = "results/long-run-other-rates/table"
"""The archive of whole runs at rates that short runs did not choose."""
SEED = 1
"""The seed that every rate was run with."""


@cache
def finished() -> dict[str, dict[float, dict[int, RunRecord]]]:
    """The whole runs by row, rate and seed, without those that diverged."""
    recorded = [run for seeds in study.runs().values() for run in seeds.values()]
    recorded += map(RunRecord.load, find_runs([ROOT / OTHER_RATES]))
    found: dict[str, dict[float, dict[int, RunRecord]]] = {}
    for run in recorded:
        slug, lr = row_of(run.identity, whole_run).slug, run.identity.config["optimizer"]["lr"]
        assert run.result is not None, f"a run of {slug} has not ended"
        if run.result.status == "finished":
            found.setdefault(slug, {}).setdefault(lr, {})[run.identity.seed] = run
    return found


def _results(slug: str, lr: float) -> dict[int, Result]:
    """How a row's whole runs at a rate ended, by seed."""
    return {seed: run.result for seed, run in finished()[slug][lr].items() if run.result}


def tests(slug: str, lr: float) -> dict[int, float]:
    """Test perplexity of a row's whole runs at a rate, by seed."""
    return {seed: result.value for seed, result in _results(slug, lr).items()}


def validations(slug: str, lr: float) -> dict[int, float]:
    """The last validation perplexity of the same runs."""
    found = {seed: result.validation for seed, result in _results(slug, lr).items()}
    return {seed: value for seed, value in found.items() if value is not None}


def sources(slug: str) -> list[str]:
    """The sources of the runs that tables show of a row: those at its best rate, if it has several."""
    if not has_several(slug):
        return study.sources(slug)
    return [study.source_of(run) for run in finished()[slug][best(slug)].values()]


def tried(slug: str) -> dict[float, float]:
    """Validation perplexity with :data:`SEED` at each rate of a row's whole runs."""
    found = {lr: validations(slug, lr).get(SEED) for lr in sorted(finished()[slug])}
    return {lr: value for lr, value in found.items() if value is not None}


def best(slug: str) -> float:
    """The rate of a row at which its whole run ends lowest in validation perplexity."""
    rates = tried(slug)
    return min(rates, key=lambda lr: rates[lr])


def rows() -> list[Row]:
    """The rows that were run to the end at more than one rate."""
    return [row for row in SHOWN if has_several(row.slug)]


def has_several(slug: str) -> bool:
    """Whether a row was run to the end at more than one rate."""
    return slug in finished() and len(tried(slug)) > 1


def at_an_end() -> list[Row]:
    """Those whose best rate is the lowest or the highest that was run to the end."""
    return [row for row in rows() if best(row.slug) in (min(tried(row.slug)), max(tried(row.slug)))]


def gap(slug: str) -> Change:
    """Test perplexity against full space on the same seeds, in percent, each at its best rate."""
    return percent(tests(slug, best(slug)), tests(study.BASE, best(study.BASE)))


def gap_on_validation(slug: str) -> Change:
    """The same as :func:`gap` by validation text."""
    return percent(validations(slug, best(slug)), validations(study.BASE, best(study.BASE)))


def to_best(slug: str) -> Change:
    """Test perplexity of a row of one rate against full space at its best rate, on the same seeds."""
    return percent(study.tests(slug), tests(study.BASE, best(study.BASE)))


def told_gap(slug: str) -> str | None:
    """The gap of a row to full space, for a cell of a table; ``None`` without a pair of runs.

    It is :func:`gap` for :func:`rows`. Others have one rate, that of the long run's table, where full
    space is not at its best. They are told against it at that rate and at its best.
    """
    if has_several(slug):
        return gap(slug).told(unit="%")
    found = study.gap(slug)
    if found is None:
        return None
    lr, base = study.rate(slug), study.rate(study.BASE)
    where = f"both at {lr:g}" if lr == base else f"at {lr:g} against {base:g}"
    told = f"{found.told(unit='%')}, {where}"
    if best(study.BASE) != base and (away := to_best(slug)).pairs:
        told += f"; {away.told(unit='%')} to full space at {best(study.BASE):g}"
    return told


def table() -> Iterator[str]:
    """Markdown: each row of :func:`rows` at its best rate, with the rates it was chosen from."""
    yield "| method | rate: validation perplexity, one seed | test perplexity | to full space |"
    yield "|---|---|--:|--:|"
    for row in rows():
        chosen = best(row.slug)
        rates = ", ".join(
            f"**{lr:g}: {value:.2f}**" if lr == chosen else f"{lr:g}: {value:.2f}"
            for lr, value in tried(row.slug).items()
        )
        level = change(tests(row.slug, chosen).values()).told(2).removeprefix("+")
        away = "–" if row.slug == study.BASE else gap(row.slug).told(unit="%")
        yield f"| {row.title} | {rates} | {level} | {away} |"
