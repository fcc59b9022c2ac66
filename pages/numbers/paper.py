"""The paper's experiments: Table 2, its ablations, and one pass over 73 million tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from pages.numbers.number import Number, of, plain, setting
from pages.records import BySeed, Line, by_seed, change, estimate, lines, paired, percent
from polarstep_lab.estimates import Difference, Estimate
from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.paper import TABLE_2, TRAINING_TOKENS
from polarstep_lab.recipes import resolve

SLUGS = {
    "adamw": "AdamW",
    "sgd": "SGD (Nesterov)",
    "muon-polyak": "Muon (Polyak)",
    "rand-muon-polyak": "Rand Muon (Polyak)",
    "muon": "Muon (Nesterov)",
    "rand-muon": "Rand Muon (Nes.-Gaussian)",
    "rand-muon-kaczmarz": "Rand Muon (Nes.-Kaczmarz)",
}
"""The rows of Table 2."""
LONG, CIFAR, GPT_RUNS = "results/long-run", "results/cifar10", "results/gpt"


def numbers() -> Iterator[tuple[str, Number]]:
    """All numbers of this file."""
    yield from _long_run()
    yield from _pairs_of_the_paper()
    yield from _cifar10()
    yield from _cifar10_ablations()
    yield from _maps_on_cifar10()
    yield from _gpt_ablations()
    yield from _text_and_model()


# --- one pass over 73 million tokens ------------------------------------------------------------

FULL = "muon-polar-express"
ROWS = {
    "full": FULL,
    "full-rows": "muon-polar-express-rows",
    "auto": "deflated-120",
    "auto-rows": "deflated-120-rows",
    "eighth": "deflated-88",
    "twelfth": "deflated",
    "adamw": "adamw",
    "sgd": "sgd",
    "quintic": "muon",
    "polyak": "muon-polyak",
    "paper": "rand-muon",
    "paper-polyak": "rand-muon-polyak",
    "paper-kaczmarz": "rand-muon-kaczmarz",
}
"""The name of a number, and of the runs in ``results/long-run``."""


@cache
def whole_runs(what: str) -> dict[str, dict[float, BySeed]]:
    """Perplexity of finished runs over all steps by variant, rate and seed.

    ``what`` is ``"value"``, of test text, or ``"validation"``.
    """
    found: dict[str, dict[float, BySeed]] = {}
    for line in (*lines("long-run", "table"), *lines("long-run", "other-rates")):
        if line["result"]["status"] == "finished":
            runs = found.setdefault(line["variant"].partition("/")[0], {})
            runs.setdefault(rate_of(line), {})[line["config"]["seed"]] = line["result"][what]
    return found


def rate_of(line: Line) -> float:
    """The learning rate of a run."""
    return float(line["config"]["config"]["optimizer"]["lr"])


@cache
def chosen(variant: str) -> float:
    """The rate of a row in the table: the one that short runs chose."""
    (rate,) = {rate_of(line) for line in lines("long-run", "table") if line["variant"] == variant}
    return rate


def best(variant: str) -> float:
    """The rate with the lowest validation perplexity of seed 1 over all steps."""
    tried = whole_runs("validation")[variant]
    return min((rate for rate, runs in tried.items() if 1 in runs), key=lambda rate: tried[rate][1])


def ends(variant: str, rate: float) -> BySeed:
    """Test perplexity of whole runs by seed."""
    return whole_runs("value")[variant].get(rate, {})


def _long_run() -> Iterator[tuple[str, Number]]:
    base, base_rate = FULL, chosen(FULL)
    for slug, variant in ROWS.items():
        rate, own = chosen(variant), best(variant)
        yield f"{slug}.best-rate.73m", setting(own, LONG)
        yield (
            f"{slug}.perplexity.73m",
            of(change(ends(variant, own).values()), LONG, "", 2, sign=False),
        )
        if slug == "full":
            lost = percent(ends(base, base_rate), ends(base, own))
            yield "full.gap-at-0.032.73m", of(lost, LONG)
            continue
        yield f"{slug}.gap.73m", of(percent(ends(variant, own), ends(base, best(base))), LONG)
        alike = percent(ends(variant, rate), ends(base, base_rate))
        yield f"{slug}.gap-at-short-rates.73m", of(alike, LONG)
    found = [line for line in lines("long-run", "table") if line["variant"] in ROWS.values()]
    unknown = [
        line
        for line in found
        if (line["environment"].get("git_tree") or line["environment"]["git_commit"]).endswith("+")
    ]
    yield "long-run.runs", plain(len(found), LONG, "", 0)
    yield "long-run.runs-of-no-commit", plain(len(unknown), LONG, "", 0)


def _pairs_of_the_paper() -> Iterator[tuple[str, Number]]:
    """Randomized against full space with seven quintic steps, here after 73M tokens and in the paper."""
    table = TABLE_2["nanogpt"]
    for name, ours, base in (
        ("pair.nesterov", "rand-muon", "muon"),
        ("pair.polyak", "rand-muon-polyak", "muon-polyak"),
        ("pair.kaczmarz", "rand-muon-kaczmarz", "rand-muon"),
        ("pair.momentum-full", "muon", "muon-polyak"),
        ("pair.momentum-rand", "rand-muon", "rand-muon-polyak"),
        ("pair.adamw", "adamw", "muon"),
        ("pair.sgd", "sgd", "muon"),
    ):
        here = percent(ends(ours, chosen(ours)), ends(base, chosen(base)))
        yield name, of(here, LONG)
        a, b = table[SLUGS[ours]], table[SLUGS[base]]
        apart = a.estimate.minus(b.estimate)
        assert apart.error is not None
        part = 100 / b.mean
        theirs = Difference(part * apart.value, part * apart.error, apart.freedom, a.seeds)
        yield f"{name}.paper", of(theirs, "polarstep_lab.paper")
    same = told_apart = 0
    for one, other in itertools.combinations(SLUGS, 2):
        paper = table[SLUGS[one]].estimate.minus(table[SLUGS[other]].estimate)
        first, second = (estimate(ends(slug, chosen(slug)).values()) for slug in (one, other))
        found = first.minus(second)
        told_apart += paper.clear
        same += paper.clear and found.clear and (found.value > 0) is (paper.value > 0)
    yield "pairs.same-order", plain(same, LONG, "", 0)
    yield "pairs.told-apart", plain(told_apart, LONG, "", 0)


# --- CIFAR-10 -----------------------------------------------------------------------------------


@cache
def accuracy(part: str, variant: str) -> BySeed:
    """Test accuracy in percent by seed."""
    found = (line for line in lines("cifar10", part) if line["variant"] == variant)
    return {seed: 100 * value for seed, value in by_seed(found).items()}


def _cifar10() -> Iterator[tuple[str, Number]]:
    """Table 2's accuracies, here and in the paper."""
    agreeing = 0
    for slug, name in SLUGS.items():
        ours, theirs = estimate(accuracy("table2", slug).values()), TABLE_2["cifar10"][name]
        paper = Estimate(100 * theirs.mean, 100 * theirs.std, theirs.seeds)
        yield f"cifar10.{slug}", _with_deviation(ours, CIFAR)
        yield f"cifar10.{slug}.paper", _with_deviation(paper, "polarstep_lab.paper")
        apart = replace(ours.minus(paper), pairs=ours.n)
        assert apart.error is not None
        yield f"cifar10.{slug}.to-paper", of(apart, CIFAR, " points", 2)
        agreeing += abs(apart.value) <= 2 * apart.error
    yield "cifar10.methods", plain(len(SLUGS), CIFAR, "", 0)
    yield "cifar10.agreeing", plain(agreeing, CIFAR, "", 0)


def _with_deviation(found: Estimate, source: str) -> Number:
    return Number(found.mean, f"{found.mean:.2f}% (σ {found.std:.2f}, n = {found.n})", source)


ABLATIONS: dict[str, tuple[Any, ...]] = {
    "rank": (16, 32, 64, 128),
    "steps": (1, 3, 5, 7, 9),
    "solver": ("polar-express", "empirical", "quintic", "cubic"),
    "batch": (500, 1000, 2000, 3000, 4000),
}
"""What the paper's curves show; the recipe's own values are 128, 7, quintic and 500."""
OWN = {"rank": 128, "steps": 7, "solver": "quintic", "batch": 500}


def table2(variant: str) -> list[Line]:
    """The runs of a row of Table 2."""
    return [line for line in lines("cifar10", "table2") if line["variant"] == variant]


def last_loss(line: Line) -> float:
    """The last validation loss of a run."""
    found = [row["loss"] for row in line["logs"]["metrics"] if row["kind"] == "val"]
    return float(found[-1])


@cache
def last_validation(axis: str, value: Any) -> BySeed:
    """The last validation loss by seed of one value of an ablation of the paper's sketch."""
    point = {"axis": axis, "value": value}
    its = [
        line
        for line in lines("cifar10", "ablations")
        if line["config"].get("ablation") == point and line["result"]["status"] == "finished"
    ]
    kept = table2("rand-muon") if value == OWN[axis] else its
    return {line["config"]["seed"]: last_loss(line) for line in kept}


def _cifar10_ablations() -> Iterator[tuple[str, Number]]:
    """The last validation loss of each value, which is where the paper's curves end."""
    for axis, values in ABLATIONS.items():
        for value in values:
            name = f"cifar10.{axis}-{value}"
            own = last_validation(axis, value)
            yield f"{name}.loss", of(change(own.values()), CIFAR, "", 3, sign=False)
            if value != OWN[axis]:
                apart = paired(own, last_validation(axis, OWN[axis]))
                yield f"{name}.loss-change", of(apart, CIFAR, "", 4)
        for one, other in itertools.pairwise(values):
            apart = paired(last_validation(axis, other), last_validation(axis, one))
            yield f"cifar10.{axis}-{one}-to-{other}", of(apart, CIFAR, "", 4)
    table = {
        slug: {line["config"]["seed"]: last_loss(line) for line in table2(slug)}
        for slug in ("rand-muon", "rand-muon-kaczmarz")
    }
    apart = paired(table["rand-muon-kaczmarz"], table["rand-muon"])
    yield "cifar10.kaczmarz.loss-change", of(apart, CIFAR, "", 4)


def _maps_on_cifar10() -> Iterator[tuple[str, Number]]:
    """Accuracy of our maps against five PolarExpress steps in full space, in points."""
    full = accuracy("maps", FULL)
    for slug, variant in (
        ("full-rows", "muon-polar-express-rows"),
        ("deflated", "deflated"),
        ("paper", "rand-muon"),
    ):
        yield f"cifar10.{slug}.gap", of(paired(accuracy("maps", variant), full), CIFAR, "", 2)
    own = paired(accuracy("table2", "rand-muon"), accuracy("table2", "muon"))
    yield "cifar10.rand-muon.gap", of(own, CIFAR, "", 2)


# --- a short GPT --------------------------------------------------------------------------------

GPT_ABLATIONS = (
    *("rank-50", "rank-100", "rank-400"),
    *("steps-1", "steps-3", "steps-5", "steps-9"),
    *("solver-polar-express", "solver-empirical", "solver-cubic"),
)
"""An axis of the paper's sketch, and a value."""


def _gpt_ablations() -> Iterator[tuple[str, Number]]:
    """Test perplexity of nanogpt-small with one setting changed, against the recipe's own."""
    table = {
        slug: by_seed(line for line in lines("gpt", "table2") if line["variant"] == slug)
        for slug in ("muon", "rand-muon")
    }
    for name in GPT_ABLATIONS:
        variant = f"{name.partition('-')[0]}/rand-muon/{name}"
        own = by_seed(line for line in lines("gpt", "ablations") if line["variant"] == variant)
        yield f"gpt.{name}", of(paired(own, table["rand-muon"]), GPT_RUNS, "")
    yield "gpt.full-to-rank-200", of(percent(table["muon"], table["rand-muon"]), GPT_RUNS)
    long = percent(ends("muon", chosen("muon")), ends("rand-muon", chosen("rand-muon")))
    yield "gpt.full-to-rank-200.73m", of(long, LONG)
    yield "gpt.tokens", plain(_tokens(lines("gpt", "table2")[0]), GPT_RUNS, "M")


def _tokens(line: Line) -> float:
    """Million tokens of a run."""
    stages = line["config"]["config"]["data"]["stages"]
    return sum(s["steps"] * s["sequences"] * s["sequence_length"] for s in stages) / 1e6


def _text_and_model() -> Iterator[tuple[str, Number]]:
    """The text and the model of the GPTs."""
    for line in lines("gpt", "text", "text"):
        name = "train" if "train" in line["variant"] else "held-out"
        for key in ("documents", "tokens"):
            yield f"text.{name}.{key}", plain(line["result"][key], GPT_RUNS, "", 0)
    with torch.device("meta"):
        model = resolve("nanogpt-wiki", "muon").model
        assert isinstance(model, GPTConfig)
        ours = sum(p.numel() for p in GPT(model).parameters())
    # Table 2 counts six FLOPs a parameter for SGD with Nesterov momentum.
    gflops = TABLE_2["nanogpt"]["SGD (Nesterov)"].gflops
    assert gflops is not None
    yield "model.parameters", plain(ours / 1e6, "nanogpt-wiki", "M")
    yield "model.parameters.paper", plain(1e3 * gflops / 6, "polarstep_lab.paper", "M")
    tokens = _tokens(lines("long-run", "table")[0])
    yield "long-run.tokens", plain(tokens, LONG, "M")
    yield "long-run.tokens.paper", plain(TRAINING_TOKENS / 1e6, "polarstep_lab.paper", "M", 0)
