"""The GPT of ``nanogpt-small``, on 6.6 million tokens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cache
from typing import Any

from differences import change, paired
from docs_claims.recorded import FULL, SKETCHED, accuracy, runs, values
from docs_claims.words import claim, signed, span

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
    fair = change(
        [sketch[best(sketch, seed)][seed] - full[best(full, seed)][seed] for seed in seeds]
    )
    alone = {
        name: values("results/noise/gpt", "nanogpt-small", FULL, "solver", name)[1]
        for name in ("polar-express", "empirical")
    }
    return (
        f"On 6.6M tokens a sketch without power iterations ended {signed(found.value)} in perplexity "
        f"beside seven quintic steps in full space, each at the best of seven rates "
        f"({rates[0]:g} and {rates[1]:g}; standard error {found.error:.1f}, 95% {span(found)}, "
        f"n = {found.pairs}). With the rates for each seed chosen on the other two seeds it is "
        f"{signed(fair.value)} (standard error {fair.error:.1f}, 95% {span(fair)}). Neither interval "
        f"excludes zero. And seven quintic steps are a weak baseline: at a rate of 0.03, on one seed, "
        f"full space had {alone['polar-express']:.1f} with PolarExpress and {alone['empirical']:.1f} "
        f"with Jordan's coefficients, where that sketch had {sketch[0.03][1]:.1f}."
    )


@claim
def warm_loss() -> str:
    """What a warm sketch costs against the paper's, at one rate."""
    gpt = paired(
        values("results/gpt", "nanogpt-small", SKETCHED, "sketch", "warm"),
        values("results/gpt/table2", "nanogpt-small", SKETCHED),
    )
    cifar = paired(accuracy(SKETCHED, "sketch", "warm"), accuracy(SKETCHED))
    return (
        f"{gpt.text(1)} (n = {gpt.pairs}, 6.6M tokens). On CIFAR-10 its accuracy is "
        f"{cifar.text(2)} points (n = {cifar.pairs})"
    )


def _beside_the_recipe(folder: str, axis: str, words: Mapping[Any, str]) -> str:
    """What each value of an ablation changes against the recipe's own, in the words for the value."""
    recipe = values("results/gpt/table2", "nanogpt-small", SKETCHED)
    changes = {
        value: paired(values(folder, "nanogpt-small", SKETCHED, axis, value), recipe).text(1)
        for value in words
    }
    return ", ".join(text.format(changes[value]) for value, text in words.items())


def _seeds() -> str:
    """On how many seeds the ablations of ``nanogpt-small`` rest, and on how many tokens."""
    return f"n = {len(values('results/gpt/table2', 'nanogpt-small', SKETCHED))}, 6.6M tokens"


@claim
def gamma_and_training() -> str:
    """The order of the fast maps in training, which is not that of γ."""
    words = {
        "gaussian-fast": "h = 0 {}",
        "kept-fast": "the kept basis {}",
        "warm-fast": "the warm sketch {}",
    }
    return (
        "On a GPT, against the paper's map in perplexity, "
        f"{_beside_the_recipe('results/gpt', 'sketch', words)} ({_seeds()}, one rate for all), although "
        "the warm sketch gives up least of the three by γ."
    )


@claim
def rank_ablation() -> str:
    """Whether perplexity falls with the rank, as the paper has it."""
    words = {rank: f"{{}} at rank {rank}" for rank in (50, 100, 400)}
    told = _beside_the_recipe("results/gpt/ablations", "rank", words)
    return f"{told}, against rank 200 ({_seeds()})"


@claim
def solver_ablation() -> str:
    """Whether three solvers are alike, as the paper has it."""
    words = {
        "polar-express": "{} with PolarExpress",
        "empirical": "{} with Jordan's coefficients",
        "cubic": "{} with the cubic",
    }
    told = _beside_the_recipe("results/gpt/ablations", "solver", words)
    return f"{told}, against the quintic ({_seeds()})"


@claim
def five_steps() -> str:
    """Five steps of the inner solver in place of the recipe's seven."""
    found = paired(
        values("results/gpt-ablations/ablations", "nanogpt-small", SKETCHED, "steps", 5),
        values("results/gpt-ablations/table2", "nanogpt-small", SKETCHED),
    )
    return f"{found.text(1)} (test perplexity, n = {found.pairs}, 6.6M tokens)"


@claim
def solver_full_space() -> str:
    """The solvers in full space, against the recipe's seven quintic steps."""
    quintic = values("results/gpt-ablations/table2", "nanogpt-small", FULL)
    jordan, express, cubic = (
        paired(values("results/gpt-ablations", "nanogpt-small", FULL, "solver", name), quintic)
        for name in ("empirical", "polar-express", "cubic")
    )
    return (
        f"{express.text(1)} with PolarExpress, {jordan.text(1)} with Jordan's coefficients and "
        f"{cubic.text(1)} with the cubic, seven steps each, against the quintic (test perplexity, "
        f"n = {express.pairs}, 6.6M tokens)"
    )


@claim
def length_ablation() -> str:
    """Sequences of 2048 tokens against sequences of 512, at equal tokens a step."""
    long, short = (
        values("results/gpt-ablations", "nanogpt-small", SKETCHED, "sequence-length", length)
        for length in (2048, 512)
    )
    changes = [100 * (long[seed] / short[seed] - 1) for seed in sorted(long)]
    return (
        f"{' and '.join(f'{each:.0f}%' for each in changes)} higher on {len(changes)} seeds (test "
        "perplexity, 6.6M tokens)"
    )
