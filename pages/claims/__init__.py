"""The sentences of the pages that claim something measured, each made from the records that say so.

Numbers that follow from the code (bytes of a plan, limits) are claims too, made by calling it.

A page has a claim between ``<!-- claim: NAME -->`` and ``<!-- end -->``; ``python -m pages`` writes
it there. NAME is a function that :func:`pages.claims.words.claim` registered, with hyphens. Claims lie
by subject:

    beside_torch   what ``torch.optim.Muon`` costs, and where it ends
    cases       what a step costs in each case of the first table of ``docs/which.md``
    cost        what a step costs on a GPU, against AdamW's and against other libraries'
    cpu         what it costs on a CPU
    quality     perplexity after 24.6 million tokens, against full space
    rates       the rates of those runs, and which of them name their source
    over_time   how long those runs take, and when they reach a perplexity
    scaling     how that gap changes with the tokens and with the width
    cifar10     accuracy on CIFAR-10
    short_runs  the GPT of ``nanogpt-small`` at several rates, on 6.6 million tokens
    ablations   its ablations: one setting changed at a time
    long_run    the GPT with the paper's matrices, after 73 million tokens
    best_rates  the same, each row at the best of its rates over all steps
    wiki        its short runs, its size, and its text
    theory      γ, the noise of gradients, and rates
    embedding   the rate of the embedding, on a toy GPT
    rms_rates   AdamW's rate with ``shape_scale="rms"``, on a toy GPT
    ranks       bytes and products of steps on many ranks, by formulas
    flops       what the ledger leaves unexplained of the paper's counts
    fuzzer      the recorded run of the fuzzer
    memory      what an optimizer keeps, and what a large parameter needs

Intervals are 95% t-intervals over paired seeds. A claim that one map is better, or as good, says how
many seeds, which baseline and how many tokens.
"""

# Each of them registers its claims.
from pages.claims import (  # noqa: F401
    ablations,
    beside_torch,
    best_rates,
    cases,
    cifar10,
    cost,
    cpu,
    embedding,
    flops,
    fuzzer,
    long_run,
    memory,
    over_time,
    quality,
    ranks,
    rates,
    rms_rates,
    scaling,
    short_runs,
    theory,
    wiki,
)
from pages.claims.words import CLAIMS

__all__ = ["CLAIMS", "made"]


def made(name: str) -> str:
    """The text of a claim."""
    if name not in CLAIMS:
        raise SystemExit(f"claim {name!r}: expected one of {', '.join(sorted(CLAIMS))}")
    return CLAIMS[name]()
