"""Ranks and new bases chosen by the captured share, as ``adaptive.py`` ran them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from differences import Change, percent
from frontier import LENGTH, SEQUENCES
from pages import ROOT
from pages.claims.words import claim
from polarstep_lab.storage import read_lines
from which_text import check_one_text

ADAPTIVE = "results/adaptive"


def _adaptive(
    name: str, fixed: str, file: str, key: str, change: Callable[[float], float]
) -> Change:
    """The change of a figure against the fixed setting on the same seeds, in percent."""
    found: dict[str, dict[int, float]] = {name: {}, fixed: {}}
    rows = [row for row in read_lines(ROOT / ADAPTIVE / file) if row.get("map") in found]
    check_one_text(rows)
    for row in rows:
        found[row["map"]][row["seed"]] = change(row[key])
    return percent(found[name], found[fixed])


def _mean_share(name: str) -> float:
    """The mean of α over matrices, steps and seeds."""
    rows = [row for row in read_lines(ROOT / ADAPTIVE / "runs.jsonl") if row["map"] == name]
    return statistics.fmean(x for row in rows for of in row["shares"].values() for x in of)


@claim
def adaptive_runs() -> str:
    """What adaptive ranks and renewals change on a GPU."""
    rows = read_lines(ROOT / ADAPTIVE / "runs.jsonl")
    tokens = rows[0]["steps"] * SEQUENCES * LENGTH / 1e6
    ranks, bases = (
        _adaptive(*names, "runs.jsonl", "perplexity", float).told(unit="%")
        for names in (("rank-energy", "rank-equal"), ("kept-fall", "kept-together"))
    )
    least, most = (
        find(x for row in rows if row["map"] == "rank-energy" for x in row["ranks"]["768x768"])
        for find in (min, max)
    )
    slow, fast = (
        find(x for row in rows if row["map"] == "kept-fall" for x in row["renewals"]["768x768"])
        for find in (min, max)
    )
    return (
        f"after {tokens:.1f}M tokens perplexity changed by {ranks} with ranks by energy, against equal "
        f"ranks, and by {bases} with new bases by the fall of α, against new bases for all matrices at "
        f"every fourth step. The 768×768 matrices had mean ranks from {least:.0f} to {most:.0f} in the "
        f"place of 208, and a new basis at {100 * slow:.0f}% to {100 * fast:.0f}% of the steps in the "
        f"place of 25%. The mean of α went from {_mean_share('rank-equal'):.3f} to "
        f"{_mean_share('rank-energy'):.3f} with the ranks, and from "
        f"{_mean_share('kept-together'):.3f} to {_mean_share('kept-fall'):.3f} with the bases"
    )


@claim
def adaptive_small() -> str:
    """What the rules change in a small GPT on a CPU, and what ranks could capture of its momentum."""
    told = []
    for words, *names in (
        ("ranks by energy", "rank-energy", "rank-equal"),
        ("ranks by share", "rank-share", "rank-equal"),
        ("bases by fall", "kept-fall", "kept-together"),
        ("bases renewed in turn", "kept-age", "kept-together"),
    ):
        found = _adaptive(names[0], names[1], "small.jsonl", "loss", math.exp)
        told.append(f"{found.told(unit='%')} for {words}")
    turn = _adaptive("kept-fall", "kept-age", "small.jsonl", "loss", math.exp)
    rows = [row for row in read_lines(ROOT / ADAPTIVE / "small.jsonl") if "captured" in row]
    last = max(row["step"] for row in rows)
    energies = []
    for row in rows:
        if row["step"] == last and row["shape"] == "128x128":
            its = row["captured"]
            equal, rule, best = (100 * its[k][0] for k in ("equal", "by energy", "best for energy"))
            energies.append(
                f"{equal:.1f}%, {rule:.1f}% and {best:.1f}% for a mean of {row['mean']}"
            )
    return (
        "of the energy of its 128×128 momentum matrices equal ranks, the rule and the best ranks "
        f"capture {', and '.join(energies)}. Perplexity changed by {', '.join(told[:-1])} and "
        f"{told[-1]}. Bases by fall against bases renewed in turn: {turn.told(unit='%')}"
    )
