"""What a report says about a section: its parts, in the order in which they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polarstep_lab.report.beside_paper import paper_blocks
from polarstep_lab.report.blocks import Block, Commands, Heading, Text
from polarstep_lab.report.gradient_noise import noise_blocks
from polarstep_lab.report.inexactness import gamma_blocks
from polarstep_lab.report.panels import Drawing
from polarstep_lab.report.randomized import Pair, randomized_blocks, verdict
from polarstep_lab.report.rows import Section
from polarstep_lab.report.tables import ablation_blocks, comparison_blocks
from polarstep_lab.wording import listed

__all__ = ["blocks_of", "brief_blocks", "headline"]

_AS_MANY = 0.999  # FLOPs that differ by less than a thousandth count as equal


def blocks_of(section: Section) -> list[Block]:
    """All parts of a section. Noise, γ and ν come first where every row was made to measure them."""
    seen = [*noise_blocks(section), *gamma_blocks(section)]
    runs = [*comparison_blocks(section), *randomized_blocks(section), *paper_blocks(section)]
    runs += ablation_blocks(section)
    body = (
        [*seen, Heading("The runs"), *runs]
        if section.watched
        else [headline(section), *runs, *seen]
    )
    rows = [(row.label, row.commands) for row in section.rows]
    rows += [(section.label_in(a, r), r.commands) for a in section.ablations for r in a.rows]
    return _shown([*body, Heading("Commands"), Commands(rows)])


def brief_blocks(section: Section) -> list[Block]:
    """What a front page has of a section: the comparison, and the randomized steps in words."""
    comparison = [b for b in comparison_blocks(section) if not isinstance(b, Drawing)]
    return _shown([*comparison, Text(verdict(section))])


def _shown(blocks: Sequence[Block | None]) -> list[Block]:
    """The blocks that have something to show: no missing figure or table, no empty text."""
    return [b for b in blocks if b is not None and not (isinstance(b, Text) and not b.text)]


def headline(section: Section) -> Text:
    """Quality against cost: the best row, and the best of the rows whose step needs fewer FLOPs.

    The rows are those of the comparison; those of the ablation, where there is one and no comparison.
    Rows that differ in their task, or in more than one axis, are not weighed against each other.
    """
    if section.apart:
        text = f"The rows differ in {listed(section.apart)}, so that no best of them is named."
        return Text(text, "headline")
    if not section.rows and len(section.ablations) > 1:
        return Text("", "headline")
    metric = section.metric
    shown = {
        r: r.metric.text(metric.decimals) for r in section.rows or section.all_rows if r.metric
    }
    best = section.best([*shown])
    if best is None or len(shown) == 1:
        return Text("" if best else "No run of this comparison has finished.", "headline")
    ties = [row for row in shown if shown[row].split()[0] == shown[best].split()[0]]
    text = (
        f"{listed([row.label for row in ties])} {'have' if ties[1:] else 'has'} the "
        f"{'highest' if metric.higher_is_better else 'lowest'} mean {metric.name.lower()} of "
        f"{len(shown)} {'methods' if section.rows else 'settings'}, {shown[best]}"
    )
    seeds = sorted(len(row.finished) for row in shown)
    if seeds[0] != seeds[-1]:
        text += f" (rows have {seeds[0]} to {seeds[-1]} seeds)"
    costs = {row: row.gflops for row in shown if row.gflops}
    best = min(ties, key=lambda row: costs.get(row, math.inf))
    if best not in costs:
        return Text(f"{text}; its optimizer FLOPs are not counted.", "headline")
    cheaper = section.best([r for r in costs if costs[r] < _AS_MANY * costs[best]])
    if cheaper is None:
        return Text(f"{text}; none has fewer FLOPs.", "headline")
    pair = Pair(cheaper.label, cheaper, best)
    time = pair.times["step_ms"]
    text += (
        f"; {pair.label}, the best of those with fewer FLOPs, needs {pair.gflops} of its "
        f"optimizer FLOPs{'' if time != time else f', takes {time:.2f} times as long for a whole step'} "
        f"and is {pair.difference.sentence(metric.decimals)}."
    )
    return Text(text, "headline")
