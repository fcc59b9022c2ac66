"""The long run: one pass of ``nanogpt-wiki`` over 73 million tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from differences import change, percent
from frontier import LENGTH, SEQUENCES, STEPS
from long_run import SEEDS, SHOWN, SLOW_TABLE, TABLE, Row
from pages.claims.cifar10 import cifar_values_that_differ
from pages.claims.words import claim, signed
from pages.records import best_rates
from pages.records import long_run as study
from pages.records.maps import HEADLINE, weighed
from polarstep_lab.estimates import Estimate
from polarstep_lab.methods import find_method
from polarstep_lab.paper import TABLE_2


@claim
def gpt_order() -> str:
    """How many pairs of methods come in the paper's order in the long runs."""
    paper = TABLE_2["nanogpt"]
    ends = {method: study.tests(find_method(method).slug) for method in paper.rows}
    found = {method: _estimate(values.values()) for method, values in ends.items()}
    same, unclear, turned = paper.order(found)
    pairs = same + unclear + len(turned)
    seeds = {len(values) for values in ends.values()}
    muons = {method: found[method] for method in found if find_method(method).algorithm == "muon"}
    of_muons = paper.order(muons).same + paper.order(muons).unclear + len(paper.order(muons).turned)
    assert of_muons == sum(
        find_method(a).randomized != find_method(b).randomized for a, b in combinations(muons, 2)
    ), "a pair of two maps in full space, or of two sketches, is told apart too"
    return (
        f"of the {pairs} pairs of methods that the paper tells apart at 95%, "
        f"{same} come in the same order here and {len(turned) or 'none'} in the other "
        f"(n = {min(seeds)}, {study.million_tokens():.1f}M tokens); {pairs - of_muons} of these pairs "
        f"have AdamW or SGD in them, and {of_muons} are full space against a sketch"
    )


@claim
def kaczmarz_behind() -> str:
    """Kaczmarz beside Gaussian, in the paper and here."""
    paper = TABLE_2["nanogpt"].rows
    kaczmarz, gaussian = (f"Rand Muon (Nes.-{sketch})" for sketch in ("Kaczmarz", "Gaussian"))
    here = percent(*(study.tests(find_method(each).slug) for each in (kaczmarz, gaussian)))
    return (
        f"Kaczmarz, level with Gaussian in the paper ({paper[kaczmarz].mean} and "
        f"{paper[gaussian].mean}), has {here.told(unit='%')} against it after "
        f"{study.million_tokens():.1f}M tokens"
    )


@claim
def not_reproduced() -> str:
    """Where the paper's results were run and came out otherwise."""
    differ, values = cifar_values_that_differ()
    return (
        f"{kaczmarz_behind()}, and {differ} of {values} values of the CIFAR-10 ablations differ from "
        "the authors' by more than the 95% intervals"
    )


@claim
def sgd_behind() -> str:
    """SGD against full space, here and in the paper."""
    rows = TABLE_2["nanogpt"].rows
    theirs = 100 * (rows["SGD (Nesterov)"].mean / rows["Muon (Nesterov)"].mean - 1)
    tried = study.rates()["sgd"]
    best = study.chosen_rate("sgd")
    above = min(lr for lr in tried if lr > best)
    return (
        f"{long_gap('sgd')} against full space after {study.million_tokens():.1f}M tokens, where the "
        f"means of the paper's table have +{theirs:.0f}% against seven quintic steps in full space. It "
        f"had {len(tried)} rates for the matrices, and at {above:g}, the next above its best, short "
        f"runs end at {tried[above]:,.0f}"
    )


def _estimate(values: Iterable[float]) -> Estimate:
    """The estimate from values of which some are finite."""
    found = Estimate.of(values)
    assert found is not None
    return found


@claim
def nesterov_lead() -> str:
    """Nesterov momentum against Polyak's in the long runs, with seven quintic steps."""
    told = [
        f"{percent(study.tests(slug), study.tests(f'{slug}-polyak')).told(unit='%')} {words}"
        for slug, words in (("muon", "in full space"), ("rand-muon", "with the paper's sketch"))
    ]
    return (
        f"{' and '.join(told)} against Polyak's in test perplexity after "
        f"{study.million_tokens():.1f}M tokens"
    )


@claim
def ranks_long_run() -> str:
    """The deflated map at three ranks: perplexity against full space, and the optimizer's time."""
    told = []
    for rank, slug in ((56, "deflated"), (88, "deflated-88"), (120, "deflated-120")):
        times = study.times(slug)
        assert times is not None, f"{slug} has no run alone on its GPU"
        told.append(f"{long_gap(slug)} at rank {rank}, with {times[0]:.1f} ms")
    return (
        f"against full space in test perplexity after {study.million_tokens():.1f}M tokens it ends at "
        f"{', '.join(told)} for the optimizer in each step, in runs of several commits, "
        f"{one_rate('all')}"
    )


@claim
def rates_tried() -> str:
    """How many rates were tried for the rows of the long run."""
    rows_of: dict[int, list[str]] = {}
    for row in TABLE:
        if row.slug in study.runs():
            rows_of.setdefault(len(study.rates().get(row.slug, ())), []).append(row.title)
    own = [f"{count} for {'; '.join(titles)}" for count, titles in sorted(rows_of.items()) if count]
    return f"{'. '.join(reversed(own))}. None of its own: {'; '.join(rows_of[0])}"


@claim
def long_run_changed() -> str:
    """How many of the long runs no commit has."""
    count = sum(len(study.sources(row.slug)) for row in TABLE)
    changed = [commit for row in TABLE for commit in study.unknown(row.slug)]
    return (
        f"{len(changed)} of the {count} runs are of {len(set(changed))} commits with changes "
        "that were not committed"
    )


@claim
def slow_ranks() -> str:
    """Ranks of the deflated map on the seed that all of them have, with the embedding of before."""
    full = study.tests("muon-polar-express-slow")
    told = []
    for slug, words in (
        ("deflated-56-slow", "rank 56"),
        ("deflated-120-slow", "rank 120"),
        ("deflated-48-slow", "rank 48 with the smaller δ"),
    ):
        found = percent({1: study.tests(slug)[1]}, full)
        told.append(f"{words} at {signed(found.value)}%")
    return (
        f"{', '.join(told)} against full space in test perplexity, after "
        f"{study.million_tokens():.1f}M tokens (one seed)"
    )


@claim
def sgd_above_guessing() -> str:
    """At how many rates SGD ended above the perplexity of guessing."""
    vocabulary = 50257
    tried = study.rates()["sgd-slow"]
    above = sum(value > vocabulary for value in tried.values())
    return f"above the perplexity of guessing ({vocabulary:,}) at {above} of {len(tried)} rates"


@claim
def long_run() -> str:
    """Test perplexity after one pass over the text, each row against full space."""
    return _against_full_space(SHOWN)


@claim
def slow_long_run() -> str:
    """The same with the rate that the recipe's embedding had before."""
    return _against_full_space(SLOW_TABLE)


def _against_full_space(rows: Sequence[Row]) -> str:

    base = rows[0].base
    told = [
        f"{row.title}: {found.told(unit='%')}"
        for row in rows
        if row.slug != base and (found := study.gap(row.slug)) is not None
    ]
    full = change(study.tests(base).values())
    return (
        f"Five PolarExpress steps in full space end at {full.told(2).removeprefix('+')} in test "
        f"perplexity after {study.million_tokens():.1f}M tokens. Against them: {'; '.join(told)}"
    )


@claim
def embedding_rate() -> str:
    """What rates for embedding and head are worth, with one rate for the matrices and with the new one.

    The earlier runs have another rate for the matrices than the rows of the table. Runs at other rates
    have one with theirs.
    """
    slow = f"{study.BASE}-slow"
    lr, new = study.rate(slow), study.rate(study.BASE)
    alike = percent(best_rates.tests(study.BASE, lr), study.tests(slow))
    with_rate = percent(study.tests(study.BASE), study.tests(slow))
    adamw, adamw_slow = (min(study.rates()[slug].values()) for slug in ("adamw-head", "adamw-slow"))
    return (
        "with 0.3 for the embedding and 0.004 for the head in place of 0.008 for both, full space ends "
        f"{alike.told(unit='%')}, both at {lr:g}, and {with_rate.told(unit='%')} at {new:g} against "
        f"{lr:g}, in test perplexity after {study.million_tokens():.1f}M tokens. AdamW with one rate "
        f"for head and matrices, at the best of several, has {adamw:.0f} in validation after 120 steps "
        f"where it had {adamw_slow:.0f}"
    )


@claim
def larger_batches() -> str:
    """The deflated map after the long run, whose batches are larger than those of the frontier."""
    run = next(iter(study.runs()[study.BASE].values()))
    batches = [
        stage["sequences"] * stage["sequence_length"] / 1000
        for stage in run.identity.config["data"]["stages"]
    ]
    small = SEQUENCES * LENGTH / 1000
    return (
        f"{long_gap('deflated')} at rank 56, {long_gap('deflated-88')} at rank 88 and "
        f"{long_gap('deflated-120')} at rank 120 against full space, after "
        f"{study.million_tokens():.1f}M tokens in batches of "
        f"{min(batches):.0f} to {max(batches):.0f} thousand, on a GPT of "
        f"{run.identity.config['model']['layers']} layers, where those after "
        f"{STEPS * small / 1000:.1f}M tokens are of batches of {small:.0f} thousand. All ranks are "
        f"{one_rate('').strip()}"
    )


@claim
def rows_long_run() -> str:
    """Normalized rows in the long run."""
    told = _normalized_rows("muon-polar-express-rows", "deflated-120-rows", rank=120)
    return f"{told}. All are {one_rate('').strip()}"


@claim
def slow_rows_long_run() -> str:
    """Normalized rows in the long run, with the embedding of before."""
    return _normalized_rows("muon-polar-express-rows-slow", "deflated-120-rows-slow", rank=120)


def _normalized_rows(full: str, deflated: str, rank: int) -> str:
    """Two rows of the long run with normalized rows, in full space and with the deflated map."""
    return (
        f"{long_gap(full)} in full space and {long_gap(deflated)} with `Deflated` of "
        f"rank {rank}, both against full space without them after {study.million_tokens():.1f}M tokens; "
        f"`Deflated` takes {step_times(deflated, full)}"
    )


def step_times(slug: str, full: str) -> str:
    """The optimizer's time of a row and of its form in full space, which may be of another commit."""
    ours, theirs = study.times(slug), study.times(full)
    assert ours is not None, f"{slug} has no run alone on its GPU"
    assert theirs is not None, f"{full} has no run alone on its GPU"
    sources = [{*study.sources(each)} for each in (slug, full)]
    other = "" if sources[0] == sources[1] else " at another commit"
    return f"{ours[0]:.1f} ms for the optimizer in each step in place of {theirs[0]:.1f}{other}"


def one_rate(which: str = "both") -> str:
    """At which rate rows are compared that have no other, and that full space has a better one."""
    chosen = study.chosen_rate(study.BASE)
    assert best_rates.best(study.BASE) != chosen, "full space is at its best there: leave this out"
    return f"{which} at {chosen:g}, which is not full space's best rate"


def long_gap(slug: str) -> str:
    """A row of the long run against full space, as ``+2.5% (one seed)``."""
    found = study.gap(slug)
    assert found is not None, f"{slug} has no run on a seed of full space"
    return found.told(unit="%")


@claim
def rows_of_no_commit() -> str:
    """The rows of the README's table whose long runs no commit has, in part or all."""
    shown = [
        (given.replace("nothing: ", ""), each.long)
        for given, title in HEADLINE
        for each in weighed()
        if each.title == title and each.long
    ]
    told = []
    for given, slug in shown:
        sources = best_rates.sources(slug)
        if count := sum(source.endswith("+") for source in sources):
            told.append(f"{count} of {len(sources)} with {given}")
    return (
        f"Of the runs over {study.million_tokens():.1f}M tokens some are of sources that no commit has: "
        f"{'; '.join(told)}"
    )


@claim
def small_head() -> str:
    """The deflated map of rank 56 in the long run, against full space and against rank 120."""
    against = percent(study.tests("deflated"), study.tests("deflated-120"))
    return (
        f"{long_gap('deflated')} in test perplexity against full space and "
        f"{against.told(unit='%')} against rank 120, after {study.million_tokens():.1f}M tokens, "
        f"{one_rate('all')}"
    )


@claim
def long_run_missing() -> str:
    """Which seeds have no run of that length, and of which rows."""
    rows_of: dict[tuple[int, ...], list[str]] = {}
    for slug, missing in study.missing().items():
        rows_of.setdefault(tuple(missing), []).append(f"`{slug}`")
    told = []
    for seeds, slugs in rows_of.items():
        words = f"seed{'s' * (len(seeds) > 1)} {' and '.join(map(str, seeds))}"
        every = len(seeds) == len(SEEDS)
        told.append(f"{'all seeds' if every else words} of {', '.join(slugs)}")
    return "; ".join(told) if told else "no run"


@claim
def long_run_edges() -> str:
    """For which rows the best rate may lie outside those that were tried."""
    names = [row.title for row in study.at_an_edge()]
    return "; ".join(names) if names else "no row"


@claim
def best_rate_of_muon() -> str:
    """The rate that the short runs chose for the rows of Muon that have rates of their own."""
    muons = [
        row.slug for row in TABLE if row.method.algorithm == "muon" and row.slug in study.rates()
    ]
    best = sorted({*map(study.chosen_rate, muons)})
    return (
        f"{' or '.join(f'{lr:g}' for lr in best)} in each of the {len(muons)} rows that have rates of "
        "their own (one seed)"
    )


@claim
def long_run_time() -> str:
    """What part of a whole step of the long run is the optimizer's."""
    told = []
    for slug, words in (
        (study.BASE, "full space"),
        ("deflated-120", "the deflated map"),
        ("rand-muon", "the paper's sketch"),
    ):
        if found := study.times(slug):
            optimizer, whole = found
            told.append(f"{optimizer / whole:.1%} for {words}")
    alone = filter(None, (study.times(row.slug) for row in TABLE))
    rest = [whole - optimizer for optimizer, whole in alone]
    return (
        f"the optimizer's part of a whole step is {', '.join(told)}. A map can save no more than that "
        "of the time of this training. The rest of a step, which is the same in all rows, took "
        f"{min(rest):.0f} to {max(rest):.0f} ms in runs of different days, so whole steps and times "
        "in the figure, differ by that too"
    )
