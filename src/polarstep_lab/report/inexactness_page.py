"""What runs say about the two assumptions of the theory, in numbers: the tables beside the figures.

The noise of a gradient is that of ``noise.jsonl``, γ and ν are those of ``gamma.jsonl``. Both tables
show the worst of a run, since an assumption has to hold throughout, and when that was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarstep.theory.bounds.polar import COVERED
from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.texts import MISSING, listed, number

__all__ = [
    "GAMMA_CAPTION",
    "NOISE_CAPTION",
    "Inexactness",
    "assumptions_headline",
    "gamma_cells",
    "gamma_of",
    "noise_cells",
    "noise_points",
    "noise_unit",
    "polar_of",
]

_LIKE_INFINITY = 1000.0

Cells = tuple[list[str], list[list[str]]]
LogRow = Mapping[str, Any]

NOISE_CAPTION = (
    "ξ is the difference of a gradient from ∇f at weights held still, over all hidden matrices "
    "together. Heaviest tail: the smallest index that Hill's estimator finds along the run, with its "
    "95% interval; Gaussian: what it finds in Gaussian noise of the same size. Slowest averaging: the "
    "smallest α with which sums grow, for the longest sums that were drawn. An α clearly below 2 "
    "speaks against a variance; one above 2 does not prove that there is one."
)
GAMMA_CAPTION = (
    "γ is the alignment that a polar step gave up and ν by how much its operator norm exceeded one, "
    "from singular values, over all sampled steps and matrices. The theorems ask for γ < 1 throughout. "
    "ν, proved: what Propositions 1 (full space) and 2 (Gaussian sketch) say of exact arithmetic, so "
    "that anything more is rounding. They give γ by the singular values of each matrix alone, which "
    "records do not keep."
)


@dataclass(frozen=True)
class Inexactness:
    """γ and ν of all monitored runs of a row, over steps and matrices."""

    steps: int
    last: int
    median: float
    gamma: float
    nu: float


def gamma_of(row: Row) -> Inexactness | None:
    """What was given up along a row's monitored runs; a zero matrix has no polar factor."""
    seen = [entry for run in row.runs for entry in run.gamma if entry.get("stable_rank") != 0]
    gamma = [entry["gamma"] for entry in seen if entry.get("gamma") is not None]
    nu = [entry["nu"] for entry in seen if entry.get("nu") is not None]
    if not gamma or not nu:
        return None
    steps = {entry["step"] for entry in seen}
    return Inexactness(len(steps), max(steps), statistics.median(gamma), max(gamma), max(nu))


def gamma_cells(section: Section) -> Cells | None:
    """A line for each monitored row: which polar map, and how inexact it was."""
    watched = [(row, found) for row in section.all_rows if (found := gamma_of(row))]
    if not watched:
        return None
    header = ["Method", "Polar map", "Runs", "Sampled steps"]
    header += ["γ, median", "γ, largest", "ν, largest", "ν, proved"]
    return header, [
        [
            row.method,
            _polar_map(row),
            _runs(row),
            f"step {found.last}" if found.steps == 1 else f"{found.steps}, last {found.last}",
            _decimal(found.median),
            _decimal(found.gamma),
            _decimal(found.nu),
            _proved(row),
        ]
        for row, found in watched
    ]


def noise_cells(section: Section) -> Cells | None:
    """A line for each unit of noise of each row that measured it: one example, one batch."""
    lines = []
    for row in section.all_rows:
        run = _run_with_noise(row)
        for unit in ("example", "batch") if run else ():
            assert run
            entries = _entries(run, unit)
            if entries:
                tail, reference = _heaviest_tail(entries)
                slowest = _slowest_averaging(entries)
                lines.append(
                    [
                        row.label if run.status == "finished" else f"{row.label}, {run.status}",
                        noise_unit(run, entries[0]),
                        noise_points(run),
                        tail,
                        reference,
                        _with_interval(*slowest) if slowest else MISSING,
                    ]
                )
    header = ["Method", "Gradient of one", "Points", "Heaviest tail, α̂", "Gaussian"]
    return ([*header, "Slowest averaging, α"], lines) if lines else None


def noise_unit(run: RunRecord, entry: LogRow) -> str:
    """What a gradient was taken of: an image, a sequence, or a batch of them."""
    noun = "image" if run.identity.benchmark == "cifar10" else "sequence"
    return noun if entry["examples"] == 1 else f"batch of {entry['examples']}"


def noise_points(run: RunRecord) -> str:
    """At how many points of a run noise was measured, and of how many where it has not ended."""
    points = len({entry["step"] for entry in run.logs.get("noise", ())})
    runtime = run.identity.config.get("runtime") or {}
    planned = (runtime.get("noise") or {}).get("points")
    return str(points) if planned in (None, points) else f"{points} of {planned}"


def assumptions_headline(section: Section) -> str:
    """The worst of each, in a few sentences."""
    sentences = []
    for row in section.all_rows:
        run = _run_with_noise(row)
        entries = _entries(run, "example") or _entries(run, "batch") if run else []
        if run and entries:
            slowest = _slowest_averaging(entries)
            if slowest:
                growth, step = slowest
                sentences.append(
                    f"Along the run of {row.label}, the noise of one {noise_unit(run, entries[0])} "
                    f"averages out slowest at step {step}: its sums grow with α = "
                    f"{_with_interval(growth)}."
                )
    finished = [
        (row, found) for row in section.all_rows if row.finished and (found := gamma_of(row))
    ]
    if finished:
        gamma_row, gamma = max(finished, key=lambda pair: pair[1].gamma)
        nu_row, nu = max(finished, key=lambda pair: pair[1].nu)
        sentences.append(
            f"In the runs that finished, γ is at most {_decimal(gamma.gamma)} "
            f"({gamma_row.method}: {_polar_map(gamma_row)}) and ν at most {_decimal(nu.nu)} "
            f"({nu_row.method}: {_polar_map(nu_row)})."
        )
    lost = [row for row in section.all_rows if not row.finished]
    if lost:
        ways = listed(sorted({status for row in lost for status in row.counts}))
        sentences.append(f"What is marked {ways} is shown as far as it went.")
    return " ".join(sentences)


def _run_with_noise(row: Row) -> RunRecord | None:
    return next((run for run in row.runs if run.logs.get("noise")), None)


def _entries(run: RunRecord, unit: str) -> list[LogRow]:
    return [
        entry
        for entry in run.logs.get("noise", ())
        if entry["unit"] == unit and entry["parameter"] == "hidden"
    ]


def _heaviest_tail(entries: Sequence[LogRow]) -> tuple[str, str]:
    """The smallest of Hill's indices, and what the estimator says of Gaussian noise there."""
    measured = [entry for entry in entries if entry.get("tail")]
    if not measured:
        return MISSING, MISSING
    worst = min(measured, key=lambda entry: _or_infinity(entry["tail"]["alpha"]))
    gaussian = worst["tail"].get("gaussian")
    ends = [*dict.fromkeys(_index(gaussian[i]) for i in (0, -1))] if gaussian else [MISSING]
    reference = " to ".join(ends)
    return _with_interval(worst["tail"], worst["step"]), reference


def _slowest_averaging(entries: Sequence[LogRow]) -> tuple[LogRow, int] | None:
    """The smallest α of sums as long as any that were drawn, and the step it was found at."""
    longest = max((g["examples"] for e in entries for g in e.get("growth") or ()), default=None)
    found = [
        (growth, entry["step"])
        for entry in entries
        for growth in entry.get("growth") or ()
        if growth["examples"] == longest
    ]
    return min(found, key=lambda pair: _or_infinity(pair[0]["alpha"])) if found else None


def _with_interval(entry: LogRow, step: int | None = None) -> str:
    low, high = _index(entry["low"]), _index(entry["high"])
    text = f"{_index(entry['alpha'])} ({low} to {high})"
    return text if step is None else f"{text} at step {step}"


def _index(alpha: float | None) -> str:
    """A tail index; ``None`` is how a record writes infinity, and large ones mean the same.

    >>> _index(1.194), _index(61.7), _index(None), _index(1.3e6)
    ('1.19', '61.7', '∞', '∞')
    """
    return "∞" if _or_infinity(alpha) > _LIKE_INFINITY else number(alpha, 3)


def _or_infinity(alpha: float | None) -> float:
    return math.inf if alpha is None else alpha


def _decimal(value: float) -> str:
    """Four decimals: less is rounding.

    >>> _decimal(0.02761), _decimal(-4e-5), _decimal(1998.4756)
    ('0.0276', '0.0000', '1998')
    """
    return (
        f"{value:.4f}".replace("-0.0000", "0.0000").replace("-", "−")
        if value < 10
        else number(value)
    )


def _runs(row: Row) -> str:
    """How many runs, and how they ended where they did not finish."""
    counts = row.counts
    if counts.keys() <= {"finished"}:
        return str(len(row.runs))
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _polar_map(row: Row) -> str:
    """Polynomial, steps and rank by the config; the label where it says nothing of them."""
    polar = polar_of(row)
    if not polar.get("solver"):
        return row.label
    words = [str(polar["solver"])]
    words += [f"{polar['steps']} steps"] if polar.get("steps") else []
    words += [f"rank {polar['rank']}"] if polar.get("rank") else []
    words += (
        [str(polar["sketch"])] if polar.get("rank") and polar.get("sketch") != "gaussian" else []
    )
    return ", ".join(words)


def _proved(row: Row) -> str:
    """ν by Proposition 1, or by Proposition 2 for a Gaussian sketch."""
    polar = polar_of(row)
    covered = not polar.get("rank") or polar.get("sketch") == "gaussian"
    return "0" if covered and polar.get("solver") in COVERED else MISSING


def polar_of(row: Row) -> Mapping[str, Any]:
    """What the config of a row says of its polar map."""
    optimizer = row.config.get("optimizer")
    polar = optimizer.get("polar") if isinstance(optimizer, Mapping) else None
    return polar if isinstance(polar, Mapping) else {}
