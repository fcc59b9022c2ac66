"""What the rate of the embedding is worth on the toy GPT, whose embedding begins at size one.

Seed 0, which has every rate, chooses by the validation half of the held-out text. The difference is of
the test half, on the other seeds.
"""

from __future__ import annotations

from differences import percent
from pages.claims.words import claim
from pages.records.runs import runs, tokens_of

FOLDER, RECIPE = "results/embedding-rate", "nanogpt-toy"
CHOOSING = 0
"""The seed that chooses the rate."""
USUAL = 3e-4
"""The rate that AdamW usually has on a whole model."""


@claim
def embedding_rate_on_a_toy() -> str:
    """A usual rate of AdamW for an embedding, against the best of several."""
    validation: dict[float, float] = {}
    test: dict[float, dict[int, float]] = {}
    for run in runs(FOLDER):
        who, result = run.identity, run.result
        assert result is not None
        assert result.validation is not None
        rate = who.config["optimizer"]["embedding_lr"]
        if who.seed == CHOOSING:
            validation[rate] = result.validation
        else:
            test.setdefault(rate, {})[who.seed] = result.value
    best = min(validation, key=lambda rate: validation[rate])
    apart = percent(test[USUAL], test[best])
    return (
        f"{USUAL:g} has {apart.told(unit='%')} against {best:g}, the best of {len(validation)} rates "
        "of the embedding on another seed, in test perplexity after "
        f"{tokens_of(RECIPE) / 1e6:.2f}M tokens (characters, in full space with the same rate for the "
        "head in all runs)"
    )
