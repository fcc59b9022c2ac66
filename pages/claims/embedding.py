"""What the rate of the embedding is worth on the toy GPT, whose embedding begins at size one.

Seed 0, which has every rate, chooses by the validation half of the held-out text. The difference is of
the test half, on the other seeds.
"""

from __future__ import annotations

from differences import percent
from pages.claims.words import claim
from pages.records.runs import runs, tokens_of
from polarstep import AdamW

FOLDER, RECIPE = "results/embedding-rate", "nanogpt-toy"
CHOOSING = 0
"""The seed that chooses the rate."""


@claim
def embedding_rate_on_a_toy() -> str:
    """The default rate of ``others`` for an embedding, against the best of several."""
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
    best, default = min(validation, key=lambda rate: validation[rate]), AdamW().lr
    apart = percent(test[default], test[best])
    return (
        f"{default:g} has {apart.told(unit='%')} against {best:g}, the best of {len(validation)} rates "
        "of the embedding on another seed, in test perplexity after "
        f"{tokens_of(RECIPE) / 1e6:.2f}M tokens (characters, in full space with the same rate for the "
        "head in all runs)"
    )
