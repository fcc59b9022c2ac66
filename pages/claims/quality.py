"""What each map does to the perplexity of a GPT, against full space after 24.6 million tokens."""

from __future__ import annotations

import math
import statistics

from differences import Change, change, paired
from frontier import reported
from pages import ROOT
from pages.claims.cost import ratio
from pages.claims.long_run import long_gap, one_rate
from pages.claims.words import claim, signed
from pages.records import best_rates
from pages.records import long_run as study
from pages.records.costs import AUTO, FULL_SPACE, SIXTH
from pages.records.maps import Weighed, at_chosen, peers, weighed
from pages.records.quality import (
    BASE,
    RATES,
    TEST,
    at_chosen_rates,
    chosen,
    million_tokens,
    perplexities,
    quality,
)
from pages.records.runs import FULL, SKETCHED, accuracy, tokens_of
from polarstep_lab.paper import TABLE_2
from polarstep_lab.storage import read_lines


def versus_full(trained: tuple[str, float]) -> str:
    """As ``+6.1% ± 2.5 (n = 2)``."""
    return quality(trained).told(unit="%")


@claim
def low_rank_loss() -> str:
    """What a quarter of the rank costs."""
    return (
        f"ends {versus_full(at_chosen('low-rank'))} higher in test perplexity than five PolarExpress "
        f"steps in full space after {million_tokens():.1f}M tokens"
    ).replace("+", "", 1)


@claim
def rates_of_maps() -> str:
    """What chose the rates of the maps, and which rows are exceptions."""
    ours = [each for each in weighed() if each.trained and each.trained != BASE]
    tried_once = [each for each in ours if each.trained and chosen(each.trained[0]) is None]
    assert all("+warmup" not in each.trained[0] for each in ours[1:] if each.trained)
    assert ours[0].trained == at_chosen("adamw+warmup")
    exceptions = "".join(
        f"; {each.title} had one rate, {each.trained[1]:g}" for each in tried_once if each.trained
    )
    return (
        f"The rate of a row is the best of three or more on another seed than those shown. Full space "
        f"has {BASE[1]:g}, with which it ends lower on the seeds shown than with {chosen(BASE[0]):g}, "
        f"the choice of that seed. AdamW has a warm-up{exceptions}"
    )


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
    """In how many pairs of runs normalized rows end lower, without the seed that chose rates."""
    found = perplexities(TEST)
    gains: dict[int, list[float]] = {}
    for (name, lr), runs in found.items():
        base = found.get((name.replace("+rows", ""), lr), {})
        if "+rows" in name:
            for seed in reported(runs).keys() & base.keys():
                gains.setdefault(seed, []).append(100 * (runs[seed] / base[seed] - 1))
    (maps,) = {len(each) for each in gains.values()}
    every = [gain for each in gains.values() for gain in each]
    mean = change(-statistics.fmean(each) for each in gains.values())
    return (
        f"in {sum(gain < 0 for gain in every)} of {len(every)} pairs of runs against the same map "
        f"without them, after {million_tokens():.1f}M tokens, by {mean.told(unit='%')} in the mean of "
        f"{maps} maps and rates"
    ).replace("+", "", 1)


@claim
def deflated_with_rows() -> str:
    """Whether the map of ``auto`` with normalized rows reaches full space for less, at width 768."""
    prices = [ratio(name, "nanoGPT") for name in (f"{SIXTH}, rows normalized", FULL_SPACE)]
    return (
        f"{versus_full(at_chosen('lift-120-warm+rows'))} in test perplexity against full space without "
        f"normalized rows, after {million_tokens():.1f}M tokens, for {prices[0]} instead of {prices[1]} "
        "times AdamW's step on nanoGPT's matrices"
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


def _within(found: Change, tokens: float, goal: float = 1.0) -> str:
    """Whether a map is so near full space, in percent: with its interval, by its mean, or not."""
    assert found.interval is not None
    words = "not"
    if found.value <= goal:
        words = "with its interval" if found.ends[1] <= goal else "by its mean"
    return f"{words} after {tokens:.1f}M tokens, {found.told(unit='%')}"


@claim
def within_a_hundredth() -> str:
    """Whether heads of three widths are within 1% of full space, in runs of two lengths."""
    told = []
    at_their_best = {row.slug for row in best_rates.rows()}
    for words, trained, slug in (
        ("a sixth", ("lift-120-warm", 0.014), "deflated-120"),
        ("an eighth", ("lift-88-warm", 0.014), "deflated-88"),
        ("a twelfth", ("lift-56-warm", 0.014), "deflated"),
    ):
        long = best_rates.gap(slug) if slug in at_their_best else study.gap(slug)
        assert long is not None
        short = _within(quality(trained), million_tokens())
        told.append(
            f"a head of {words} of the width {short}, and {_within(long, study.million_tokens())}"
        )
    return (
        f"{'; '.join(told)}, in test perplexity against full space. Each is at the best of its rates "
        f"over all steps, but for an eighth and a twelfth after {study.million_tokens():.1f}M tokens: "
        f"these are {one_rate('').strip()}"
    )


@claim
def auto_with_rows() -> str:
    """The map of ``auto`` with normalized rows in long runs, and what its step costs."""
    prices = [ratio(f"{AUTO[load]}, rows normalized", load) for load in ("nanoGPT", "8B layer")]
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
        f"In test perplexity against full space {', '.join(told)}, after "
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
        f"{million_tokens():.1f}M tokens ({' and '.join(own)} against it at {chosen(BASE[0])}, which "
        "the seed that chose their rates would choose for it)"
    )


def _at_chosen_rates(peer: Weighed) -> str:
    """The gap of another library's optimizer to full space, both at the rates that one seed chose."""
    assert peer.trained is not None
    found = at_chosen_rates(peer.trained[0])
    assert found is not None
    return found.change.told(unit="%")


@claim
def peers_at_chosen_rates() -> str:
    """The same with full space at the rate that one seed chose for it, and which of two is better."""
    rate = chosen(BASE[0])
    assert rate is not None
    own = quality((BASE[0], rate))
    muons = [each for each in peers() if each.trained and each.trained[1] in RATES]
    told = ", ".join(f"{each.title} has {_at_chosen_rates(each)}" for each in muons)
    return (
        f"The seed that chooses rates has {rate} for our full space. On the other seeds that ends "
        f"{own.told(unit='%')} in test perplexity against {BASE[1]}, which is therefore the stronger "
        f"baseline, and the table's. With full space at {rate}, {told}, after {million_tokens():.1f}M "
        "tokens"
    )


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
            f"{SIXTH}, rows normalized",
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
        f"{tokens_of('nanogpt') / 1e6:.0f}M tokens"
    )


@claim
def delta_change() -> str:
    """The deflated map with the δ of now beside an earlier form with a smaller δ and a smaller head."""
    found = quality(("lift-56-warm", 0.014), ("flat-48-warm", 0.014))
    return (
        f"{found.told(unit='%')} for rank 56 with the δ of now against rank 48 with the smaller δ, "
        f"in the perplexity of all held-out text after {million_tokens():.1f}M tokens"
    )
