"""Where training ends: perplexity of GPTs with each map and each peer, against full space and AdamW."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pages.numbers.number import Number, of, plain, setting, span
from pages.records import BySeed, Change, change, percent, rows

CHOICE = 3
"""The seed that chooses rates; tables are of other seeds."""
RATE = 0.014
"""Full space's rate in the frontier: better than 0.02, which seed 3 has for it, on the other seeds."""
RATES = 3
"""A map has a rate of its own where seed 3 tried so many."""
FRONTIER, SCALING = "results/frontier", "results/scaling"
MAPS = {
    "full": "full",
    "full-rows": "full+rows",
    "full-fan": "full+fans",
    "auto": "lift-120-warm",
    "auto-rows": "lift-120-warm+rows",
    "auto-rows-fan": "lift-120-warm+rows+fans",
    "eighth": "lift-88-warm",
    "eighth-rows": "lift-88-warm+rows",
    "twelfth": "lift-56-warm",
    "twelfth-rows": "lift-56-warm+rows",
    "scaled": "scaled-200",
    "low-rank": "low-rank",
    "low-rank-rows": "low-rank+rows",
    "paper": "paper",
    "paper-rows": "paper+rows",
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

    ``text`` is ``"perplexity"`` for all held-out text, which every run has, or one of its halves.
    """
    found: dict[Trained, BySeed] = {}
    for run in rows("frontier", "runs"):
        if run["steps"] == 1500 and run.get("width", 768) == 768:
            seeds = found.setdefault((run["map"], run["lr"]), {})
            assert run["seed"] not in seeds, f"recorded twice: {run}"
            if text in run:
                seeds[run["seed"]] = run[text]
    return found


def _halves(*trained: Trained) -> bool:
    """Whether every run of these has a perplexity of the test half."""
    test, every = perplexities("test"), perplexities("perplexity")
    return all(test[each].keys() == every[each].keys() for each in trained)


def _reported(runs: BySeed) -> BySeed:
    return {seed: value for seed, value in runs.items() if seed != CHOICE}


def chosen(name: str) -> float | None:
    """The rate with the lowest validation perplexity on the seed that chooses."""
    keys = [key for key, runs in perplexities("perplexity").items() if key[0] == name]
    tried = [key for key in keys if CHOICE in perplexities("perplexity")[key]]
    if len(tried) < RATES:
        return None
    halved = all(CHOICE in perplexities("validation")[key] for key in tried)
    found = perplexities("validation" if halved else "perplexity")
    return min(tried, key=lambda key: found[key][CHOICE])[1]


def trained(name: str) -> Trained:
    """A map at its chosen rate; AdamW and peers with or without a warm-up, whichever is better."""
    if name == "full":
        return name, RATE
    found = []
    for each in (name, f"{name}+warmup"):
        keys = [key for key in perplexities("perplexity") if key[0] == each]
        rate = chosen(each)
        if rate is not None and _reported(perplexities("perplexity")[each, rate]):
            found.append((each, rate))
        elif keys and (name.startswith("peer:") or name == "adamw"):
            means = {
                key: statistics.fmean(perplexities("perplexity")[key].values()) for key in keys
            }
            found.append(min(means, key=lambda key: means[key]))
        elif keys:
            found.append((each, RATE if rate is None else rate))
    text = perplexities("validation" if _halves(*found) else "perplexity")
    return min(found, key=lambda key: text[key].get(CHOICE, math.inf))


def gap(one: Trained, base: Trained = ("full", RATE)) -> Change:
    """Test perplexity against that of another on the same seeds, in percent."""
    found = perplexities("test" if _halves(one, base) else "perplexity")
    return percent(_reported(found[one]) or found[one], found[base])


def _frontier() -> Iterator[tuple[str, Number]]:
    own = ("full", chosen("full") or RATE)
    yield "full.rates-apart.25m", of(gap(own), FRONTIER)
    for slug, name in MAPS.items():
        one = trained(name)
        yield f"{slug}.rate.25m", setting(one[1], FRONTIER)
        ends = _reported(perplexities("test" if _halves(one) else "perplexity")[one])
        if ends:
            yield f"{slug}.perplexity.25m", of(change(ends.values()), FRONTIER, "", sign=False)
        if slug == "full":
            continue
        yield f"{slug}.gap.25m", of(gap(one), FRONTIER)
    yield (
        "auto-rows-fan.gap-to-normuon.25m",
        of(gap(trained(MAPS["auto-rows-fan"]), trained(MAPS["normuon"])), FRONTIER),
    )
    yield (
        "full-fan.gap-to-dion.25m",
        of(gap(trained(MAPS["full-fan"]), trained(MAPS["dion"])), FRONTIER),
    )
    yield "full-fan.gain.25m", of(gap(("full+fans", 0.02)), FRONTIER)
    fan, plain_rate = trained(MAPS["auto-rows-fan"]), trained(MAPS["auto-rows"])
    yield "auto-rows-fan.gain-of-fan.25m", of(gap(fan, plain_rate), FRONTIER)
    yield "rows.gain.25m", of(_gain_of_rows(), FRONTIER)
    yield from _repeated()
    yield "frontier.tokens", plain(1500 * 16 * 1024 / 1e6, FRONTIER, "M")
    count = len(rows("frontier", "runs"))
    yield "frontier.runs", plain(count, FRONTIER, "", 0)


def _gain_of_rows() -> Change:
    """What normalized rows do in the mean of all maps that have them, each at its own rate."""
    seeds: dict[int, list[float]] = {}
    for name in dict.fromkeys(name for name, _ in perplexities("test")):
        if name in MAPS.values() and name.endswith("+rows"):
            ours, theirs = trained(name), trained(name.removesuffix("+rows"))
            found = perplexities("test" if _halves(ours, theirs) else "perplexity")
            for seed in _reported(found[ours]).keys() & found[theirs].keys():
                change_of_it = 100 * (found[ours][seed] / found[theirs][seed] - 1)
                seeds.setdefault(seed, []).append(change_of_it)
    return change(statistics.fmean(each) for each in seeds.values())


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
    found: dict[tuple[str, int, int], BySeed] = {}
    runs = [*rows("scaling", "runs"), *rows("frontier", "runs")]
    for run in runs:
        if run["lr"] == RATE and run["seed"] != CHOICE and "test" in run:
            key = run["map"], run["steps"], run.get("width", 768)
            found.setdefault(key, {})[run["seed"]] = run["test"]
    gaps: dict[tuple[int, int], BySeed] = {}
    for (name, steps, width), seeds in found.items():
        full = found.get(("full", steps, width), {})
        if name in SCALED[slug]:
            point = gaps.setdefault((steps, width), {})
            point |= {
                seed: 100 * (value / full[seed] - 1)
                for seed, value in seeds.items()
                if seed in full
            }
    return {at: seeds for at, seeds in gaps.items() if seeds}


def _scaling() -> Iterator[tuple[str, Number]]:
    for slug in SCALED:
        points = scaled(slug)
        for (steps, width), seeds in sorted(points.items()):
            name = LENGTHS[steps] if width == 768 else f"width-{width}"
            yield f"{slug}.gap-at-{name}", of(change(seeds.values()), SCALING)
        lengths = {s: statistics.fmean(v.values()) for (s, w), v in points.items() if w == 768}
        widths = {w: statistics.fmean(v.values()) for (s, w), v in points.items() if s == 1500}
        for name, means in (("tokens", lengths), ("width", widths)):
            if len(means) > 2:
                yield f"{slug}.slope-over-{name}", of(_slope(means), SCALING, "", 2)


def _slope(means: Mapping[int, float]) -> Change:
    """What a line through the mean gaps gains for each doubling, in points; ``seeds`` counts places."""
    from scipy import stats

    places = sorted(means)
    fit = stats.linregress([math.log2(x) for x in places], [means[x] for x in places])
    half = float(fit.stderr * stats.t.ppf(0.975, len(places) - 2))
    return Change(float(fit.slope), half, len(places))


# --- two lines: muon_for without options, against optimizers at the best of their grids ---------

DEFAULT = {"lr": 0.02, "weight_decay": 0.05}
"""The options of ``muon_for`` that the runs of ``ours`` name; ``default`` names none."""
SMALL = ("lstm", "moe", "vit", "cnn", "fine-tuning", "lora")
FAMILIES = {"gpt": "h200", "gpt2": "h200"} | dict.fromkeys(SMALL, "cpu")


@cache
def family(name: str) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs of a family by method, then by seed, each method at its best options.

    ``default`` are runs without options, or those of the same options by name. Of another method the
    options with the lowest validation loss on the seed that chooses count.
    """
    runs = [row for row in rows("two-lines", FAMILIES[name]) if row["family"] == name]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for method in sorted({row["method"] for row in runs}, reverse=True):  # ours, then default
        its = [row for row in runs if row["method"] == method]
        tried = [row for row in its if row["seed"] == CHOICE and "validation" in row]
        if method in ("default", "ours"):
            best = DEFAULT if method == "ours" else {}
        elif tried:
            best = min(tried, key=lambda row: row["validation"])["options"]
        else:
            best = its[0]["options"]
        kept = {row["seed"]: row for row in its if row["options"] == best}
        label = "default" if method == "ours" else "full-space" if method == "ours-full" else method
        if method == "ours-full":
            kept = {row["seed"]: row for row in its if row["options"] == DEFAULT}
        if kept:
            found.setdefault(label, {}).update(kept)
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


def _apart(runs: Mapping[int, Any], base: Mapping[int, Any]) -> Change | None:
    """Test perplexity against others on common seeds, the one that chooses only where no other is."""
    if runs is base or not runs.keys() & base.keys():
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
        adamw = its.get("adamw", {})
        for method, runs in its.items():
            prefix = f"two-lines.{name}.{method}"
            losses = {seed: run["test"] for seed, run in runs.items()}
            losses = _reported(losses) or losses
            ends = [math.exp(loss) for loss in losses.values()]
            yield f"{prefix}.perplexity", of(change(ends), source, "", sign=False)
            yield f"{prefix}.loss", of(change(losses.values()), source, "", 3, sign=False)
            if found := _apart(runs, adamw):
                yield f"{prefix}.gap-adamw", of(found, source)
                parts = tokens_to(runs, adamw)
                if parts:
                    yield f"{prefix}.tokens-to-adamw", span(parts, source, "%", 0)
        for other in ("normuon", "full-space"):
            if found := _apart(its.get("default", {}), its.get(other, {})):
                yield f"two-lines.{name}.default.gap-{other}", of(found, source)


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


# --- a toy GPT: rates of embeddings, and rates with shape_scale="rms" ------------------------------


def _toy() -> Iterator[tuple[str, Number]]:
    source = "results/ideas"
    validation: dict[float, float] = {}
    test: dict[float, BySeed] = {}
    for row in rows("ideas", "embedding-rate"):
        rate = row["config"]["optimizer"]["embedding_lr"]
        if row["seed"] == 0:
            validation[rate] = row["validation"]
        else:
            test.setdefault(rate, {})[row["seed"]] = row["value"]
    best = min(validation, key=lambda rate: validation[rate])
    yield "embedding.best-rate.toy", setting(best, source)
    yield "embedding.gap-at-3e-4.toy", of(percent(test[3e-4], test[best]), source)

    found: dict[tuple[str, str], dict[float, BySeed]] = {}
    first: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows("ideas", "rms-rates"):
        key = row["method"], row["config"]["optimizer"]["shape_scale"]
        rate = float(row["ablation"]["value"])
        found.setdefault(key, {}).setdefault(rate, {})[row["seed"]] = row["value"]
        if row["seed"] == 0:
            first.setdefault(key, {})[rate] = row["validation"]
    best_of = {key: min(rates, key=lambda rate: rates[rate]) for key, rates in first.items()}
    adamw = ("AdamW", "spectral")
    yield "rms.adamw.rate", setting(best_of[adamw], source)
    for slug, method in (
        ("full", "Muon (PolarExpress 5)"),
        ("deflated", "Deflated Muon"),
        ("paper", "Rand Muon (Nes.-Gaussian)"),
    ):
        key = method, "rms"
        at = best_of[adamw]
        yield f"rms.{slug}.rate", setting(best_of[key], source)
        lost = percent(found[key][at], found[key][best_of[key]])
        yield f"rms.{slug}.gap-at-adamws-rate", of(lost, source)
        beside = percent(found[key][at], found[adamw][at])
        yield f"rms.{slug}.gap-to-adamw", of(beside, source)
    spectral = ("Deflated Muon", "spectral")
    yield "rms.spectral.rate", setting(best_of[spectral], source)
    lost = percent(found[spectral][best_of[adamw]], found[spectral][best_of[spectral]])
    yield "rms.spectral.gap-at-adamws-rate", of(lost, source)
    other = percent(
        found["Deflated Muon", "rms"][best_of["Deflated Muon", "rms"]],
        found[spectral][best_of[spectral]],
    )
    yield "rms.deflated.gap-to-spectral", of(other, source)
