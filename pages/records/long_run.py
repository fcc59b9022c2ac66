"""The long run: the rows of ``long_run.py``, one pass over 73 million tokens, from its archives.

Full space is five PolarExpress steps. The figure is the test perplexity, on the half of the held-out
text that no rate was chosen on; rates were chosen on the other half, on short runs with another seed.
Rates that are better over all steps have a file of their own (:mod:`pages.records.best_rates`).
There are two tables: one of the recipe, and one of runs from before its embedding had a rate that fits.
Seeds of the first that have no run are named as missing, those of other libraries' optimizers only after
one of them was run. ``long_run.py`` makes the runs, and says which row a run belongs to: functions here
take and return the slugs of rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import cache

from differences import Change, change, percent
from long_run import PEER_TABLE, ROWS, SEEDS, SHOWN, TABLE, Row, row_of, tried_rates, whole_run
from pages import ROOT
from pages.records.costs import FULL_SPACE, memory, steps
from pages.records.runs import tokens_of_run
from polarstep_lab.records.record import Result, RunRecord, find_runs

FOLDER, SLOW_FOLDER = "results/long-run/table", "results/long-run-slow/table"
"""The archives of the first table and of the second."""
RATES, SLOW_RATES = "results/long-run-rates/table", "results/long-run-slow-rates/table"
"""The archives of the runs that chose their rates."""
BASE = "muon-polar-express"
"""Full space in the first table."""
MAP_OF_AUTO = "deflated-120"
"""The row with the map that ``auto`` takes for these matrices."""
TIMED = {
    "adamw": "AdamW, fused",
    "muon": "full space, quintic 7",
    "rand-muon": "LowRank, the paper's (h=1, q=7)",
    "muon-polar-express": FULL_SPACE,
    "muon-polar-express-rows": f"{FULL_SPACE}, rows normalized",
    "deflated": "Deflated 56, warm, one step",
    "deflated-rows": "Deflated 56, warm, one step, rows normalized",
    "deflated-56": "Deflated 56, warm, one step",
    "deflated-88": "Deflated 88, warm, one step",
    "deflated-120": "Deflated 120, warm, one step",
    "deflated-120-rows": "Deflated 120, warm, one step, rows normalized",
    "deflated-48": "Deflated 48, warm, one step",
    **{row.slug: row.title for row in PEER_TABLE},
}
"""Names in the step-cost record of rows whose map is timed there on the same 64 matrices, without the
ending of the slug that says which table. Peers run without a CUDA graph in the long run."""


@cache
def runs() -> dict[str, dict[int, RunRecord]]:
    """The runs that ended, by row and seed, in the order of the study."""
    found: dict[str, dict[int, RunRecord]] = {row.slug: {} for row in ROWS}
    for run in map(RunRecord.load, find_runs([ROOT / FOLDER, ROOT / SLOW_FOLDER])):
        if run.result and run.result.status in ("finished", "diverged"):
            found[row_of(run.identity, whole_run).slug][run.identity.seed] = run
    return {slug: seeds for slug, seeds in found.items() if seeds}


def sources(slug: str) -> list[str]:
    """The :func:`source_of` each of a row's runs."""
    return [source_of(run) for run in runs().get(slug, {}).values()]


def source_of(run: RunRecord) -> str:
    """The source of a run: a commit, or a "+" after it for changes that nothing records.

    For a run with the hash of its source, by which a later commit can be found, it is this hash.
    """
    return run.environment.get("git_tree") or run.environment["git_commit"]


def unknown(slug: str) -> list[str]:
    """The sources of a row's runs that no commit has."""
    return [source for source in sources(slug) if source.endswith("+")]


def tests(slug: str) -> dict[int, float]:
    """Test perplexity by seed."""
    return {seed: result.value for seed, result in _finished(slug)}


def validations(slug: str) -> dict[int, float]:
    """The last validation perplexity by seed."""
    found = {seed: result.validation for seed, result in _finished(slug)}
    return {seed: value for seed, value in found.items() if value is not None}


def _finished(slug: str) -> Iterator[tuple[int, Result]]:
    """Seed and result of the runs of a row that did not diverge."""
    for seed, run in runs().get(slug, {}).items():
        if run.result and run.result.status == "finished":
            yield seed, run.result


def gap(slug: str) -> Change | None:
    """Test perplexity against full space of the same table and seeds, in percent.

    ``None`` without a pair of runs.
    """
    (row,) = (row for row in ROWS if row.slug == slug)
    ours, full = tests(slug), tests(row.base)
    return percent(ours, full) if ours.keys() & full.keys() else None


@cache
def rates() -> dict[str, dict[float, float]]:
    """Validation perplexity of the short runs, by row and rate; infinite where a run diverged."""
    return tried_rates(ROOT / RATES, ROOT / SLOW_RATES)


def chosen_rate(slug: str) -> float:
    """The rate that the short runs of a row chose: that with the lowest validation perplexity."""
    tried = rates()[slug]
    return min(tried, key=lambda lr: tried[lr])


def rate(slug: str) -> float:
    """The learning rate of a row's runs, which is the same for all seeds."""
    (lr,) = {run.identity.config["optimizer"]["lr"] for run in runs()[slug].values()}
    return lr


def missing() -> dict[str, list[int]]:
    """The seeds of the table that have no run, by the slug of their row; of peers once one was run."""
    rows = SHOWN if any(row.slug in runs() for row in PEER_TABLE) else TABLE
    found = {row.slug: set(SEEDS) - set(runs().get(row.slug, ())) for row in rows}
    return {slug: sorted(seeds) for slug, seeds in found.items() if seeds}


def at_an_edge() -> list[Row]:
    """The rows of the first table whose best rate is the lowest or the highest that was tried."""
    return [
        row
        for row in SHOWN
        if (tried := rates().get(row.slug)) and chosen_rate(row.slug) in (min(tried), max(tried))
    ]


def million_tokens() -> float:
    """The tokens of a run, in millions; the same for all of them."""
    (length,) = {tokens_of_run(run) for seeds in runs().values() for run in seeds.values()}
    return length / 1e6


def seconds(run: RunRecord) -> list[tuple[float, float]]:
    """(seconds, validation perplexity) along a run, in steps of median length.

    The clock of a run also counts compiling, validations and, after an interruption, starting again.
    """
    assert run.result is not None
    step = run.result.step_ms / 1000
    return [
        (step * row.step, row.perplexity)
        for row in run.metrics
        if row.kind == "val" and row.step > 0 and row.perplexity is not None
    ]


def alone(slug: str) -> dict[int, RunRecord]:
    """The runs of a row that ended and had the GPU to themselves, by seed: those whose times count."""
    return {
        seed: run
        for seed, run in runs().get(slug, {}).items()
        if run.result and not run.environment.get("device_shared", False)
    }


def times(slug: str) -> tuple[float, float] | None:
    """Median ms of the optimizer and of a whole step, of runs that were :func:`alone`."""
    found = [run.result for run in alone(slug).values() if run.result]
    if not found:
        return None
    return (
        statistics.median(result.optimizer_ms_per_step for result in found),
        statistics.median(result.step_ms for result in found),
    )


def table(rows: Sequence[Row] = SHOWN) -> Iterator[str]:
    """Markdown: perplexity, difference to full space, times and memory of every row that was run."""
    yield "| method | rate | test perplexity | to full space | optimizer ms | whole step, ms | MiB |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for row in (row for row in rows if row.slug in runs()):
        slug = row.slug
        cells = [f"{rate(slug):g}", _level([*tests(slug).values()]), _gap(slug)]
        cells += [f"{ms:.1f}" for ms in times(slug) or ()] or ["not timed"] * 2
        cells.append(memory(steps().get((TIMED.get(slug.removesuffix("-slow"), ""), "nanoGPT"))))
        yield f"| {row.title} | {' | '.join(cells)} |"


def table_of_rates(rows: Sequence[Row] = SHOWN) -> Iterator[str]:
    """Markdown: validation perplexity of each row at each rate, the lowest of a row in bold."""
    yield "| method | rate: validation perplexity |"
    yield "|---|---|"
    for row in (row for row in rows if row.slug in rates()):
        found = rates()[row.slug]
        best = min(found.values())
        told = [
            f"**{lr:g}: {_short(value)}**" if value == best else f"{lr:g}: {_short(value)}"
            for lr, value in found.items()
        ]
        yield f"| {row.title} | {', '.join(told)} |"


def _short(value: float) -> str:
    return "diverged" if math.isinf(value) else f"{value:.1f}" if value < 1e4 else f"{value:.0e}"


def _level(values: list[float]) -> str:
    """As ``39.21 ± 0.30 (n = 3)``."""
    if not values:
        return "diverged"
    return change(values).told(2).removeprefix("+")


def _gap(slug: str) -> str:
    found = gap(slug)
    base = slug in {row.base for row in ROWS}
    return "–" if base or found is None else found.told(unit="%")
