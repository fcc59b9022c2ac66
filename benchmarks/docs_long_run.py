"""The long run: the methods on ``nanogpt-wiki``, one pass over 73 million tokens, from its archives.

Full space is five PolarExpress steps. The figure is the test perplexity, on the half of the held-out
text that no choice has seen; rates were chosen on the other half, on short runs with another seed.
Methods of the study that have no run are named as missing. ``long_run.py`` makes the runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from functools import cache

from differences import Change, change, percent
from docs_quality import ROOT, memory, steps
from long_run import METHODS
from polarstep_lab.methods import Method, all_methods, find_methods
from polarstep_lab.records.record import RunRecord, find_runs

FOLDER = "results/long-run/table"
RATES = "results/long-run-rates/table"
BASE = "muon-polar-express"
"""The method that all others are compared with."""
TIMED = {
    "adamw": "AdamW, fused",
    "muon": "full space, quintic 7",
    "rand-muon": "LowRank, the paper's (h=1, q=7)",
    "muon-polar-express": "full space, PolarExpress 5",
    "muon-polar-express-rows": "full space, PolarExpress 5, rows normalized",
    "deflated": "Deflated 48, warm, one step",
    "deflated-rows": "Deflated 48, warm, one step, rows normalized",
    "auto": "auto",
}
"""Names in the step-cost record of methods whose map is timed there on the same 64 matrices."""


@cache
def runs() -> dict[str, dict[int, RunRecord]]:
    """The runs that ended, by method and seed, in the order of ``polarstep list``."""
    found: dict[str, dict[int, RunRecord]] = {}
    for run in map(RunRecord.load, find_runs([ROOT / FOLDER])):
        if run.result and run.result.status in ("finished", "diverged"):
            found.setdefault(run.identity.method, {})[run.identity.seed] = run
    return {each.slug: found[each.name] for each in all_methods() if each.name in found}


def tests(slug: str) -> dict[int, float]:
    """Test perplexity by seed."""
    return {
        seed: run.result.value
        for seed, run in runs().get(slug, {}).items()
        if run.result and run.result.status == "finished"
    }


def gap(slug: str) -> Change | None:
    """Test perplexity against full space on the same seeds, in percent; ``None`` without a pair."""
    ours, full = tests(slug), tests(BASE)
    return percent(ours, full) if ours.keys() & full.keys() else None


@cache
def rates() -> dict[str, dict[float, float]]:
    """Validation perplexity of the short runs that chose the rates, by method and rate."""
    found: dict[str, dict[float, float]] = {}
    for run in map(RunRecord.load, find_runs([ROOT / RATES])):
        if run.result:
            value = run.result.validation if run.result.status == "finished" else None
            lr = run.identity.config["optimizer"]["lr"]
            found.setdefault(run.identity.method, {})[lr] = math.inf if value is None else value
    return {
        each.slug: dict(sorted(found[each.name].items()))
        for each in all_methods()
        if each.name in found
    }


def missing() -> list[Method]:
    """The methods of the study without a run."""
    return [method for method in find_methods(METHODS) if method.slug not in runs()]


def million_tokens() -> float:
    """The tokens of a run, in millions; the same for all of them."""
    (length,) = {
        sum(
            stage["steps"] * stage["sequences"] * stage["sequence_length"]
            for stage in run.identity.config["data"]["stages"]
        )
        for seeds in runs().values()
        for run in seeds.values()
    }
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


def times(slug: str) -> tuple[float, float] | None:
    """Median ms of the optimizer and of a whole step, of runs that had the GPU to themselves."""
    alone = [
        run.result
        for run in runs().get(slug, {}).values()
        if run.result and not run.environment.get("device_shared", False)
    ]
    if not alone:
        return None
    return (
        statistics.median(result.optimizer_ms_per_step for result in alone),
        statistics.median(result.step_ms for result in alone),
    )


def table() -> Iterator[str]:
    """Markdown: perplexity, difference to full space, times and memory of every method that was run."""
    yield "| method | rate | test perplexity | to full space | optimizer ms | whole step, ms | MiB |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    names = {method.slug: method.name for method in all_methods()}
    for slug in runs():
        cells = [_rate(slug), _level([*tests(slug).values()]), _gap(slug)]
        cells += [f"{ms:.1f}" for ms in times(slug) or ()] or ["not timed"] * 2
        cells.append(memory(steps().get((_row_of_times(slug), "nanoGPT"))))
        yield f"| {names[slug]} | {' | '.join(cells)} |"


def table_of_rates() -> Iterator[str]:
    """Markdown: validation perplexity of each method at each rate, the lowest of a method in bold."""
    yield "| method | rate: validation perplexity |"
    yield "|---|---|"
    names = {method.slug: method.name for method in all_methods()}
    for slug, found in rates().items():
        best = min(found.values())
        told = [
            f"**{lr:g}: {_short(value)}**" if value == best else f"{lr:g}: {_short(value)}"
            for lr, value in found.items()
        ]
        yield f"| {names[slug]} | {', '.join(told)} |"


def _short(value: float) -> str:
    return "diverged" if math.isinf(value) else f"{value:.1f}" if value < 1e4 else f"{value:.0e}"


def _rate(slug: str) -> str:
    """The learning rate of a method's runs, which is one for all seeds."""
    (lr,) = {run.identity.config["optimizer"]["lr"] for run in runs()[slug].values()}
    return f"{lr:g}"


def _row_of_times(slug: str) -> str:
    """The name in the step-cost record; a peer's is its title."""
    return TIMED.get(slug, next(m.name for m in all_methods() if m.slug == slug))


def _level(values: list[float]) -> str:
    """As ``39.21 ± 0.30 (n = 3)``."""
    if not values:
        return "diverged"
    return change(values).told(2).removeprefix("+")


def _gap(slug: str) -> str:
    found = gap(slug)
    return "–" if slug == BASE or found is None else found.told(unit="%")
