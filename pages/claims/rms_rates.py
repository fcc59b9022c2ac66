"""Whether AdamW's learning rate carries over with ``lr_scale="rms"``, on the toy GPT.

Seed 0, which has every rate, chooses by the validation half of the held-out text. Differences are of
the test half, over the seeds that both rates have, seed 0 among them.
"""

from __future__ import annotations

from functools import cache

from differences import Change, percent
from pages.claims.words import claim
from pages.records.runs import runs, tokens_of

FOLDER, RECIPE = "results/rms-rates", "nanogpt-toy"
CHOOSING = 0
"""The seed that chooses rates."""
ADAMW = ("AdamW", "spectral")  # AdamW does not read lr_scale; this is the recipe's
DEFLATED = "Deflated Muon"
MAPS = {
    "Muon (PolarExpress 5)": "full space, PolarExpress",
    DEFLATED: "`Deflated`",
    "Rand Muon (Nes.-Gaussian)": "`LowRank`, the paper's",
}
Figures = dict[float, dict[int, float]]
"""A figure by rate, then by seed."""


@cache
def by_rate(method: str, lr_scale: str = "rms") -> tuple[Figures, Figures]:
    """Validation and test perplexity of a method by rate, then by seed."""
    validation: Figures = {}
    test: Figures = {}
    for run in runs(FOLDER):
        who, point, result = run.identity, run.identity.ablation, run.result
        if (who.method, who.config["optimizer"]["lr_scale"]) != (method, lr_scale):
            continue
        assert point is not None
        assert result is not None
        assert result.validation is not None
        validation.setdefault(float(point.value), {})[who.seed] = result.validation
        test.setdefault(float(point.value), {})[who.seed] = result.value
    if not test:
        raise SystemExit(f"{FOLDER} has no runs of {method} with lr_scale={lr_scale}")
    return validation, test


def chosen(method: str, lr_scale: str = "rms") -> float:
    """The rate with the lowest validation perplexity on the seed that chooses."""
    validation, _ = by_rate(method, lr_scale)
    return min(validation, key=lambda lr: validation[lr][CHOOSING])


def lost(method: str, lr_scale: str = "rms") -> Change:
    """Test perplexity at AdamW's rate against that at the method's own, in percent."""
    _, test = by_rate(method, lr_scale)
    return percent(test[chosen(*ADAMW)], test[chosen(method, lr_scale)])


def beside_adamw(method: str) -> Change:
    """Test perplexity of a method against AdamW's, both at AdamW's rate, in percent."""
    rate = chosen(*ADAMW)
    return percent(by_rate(method)[1][rate], by_rate(*ADAMW)[1][rate])


def rows() -> list[list[str]]:
    """The table of the page: of each method the best rate, and what AdamW's best rate does to it."""
    return [
        ["AdamW", f"{chosen(*ADAMW):g}", "–", "–"],
        *(
            [
                words,
                f"{chosen(method):g}",
                *(of(method).told(unit="%") for of in (lost, beside_adamw)),
            ]
            for method, words in MAPS.items()
        ),
    ]


@claim
def rms_rates() -> str:
    """The length of the runs on the toy GPT, and the rates that were tried."""
    tried = sorted(by_rate(*ADAMW)[0])
    more = {method: by_rate(method)[0].keys() - set(tried) for method in MAPS}
    besides = "".join(
        f"; for {words.partition(',')[0]} {', '.join(f'{lr:g}' for lr in sorted(more[method]))} too"
        for method, words in MAPS.items()
        if more[method]
    )
    return (
        f"after {tokens_of(RECIPE) / 1e6:.2f}M tokens, of {len(tried)} rates from {tried[0]:g} to "
        f"{tried[-1]:g}, each twice the one before{besides}"
    )


@claim
def spectral_rates() -> str:
    """The same for ``Deflated`` with the default scale, on the seed that chooses."""
    own, rms = chosen(DEFLATED, "spectral"), chosen(DEFLATED)
    tests = by_rate(DEFLATED, "spectral")[1]
    best = percent(by_rate(DEFLATED)[1][rms], tests[own])
    return (
        f"`Deflated` is best at {own:g}, of {', '.join(f'{lr:g}' for lr in sorted(tests))}: at AdamW's "
        f"rate it loses {lost(DEFLATED, 'spectral').told(unit='%')} in test perplexity against that. "
        f'`"rms"` at its own best rate, {rms:g}, has {best.told(unit="%")} against `"spectral"` at '
        f"{own:g} (both after {tokens_of(RECIPE) / 1e6:.2f}M tokens)"
    )
