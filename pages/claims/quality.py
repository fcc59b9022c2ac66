"""What each map does to the perplexity of a GPT, against full space after 24.6 million tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from differences import change, paired
from frontier import reported
from pages import ROOT
from pages.claims.cost import ratio
from pages.claims.long_run import long_gap, one_rate
from pages.claims.words import claim, signed
from pages.records import long_run as study
from pages.records.costs import AUTO, FULL_SPACE, HELD
from pages.records.heads import on_validation
from pages.records.maps import Weighed, at_chosen, peers, weighed
from pages.records.quality import (
    BASE,
    TEST,
    at_chosen_rates,
    chosen,
    million_tokens,
    perplexities,
    quality,
)
from pages.records.runs import FULL, SKETCHED, accuracy
from polarstep_lab.paper import TABLE_2, TRAINING_TOKENS
from polarstep_lab.storage import read_lines


def versus_full(trained: tuple[str, float]) -> str:
    """As ``+6.1% ± 2.5 (n = 2)``."""
    return quality(trained).told(unit="%")


@claim
def low_rank_loss() -> str:
    """What a quarter of the rank costs, at the rate of full space and at its own."""
    name, own = at_chosen("low-rank")
    alike = versus_full((name, BASE[1]))
    assert own != BASE[1]
    return (
        f"ends {alike} higher in test perplexity than five PolarExpress steps in full space with both "
        f"at {BASE[1]:g}, and {versus_full((name, own))} with `LowRank` at {own:g}, which another seed "
        f"chose, after {million_tokens():.1f}M tokens"
    ).replace("+", "")


@claim
def rows_gain() -> str:
    """What normalized rows gain in full space, at each rate that both have and at the chosen one."""
    name, rate = at_chosen("full+rows")
    equal = ", ".join(
        f"{quality((name, lr), (BASE[0], lr)).told(unit='%')} with both at a rate of {lr:g}"
        for lr in (BASE[1], rate)
    )
    assert rate != BASE[1]
    return (
        f"{equal}, and {versus_full((name, rate))} at {rate:g}, which another seed chose, against full "
        f"space without them at {BASE[1]:g}, in test perplexity after {million_tokens():.1f}M tokens"
    )


@claim
def pairs_with_rows() -> str:
    """What normalized rows gain at each map's own rates, and at equal rates.

    Without the seed that chose the rates. Full space without rows has the rate of the tables, at which
    it ends lower on the other seeds.
    """
    found = perplexities(TEST)
    own = [
        (each.trained, BASE if plain == BASE[0] else at_chosen(plain))
        for each in weighed()
        if each.trained and each.trained[0].endswith("+rows")
        for plain in [each.trained[0].removesuffix("+rows")]
    ]
    equal = [
        ((name, lr), (name.replace("+rows", ""), lr))
        for name, lr in found
        if "+rows" in name and found.get((name.replace("+rows", ""), lr))
    ]
    best, pairs_of_best, maps = _gain_of_rows(own)
    alike, pairs, both = _gain_of_rows(equal)
    return (
        f"by {best} in the mean of {maps} maps against the same maps without them, each at the best of "
        f"its own rates, and by {alike} in the mean of {both} maps and rates where both have one rate, "
        f"after {million_tokens():.1f}M tokens ({pairs_of_best} pairs of runs and {pairs} pairs, all of "
        "the same three seeds)"
    ).replace("+", "")


Trained = tuple[str, float]


def _gain_of_rows(compared: Iterable[tuple[Trained, Trained]]) -> tuple[str, str, int]:
    """How far maps end below others in the mean, in how many pairs of runs, and the number of maps."""
    found = perplexities(TEST)
    gains: dict[int, list[float]] = {}
    for rows, base in compared:
        for seed in reported(found[rows]).keys() & found[base].keys():
            gains.setdefault(seed, []).append(100 * (1 - found[rows][seed] / found[base][seed]))
    (maps,) = {len(each) for each in gains.values()}
    every = [gain for each in gains.values() for gain in each]
    mean = change(statistics.fmean(each) for each in gains.values())
    return mean.told(unit="%"), f"{sum(gain > 0 for gain in every)} of {len(every)}", maps


@claim
def deflated_with_rows() -> str:
    """Whether the map of ``auto`` with normalized rows reaches full space for less, at width 768."""
    prices = [ratio(name, "nanoGPT") for name in (f"{AUTO}, rows normalized", FULL_SPACE)]
    return (
        f"{versus_full(at_chosen('lift-120-warm+rows'))} in test perplexity against full space at "
        f"{BASE[1]:g} without normalized rows, after {million_tokens():.1f}M tokens, for {prices[0]} "
        f"instead of {prices[1]} times AdamW's step on nanoGPT's matrices"
    )


@claim
def deflated_gap() -> str:
    """How far the deflated map is from full space, at each rate that was tried."""
    rates = 0.014, 0.02
    eight = [quality(("flat-48-warm", rate), ("full", rate)) for rate in rates]
    runs = {rate: reported(perplexities()["flat-48-warm", rate]) for rate in rates}
    of_seeds = [
        statistics.fmean(
            100 * (runs[rate][seed] / perplexities()["full", rate][seed] - 1) for rate in rates
        )
        for seed in runs[rates[0]].keys() & runs[rates[1]].keys()
    ]
    sixteen = quality(("flat-48-warm-16", 0.02), ("full", 0.02))
    rows = quality(("flat-48-warm+rows", 0.014))
    beside_rows = quality(("flat-48-warm+rows", 0.014), ("full+rows", 0.014))
    return (
        f"With products in eight bits, as on a Hopper GPU, it is {eight[0].told(unit='%')} against full "
        f"space with both at a rate of 0.014, {eight[1].told(unit='%')} with both at 0.02, and "
        f"{change(of_seeds).told(unit='%')} in the mean of both rates. In 16 bits at 0.02 it is "
        f"{sixteen.told(unit='%')}. With normalized rows, in eight bits at 0.014, it is "
        f"{rows.told(unit='%')} against full space without them, and "
        f"{beside_rows.told(unit='%')} against full space with them, all in the perplexity of all "
        f"held-out text after {million_tokens():.1f}M tokens"
    )


@claim
def kept_basis_loss() -> str:
    """What a basis for four steps costs."""
    lost = paired(accuracy(FULL), accuracy(SKETCHED, "sketch", "kept-fast"))
    return (
        f"cost {lost.value:.2f} ± {lost.interval:.2f} points of accuracy on CIFAR-10 against full space "
        f"(n = {lost.pairs}). On `Deflated` perplexity "
        f"changed by {quality(('joint-2-kept', 0.014)).told(unit='%')} against full space after "
        f"{million_tokens():.1f}M tokens"
    )


@claim
def heads_on_validation() -> str:
    """The same rows of the long run by the other half of the held-out text."""
    ranks = {56: "deflated", 88: "deflated-88", 120: "deflated-120"}
    found = {rank: on_validation(slug) for rank, slug in ranks.items()}
    told = [f"{gap.told(unit='%')} at rank {rank}" for rank, gap in found.items()]
    apart = [f"rank {rank}" for rank, gap in found.items() if not gap.ends[0] <= 0 <= gap.ends[1]]
    return (
        f"{', '.join(told[:-1])} and {told[-1]} against full space, in validation perplexity after "
        f"{study.million_tokens():.1f}M tokens, {one_rate('all')}: this text tells "
        f"{' and '.join(apart) or 'none'} of them from full space"
    )


@claim
def auto_with_rows() -> str:
    """The map of ``auto`` with normalized rows in long runs, and what its step costs."""
    prices = [ratio(f"{AUTO}, rows normalized", load) for load in HELD]
    slug = "deflated-120-rows"
    no_commit = len(study.unknown(slug)) == len(study.sources(slug))
    changed = ", in runs of sources that no commit has" if no_commit else ""
    return (
        f"{long_gap(slug)} against full space without them, after "
        f"{study.million_tokens():.1f}M tokens, at width 768, {one_rate()}{changed}. "
        f"A step takes {prices[0]} times AdamW's on nanoGPT's matrices, with the same ranks, and "
        f"{prices[1]} times on the 8B layer"
    )


@claim
def peers_quality() -> str:
    """Perplexity of other libraries' optimizers in the same loop, and of ours with normalized rows."""
    told = [
        f"{each.title} has {quality(each.trained).told(unit='%')}"
        for each in peers()
        if each.trained
    ]
    rows = [versus_full(at_chosen(name)) for name in ("full+rows", "lift-120-warm+rows")]
    return (
        f"In test perplexity against full space at {BASE[1]:g} {', '.join(told)}, after "
        f"{million_tokens():.1f}M tokens. With normalized rows our full space has {rows[0]}, and the "
        f"map of `auto` {rows[1]}"
    )


@claim
def peers_ahead() -> str:
    """The optimizers of other libraries whose mean is below that of our full space."""
    ahead = [each for each in peers() if each.trained and quality(each.trained).value < 0]
    told = [
        f"{each.title} {quality(each.trained).told(unit='%')}" for each in ahead if each.trained
    ]
    own = [_at_chosen_rates(each) for each in ahead]
    return (
        f"{' and '.join(told)}, in test perplexity against our full space at {BASE[1]} after "
        f"{million_tokens():.1f}M tokens. With our full space at {chosen(BASE[0])}, the rate that the "
        f"tuning seed chose for it as for them, their lead is {' and '.join(own)}"
    )


def _at_chosen_rates(peer: Weighed) -> str:
    """The gap of another library's optimizer to full space, both at the rates that one seed chose."""
    assert peer.trained is not None
    found = at_chosen_rates(peer.trained[0])
    assert found is not None
    return found.change.told(unit="%")


FANS = ("full+fans", 0.02)
AUTO_FANS = ("lift-120-warm+rows+fans", 0.02)
"""Full space, and the map of ``auto`` with normalized rows, at rates times √(m/n)."""


@claim
def fan_ratio_gain() -> str:
    """What the rate √(m/n) in place of √max(1, m/n) changes, each at its own best rate."""
    rows = quality(AUTO_FANS, at_chosen("lift-120-warm+rows"))
    return (
        f"test perplexity changes by {versus_full(FANS)} in full space and by {rows.told(unit='%')} "
        "with the map of `auto` and normalized rows, both at 0.02 against 0.014 without it, "
        f"after {million_tokens():.1f}M tokens"
    )


@claim
def fan_ratio_beside_dion() -> str:
    """Our maps at dion's rate beside dion's, and what each costs."""
    others = {each.title: each for each in peers()}
    told = []
    for words, ours, timed, title in (
        ("full space", FANS, FULL_SPACE, "Muon of dion"),
        (
            "the map of `auto` (ℓ = 128) with normalized rows",
            AUTO_FANS,
            f"{AUTO}, rows normalized",
            "NorMuon of dion",
        ),
    ):
        theirs = others[title]
        assert theirs.trained is not None
        assert theirs.timed is not None
        told.append(
            f"{words} has {quality(ours, theirs.trained).told(unit='%')} against {title}, for "
            f"{ratio(timed, 'nanoGPT')} instead of {ratio(theirs.timed, 'nanoGPT')} times AdamW's step "
            "on nanoGPT's matrices"
        )
    return f"{', and '.join(told)}, in test perplexity after {million_tokens():.1f}M tokens"


@claim
def warm_up_gain() -> str:
    """What a warm-up changes for AdamW and SOAP, each at its own best rate with and without it."""
    adamw = quality(("adamw+warmup", 0.001), ("adamw", 0.0005))
    soap = quality(("peer:soap+warmup", 0.002), ("peer:soap", 0.002))
    return (
        f"Against runs without, a warm-up over the first tenth of the run changes test perplexity by "
        f"{adamw.told(unit='%')} with AdamW and by {soap.told(unit='%')} with SOAP, after "
        f"{million_tokens():.1f}M tokens"
    )


@claim
def made_twice() -> str:
    """How far two runs with equal settings are apart."""
    again = perplexities()
    apart = [
        100 * (again[run["map"], run["lr"]][run["seed"]] / run["perplexity"] - 1)
        for run in read_lines(ROOT / "results/frontier/repeated.jsonl")
    ]
    return (
        f"{len(apart)} runs that were made again at a later commit, with equal settings and seeds, "
        f"ended {math.hypot(*apart) / math.sqrt(len(apart)):.1f}% apart in the root mean square and "
        f"{max(map(abs, apart)):.1f}% at most"
    )


@claim
def papers_gap() -> str:
    """What rank 200 costs in the paper's own table."""
    rows = TABLE_2["nanogpt"].rows
    apart = rows[SKETCHED].estimate.minus(rows[FULL].estimate)
    assert apart.interval is not None
    gap, half = (100 * value / rows[FULL].mean for value in (apart.value, apart.interval))
    return (
        f"the paper's own table has {signed(gap)}% ± {half:.1f} against seven quintic steps in full "
        f"space ({rows[FULL].seeds} seeds of each, validation text), after "
        f"{TRAINING_TOKENS / 1e6:.0f}M tokens"
    )


@claim
def delta_change() -> str:
    """The deflated map with the δ of now beside an earlier form with a smaller δ and a smaller head."""
    found = quality(("lift-56-warm", 0.014), ("flat-48-warm", 0.014))
    return (
        f"{found.told(unit='%')} for rank 56 with the δ of now against rank 48 with the smaller δ, "
        f"in the perplexity of all held-out text after {million_tokens():.1f}M tokens"
    )
