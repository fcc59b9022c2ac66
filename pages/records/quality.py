"""Perplexity of the runs of ``frontier.py``, and the rates that were chosen for them.

Quality is the perplexity of a GPT after 24.6 million tokens against full space (``results/frontier``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from differences import Change, percent
from frontier import CHOICE, FULL, LENGTH, SEQUENCES, STEPS, Row, best_rate, of_shape, reported
from pages import ROOT
from polarstep_lab.storage import read_lines
from which_text import check_one_text

RUNS = "results/frontier/runs.jsonl"
BASE = ("full", 0.014)
"""The map and the rate that all others are compared with, unless rates are chosen for each map.

0.014 is better for full space than 0.02 on the mean of four seeds, and better than 0.01 on one seed."""
TEST, VALIDATION, WHOLE = "test", "validation", "perplexity"
"""What a run is judged by: halves of the held-out text, and all of it. Early runs have no halves."""
RATES = (0.01, 0.014, 0.02)
"""The rates that a map's own is chosen from, on the seed that ``frontier.py`` keeps for that.

AdamW and SOAP, whose rates are of another size, have three of their own."""


@cache
def records() -> list[Row]:
    """The runs of ``frontier.py`` that have the length and the width of its tables, on one text."""
    found = of_shape(read_lines(ROOT / RUNS))
    check_one_text(found)
    return found


def perplexities(text: str = WHOLE) -> dict[tuple[str, float], dict[int, float]]:
    """Perplexity on a text, by map and rate, then by seed; without runs that do not have it."""
    found: dict[tuple[str, float], dict[int, float]] = {}
    for run in records():
        seeds = found.setdefault((run["map"], run["lr"]), {})
        assert run["seed"] not in seeds, f"recorded twice: {run}"
        if text in run:
            seeds[run["seed"]] = run[text]
    return found


def judged_by(*trained: tuple[str, float]) -> str:
    """The text that compares these maps: :data:`TEST` where every run of them has it."""
    tested, all_runs = perplexities(TEST), perplexities()
    have = all(tested.get(each, {}).keys() == all_runs[each].keys() for each in trained)
    return TEST if have else WHOLE


def _choosing_text(judged: str) -> str:
    """The text that chooses rates for runs that are judged by ``judged``."""
    return VALIDATION if judged == TEST else WHOLE


def quality(trained: tuple[str, float], base: tuple[str, float] = BASE) -> Change:
    """Perplexity against that of ``base`` on the same seeds, in percent.

    The text is that of :func:`judged_by`.
    The seed that chooses rates counts only where no other seed was run.
    """
    found = perplexities(judged_by(trained, base))
    return percent(reported(found[trained]) or found[trained], found[base])


def chosen(name: str) -> float | None:
    """The rate that one seed chose for a map; ``None`` where that seed has less than three rates."""
    tried = {run["lr"] for run in records() if (run["map"], run["seed"]) == (name, CHOICE)}
    return best_rate(records(), name) if len(tried) >= len(RATES) else None


@dataclass(frozen=True)
class AtChosenRates:
    """A map at its chosen rate against full space at its own.

    ``change`` is over the seeds that chose nothing, in percent, on the text ``text``.
    ``tried`` are the perplexities that chose the rate, by rate: of the validation half if ``text`` is
    :data:`TEST`, else of the same text.
    """

    rate: float
    tried: Mapping[float, float]
    change: Change
    text: str


def at_chosen_rates(name: str) -> AtChosenRates | None:
    """What a map does at its chosen rate; ``None`` if it or full space has none, or no other seed."""
    rate, base = chosen(name), chosen(FULL)
    if rate is None or base is None:
        return None
    choosing = [
        key for key, runs in perplexities().items() if key[0] in (name, FULL) and CHOICE in runs
    ]
    # Runs at rates that were not chosen, of other seeds, have no part in this.
    tested = perplexities(TEST)
    halved = all(CHOICE in tested[key] for key in choosing)
    text = TEST if halved and judged_by((name, rate), (FULL, base)) == TEST else WHOLE
    found = perplexities(text)
    runs, full = reported(found[name, rate]), found[FULL, base]
    if not runs.keys() & full.keys():
        return None
    seen = perplexities(_choosing_text(text))
    tried = {lr: seen[each, lr][CHOICE] for each, lr in choosing if each == name}
    return AtChosenRates(rate, tried, percent(runs, full), text)


def best_run(name: str) -> tuple[str, float] | None:
    """The map, AdamW or peer of this name, and its rate: the one that was :func:`chosen` for it.

    With a warm-up or without, whichever the seed that chooses rates has lower.
    """
    found = [run for each in (name, f"{name}+warmup") if (run := _best_rate_of(each))]
    seen = perplexities(_choosing_text(judged_by(*found)))
    on_choice = {run: seen[run].get(CHOICE, math.inf) for run in found}
    return min(found, key=lambda run: on_choice[run], default=None)


def _best_rate_of(name: str) -> tuple[str, float] | None:
    """The name and its chosen rate.

    Where none was, or no other seed has it, it is the rate with the lowest mean perplexity of all runs.
    The seeds that are reported then choose the rate too, which flatters the optimizer a little.
    """
    rate = chosen(name)
    if rate is not None and reported(perplexities()[name, rate]):
        return name, rate
    runs = [key for key in perplexities() if key[0] == name]
    if not runs:
        return None
    return min(runs, key=lambda key: statistics.fmean(perplexities()[key].values()))


def million_tokens() -> float:
    """The tokens of a run of :data:`RUNS`, in millions."""
    return STEPS * SEQUENCES * LENGTH / 1e6
