"""The GPT with the paper's matrices, ``nanogpt-wiki``: its short runs, its size, and its text."""

from __future__ import annotations

from calendar import month_name
from typing import Any

import torch

from differences import paired
from pages.claims.words import claim
from pages.records import read_json
from pages.records.runs import FULL, SKETCHED, runs, stages_of, tokens_of_run, values
from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.paper import TABLE_2, TRAINING_TOKENS
from polarstep_lab.recipes import resolve


@claim
def wiki_runs() -> str:
    """The sketches on the model with the paper's matrices, in runs of a fifth of its steps."""
    folder, recipe = "results/gpt/paper-model", "nanogpt-wiki"
    full = values(folder, recipe, FULL)
    rows = {
        "the paper's sketch": (None, None),
        "h = 0 with four inner steps": ("sketch", "gaussian-fast"),
        "the same with a basis for four steps": ("sketch", "kept-fast"),
    }
    told = [
        f"{found.text(1)} ({words})"
        for words, point in rows.items()
        for found in [paired(values(folder, recipe, SKETCHED, *point), full)]
    ]
    return (
        f"{', '.join(told)} in validation perplexity against seven quintic steps in full space "
        f"(n = {len(full)}, {_longest_wiki_run(folder) / 1e6:.1f}M tokens)"
    )


def _longest_wiki_run(folder: str) -> int:
    """The tokens of the longest runs of ``nanogpt-wiki`` below a folder."""
    return max(tokens_of_run(run) for run in runs(folder) if run.identity.recipe == "nanogpt-wiki")


@claim
def paper_model() -> str:
    """How far the GPT of ``nanogpt-wiki`` is from the paper's: parameters and tokens."""
    with torch.device("meta"):
        model = resolve("nanogpt-wiki", "muon").model
        assert isinstance(model, GPTConfig)
        ours = sum(p.numel() for p in GPT(model).parameters())
    # Table 2 counts six FLOPs a parameter for SGD with Nesterov momentum.
    gflops = TABLE_2["nanogpt"].rows["SGD (Nesterov)"].gflops
    assert gflops is not None
    theirs = 1e9 * gflops / 6
    short, whole = (_longest_wiki_run(f"results/{each}") for each in ("gpt", "long-run"))
    long = TRAINING_TOKENS
    return (
        f"It has {ours / 1e6:.1f}M parameters where the paper's has {theirs / 1e6:.1f}M, and saw "
        f"{short / 1e6:.1f}M tokens, in the long runs {whole / 1e6:.1f}M, where the paper's saw "
        f"{long / 1e6:.0f}M: {short / long:.0%} and {whole / long:.0%} of them"
    )


@claim
def wiki_length() -> str:
    """How much of the recipe the short runs of ``nanogpt-wiki`` are."""
    steps_run = max(run.result.steps for run in runs("results/gpt/paper-model") if run.result)
    steps_of_recipe = sum(stage.steps for stage in stages_of("nanogpt-wiki"))
    return f"cut to {steps_run} of the recipe's {steps_of_recipe} steps"


@claim
def text_of_the_runs() -> str:
    """What the GPTs were trained on, so that it can be built again."""
    train, held = _shards()
    return (
        f"{train['documents']:,} articles, {train['tokens']:,} tokens, for training and "
        f"{held['documents']:,} articles, {held['tokens']:,} tokens, held out; the shortest article has "
        f"{min(train['shortest'], held['shortest'])} tokens, the median {train['median']}. SHA-256 of "
        f"the tokens as little-endian uint16: `{train['sha256'][:16]}…` and `{held['sha256'][:16]}…`"
    )


@claim
def filter_of_the_text() -> str:
    """The filter by length, as the articles show it."""
    shortest = {shard["characters"]["shortest"] for shard in _shards()}
    return f"the shortest article has {' and '.join(f'{n:,}' for n in sorted(shortest))} characters"


@claim
def day_of_the_text() -> str:
    """The day of the dump, after which articles hardly name a day."""
    train, _ = _shards()
    days = train["days"]["documents"]
    last = max(range(1, len(days)), key=lambda day: min(days[:day]) - max(days[day:]))
    before, after = days[:last], days[last:]
    year, month = map(int, train["days"]["month"].split("-"))
    return (
        f"each day of {month_name[month]} {year} up to the {last}th is named by {min(before)} to "
        f"{max(before)} articles, each later day by {min(after)} to {max(after)}"
    )


def _shards() -> list[dict[str, Any]]:
    """What ``describe_text.py`` found in the training shard and in the held-out shard."""
    return read_json("results/gpt/text.json")["shards"]
