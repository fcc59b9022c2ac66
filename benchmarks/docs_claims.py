"""The sentences of the pages that claim something measured, each made from the records that say so.

A page has a claim between ``<!-- claim: NAME -->`` and ``<!-- end -->``; ``update_docs.py`` writes it
there. Intervals are 95% t-intervals over paired seeds. A claim that one map is better, or as good, says
how many seeds, which baseline and how many tokens.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from docs_quality import (
    BASE,
    ROOT,
    Estimate,
    estimate,
    million_tokens,
    paired,
    peers,
    perplexities,
    quality,
    steps,
)
from polarstep.storage import read_lines
from polarstep_lab.methods import all_methods
from polarstep_lab.records.record import RunRecord, find_runs

CLAIMS: dict[str, Callable[[], str]] = {}


def claim(make: Callable[[], str]) -> Callable[[], str]:
    """Register a function under its name, with hyphens."""
    CLAIMS[make.__name__.replace("_", "-")] = make
    return make


# Records of training runs


@cache
def runs(folder: str) -> tuple[RunRecord, ...]:
    """The finished runs below a folder of the repository."""
    records = map(RunRecord.load, find_runs([ROOT / folder]))
    return tuple(run for run in records if run.result and run.result.status == "finished")


def values(
    folder: str, recipe: str, method: str, axis: str | None = None, value: Any = None, **polar: Any
) -> dict[int, float]:
    """The figure of each seed: of a method, or of one point of an ablation of it.

    Where runs of several lengths were recorded, those are of the longest. ``polar`` are settings of
    the polar map that the runs must have.
    """
    lengths: dict[int, dict[int, float]] = {}
    for run in runs(folder):
        who, point = run.identity, run.identity.ablation
        at = (point.axis, point.value) if point else (None, None)
        if (who.recipe, who.method, *at) != (recipe, method, axis, value):
            continue
        settings = who.config["optimizer"]["polar"]
        if all(settings[key] == wanted for key, wanted in polar.items()):
            assert run.result is not None
            lengths.setdefault(run.result.steps, {})[who.seed] = run.result.value
    if not lengths:
        raise SystemExit(f"{folder} has no runs of {method} on {recipe} with {axis}={value}")
    return lengths[max(lengths)]


FULL, SKETCHED = "Muon (Nesterov)", "Rand Muon (Nes.-Gaussian)"


def signed(number: float, digits: int = 1) -> str:
    """With a sign, and a minus as wide as a plus."""
    return f"{'−' if number < 0 else '+'}{abs(number):.{digits}f}"


def span(found: Estimate, digits: int = 1) -> str:
    """As ``−9.5 to +3.7``."""
    return f"{signed(found.low, digits)} to {signed(found.high, digits)}"


# Cost


def ratio(optimizer: str, workload: str) -> str:
    """The time of a step over AdamW's."""
    return f"{steps()[optimizer, workload]['ratio']:.1f}"


AUTO, FULL_SPACE = "Deflated 48, warm, one step", "full space, PolarExpress 5"


@claim
def auto_price() -> str:
    """What ``polar="auto"`` costs and saves."""
    lost = quality(("flat-48-warm", 0.014))
    saved = [
        f"{ratio(AUTO, load)} instead of {ratio(FULL_SPACE, load)} times"
        for load in ("nanoGPT", "8B layer")
    ]
    return (
        f"{saved[0]} AdamW's step on nanoGPT's matrices, and {saved[1]} on an 8B layer. Perplexity "
        f"changes by {lost.told(unit='%')} after {million_tokens():.1f}M tokens"
    )


@claim
def rank_price() -> str:
    """What a sketch costs where ℓ is a larger part of the width."""
    sweeps = json.loads((ROOT / "results/step-cost/h200.json").read_text())["sweeps"]
    adamw = {row["x"]: row for row in sweeps["width"]}[4096]
    wide = {row["x"]: row for row in sweeps["rank"]}[1024]["LowRank, warm"]
    return (
        f"With ℓ = 1024 on four 4096×4096 matrices, 25% of the width, a warm sketch costs "
        f"{wide / adamw['AdamW, fused']:.1f}× AdamW's step, and full space "
        f"{adamw[FULL_SPACE] / adamw['AdamW, fused']:.1f}×"
    )


@claim
def rank_shares() -> str:
    """Which part of the width the timed sketches have."""
    from step_cost import WORKLOADS

    parts = []
    for load, d in (("nanoGPT", 768), ("8B layer", 4096)):
        ell = sum(WORKLOADS[load][1:])
        parts.append(f"ℓ = {ell} is {ell / d:.0%} of the short side")
    return f"on nanoGPT {parts[0]}, on the 8B layer {parts[1]}"


@claim
def cpu_speedup() -> str:
    """How many times as fast as a loop of seven steps ``LowRank(200)`` is on a CPU."""
    found = []
    for record in ("cpu", "cpu-no-tiles"):
        times = steps(f"results/step-cost/{record}.json")
        loop = times["a loop of Newton–Schulz 7", "nanoGPT"]["ms"]
        found.append(loop / times["LowRank, the paper's (h=1, q=7)", "nanoGPT"]["ms"])
    return (
        f"{found[1]:.1f} times as fast as a float32 loop of seven Newton–Schulz steps on nanoGPT's "
        f"matrices, and {found[0]:.1f} times on a CPU with bfloat16 tiles"
    )


@claim
def cpu_auto() -> str:
    """How many times as fast as full space ``polar="auto"`` is on a CPU."""
    times = steps("results/step-cost/cpu-arm.json")
    found = [
        times[FULL_SPACE, load]["ms"] / times["auto", load]["ms"]
        for load in ("nanoGPT", "one of each")
    ]
    return (
        f'`polar="auto"` is {found[0]:.1f} times as fast as full space with PolarExpress 5 on a tenth '
        f"of nanoGPT's matrices, and {found[1]:.1f} times on one of each shape"
    )


@claim
def goals() -> str:
    """The prices against the goals that were set for them."""
    rows = steps("results/step-cost/h200.json")

    def both(name: str, digits: int = 2) -> str:
        told = [f"{rows[name, load]['ratio']:.{digits}f}×" for load in ("nanoGPT", "8B layer")]
        return f"{told[0]} on nanoGPT and {told[1]} on the 8B layer"

    return (
        f"The warm sketch costs {both('LowRank, warm')}, and full space {both(FULL_SPACE, 1)}. A fresh "
        f"sketch without power iterations, which needs no state, costs "
        f"{both('LowRank, Gaussian h=0')}; with its basis kept for four steps it costs "
        f"{both('LowRank, Gaussian h=0, kept 4 steps')}, as a mean over steps that make a basis and "
        "steps that do not."
    )


@claim
def growth_with_width() -> str:
    """The exponents of the time of a step in the width."""
    width = json.loads((ROOT / "results/step-cost/h200.json").read_text())["sweeps"]["width"]
    ends = [row for row in width if row["x"] in (1024, 8192)]

    def power(name: str) -> float:
        return math.log(ends[1][name] / ends[0][name]) / math.log(ends[1]["x"] / ends[0]["x"])

    return (
        f"From 1024 to 8192 the time of the randomized step grows as the width to the power of "
        f"{power('LowRank, warm'):.2f}, and that of the full-space step as {power(FULL_SPACE):.2f}"
    )


@claim
def kaczmarz_time() -> str:
    """Whether column sampling saves time."""
    rows = steps("results/step-cost/h200.json")
    ours, gaussian = (
        rows[f"LowRank, {sketch} h=½", "nanoGPT"]["ms"] for sketch in ("Kaczmarz", "Gaussian")
    )
    return f"{ours:.2f} ms where a Gaussian sketch of the same width takes {gaussian:.2f}"


@claim
def torch_muon() -> str:
    """How much of the time of torch's Muon is the host's."""
    times = [
        steps(f"results/step-cost/{record}.json")["torch.optim.Muon", "nanoGPT"]["ms"]
        for record in ("h200", "h200-deflated", "h200-peers")
    ]
    told = [f"{ms:.0f} ms" for ms in times]
    return f"{', '.join(told[:-1])} and {told[-1]} on {len(told)} hosts"


@claim
def peers_price() -> str:
    """What other libraries' optimizers cost beside ours, in one run."""
    rows = steps()
    dion = {peer.title: peer for peer in peers()}["Muon of dion"]
    assert dion.timed is not None

    def both(name: str) -> str:
        first, second = (f"{rows[name, load]['ratio']:.1f}" for load in ("nanoGPT", "8B layer"))
        return f"{first} times AdamW's step on nanoGPT's matrices and {second} times on an 8B layer"

    return (
        f"`torch.optim.Muon` takes {both('torch.optim.Muon')}; {dion.timed}, {both(dion.timed)}; our "
        f'full space, {both(FULL_SPACE)}; `polar="auto"`, {both("auto")}'
    )


@claim
def peers_quality() -> str:
    """Perplexity of other libraries' optimizers in the same loop, and which run ended lowest."""
    from frontier import others

    told = [
        f"{each.title} has {quality(each.trained).told(unit='%')}"
        for each in peers()
        if each.trained
    ]
    first = {key: runs[0] for key, runs in perplexities().items() if 0 in runs}
    lowest = min(first, key=lambda key: first[key])
    rows, full = first["full+rows", 0.014], first[BASE]
    return (
        f"Against full space {', '.join(told)}, after {million_tokens():.1f}M tokens. On the same seed "
        f"full space with normalized rows has {signed(100 * (rows / full - 1))}%, and the lowest of all "
        f"runs is that of {others().get(lowest[0], lowest[0])}"
    )


@claim
def rows_price() -> str:
    """What normalized rows cost."""
    told = []
    for load, words in (("nanoGPT", "nanoGPT's matrices"), ("8B layer", "an 8B layer")):
        pairs = [
            f"{ratio(f'{name}, rows normalized', load)} instead of {ratio(name, load)}"
            for name in (FULL_SPACE, AUTO)
        ]
        told.append(
            f"{pairs[0]} times AdamW's step in full space and {pairs[1]} times with "
            f'`polar="auto"` on {words}'
        )
    return ", ".join(told)


# Quality after 24.6 million tokens


def versus_full(trained: tuple[str, float]) -> str:
    """As ``+6.1% ± 2.5 (n = 2)``."""
    return quality(trained).told(unit="%")


@claim
def low_rank_loss() -> str:
    """What a quarter of the rank costs."""
    return (
        f"ends {versus_full(('low-rank', 0.014))} higher in perplexity than five PolarExpress steps in "
        f"full space after {million_tokens():.1f}M tokens"
    ).replace("+", "", 1)


@claim
def rows_gain() -> str:
    """What normalized rows gain."""
    return (
        f"{versus_full(('full+rows', 0.014))} against full space without them, after "
        f"{million_tokens():.1f}M tokens"
    )


@claim
def auto_with_rows() -> str:
    """Whether ``polar="auto"`` with normalized rows reaches full space for less time."""
    return (
        f"{versus_full(('flat-48-warm+rows', 0.014))} against full space without normalized rows, after "
        f"{million_tokens():.1f}M tokens"
    )


@claim
def deflated_gap() -> str:
    """How far the deflated map is from full space, at each rate that was tried."""
    rates = 0.014, 0.02
    eight = [quality(("flat-48-warm", rate), ("full", rate)) for rate in rates]
    pairs = [
        100 * (perplexities()["flat-48-warm", rate][seed] / perplexity - 1)
        for rate in rates
        for seed, perplexity in perplexities()["full", rate].items()
        if seed in perplexities()["flat-48-warm", rate]
    ]
    sixteen = quality(("flat-48-warm-16", 0.02), ("full", 0.02))
    rows = quality(("flat-48-warm+rows", 0.014))
    beside_rows = quality(("flat-48-warm+rows", 0.014), ("full+rows", 0.014))
    return (
        f"With products in eight bits, as on a Hopper GPU, it is {eight[0].told(unit='%')} against full "
        f"space with both at a rate of 0.014, {eight[1].told(unit='%')} with both at 0.02, and "
        f"{estimate(pairs).told(unit='%')} over the pairs of both rates. In 16 bits at 0.02 it is "
        f"{sixteen.told(unit='%')}. With normalized rows, in eight bits at 0.014, it is "
        f"{rows.told(unit='%')} against full space without them, and "
        f"{beside_rows.told(unit='%')} against full space with them, all after "
        f"{million_tokens():.1f}M tokens"
    )


@claim
def kept_basis_loss() -> str:
    """What a basis for four steps costs."""
    accuracy = paired(
        values("results/cifar10", "cifar10", SKETCHED, "sketch", "kept-fast"),
        values("results/cifar10", "cifar10", FULL),
    )
    return (
        f"cost {-100 * accuracy.mean:.2f} ± {100 * accuracy.half:.2f} points of accuracy on CIFAR-10 "
        f"against full space (n = {accuracy.n}). On `Deflated` perplexity "
        f"changed by {quality(('joint-2-kept', 0.014)).told(unit='%')} against full space after "
        f"{million_tokens():.1f}M tokens"
    )


@claim
def cifar_agreement() -> str:
    """How many rows of Table 2 agree with the paper's on CIFAR-10."""
    from polarstep_lab.paper import TABLE_2

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
def cifar_sketches() -> str:
    """What the three sketches cost on CIFAR-10."""
    full = values("results/cifar10", "cifar10", FULL)
    rows = {
        "a basis for four steps": ("sketch", "kept-fast"),
        "the warm sketch": ("sketch", "warm"),
        "the paper's": (None, None),
    }
    told = []
    for words, point in rows.items():
        lost = paired(values("results/cifar10", "cifar10", SKETCHED, *point), full)
        told.append(f"{-100 * lost.mean:.2f} ± {100 * lost.half:.2f} ({words})")
    return f"{', '.join(told)} points below full space on {len(full)} seeds"


FRONTIER_10 = "results/cifar10-frontier"
DEFAULT = "Muon (PolarExpress 5)"
GOAL = 0.05
"""Points of accuracy that a cheap map may lose on CIFAR-10."""


def cifar_frontier_rows(
    folder: Path,
) -> Iterator[tuple[str, float, Estimate | None, float]]:
    """Method, mean accuracy, difference to full space in points, and the median ms of a step."""
    place = str(folder.relative_to(ROOT))
    full = values(place, "cifar10", DEFAULT)
    methods = dict.fromkeys(run.identity.method for run in runs(place))
    for name in (method.name for method in all_methods() if method.name in methods):
        found = values(place, "cifar10", name)
        points = {seed: 100 * value for seed, value in found.items()}
        lost = paired(points, {seed: 100 * value for seed, value in full.items()})
        # Of runs that had the GPU to themselves.
        ms = statistics.median(
            run.result.optimizer_ms_per_step
            for run in runs(place)
            if run.result
            and run.identity.method == name
            and not run.environment.get("device_shared", False)
        )
        yield name, statistics.fmean(found.values()), None if name == DEFAULT else lost, ms


@claim
def cifar_deflated() -> str:
    """What the deflated map costs on CIFAR-10, where it is made to sketch."""
    rows = {name: found for name, _, found, _ in cifar_frontier_rows(ROOT / FRONTIER_10)}
    told = []
    for name, words in (
        ("Deflated Muon", "the deflated map"),
        ("Deflated Muon (normalized rows)", "the deflated map with normalized rows"),
        ("Rand Muon (Nes.-Gaussian)", "the paper's sketch"),
        ("Rand Muon (Nes.-Gaussian, normalized rows)", "the paper's sketch with normalized rows"),
        ("Muon (PolarExpress 5, normalized rows)", "full space with normalized rows"),
    ):
        found = rows[name]
        assert found is not None
        told.append(f"{signed(found.mean, 2)} ± {found.half:.2f} ({words})")
        n = found.n
    return (
        f"{', '.join(told)} points of test accuracy against five PolarExpress steps in full space "
        f"(n = {n})"
    )


@claim
def cifar_goal() -> str:
    """Whether ten seeds show that the deflated map is within 0.05 points of full space."""
    rows = {name: found for name, _, found, _ in cifar_frontier_rows(ROOT / FRONTIER_10)}
    found, control = rows["Deflated Muon"], rows["Auto Muon"]
    assert found is not None
    assert control is not None
    reached = "is met" if found.low >= -GOAL else "is met by the mean and not by the interval"
    if found.mean < -GOAL:
        reached = "is missed"
    return (
        f"{reached}: the interval of the deflated map reaches from {signed(found.low, 2)} to "
        f"{signed(found.high, 2)} points (n = {found.n}). Two rows of the same map, full space and "
        f"`auto`, differ by {control.told(2)} points"
    )


@claim
def cifar_routes() -> str:
    """Which map the library runs on the filters of the CIFAR-10 network on a GPU, and why."""
    import torch

    from polarstep.polar.auto import DEFLATED
    from polarstep_lab.models.convnet import ConvNet, ConvNetConfig

    gpu = torch.device("cuda")
    with torch.device("meta"):
        shapes = ConvNet(ConvNetConfig()).matrix_shapes()
    reasons: dict[str, list[str]] = {}
    for m, n in dict.fromkeys(shapes):
        reason = DEFLATED.full_space_reason(m, n, gpu)
        assert reason is not None, (m, n)
        reasons.setdefault(reason, []).append(f"{m}×{n}")
    told = [f"{' and '.join(found)} ({reason})" for reason, found in reasons.items()]
    return f"full space on all {len(shapes)} filters: {', '.join(told)}"


# How the gap to full space scales


@claim
def gap_over_tokens() -> str:
    """Whether the gap closes, stays or grows with the tokens."""
    return _scaled("tokens")


@claim
def gap_over_width() -> str:
    """Whether the gap closes, stays or grows with the width."""
    return _scaled("width")


def _scaled(unit: str) -> str:
    import scaling as study

    found = study.gaps(study.recorded(ROOT / "results/scaling/runs.jsonl", study.FRONTIER))
    told = []
    for name, words in ((study.DEFLATED, "`Deflated`"), (study.LOW_RANK, "`LowRank`")):
        line = study.fits(found, name)[unit]
        points = (study.over_tokens if unit == "tokens" else study.over_width)(found, name)
        places = sorted({x for x, _ in points})
        verb = f"{line.verdict} by this fit"
        if line.verdict not in ("grows", "closes"):
            verb = "does not change clearly"
        at = f"{places[0]:.1f}M to {places[-1]:.1f}M tokens"
        if unit == "width":
            at = f"width {places[0]:g} to {places[-1]:g}, {million_tokens():.1f}M tokens"
        alone = sum([x for x, _ in points].count(place) == 1 for place in places)
        text = (
            f"the gap of {words} {verb}, {signed(line.slope, 2)} ± {line.half:.2f} points for each "
            f"doubling (n = {line.n} pairs of runs, {at}"
        )
        if alone:
            of = "lengths" if unit == "tokens" else "widths"
            text += f"; {alone} of {len(places)} {of} have one seed"
        if len(places) > 2:
            low, high = study.without_one(points)
            text += f"; {signed(low, 2)} to {signed(high, 2)} with any one of them left out"
        told.append(f"{text})")
    return "; ".join(told)


@claim
def widest_gap() -> str:
    """The deflated map in the widest model that was run."""
    import scaling as study

    found = study.gaps(study.recorded(ROOT / "results/scaling/runs.jsonl", study.FRONTIER))
    told = [
        estimate([*found[study.DEFLATED][study.STEPS, width].values()]).told(unit="%")
        for width in (study.WIDTHS[-1], study.WIDTH)
    ]
    return (
        f"at width {study.WIDTHS[-1]} the gap of `Deflated` is {told[0]}, where at width {study.WIDTH} "
        f"it is {told[1]}, both after {million_tokens():.1f}M tokens"
    )


@claim
def closest_map() -> str:
    """How near the best cheap map comes to full space, and in which runs."""
    import scaling as study

    found = study.gaps(study.recorded(ROOT / "results/scaling/runs.jsonl", study.FRONTIER))
    gaps = {at: each for at, each in found[study.DEFLATED].items() if at[1] == study.WIDTH}
    longest = max(gaps)
    return (
        f"{quality(('flat-48-warm', 0.014)).told(unit='%')} in perplexity after {million_tokens():.1f}M "
        f"tokens, and {estimate([*gaps[longest].values()]).told(unit='%')} after "
        f"{study.million(longest[0]):.1f}M, at width {study.WIDTH}"
    )


# The short runs, at 6.6 million tokens

FAST = {"power": 0, "keep": 1, "solver": "polar-express-sketch"}


@cache
def by_rate(method: str, **polar: Any) -> dict[float, dict[int, float]]:
    """Perplexity on ``nanogpt-small`` by rate, then by seed."""
    lrs = {
        run.identity.ablation.value
        for run in runs("results/gpt/rates")
        if run.identity.ablation and run.identity.ablation.axis == "lr"
    }
    return {
        float(lr): values("results/gpt/rates", "nanogpt-small", method, "lr", lr, **polar)
        for lr in sorted(lrs)
    }


def best(table: Mapping[float, Mapping[int, float]], without: int | None = None) -> float:
    """The rate with the lowest mean, with one seed left out if that is asked for."""
    return min(
        table,
        key=lambda lr: statistics.fmean(x for seed, x in table[lr].items() if seed != without),
    )


@claim
def short_runs() -> str:
    """h = 0 against full space at the best rates, on few tokens and against a weak baseline."""
    sketch, full = by_rate(SKETCHED, **FAST), by_rate(FULL)
    rates = best(sketch), best(full)
    found = paired(sketch[rates[0]], full[rates[1]])
    seeds = sorted(full[rates[1]])
    fair = estimate(
        [sketch[best(sketch, seed)][seed] - full[best(full, seed)][seed] for seed in seeds]
    )
    alone = {
        name: values("results/noise/gpt", "nanogpt-small", FULL, "solver", name)[1]
        for name in ("polar-express", "empirical")
    }
    return (
        f"On 6.6M tokens a sketch without power iterations ended {signed(found.mean)} in perplexity "
        f"beside seven quintic steps in full space, each at the best of seven rates "
        f"({rates[0]:g} and {rates[1]:g}; standard error {found.error:.1f}, 95% {span(found)}, "
        f"n = {found.n}). With the rates for each seed chosen on the other two seeds it is "
        f"{signed(fair.mean)} (standard error {fair.error:.1f}, 95% {span(fair)}). Neither interval "
        f"excludes zero. And seven quintic steps are a weak baseline: at a rate of 0.03, on one seed, "
        f"full space had {alone['polar-express']:.1f} with PolarExpress and {alone['empirical']:.1f} "
        f"with Jordan's coefficients, where that sketch had {sketch[0.03][1]:.1f}."
    )


@claim
def adamw_gap() -> str:
    """How Muon compares with AdamW on few tokens."""
    muon, adamw = (
        values("results/gpt/table2", "nanogpt-small", method) for method in (FULL, "AdamW")
    )
    found = paired(muon, adamw)
    ends = [statistics.fmean(each.values()) for each in (muon, adamw)]
    return (
        f"a validation perplexity of {ends[0]:.1f} where AdamW ends at {ends[1]:.1f}: "
        f"{signed(found.mean)} ± {found.half:.1f} (n = {found.n}, 6.6M tokens, each at its tuned rates, "
        f"which the same text chose)"
    )


@claim
def warm_loss() -> str:
    """What a warm sketch costs against the paper's, at one rate."""
    gpt = paired(
        values("results/gpt", "nanogpt-small", SKETCHED, "sketch", "warm"),
        values("results/gpt/table2", "nanogpt-small", SKETCHED),
    )
    cifar = paired(
        values("results/cifar10", "cifar10", SKETCHED, "sketch", "warm"),
        values("results/cifar10", "cifar10", SKETCHED),
    )
    return (
        f"{signed(gpt.mean)} ± {gpt.half:.1f} (n = {gpt.n}, 6.6M tokens). On CIFAR-10 its accuracy is "
        f"{signed(100 * cifar.mean, 2)} ± {100 * cifar.half:.2f} points (n = {cifar.n})"
    )


@claim
def gamma_and_training() -> str:
    """The order of the fast maps in training, which is not that of γ."""
    recipe = values("results/gpt/table2", "nanogpt-small", SKETCHED)
    told = []
    for words, name in (
        ("h = 0", "gaussian-fast"),
        ("the kept basis", "kept-fast"),
        ("the warm sketch", "warm-fast"),
    ):
        found = paired(values("results/gpt", "nanogpt-small", SKETCHED, "sketch", name), recipe)
        told.append(f"{words} {signed(found.mean)} ± {found.half:.1f}")
    return (
        f"On a GPT, against the paper's map in perplexity, {', '.join(told)} (n = {len(recipe)}, "
        f"6.6M tokens, one rate for all), although the warm sketch gives up least of the three by γ."
    )


@claim
def rank_ablation() -> str:
    """Whether perplexity falls with the rank, as the paper has it."""
    recipe = values("results/gpt/table2", "nanogpt-small", SKETCHED)
    told = []
    for rank in (50, 100, 400):
        found = paired(
            values("results/gpt/ablations", "nanogpt-small", SKETCHED, "rank", rank), recipe
        )
        told.append(f"{signed(found.mean)} ± {found.half:.1f} at rank {rank}")
    return f"{', '.join(told)}, against rank 200 (n = {len(recipe)}, 6.6M tokens)"


@claim
def solver_ablation() -> str:
    """Whether three solvers are alike, as the paper has it."""
    recipe = values("results/gpt/table2", "nanogpt-small", SKETCHED)
    told = []
    for name, words in (
        ("polar-express", "PolarExpress"),
        ("empirical", "Jordan's coefficients"),
        ("cubic", "the cubic"),
    ):
        found = paired(
            values("results/gpt/ablations", "nanogpt-small", SKETCHED, "solver", name), recipe
        )
        told.append(f"{signed(found.mean)} ± {found.half:.1f} with {words}")
    return f"{', '.join(told)}, against the quintic (n = {len(recipe)}, 6.6M tokens)"


@claim
def wiki_runs() -> str:
    """The sketches on the model with the paper's matrices, in runs of a fifth of its steps."""
    folder, recipe = "results/gpt/paper-model", "nanogpt-wiki"
    full = values(folder, recipe, FULL)
    rows = {
        "the paper's sketch": (None, None),
        "h = 0": ("sketch", "gaussian-fast"),
        "a basis for four steps": ("sketch", "kept-fast"),
    }
    told = [
        f"{signed(found.mean)} ± {found.half:.1f} ({words})"
        for words, point in rows.items()
        for found in [paired(values(folder, recipe, SKETCHED, *point), full)]
    ]
    return (
        f"{', '.join(told)} in perplexity against seven quintic steps in full space (n = {len(full)}, "
        f"{_longest_wiki_run(folder) / 1e6:.1f}M tokens)"
    )


def _longest_wiki_run(folder: str = "results/gpt") -> int:
    """The tokens of the longest runs of ``nanogpt-wiki`` below a folder."""
    return max(
        sum(
            stage["steps"] * stage["sequences"] * stage["sequence_length"]
            for stage in run.identity.config["data"]["stages"]
        )
        for run in runs(folder)
        if run.identity.recipe == "nanogpt-wiki"
    )


@claim
def paper_model() -> str:
    """How far the GPT of ``nanogpt-wiki`` is from the paper's: parameters and tokens."""
    import torch

    from polarstep_lab.models.gpt import GPT
    from polarstep_lab.paper import TABLE_2
    from polarstep_lab.recipes import resolve

    with torch.device("meta"):
        config = resolve("nanogpt-wiki", "muon")
        ours = sum(p.numel() for p in GPT(config.model).parameters())
    # Table 2 counts six FLOPs a parameter for SGD with Nesterov momentum.
    theirs = 1e9 * TABLE_2["nanogpt"].rows["SGD (Nesterov)"].gflops / 6
    short, long = _longest_wiki_run(), _tokens("nanogpt")
    return (
        f"It has {ours / 1e6:.1f}M parameters where the paper's has {theirs / 1e6:.1f}M, and saw "
        f"{short / 1e6:.1f}M tokens where the paper's saw {long / 1e6:.0f}M, {short / long:.0%} of them"
    )


def _tokens(recipe: str) -> int:
    """The tokens that a recipe trains on."""
    from polarstep_lab.recipes import resolve

    stages = resolve(recipe, "muon").data.stages
    return sum(stage.steps * stage.sequences * stage.sequence_length for stage in stages)


@claim
def wiki_length() -> str:
    """How much of the recipe the short runs of ``nanogpt-wiki`` are."""
    from polarstep_lab.recipes import resolve

    steps_run = max(run.result.steps for run in runs("results/gpt/paper-model") if run.result)
    steps_of_recipe = sum(stage.steps for stage in resolve("nanogpt-wiki", "muon").data.stages)
    return f"cut to {steps_run} of the recipe's {steps_of_recipe} steps"


@claim
def long_run() -> str:
    """Test perplexity after one pass over the text, each method against full space."""
    import docs_long_run as study

    names = {method.slug: method.name for method in all_methods()}
    told = [
        f"{names[slug]} {found.told(unit='%')}"
        for slug in study.runs()
        if slug != study.BASE and (found := study.gap(slug)) is not None
    ]
    full = estimate([*study.tests(study.BASE).values()])
    return (
        f"five PolarExpress steps in full space end at {full.told(2).removeprefix('+')} in test "
        f"perplexity after {study.million_tokens():.1f}M tokens. Against them: {'; '.join(told)}"
    )


@claim
def long_run_missing() -> str:
    """Which methods have no run of that length."""
    import docs_long_run as study

    names = [f"`{method.slug}`" for method in study.missing()]
    return f"Not run: {', '.join(names)}" if names else "Every method of this page was run"


@claim
def long_run_time() -> str:
    """What part of a whole step of the long run is the optimizer's."""
    import docs_long_run as study

    told = []
    for slug, words in (
        (study.BASE, "full space"),
        ("deflated", "the deflated map"),
        ("rand-muon", "the paper's sketch"),
        ("peer:torch-muon", "`torch.optim.Muon`"),
    ):
        if found := study.times(slug):
            optimizer, whole = found
            told.append(f"{optimizer / whole:.1%} for {words}")
    return (
        f"the optimizer's part of a whole step is {', '.join(told)}. A map can save no more than that "
        "of the time of this training"
    )


@claim
def papers_gap() -> str:
    """What rank 200 costs in the paper's own table."""
    from polarstep_lab.paper import TABLE_2

    rows = TABLE_2["nanogpt"].rows
    gap = 100 * (rows[SKETCHED].mean / rows[FULL].mean - 1)
    return f"the paper's own table has {signed(gap)}%, after {_tokens('nanogpt') / 1e6:.0f}M tokens"


@claim
def gamma_of_full_space() -> str:
    """The median γ of three full-space maps along a run."""
    folder = ROOT / "results/noise/gpt/records.jsonl"
    places = {
        "seven quintic steps": "muon-noise",
        "Jordan's coefficients": "muon/solver-empirical",
        "PolarExpress": "muon/solver-polar-express",
    }
    told = []
    for words, place in places.items():
        rows = RunRecord.load(folder / place / "seed-1").logs["gamma"]
        told.append(f"{statistics.median(row['gamma'] for row in rows):.4f} with {words}")
    return f"the median γ in full space is {', '.join(told)}"


@claim
def text_of_the_runs() -> str:
    """What the GPTs were trained on, so that it can be built again."""
    found = json.loads((ROOT / "results/gpt/text.json").read_text())
    train, held = found["shards"]
    return (
        f"{train['documents']:,} articles, {train['tokens']:,} tokens, for training and "
        f"{held['documents']:,} articles, {held['tokens']:,} tokens, held out; the shortest article has "
        f"{min(train['shortest'], held['shortest'])} tokens, the median {train['median']}. SHA-256 of "
        f"the tokens as little-endian uint16: `{train['sha256'][:16]}…` and `{held['sha256'][:16]}…`"
    )


# Noise and rates


@cache
def _last_noise() -> dict[str, dict[str, Any]]:
    """The last measurement of the noise of all hidden parameters on CIFAR-10, by its unit."""
    run = RunRecord.load(ROOT / "results/noise/cifar10/records.jsonl/muon-noise/seed-0")
    rows = run.logs["noise"]
    last = max(row["step"] for row in rows)
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["step"] == last:
            first.setdefault(row["unit"], row)
    return first


@claim
def noise_of_examples() -> str:
    """What the end of a CIFAR-10 run says about heavy tails, all of it."""
    example, batch = _last_noise()["example"], _last_noise()["batch"]
    alphas = ", ".join(f"{point['alpha']:.2f}" for point in example["growth"])
    lengths = ", ".join(str(point["examples"]) for point in example["growth"])
    tail = example["tail"]
    run = RunRecord.load(ROOT / "results/noise/cifar10/records.jsonl/muon-noise/seed-0")
    before = next(
        row for row in run.logs["noise"] if row["step"] == 453 and row["unit"] == "example"
    )
    return (
        f"At the last step the α of sums of {lengths} examples rises: {alphas}. For batches of 500 it "
        f"is {batch['growth'][0]['alpha']:.2f} ({batch['growth'][0]['low']:.2f} to "
        f"{batch['growth'][0]['high']:.2f}). Hill's estimate is {tail['alpha']:.1f} "
        f"({tail['low']:.1f} to {tail['high']:.1f}) there, and {before['tail']['alpha']:.1f} at step "
        f"{before['step']}. The mean norm is {example['noise']:.1f}, the root of the mean square "
        f"{example['moments']['2']:.2f}, the largest of {example['draws']} draws "
        f"{example['largest']:.0f}"
    )


@cache
def _rates() -> dict[str, Any]:
    return json.loads((ROOT / "results/rates/rates.json").read_text())


@claim
def rates_of_minimum() -> str:
    """How many cases fall as fast as promised, by three measures."""
    rows, replicas = _rates()["rates"], _rates()["setup"]["replicas"]

    def steep(kind: str) -> int:
        return sum(row["fit"][kind]["low"] <= row["predicted"] for row in rows)

    below = all(row["details"]["below_bound"] for row in rows)
    assert below, "a measured value is above the theorem's bound"
    gap = statistics.median(
        100 * (1 - low / high)
        for row in rows
        for low, high in zip(
            row["fit"]["minimum"]["values"], row["fit"]["held_out"]["values"], strict=True
        )
    )
    return (
        f"The smallest mean of {replicas} replicas over a run falls at least as steeply as "
        f"−(α−1)/(3α−2), within its 95% band, in {steep('minimum')} of {len(rows)} cases. That minimum "
        f"is biased down, because it also takes the luckiest noise. With the step chosen on one half of "
        f"the replicas and its mean taken over the other half, which is biased up, values are "
        f"{gap:.0f}% higher (median), and {steep('held_out')} of {len(rows)} cases are steep enough. "
        f"The average over a run, which the theorems bound as well, is steep enough in "
        f"{steep('average')} of {len(rows)}, and too flat in {len(rows) - steep('average')}"
    )


@claim
def flat_averages() -> str:
    """Which cases have too flat an average, by α."""
    rows = _rates()["rates"]
    flat = [row for row in rows if row["fit"]["average"]["low"] > row["predicted"]]
    told = []
    for alpha in sorted({row["alpha"] for row in rows}):
        count = sum(row["alpha"] == alpha for row in flat)
        of = sum(row["alpha"] == alpha for row in rows)
        told.append(f"{count} of {of} at α = {alpha:g}")
    return ", ".join(told)


@claim
def tuned_for_variance() -> str:
    """Slopes of the example about tuning for bounded variance."""
    rows = {row["name"]: row for row in _rates()["tuning"]["rows"]}
    right, wrong = rows["theorem"], rows["bounded variance"]

    def slope(row: Mapping[str, Any], kind: str) -> str:
        return f"K^{{{signed(row['fit'][kind]['slope'], 2)}}}"

    return (
        f"the average of E‖∇f‖ over a run falls like {slope(wrong, 'average')} with the α = 2 schedule, "
        f"where bounded-variance theory promises K^{{−1/4}}; with the schedule for α = "
        f"{right['alpha']:g} it falls like {slope(right, 'average')}, where "
        f"K^{{{signed(right['predicted'], 2)}}} is promised and its band reaches "
        f"{signed(right['fit']['average']['low'], 2)}. The smallest value of a run does not "
        f"distinguish the schedules: it falls like {slope(wrong, 'minimum')} and "
        f"{slope(right, 'minimum')}, flatter than either promise"
    )


# Ranks and renewals chosen from the captured share (adaptive.py)

ADAPTIVE = "results/adaptive"


def _adaptive(
    name: str, fixed: str, file: str, key: str, change: Callable[[float], float]
) -> Estimate:
    """The change of a figure against the fixed setting on the same seeds, in percent."""
    found: dict[str, dict[int, float]] = {name: {}, fixed: {}}
    for row in read_lines(ROOT / ADAPTIVE / file):
        if row.get("map") in found:
            found[row["map"]][row["seed"]] = change(row[key])
    seeds = sorted(set(found[name]) & set(found[fixed]))
    return estimate([100 * (found[name][s] / found[fixed][s] - 1) for s in seeds])


def _mean_share(name: str) -> float:
    """The mean of α over matrices, steps and seeds."""
    rows = [row for row in read_lines(ROOT / ADAPTIVE / "runs.jsonl") if row["map"] == name]
    return statistics.fmean(x for row in rows for of in row["shares"].values() for x in of)


@claim
def adaptive_runs() -> str:
    """What adaptive ranks and renewals change on a GPU."""
    from frontier import LENGTH, SEQUENCES

    rows = read_lines(ROOT / ADAPTIVE / "runs.jsonl")
    tokens = rows[0]["steps"] * SEQUENCES * LENGTH / 1e6
    ranks, bases = (
        _adaptive(*names, "runs.jsonl", "perplexity", float).told(unit="%")
        for names in (("rank-energy", "rank-equal"), ("kept-fall", "kept-together"))
    )
    least, most = (
        find(x for row in rows if row["map"] == "rank-energy" for x in row["ranks"]["768x768"])
        for find in (min, max)
    )
    slow, fast = (
        find(x for row in rows if row["map"] == "kept-fall" for x in row["renewals"]["768x768"])
        for find in (min, max)
    )
    return (
        f"after {tokens:.1f}M tokens perplexity changed by {ranks} with ranks by energy, against equal "
        f"ranks, and by {bases} with new bases by the fall of α, against new bases for all matrices at "
        f"every fourth step. The 768×768 matrices had mean ranks from {least:.0f} to {most:.0f} in the "
        f"place of 208, and a new basis at {100 * slow:.0f}% to {100 * fast:.0f}% of the steps in the "
        f"place of 25%. The mean of α went from {_mean_share('rank-equal'):.3f} to "
        f"{_mean_share('rank-energy'):.3f} with the ranks, and from "
        f"{_mean_share('kept-together'):.3f} to {_mean_share('kept-fall'):.3f} with the bases"
    )


@claim
def adaptive_small() -> str:
    """What the rules change in a small GPT on a CPU, and what ranks could capture of its momentum."""
    told = []
    for words, *names in (
        ("ranks by energy", "rank-energy", "rank-equal"),
        ("ranks by share", "rank-share", "rank-equal"),
        ("bases by fall", "kept-fall", "kept-together"),
        ("bases renewed in turn", "kept-age", "kept-together"),
    ):
        found = _adaptive(names[0], names[1], "small.jsonl", "loss", math.exp)
        told.append(f"{found.told(unit='%')} for {words}")
    turn = _adaptive("kept-fall", "kept-age", "small.jsonl", "loss", math.exp)
    rows = [row for row in read_lines(ROOT / ADAPTIVE / "small.jsonl") if "captured" in row]
    last = max(row["step"] for row in rows)
    energies = []
    for row in rows:
        if row["step"] == last and row["shape"] == "128x128":
            its = row["captured"]
            equal, rule, best = (100 * its[k][0] for k in ("equal", "by energy", "best for energy"))
            energies.append(
                f"{equal:.1f}%, {rule:.1f}% and {best:.1f}% for a mean of {row['mean']}"
            )
    return (
        "of the energy of its 128×128 momentum matrices equal ranks, the rule and the best ranks "
        f"capture {', and '.join(energies)}. Perplexity changed by {', '.join(told[:-1])} and "
        f"{told[-1]}. Bases by fall against bases renewed in turn: {turn.told(unit='%')}"
    )


def made(name: str) -> str:
    """The text of a claim."""
    if name not in CLAIMS:
        raise SystemExit(f"claim {name!r}: expected one of {', '.join(sorted(CLAIMS))}")
    return CLAIMS[name]()
