"""The gap to full space over tokens and width: the runs of ``scaling.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import scaling as study
from pages import ROOT

RUNS = "results/scaling/runs.jsonl"
OVER: Mapping[study.Unit, Callable[[study.Gaps, str], list[tuple[float, float]]]] = {
    "tokens": study.over_tokens,
    "width": study.over_width,
}
"""The points of a map: (x, gap) of every run, by what x is."""


def gaps(text: study.Text = "test") -> study.Gaps:
    """Perplexity against full space in percent, by map, then by steps and width, then by seed.

    Of the test text or, as ``"perplexity"``, of all held-out text.
    """
    return study.gaps(study.recorded(ROOT / RUNS, study.FRONTIER), text)
