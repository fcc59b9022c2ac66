"""Accuracy on CIFAR-10."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

import polarstep as ps
from differences import Change, paired
from pages import ROOT
from pages.claims.words import claim, span
from pages.records.runs import FULL, SKETCHED, accuracy, runs, values
from polarstep_lab.methods import all_methods
from polarstep_lab.models.convnet import ConvNet, ConvNetConfig
from polarstep_lab.paper import ABLATIONS, TABLE_2
from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.grouping import sections_of
from polarstep_lab.report.runs import collect_runs


@claim
def size_of_an_archive() -> str:
    """How large the records of Table 2 on CIFAR-10 are, packed into one file."""
    folder = "results/cifar10/table2"
    nbytes = (ROOT / folder / "records.jsonl").stat().st_size
    return f"{len(runs(folder))} runs are {nbytes / 1e6:.1f} MB"


@claim
def cifar_agreement() -> str:
    """How many rows of Table 2 agree with the paper's on CIFAR-10."""
    agreeing, seeds = 0, set()
    rows = TABLE_2["cifar10"].rows
    for method, published in rows.items():
        found = [*values("results/cifar10/table2", "cifar10", method).values()]
        seeds.add(len(found))
        spread = math.hypot(
            statistics.stdev(found) / math.sqrt(len(found)),
            published.std / math.sqrt(published.seeds),
        )
        agreeing += abs(statistics.fmean(found) - published.mean) <= 2 * spread
    return (
        f"{agreeing} of {len(rows)} methods are within two standard errors of the paper's figure, on "
        f"{min(seeds)} seeds each"
    )


@claim
def cifar_ablations() -> str:
    """How many values of the ablations differ from the figures in the authors' repository."""
    others, bases = _ablated(base=False), _ablated(base=True)
    return (
        f"{sum(others)} of {len(others)} values beside the recipe's own differ from "
        f"the authors' figures by more than the 95% intervals, and so does the recipe's own on "
        f"{sum(bases)} of {len(bases)} axes, where their figure changes from axis to axis"
    )


def cifar_values_that_differ() -> tuple[int, int]:
    """Of how many ablated values, the recipe's own apart, how many differ from the authors'."""
    others = _ablated(base=False)
    return sum(others), len(others)


@cache
def _ablated(base: bool) -> list[bool]:
    """Whether each value of the ablations differs: those of the recipe itself, or all others."""
    (section,), _ = sections_of(collect_runs([ROOT / "results/cifar10"]))
    return [
        row.metric is not None and row.metric.minus(published.estimate).clear
        for ablation in section.ablations
        if ablation.axis in ABLATIONS
        for row in ablation.row_names
        if (published := ablation.published(row)) and (row is ablation.base) is base
    ]


@claim
def cifar_sketches() -> str:
    """What the three sketches cost on CIFAR-10."""
    full = accuracy(FULL)
    rows = {
        "a basis for four steps": ("sketch", "kept-fast"),
        "the warm sketch": ("sketch", "warm"),
        "the paper's": (None, None),
    }
    told = []
    for words, point in rows.items():
        lost = paired(full, accuracy(SKETCHED, *point))
        told.append(f"{lost.value:.2f} ± {lost.interval:.2f} ({words})")
    return f"{', '.join(told)} points below full space on {len(full)} seeds"


FRONTIER = "results/cifar10-frontier"
EARLIER = "results/cifar10-deflated"
"""Three of the methods on the same seeds, at an earlier commit."""
DEFAULT = "Muon (PolarExpress 5)"
SCALED = ", rest scaled"
GOAL = 0.05
"""Points of accuracy that a cheap map may lose on CIFAR-10."""


def cifar_frontier_rows(folder: Path) -> Iterator[tuple[str, float, Change | None]]:
    """Method, mean accuracy, and the difference to full space in points, of each row of a table."""
    place = str(folder.relative_to(ROOT))
    full = values(place, "cifar10", DEFAULT)
    made = {(run.identity.method, _rest(run)) for run in runs(place)}
    for method in all_methods():
        for rest in sorted(rest for name, rest in made if name == method.name):
            found = values(place, "cifar10", method.name, rest=rest)
            points = {seed: 100 * value for seed, value in found.items()}
            lost = paired(points, {seed: 100 * value for seed, value in full.items()})
            title = method.name + (SCALED if rest == "scaled" else "")
            mean = statistics.fmean(found.values())
            yield title, mean, None if method.name == DEFAULT else lost


def _rest(run: RunRecord) -> str:
    """What becomes of the rest in a run: the same method was run with a scaled one too."""
    return str(run.identity.config["optimizer"]["polar"]["rest"])


def _to_full_space(folder: str, method: str) -> Change:
    """The difference of a method to full space, in points."""
    rows = {name: found for name, _, found in cifar_frontier_rows(ROOT / folder)}
    found = rows[method]
    assert found is not None, f"{method} is full space"
    return found


@claim
def cifar_maps() -> str:
    """What maps that sketch and normalized rows cost on CIFAR-10."""
    told = []
    for name, words in (
        ("Rand Muon (Nes.-Gaussian)", "the paper's sketch"),
        ("Rand Muon (Nes.-Gaussian, normalized rows)", "the paper's sketch with normalized rows"),
        ("Muon (PolarExpress 5, normalized rows)", "full space with normalized rows"),
        (f"Deflated Muon{SCALED}", "the deflated map with a scaled rest"),
        (f"Deflated Muon (normalized rows){SCALED}", "the same with normalized rows"),
    ):
        found = _to_full_space(FRONTIER, name)
        told.append(f"{found.text(2)} ({words})")
        n = found.pairs
    return (
        f"{', '.join(told)} points of test accuracy against five PolarExpress steps in full space "
        f"(n = {n})"
    )


@claim
def rows_on_cifar() -> str:
    """What normalized rows gain on CIFAR-10."""
    found = _to_full_space(FRONTIER, "Muon (PolarExpress 5, normalized rows)")
    return f"{found.told(2)} points of test accuracy against full space without them"


@claim
def cifar_goal() -> str:
    """Whether twenty seeds show that the deflated map is within 0.05 points of full space."""
    found, control = (_to_full_space(FRONTIER, name) for name in ("Deflated Muon", "Auto Muon"))
    reached = "is met" if found.ends[0] >= -GOAL else "is met by the mean and not by the interval"
    if found.value < -GOAL:
        reached = "is missed"
    return (
        f"{reached}: the interval of the deflated map reaches from {span(found, 2)} "
        f"points of test accuracy against full space (n = {found.pairs}). Two rows of the same map, "
        f"full space and `auto`, differ by {control.told(2)} points"
    )


@claim
def cifar_again() -> str:
    """The deflated map on the same seeds at an earlier commit."""
    told = [
        f"{_to_full_space(EARLIER, name).text(2)} ({words})"
        for name, words in (
            ("Deflated Muon", "as it is"),
            ("Deflated Muon (normalized rows)", "with normalized rows"),
        )
    ]
    n = _to_full_space(EARLIER, "Deflated Muon").pairs
    return f"{' and '.join(told)} points of test accuracy against full space (n = {n})"


@claim
def cifar_routes() -> str:
    """Which map the library runs on the filters of the CIFAR-10 network on a GPU, and why."""
    gpu, deflated = torch.device("cuda"), ps.Deflated(ps.LowRank(48, 8), ps.NewtonSchulz(1, "flat"))
    with torch.device("meta"):
        shapes = ConvNet(ConvNetConfig()).matrix_shapes()
    reasons: dict[str, list[str]] = {}
    fewest: list[int] = []
    for m, n in dict.fromkeys(shapes):
        reason = deflated.full_space_reason(m, n, gpu)
        assert reason is not None, (m, n)
        reasons.setdefault(reason, []).append(f"{m}×{n}")
        assert isinstance(ps.Auto().on(m, n, gpu), ps.NewtonSchulz), (m, n)
        found = re.search(r"auto: a sketch pays from (\d+) rows on", ps.Auto().describe(m, n, gpu))
        assert found is not None, (m, n)
        fewest.append(int(found[1]))
    told = [f"{' and '.join(found)} ({reason})" for reason, found in reasons.items()]
    return (
        f"full space on all {len(shapes)} filters. `ps.Deflated`: {', '.join(told)}. `auto`: a "
        f"sketch pays from {min(fewest)} or {max(fewest)} rows on, by the ratio of the sides"
    )
