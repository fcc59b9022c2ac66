"""γ and ν of steps, certificates, rates of convergence, the fuzzer, and FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pages.numbers.number import Number, plain, span
from pages.records import lines
from polarstep_lab import flops
from polarstep_lab.flops import CIFAR10, NANOGPT, TABLE_2

ACCURACY, CERTIFICATES = "results/step-cost", "results/certificates"
RATES = "results/convergence"
MAPS = {
    "full": "full space, PolarExpress 5",
    "quintic": "full space, quintic 7",
    "low-rank-warm": "warm",
    "low-rank": "Gaussian h=0",
    "paper": "the paper's",
    "auto": "Deflated warm, a sixth, one step",
    "eighth-512": "Deflated warm, ℓ = 512, one step",
    "deflated-16-bits": "Deflated warm, one step in 16 bits",
}
"""Maps whose applied updates were measured."""


def numbers() -> Iterator[tuple[str, Number]]:
    """All numbers of this file."""
    yield from _gamma()
    yield from _tightness()
    yield from _convergence()
    yield from _fuzz()
    yield from _ledger()


def _gamma() -> Iterator[tuple[str, Number]]:
    """γ on recorded momentum, and the largest Δγ and ν over all matrices."""
    for slug, title in MAPS.items():
        found = [
            (line["config"]["matrices"], line["result"])
            for line in lines("step-cost", "h200-accuracy", "accuracy")
            if line["variant"] == title
        ]
        for matrices, row in found:
            if matrices.startswith("recorded"):
                yield f"{slug}.gamma", plain(row["gamma_median"], ACCURACY, "", 3)
                yield f"{slug}.gamma-largest", plain(row["gamma_largest"], ACCURACY, "", 3)
                yield f"{slug}.nu-on-momentum", plain(row["nu"], ACCURACY, "", 3)
            elif slug == "eighth-512" and matrices.startswith("sixteen spikes, 2048"):
                yield f"{slug}.gamma-on-spikes", plain(row["gamma_largest"], ACCURACY, "", 2)
        yield f"{slug}.nu", plain(max(row["nu"] for _, row in found), ACCURACY, "", 3)


CERTIFIED = {
    "exact": "Exact",
    "low-rank-64": "LowRank(64+8, h=1)",
    "low-rank-64-half": "LowRank(64+8, h=½)",
    "kaczmarz-64": "LowRank(64+8, Kaczmarz)",
    "low-rank-16": "LowRank(16+8, h=1)",
    "quintic-9": "NewtonSchulz(9, quintic)",
    "quintic-5": "NewtonSchulz(5, quintic)",
    "polar-express-5": "NewtonSchulz(5, polar-express)",
    "deflated-40": "Deflated(40+8, one step)",
}
"""Maps whose certificates were compared with exact values, on momentum of a small GPT."""


def _tightness() -> Iterator[tuple[str, Number]]:
    """The exact γ and ν beside the bounds of certificates."""
    found = {line["variant"]: line for line in lines("certificates", "tightness", "certificate")}
    for slug, title in CERTIFIED.items():
        for key in ("gamma_median", "bound_median", "nu_largest", "nu_bound_largest"):
            name = f"certificate.{slug}.{key.replace('_', '-')}"
            yield name, plain(found[title]["result"][key], CERTIFICATES, "", 3)


def _convergence() -> Iterator[tuple[str, Number]]:
    """In how many cases a run falls as fast as the theorems promise."""
    cases = [line["result"] for line in lines("convergence", "rates", "rate")]
    assert all(case["details"]["below_bound"] for case in cases)
    yield "rates.cases", plain(len(cases), RATES, "", 0)
    for kind in ("minimum", "held_out", "average"):
        steep = sum(case["fit"][kind]["low"] <= case["predicted"] for case in cases)
        yield f"rates.{kind.replace('_', '-')}", plain(steep, RATES, "", 0)
    tuning = {row["name"]: row for row in _study("tuning")["rows"]}
    for name, slug in (("theorem", "right"), ("bounded variance", "wrong")):
        slope = tuning[name]["fit"]["average"]["slope"]
        yield f"rates.schedule-{slug}.average", plain(slope, RATES, "", 2)
    yield "rates.schedule-right.promised", plain(tuning["theorem"]["predicted"], RATES, "", 2)
    rows = {row["details"]["batch"]: row["fit"] for row in _study("batch")["rows"]}
    small, large = rows[256], rows[max(rows)]
    yield "rates.batch.threshold", plain(max(rows), RATES, "", 0)
    for slug, fit in (("small", small), ("large", large)):
        yield f"rates.batch-{slug}.slope", plain(fit["average"]["slope"], RATES, "", 2)
    times = small["average"]["values"][-1] / large["average"]["values"][-1]
    yield "rates.batch.average", plain(times, RATES, "×")


def _study(part: str) -> dict[str, Any]:
    (line,) = lines("convergence", part, "rate")
    return dict(line["result"])


def _fuzz() -> Iterator[tuple[str, Number]]:
    (line,) = lines("certificates", "fuzz", "fuzz")
    yield "fuzz.cases", plain(line["config"]["cases"], CERTIFICATES, "", 0)
    for name, count in line["result"]["tried"].items():
        yield f"fuzz.{name.replace(' ', '-')}", plain(count, CERTIFICATES, "", 0)
    yield "fuzz.violations", plain(len(line["result"]["violations"]), CERTIFICATES, "", 0)
    yield "fuzz.minutes", plain(line["result"]["seconds"] / 60, CERTIFICATES, "", 0)


def _ledger() -> Iterator[tuple[str, Number]]:
    """What the ledger of FLOPs leaves unexplained of Table 2."""
    source = "polarstep_lab.flops"
    items = {method: flops.ledger(NANOGPT, method) for method in TABLE_2["nanogpt"]}
    extra = {found["extra"] for found in items.values() if "extra" in found}
    (cost,) = extra
    yield "flops.extra-per-parameter", plain(cost / NANOGPT.muon_parameters, source, "", 0)
    for slug, randomized in (("full", False), ("randomized", True)):
        parts = [
            100 * cost / sum(found.values())
            for method, found in items.items()
            if "extra" in found and method.startswith("Rand") is randomized
        ]
        yield f"flops.extra-share.{slug}", span(parts, source, "%", 2)
    ours, theirs = flops.gflops(CIFAR10), TABLE_2["cifar10"]
    rows = [method for method in theirs if method.startswith("Rand")]
    short = [(theirs[row] - ours[row]) / theirs[row] for row in rows]
    yield "flops.shortfall.cifar10", plain(100 * max(short), source, "%", 5)
