"""Cost and quality of polar maps from their records: what tables, claims and figures share.

Cost is the time of a whole ``step()`` (``results/step-cost``), quality the perplexity of a GPT after
24.6 million tokens against full space (``results/frontier``).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from differences import Change, percent
from frontier import reported
from pages import ROOT

RUNS = "results/frontier/runs.jsonl"
GAPS = "results/scaling/runs.jsonl"
TIMES = "results/step-cost/h200-peers.json"
LATER = "results/step-cost/h200-later.json"
"""Rows of ours that were timed again after their kernels had changed; they replace those of TIMES."""
HEADS = "results/step-cost/h200-heads.json"
"""Heads of several widths, and maps that had not been timed; they replace those of TIMES, too."""
BETWEEN = "results/step-cost/h200-between.json"
"""A few maps on matrices of 384 to 4096 rows, for what the other two lack."""
ACCURACY = "results/step-cost/h200-accuracy.txt"
"""γ and ν of applied updates."""
BASE = ("full", 0.014)
"""The map and the rate that all others are compared with, unless rates are chosen for each map.

0.014 is better for full space than 0.02 on the mean of four seeds, and better than 0.01 on one seed."""
HELD = {"nanoGPT": 768, "8B layer": 4096}
"""The short side of the matrices of a workload."""
SIXTH, EIGHTH = "Deflated, ℓ = a sixth", "Deflated, ℓ = an eighth"
TWELFTH = "Deflated, ℓ = a twelfth"
"""Heads of three widths. ``auto`` takes ℓ = a sixth of the short side, from 2048 rows on an eighth."""
SCALED_SIXTH = "Deflated, ℓ = a sixth, rest scaled"
AUTO = {"nanoGPT": SIXTH, "8B layer": EIGHTH}
"""What ``auto`` takes on a workload."""
TIMED_AS = {
    (SCALED_SIXTH, "nanoGPT"): "Deflated 120, warm, rest scaled",
    (SIXTH, "nanoGPT"): "Deflated 120, warm, one step",
    (EIGHTH, "nanoGPT"): "Deflated 88, warm, one step",
    (TWELFTH, "nanoGPT"): "Deflated 56, warm, one step",
}
"""Their rows in the records, by workload."""
TIMED_ON_ARM = {
    (SIXTH, "nanoGPT"): "auto",
    (TWELFTH, "nanoGPT"): "Deflated 48, warm, one step",
}
"""The same for the record of an ARM CPU, which has rank 48 in place of 56."""


TEST, VALIDATION, WHOLE = "test", "validation", "perplexity"
"""What a run is judged by: halves of the held-out text, and all of it. Early runs have no halves."""
RATES = (0.01, 0.014, 0.02)
"""The rates that a map's own is chosen from, on the seed that ``frontier.py`` keeps for that.

AdamW and SOAP, whose rates are of another size, have three of their own."""


@dataclass(frozen=True)
class Weighed:
    """A map whose cost and quality stand side by side.

    ``timed`` is its name in the times and ``trained`` its name and rate in the runs; ``None`` where the
    record does not have it. ``columns`` are ℓ on the workloads of :data:`HELD`, as far as it was timed
    there; ``None`` in full space. ``long`` is its row in the long run.
    """

    title: str
    timed: str | None
    trained: tuple[str, float] | None
    columns: tuple[int, ...] | None = None
    long: str | None = None

    @property
    def name(self) -> str:
        """The title, with ℓ and its part of the width of the two workloads."""
        if self.columns is None:
            return self.title
        parts = [
            f"{ell} ({ell / d:.0%})" for ell, d in zip(self.columns, HELD.values(), strict=False)
        ]
        return f"{self.title}, ℓ = {' and '.join(parts)}"


def weighed() -> tuple[Weighed, ...]:
    """The maps of the tables and figures, best first."""
    from step_workloads import WORKLOADS

    wide = tuple(WORKLOADS[load].width for load in HELD)
    full = "full space, PolarExpress 5"
    sixth, eighth, twelfth = (
        f"`Deflated`, warm, {part}" for part in ("a sixth", "an eighth", "a twelfth")
    )
    return (
        Weighed("AdamW, fused", "AdamW, fused", best_run("adamw"), long="adamw"),
        Weighed("full space", full, BASE, long="muon-polar-express"),
        Weighed(
            "full space, `NormalizedRows`",
            with_rows(full),
            ("full+rows", 0.014),
            long="muon-polar-express-rows",
        ),
        Weighed("full space, `fan-ratio`", full, ("full+fans", 0.02)),
        Weighed(sixth, SIXTH, ("lift-120-warm", 0.014), (128, 688), "deflated-120"),
        Weighed(
            f"{sixth}, `NormalizedRows`",
            with_rows(SIXTH),
            ("lift-120-warm+rows", 0.014),
            (128, 688),
            "deflated-120-rows",
        ),
        Weighed(
            f"{sixth}, `NormalizedRows`, `fan-ratio`",
            with_rows(SIXTH),
            ("lift-120-warm+rows+fans", 0.02),
            (128, 688),
        ),
        Weighed(eighth, EIGHTH, ("lift-88-warm", 0.014), (96, 512), "deflated-88"),
        Weighed(twelfth, TWELFTH, ("lift-56-warm", 0.014), (64, 352), "deflated"),
        Weighed(
            f"{twelfth}, `NormalizedRows`",
            with_rows(TWELFTH),
            ("lift-56-warm+rows", 0.014),
            (64, 352),
            "deflated-rows",
        ),
        Weighed(
            "`Deflated`, h = 1, rest scaled",
            "Deflated, Gaussian h=1, rest scaled",
            ("scaled-200", 0.014),
            wide,
        ),
        Weighed(
            "`Deflated`, h = 1, rest scaled, `NormalizedRows`",
            with_rows("Deflated, Gaussian h=1, rest scaled"),
            ("scaled-200+rows", 0.02),
            wide,
        ),
        Weighed(
            f"{sixth}, rest scaled", timed_as(SCALED_SIXTH), ("scaled-120-warm", 0.014), (128,)
        ),
        Weighed(
            f"{sixth}, rest scaled, `NormalizedRows`",
            with_rows(SCALED_SIXTH),
            ("scaled-120-warm+rows", 0.014),
            (128,),
        ),
        Weighed("`LowRank`, h = 0", "LowRank, Gaussian h=0", ("low-rank", 0.014), wide),
        Weighed(
            "`LowRank`, h = 0, `NormalizedRows`",
            with_rows("LowRank, Gaussian h=0"),
            ("low-rank+rows", 0.02),
            wide,
        ),
        Weighed("… basis kept 4 steps", "LowRank, Gaussian h=0, kept 4 steps", None, wide),
        Weighed("`LowRank`, warm", "LowRank, warm", None, wide),
        Weighed(
            "`LowRank`, the paper's",
            "LowRank, the paper's (h=1, q=7)",
            ("paper", 0.02),
            wide,
            "rand-muon",
        ),
        Weighed(
            "`LowRank`, the paper's, `NormalizedRows`",
            with_rows("LowRank, the paper's (h=1, q=7)"),
            ("paper+rows", 0.014),
            wide,
        ),
    )


def columns_of_auto() -> tuple[int, ...]:
    """ℓ that ``auto`` takes on a GPU for square matrices of the widths of :data:`HELD`."""
    import torch

    import polarstep as ps

    found = []
    for d in HELD.values():
        polar = ps.Auto().on(d, d, torch.device("cuda"))
        assert isinstance(polar, ps.Deflated), d
        found.append(polar.head.width)
    return tuple(found)


def timed_as(name: str) -> str | None:
    """The name of a map in the times; ``None`` where it was not timed."""
    return name if any(name == each for each, _ in steps()) else None


def with_rows(timed: str) -> str | None:
    """The name of a map with normalized rows in the times; ``None`` where it was not timed."""
    return timed_as(f"{timed}, rows normalized")


@cache
def records() -> list[dict[str, Any]]:
    """All runs of ``frontier.py``."""
    return [json.loads(line) for line in (ROOT / RUNS).read_text(encoding="utf-8").splitlines()]


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
    from frontier import CHOICE, best_rate

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
    from frontier import CHOICE, FULL

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
    from frontier import CHOICE

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


def peers() -> tuple[Weighed, ...]:
    """The optimizers of other libraries that were timed or trained, each at :func:`best_run`.

    Of a peer that was timed in several forms, with a CUDA graph of its own or without, the fastest on
    nanoGPT's matrices counts.
    """
    from polarstep_lab.peers import PEERS

    found = []
    for peer in PEERS.values():
        forms = {
            name: row["ms"]
            for (name, load), row in steps().items()
            if load == "nanoGPT" and (name == peer.title or name.startswith(f"{peer.title}, CUDA"))
        }
        timed = min(forms, key=lambda name: forms[name]) if forms else None
        trained = best_run(f"peer:{peer.name}")
        if timed or trained:
            found.append(Weighed(peer.title, timed, trained, long=peer.name))
    return tuple(found)


@cache
def steps(record: str = TIMES) -> dict[tuple[str, str], dict[str, Any]]:
    """What ``step_cost.py`` measured, by optimizer and workload.

    Those of :data:`TIMES` are with the rows of :data:`LATER` and :data:`HEADS` in their places, and with
    those of :data:`BETWEEN` where all have none. A ratio is to AdamW in the run of its row.
    """
    records = (BETWEEN, TIMES, HEADS, LATER) if record == TIMES else (record,)
    rows = [json.loads((ROOT / each).read_text(encoding="utf-8"))["steps"] for each in records]
    found = {(row["optimizer"], row["workload"]): row for part in rows for row in part}
    timed_as = TIMED_ON_ARM if record.endswith("cpu-arm.json") else TIMED_AS
    for (name, load), timed in timed_as.items():
        for suffix in ("", ", rows normalized"):
            if (timed + suffix, load) in found:
                found[name + suffix, load] = found[timed + suffix, load]
    return found


class Applied(NamedTuple):
    """γ and ν of applied updates: a line of what ``step_accuracy.py`` prints, for a map and matrices.

    ``median`` and ``largest`` are of γ; ``delta`` is the largest Δγ.
    """

    matrices: str
    name: str
    median: float
    largest: float
    delta: float
    nu: float


def applied(record: Path = ROOT / ACCURACY) -> list[Applied]:
    """What ``step_accuracy.py`` printed, line by line."""
    line = r"^  (\S.*?)\s{2,}(\S.*?)\s+γ\s+(\S+)\s+(\S+)\s+Δγ\s+(\S+)\s+ν (\S+)$"
    found = re.findall(line, record.read_text(encoding="utf-8"), re.M)
    return [Applied(matrices, name, *map(float, rest)) for matrices, name, *rest in found]


def memory(row: Mapping[str, Any] | None) -> str:
    """MiB of an optimizer's state, and what a step takes besides, from a row of :func:`steps`."""
    return f"{row['state_mib']:.0f} + {row['extra_mib']:.0f}" if row else "not measured"


def million_tokens() -> float:
    """The tokens of a run of :data:`RUNS`, in millions."""
    from frontier import LENGTH, SEQUENCES, STEPS

    return STEPS * SEQUENCES * LENGTH / 1e6
