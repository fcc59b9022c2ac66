"""Where training ends: perplexity of GPTs with each map and each peer, against full space and AdamW."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pages.numbers.number import Number, of, plain, setting, span
from pages.records import BySeed, change, percent, rows
from polarstep_lab.estimates import Difference

CHOICE = 3
"""The seed that chooses rates; tables are of other seeds."""
RATE = 0.014
"""Full space's rate in the frontier: better than 0.02, which seed 3 has for it, on the other seeds."""
FRONTIER, SCALING = "results/frontier", "results/scaling"
MAPS = {
    "full": "full",
    "full-rows": "full+rows",
    "full-fan": "full+fans",
    "auto": "lift-120-warm",
    "auto-rows": "lift-120-warm+rows",
    "auto-rows-fan": "lift-120-warm+rows+fans",
    "eighth": "lift-88-warm",
    "twelfth": "lift-56-warm",
    "low-rank": "low-rank",
    "paper": "paper",
    "adamw": "adamw",
    "torch-muon": "peer:torch-muon",
    "jordan": "peer:jordan-muon",
    "dion": "peer:dion-muon",
    "normuon": "peer:dion-normuon",
    "dion2": "peer:dion2",
    "dion3": "peer:dion3",
    "soap": "peer:soap",
}
"""The name of a number, and of the runs. At width 768 ``auto`` is a deflated map of rank 120."""
Trained = tuple[str, float]
"""A map and its rate."""


def numbers() -> Iterator[tuple[str, Number]]:
    """All numbers of this file."""
    yield from _frontier()
    yield from _scaling()
    yield from _two_lines()
    yield from _low_precision()
    yield from _toy()


# --- 24.6 million tokens ------------------------------------------------------------------------


@cache
def perplexities(text: str) -> dict[Trained, BySeed]:
    """Perplexity of the frontier's runs by map and rate, then by seed.

    ``text`` is ``"test"`` or ``"validation"``, the halves of held-out text, or ``"perplexity"``, all
    of it. Runs of an early commit have no halves and count for none.
    """
    found: dict[Trained, BySeed] = {}
    for run in rows("frontier", "runs"):
        if run["steps"] == 1500 and run.get("width", 768) == 768 and text in run:
            seeds = found.setdefault((run["map"], run["lr"]), {})
            assert run["seed"] not in seeds, f"recorded twice: {run}"
            seeds[run["seed"]] = run[text]
    return found


def _reported(runs: BySeed) -> BySeed:
    return {seed: value for seed, value in runs.items() if seed != CHOICE}


def trained(name: str) -> Trained:
    """A map at the rate with the lowest validation perplexity on the seed that chooses.

    AdamW and peers are with or without a warm-up, whichever is better there.
    """
    if name == "full":
        return name, RATE
    tried = {
        key: runs[CHOICE]
        for key, runs in perplexities("validation").items()
        if CHOICE in runs and key[0] in (name, f"{name}+warmup")
    }
    return min(tried, key=lambda key: tried[key])


def gap(one: Trained, base: Trained = ("full", RATE)) -> Difference:
    """Test perplexity against that of another on the same seeds, in percent."""
    test = perplexities("test")
    return percent(_reported(test[one]), test[base])


def _frontier() -> Iterator[tuple[str, Number]]:
    for slug, name in MAPS.items():
        one = trained(name)
        yield f"{slug}.rate.25m", setting(one[1], FRONTIER)
        ends = change(_reported(perplexities("test")[one]).values())
        yield f"{slug}.perplexity.25m", of(ends, FRONTIER, "", sign=False)
        if slug != "full":
            yield f"{slug}.gap.25m", of(gap(one), FRONTIER)
    for ours, theirs in (("auto-rows-fan", "normuon"), ("full-fan", "dion")):
        apart = gap(trained(MAPS[ours]), trained(MAPS[theirs]))
        yield f"{ours}.gap-to-{theirs}.25m", of(apart, FRONTIER)
    yield from _repeated()
    yield "frontier.tokens", plain(1500 * 16 * 1024 / 1e6, FRONTIER, "M")


def _repeated() -> Iterator[tuple[str, Number]]:
    """How far two runs with equal settings and seeds end apart, at two commits."""
    table = perplexities("perplexity")
    apart = [
        100 * (table[run["map"], run["lr"]][run["seed"]] / run["perplexity"] - 1)
        for run in rows("frontier", "repeated")
    ]
    rms = math.hypot(*apart) / math.sqrt(len(apart))
    yield "repeated.rms.25m", plain(rms, FRONTIER, "%")
    yield "repeated.most.25m", plain(max(map(abs, apart)), FRONTIER, "%")
    yield "repeated.runs.25m", plain(len(apart), FRONTIER, "", 0)


# --- other lengths and widths -------------------------------------------------------------------

SCALED = {
    "auto": ("deflated-sixth", "lift-120-warm"),
    "eighth": ("deflated-eighth", "lift-88-warm"),
    "low-rank": ("low-rank", "low-rank"),
}
"""The name of a number, and of the map in the study of scaling and in the frontier."""
LENGTHS = {375: "6m", 750: "12m", 1500: "25m", 3000: "49m", 4440: "73m"}


@cache
def scaled(slug: str) -> dict[tuple[int, int], BySeed]:
    """The gap to full space in percent by steps and width, then by seed; both at one rate."""
    tests: dict[tuple[str, int, int], BySeed] = {}
    for run in (*rows("scaling", "runs"), *rows("frontier", "runs")):
        if run["lr"] == RATE and run["seed"] != CHOICE and "test" in run:
            name = "map" if run["map"] in SCALED[slug] else run["map"]
            key = name, run["steps"], run.get("width", 768)
            tests.setdefault(key, {})[run["seed"]] = run["test"]
    return {
        (steps, width): {
            seed: 100 * (its[seed] / full[seed] - 1) for seed in sorted(its.keys() & full.keys())
        }
        for (name, steps, width), its in tests.items()
        if name == "map" and (full := tests.get(("full", steps, width)))
    }


def _scaling() -> Iterator[tuple[str, Number]]:
    for slug in SCALED:
        points = scaled(slug)
        for (steps, width), seeds in sorted(points.items()):
            name = LENGTHS[steps] if width == 768 else f"width-{width}"
            yield f"{slug}.gap-at-{name}", of(change(seeds.values()), SCALING)
    for slug in ("auto", "low-rank"):
        lengths = {
            s: statistics.fmean(v.values()) for (s, w), v in scaled(slug).items() if w == 768
        }
        yield f"{slug}.slope-over-tokens", of(_slope(lengths), SCALING, "", 2)


def _slope(means: Mapping[int, float]) -> Difference:
    """What a line through the mean gaps gains for each doubling, in points; ``pairs`` counts places."""
    from scipy import stats

    places = sorted(means)
    fit = stats.linregress([math.log2(x) for x in places], [means[x] for x in places])
    return Difference(float(fit.slope), float(fit.stderr), len(places) - 2, len(places))


# --- two lines: muon_for without options, against optimizers at the best of their grids ---------

DEFAULT = {"lr": 0.02, "weight_decay": 0.05}
"""The options of ``muon_for``, where runs of our map name them; runs of ``default`` name none."""
SMALL = ("lstm", "moe", "vit", "cnn", "resnet18", "fine-tuning", "lora")
FAMILIES = dict.fromkeys(("gpt", "gpt2", "llama"), "h200") | dict.fromkeys(SMALL, "cpu")
SEARCHED = ("adamw", "normuon", "torch-muon", "ours")


@cache
def family(name: str) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs of a family by method, then by seed.

    ``default`` has the options of ``muon_for``. The others are each at the options with the lowest
    validation loss on the seed that chooses. Of ours the runs at the newest commit count, as what
    ``muon_for`` does may change.
    """
    runs = [row for row in rows("two-lines", FAMILIES[name]) if row["family"] == name]
    newest = {row["method"]: row["commit"] for row in sorted(runs, key=lambda row: row["ended"])}
    runs = [
        row
        for row in runs
        if row["method"] not in ("default", "ours") or row["commit"] == newest[row["method"]]
    ]
    wanted = [("default", "ours", DEFAULT), ("default", "default", {})]
    for method in SEARCHED:
        search = [row for row in runs if (row["method"], row["seed"]) == (method, CHOICE)]
        tried = [row for row in search if "validation" in row]
        if tried:
            best = min(tried, key=lambda row: row["validation"])["options"]
            wanted.append((method, method, best))
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for label, method, options in wanted:
        its = {r["seed"]: r for r in runs if (r["method"], r["options"]) == (method, options)}
        if its:
            found.setdefault(label, {}).update(its)
    return found


def tokens_to(runs: Mapping[int, Any], base: Mapping[int, Any]) -> list[float]:
    """The part of the tokens after which runs reach the last validation loss of others, by seed."""
    parts = []
    for seed in sorted(runs.keys() & base.keys()):
        goal, last = base[seed]["validation"], (0, math.inf)
        for step, loss in runs[seed]["curve"]:
            if loss <= goal:
                back = (goal - loss) / (last[1] - loss) if last[0] else 0.0
                parts.append(100 * (step - back * (step - last[0])) / runs[seed]["curve"][-1][0])
                break
            last = (step, loss)
    return parts


def _apart(runs: Mapping[int, Any], base: Mapping[int, Any]) -> Difference | None:
    """Test perplexity against others on common seeds, the one that chooses only where no other is."""
    if not runs.keys() & base.keys():
        return None
    ours, theirs = (
        {seed: math.exp(run["test"]) for seed, run in each.items()} for each in (runs, base)
    )
    fair = _reported(ours)
    return percent(fair if fair.keys() & theirs.keys() else ours, theirs)


def _two_lines() -> Iterator[tuple[str, Number]]:
    source = "results/two-lines"
    for name in FAMILIES:
        its = family(name)
        for method, runs in its.items():
            prefix = f"two-lines.{name}.{method}"
            ends = {seed: math.exp(run["test"]) for seed, run in runs.items()}
            found = change((_reported(ends) or ends).values())
            digits = 1 if found.value > 20 else 2
            yield f"{prefix}.perplexity", of(found, source, "", digits, sign=False)
            parts = tokens_to(runs, its.get("adamw", {}))
            if method != "adamw" and parts:
                yield f"{prefix}.tokens-to-adamw", span(parts, source, "%", 0)
        for one, other in itertools.permutations(its, 2):
            if apart := _apart(its[one], its[other]):
                yield f"two-lines.{name}.{one}.gap-{other}", of(apart, source)


# --- low precision ------------------------------------------------------------------------------


def _low_precision() -> Iterator[tuple[str, Number]]:
    source = "results/low-precision"
    for part in ("h200", "cpu"):
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for row in rows("low-precision", part):
            found.setdefault(row["variant"], {})[row["seed"]] = row
        for name, runs in found.items():
            prefix = f"precision.{name}.{part}"
            ends = {seed: math.exp(run["loss"]) for seed, run in runs.items()}
            base = {seed: math.exp(run["loss"]) for seed, run in found["float32"].items()}
            if name != "float32":
                yield f"{prefix}.gap", of(percent(ends, base), source, "%", 2)
            if name != "stochastic":
                yield f"{prefix}.bytes", plain(next(iter(runs.values()))["bytes"], source, "", 2)


# --- a toy GPT with shape_scale="rms", at AdamW's rate ------------------------------------------

TOYS = {
    "adamw": ("AdamW", "spectral"),
    "full": ("Muon (PolarExpress 5)", "rms"),
    "deflated": ("Deflated Muon", "rms"),
    "paper": ("Rand Muon (Nes.-Gaussian)", "rms"),
}
"""The name of a number, and method and scale of the runs."""


def _toy() -> Iterator[tuple[str, Number]]:
    source = "results/ideas"
    found: dict[Trained, BySeed] = {}
    first: dict[str, dict[float, float]] = {slug: {} for slug in TOYS}
    slugs = {key: slug for slug, key in TOYS.items()}
    for row in rows("ideas", "rms-rates"):
        slug = slugs.get((row["method"], row["config"]["optimizer"]["shape_scale"]))
        if slug is not None:
            rate = float(row["ablation"]["value"])
            found.setdefault((slug, rate), {})[row["seed"]] = row["value"]
            if row["seed"] == 0:
                first[slug][rate] = row["validation"]
    best = {slug: min(rates, key=lambda rate: rates[rate]) for slug, rates in first.items()}
    adamw = found["adamw", best["adamw"]]
    for slug, rate in best.items():
        yield f"rms.{slug}.rate", setting(rate, source)
        if slug != "adamw":
            its = found[slug, best["adamw"]]
            yield f"rms.{slug}.gap-at-adamws-rate", of(percent(its, found[slug, rate]), source)
            yield f"rms.{slug}.gap-to-adamw", of(percent(its, adamw), source)
