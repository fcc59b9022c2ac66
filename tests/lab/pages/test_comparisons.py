"""A claim that compares tells with what, on how many seeds, after how many tokens, and how surely."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SIGNED = re.compile(r"[+−]\d+\.\d+(?:%|\s±|\spoints)|\d+ of (?:the )?\d+ pairs|of the \d+ pairs")
"""A signed difference, as ``+0.3%`` or ``−1.9 ± 5.5``, or a count of pairs."""


FASTER = re.compile(r"times as fast")
"""A ratio of times."""


TOLD = {
    "seeds": r"n\s=\s\d|one\sseed|\d\sseeds",
    "tokens": r"M tokens|CIFAR|accuracy",
    "baseline": r"[Aa]gainst|to full space|than|from the runs|in place of|without|from \d+ to \d+",
    "interval": r"±|95%|one\sseed",
}
"""What a claim that compares has to tell, and how it is found in its text."""


TOLD_OF_TIMES = {
    "baseline": r"times as fast as \w",
    "matrices": r"matri|shape|\d×\d",
    "machine": r"CPU|cores|H200",
    "runs": r"single runs?|rounds",
}
"""The same of a claim that is about times."""


APART = {}
"""Claims that leave something to their page, and where it is."""


def comparisons(module, compares=SIGNED):
    texts = {name: module.made(name) for name in importlib.import_module("pages.claims").CLAIMS}
    return {name: text for name, text in texts.items() if compares.search(text)}


def untold(found, told):
    """What claims leave out of what a comparison has to tell."""
    return [
        f"{name} without {part}: {text}"
        for name, text in found.items()
        for part, pattern in told.items()
        if name not in APART and not re.search(pattern, text)
    ]


def test_a_claim_that_compares_names_seeds_tokens_baseline_and_interval(module):
    found = comparisons(module)
    assert len(found) > 40
    assert {
        "adamw-at-its-best",
        "gap-over-tokens",
        "long-run",
        "peers-ahead",
        "rank-ablation",
    } <= found.keys()
    assert {"gpt-order", "pairs-with-rows"} <= found.keys()
    missing = untold(found, TOLD)
    assert not missing, "\n".join(missing)


def test_a_claim_of_times_names_baseline_matrices_machine_and_runs(module):
    found = comparisons(module, FASTER)
    assert {"cpu-speedup", "cpu-auto", "cpu-small-matrix", "cpu-beside-full-space"} <= found.keys()
    missing = untold(found, TOLD_OF_TIMES)
    assert not missing, "\n".join(missing)


def test_a_claim_that_leaves_something_out_is_noticed():
    text = "it ends lower in 43 of 44 pairs against full space"
    assert SIGNED.search(text)
    assert untold({"a": text}, TOLD) == [
        f"a without {part}: {text}" for part in ("seeds", "tokens", "interval")
    ]
    text = "it is 7.1 times as fast on nanoGPT's matrices"
    assert FASTER.search(text)
    assert untold({"b": text}, TOLD_OF_TIMES) == [
        f"b without {part}: {text}" for part in ("baseline", "machine", "runs")
    ]


def test_intervals_are_those_of_student(module):
    from differences import change, paired

    found = paired({1: 5.0, 2: 7.0, 3: 9.0, 8: 1.0}, {1: 4.0, 2: 5.0, 3: 6.0, 9: 2.0})
    assert (found.value, found.pairs) == (2.0, 3)
    assert found.error == pytest.approx(1 / math.sqrt(3))
    assert found.interval == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert found.told(1, "%").replace("\N{NO-BREAK SPACE}", " ") == "+2.0% ± 2.5 (n = 3)"
    assert change([-0.4]).told(unit="%").replace("\N{NO-BREAK SPACE}", " ") == "−0.4% (one seed)"
