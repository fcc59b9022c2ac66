"""The rates of the runs over 24.6 million tokens, and how many of them name their source."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import frontier
import polarstep as ps
from frontier import CHOICE
from pages import ROOT
from pages.claims.words import claim
from pages.records import long_run as study
from pages.records.maps import at_chosen, weighed
from pages.records.quality import BASE, RUNS, chosen, million_tokens, perplexities, quality
from polarstep.rates import PER_SIZE
from polarstep_lab.storage import read_lines


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
    coarse, fine = (_tried(name) for name in ("adamw+warmup", BASE[0]))
    apart = [statistics.geometric_mean(b / a for a, b in pairwise(each)) for each in (coarse, fine)]
    return (
        f"The rate of a row is the best of three or more on another seed than those shown. Full space "
        f"has {BASE[1]:g}, with which it ends lower on the seeds shown than with {chosen(BASE[0]):g}, "
        f"the choice of that seed. The rates that Muon tried are a factor of {apart[1]:.2g} apart "
        f"({_listed(fine)}), and those of AdamW, which has a warm-up, a factor of {apart[0]:.2g} "
        f"({_listed(coarse)}){exceptions}"
    )


def _tried(name: str) -> list[float]:
    """The rates of a map on the seed that chooses among them."""
    return sorted(
        lr for (each, lr), runs in perplexities().items() if each == name and CHOICE in runs
    )


def _listed(rates: Sequence[float]) -> str:
    """As ``0.01, 0.014 and 0.02``."""
    *first, last = (f"{lr:g}" for lr in rates)
    return f"{', '.join(first)} and {last}"


@claim
def full_space_at_both_rates() -> str:
    """Three rows against full space at the rate that one seed chose for it, in place of the table's."""
    rate = chosen(BASE[0])
    assert rate is not None
    told = [
        f"{words} {quality(trained, (BASE[0], rate)).told(unit='%')}"
        for words, trained in (
            ("`auto` has", at_chosen("lift-120-warm")),
            ("`LowRank` with h = 0", at_chosen("low-rank")),
            ("`torch.optim.Muon`", at_chosen("peer:torch-muon")),
        )
    ]
    return (
        f"at {BASE[1]:g} it ends lower on the seeds shown than at {rate:g}, the choice of the seed that "
        f"chose the other rates. Against it at {rate:g} {', '.join(told[:-1])} and {told[-1]} in test "
        f"perplexity after {million_tokens():.1f}M tokens"
    )


@claim
def rates_beside_muon() -> str:
    """The rates of AdamW's part and Muon's momentum in the runs of the tables, and the defaults."""
    group = {"lr": 1.0, "momentum": 0.0}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    momenta = []
    for done in (0.0, 1.0):
        frontier.schedule(optimizer, [1.0], done)
        momenta.append(group["momentum"])
    muons = [each.long for each in weighed() if each.long and each.long != "adamw"]
    embedding, head, start, momentum = _settings(muons)
    of_adamw, head_of_adamw, *_ = _settings(["adamw"])
    assert (embedding, head, head_of_adamw) == (
        frontier.EMBEDDING,
        frontier.OTHERS,
        frontier.OTHERS,
    )
    assert start == momenta[0]
    usual = inspect.signature(ps.muon_for).parameters
    lr = usual["lr"].default
    long = f"{study.million_tokens():.1f}M tokens"
    defaults = f"{PER_SIZE * lr:g} times the size of the entries for both, at `lr={lr:g}`"
    return (
        f"AdamW's part has a rate of {embedding:g} for the embedding ({of_adamw:g} in AdamW's own row "
        f"over {long}) and of {head:g} for the head, and Muon's momentum rises from {momenta[0]:g} to "
        f"{momenta[1]:g}, over {long} to {momentum:.3g}. `muon_for` has {defaults}, and a "
        f"momentum of {usual['momentum'].default:g}, unless you give others"
    )


def _settings(slugs: Sequence[str]) -> tuple[float, ...]:
    """Rates of embedding and head, and the momentum at first and later, of rows of the long run.

    Raises ``ValueError`` if these differ between their runs.
    """
    found = set()
    for run in (run for slug in slugs for run in study.runs()[slug].values()):
        optimizer, schedule = (run.identity.config[part] for part in ("optimizer", "schedule"))
        rates = optimizer["embedding_lr"], optimizer["head_lr"]
        found.add((*rates, schedule["momentum_start"], optimizer["momentum"]))
    (settings,) = found
    return settings


@claim
def frontier_commits() -> str:
    """How many of the shorter runs say which source they are of."""
    runs = read_lines(ROOT / RUNS)
    named = sum("git_commit" in run or "git_tree" in run for run in runs)
    return f"{named} of the {len(runs)} runs over {million_tokens():.1f}M tokens name their commit"


@claim
def peers_at_chosen_rates() -> str:
    """Which of two rates of full space is the better one, and which of them one seed chose."""
    rate = chosen(BASE[0])
    assert rate is not None
    own = quality((BASE[0], rate))
    return (
        f"The seed that chooses rates has {rate} for our full space. On the other seeds that ends "
        f"{own.told(unit='%')} in test perplexity against {BASE[1]} after {million_tokens():.1f}M "
        f"tokens. So {BASE[1]} is the stronger baseline, and that of the text; the tables have both"
    )
