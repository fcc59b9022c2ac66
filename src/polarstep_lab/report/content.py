"""What a report says about a section, part by part, in the order in which it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from polarstep_lab.report import captions
from polarstep_lab.report.beside_paper import beside_the_paper, paper_table
from polarstep_lab.report.blocks import Block, Commands, Heading, Notes, Table, Text
from polarstep_lab.report.drawing import Drawing
from polarstep_lab.report.gradient_noise import NOISE_CAPTION, noise_sentence, noise_table
from polarstep_lab.report.inexactness import GAMMA_CAPTION, gamma_sentence, gamma_table
from polarstep_lab.report.randomized import RANDOMIZED_CAPTION, Pair, randomized_table, verdict
from polarstep_lab.report.rows import Section
from polarstep_lab.report.tables import ablation_table, comparison_table
from polarstep_lab.report.texts import listed, metric_text, plural, share_text, size_text

__all__ = ["Drawings", "blocks_of", "headline"]

_AS_MANY = 0.999  # FLOPs that differ by less than a thousandth are as many


class Drawings(NamedTuple):
    """The figures of one section, by their place."""

    comparison: Sequence[Drawing] = ()
    ablations: Sequence[Drawing] = ()
    inexactness: Sequence[Drawing] = ()
    noise: Sequence[Drawing] = ()


def blocks_of(section: Section, drawings: Drawings) -> list[Block]:
    """All parts of a section. Where its runs were made to be watched, what was seen comes first."""
    rows = section.all_rows
    noise = _part("Noise of the gradient", noise_table(rows), NOISE_CAPTION, drawings.noise)
    inexactness = _part(
        "How inexact each step was", gamma_table(rows), GAMMA_CAPTION, drawings.inexactness
    )
    seen = [*noise, *inexactness]
    runs: list[Block] = []
    if section.rows:
        runs += [Heading("The runs")] if section.watched else []
        runs += [comparison_table(section), Text(captions.comparison_caption(section), "caption")]
        runs += [*drawings.comparison, *_randomized(section), *_beside_the_paper(section)]
    if section.ablations:
        runs += [Heading("Ablations"), *drawings.ablations]
        for ablation in section.ablations:
            runs += [Heading(f"{ablation.axis}, {ablation.of}", level=4)]
            runs += [ablation_table(section, ablation)]
        runs += [Text(captions.ablation_caption(section), "caption")]
    named = [(row.label, row) for row in section.rows]
    named += [(r.label + section.whose(a), r) for a in section.ablations for r in a.rows]
    commands = Commands([(label, "\n".join(row.commands)) for label, row in named])
    top = _watched_headline(section) if section.watched else headline(section)
    body = [*seen, *runs] if section.watched else [*runs, *seen]
    blocks = [Text(top, "headline"), *body, Heading("Commands"), commands]
    return [block for block in blocks if not isinstance(block, Text) or block.text]


def headline(section: Section) -> str:
    """Quality against cost: the best row, and the best of those whose step needs fewer FLOPs.

    The rows are those of the comparison, or else of the ablations.
    """
    scored = [(row, row.metric) for row in section.rows or section.all_rows if row.metric]
    best = section.best([row for row, _ in scored])
    if best is None or len(scored) == 1:
        return "" if best else "No run of this comparison has finished."
    shown = {row: metric_text(metric, section.decimals) for row, metric in scored}
    ties = [row for row in shown if shown[row].split()[0] == shown[best].split()[0]]
    text = (
        f"{listed([row.label for row in ties])} {'have' if ties[1:] else 'has'} the "
        f"{'highest' if section.higher_is_better else 'lowest'} mean {section.metric_name.lower()} of "
        f"{len(scored)} {'methods' if section.rows else 'settings'}, {shown[best]}"
    )
    costs = {row: row.gflops for row in shown if row.gflops}
    best = min(ties, key=lambda row: costs.get(row, math.inf))
    cheaper = section.best([r for r in costs if costs[r] < _AS_MANY * costs.get(best, 0.0)])
    if cheaper is None:
        return f"{text}; none has fewer FLOPs."
    pair = Pair(cheaper.label, cheaper, best)
    time, difference = pair.times[1], pair.difference
    assert difference is not None  # both rows have a metric
    text += (
        f"; {pair.label}, the best of those with fewer FLOPs, needs {share_text(pair.gflops)} of its "
        f"optimizer FLOPs{'' if time is None else f', takes {time:.2f} times as long for a whole step'} "
        f"and is {size_text(difference, section.decimals)}."
    )
    if difference.error is None:
        return text
    seeds = f"on {plural(difference.pairs, 'common seed')}" if difference.pairs else "of the means"
    clear = "more" if difference.clear else "less"
    return f"{text} This difference, {seeds}, is {clear} than two standard errors."


def _watched_headline(section: Section) -> str:
    """The worst noise and the worst γ and ν, in a few sentences."""
    lost = [row for row in section.all_rows if row.finished.empty]
    ways = sorted({status for row in lost for status in row.counts})
    return captions.joined(
        *map(noise_sentence, section.all_rows),
        gamma_sentence([row for row in section.all_rows if row not in lost]),
        f"What is marked {listed(ways)} is shown as far as it went." if lost else "",
    )


def _part(title: str, table: Table | None, caption: str, figures: Sequence[Drawing]) -> list[Block]:
    """A table with its caption and its figures; nothing where nothing was measured."""
    parts: list[Block] = [table, Text(caption, "caption")] if table else []
    return [Heading(title), *parts, *figures] if parts or figures else []


def _randomized(section: Section) -> list[Block]:
    """Randomized rows next to full space, after what they say in words."""
    part = _part("Randomized next to full space", randomized_table(section), RANDOMIZED_CAPTION, ())
    return [*part[:1], Text(verdict(section)), *part[1:]]


def _beside_the_paper(section: Section) -> list[Block]:
    """The section next to the paper, with what is known to differ."""
    beside = beside_the_paper(section)
    if beside is None:
        return []
    caption = captions.joined(
        "Difference: here less the paper, ± its standard error." if beside.comparable else "",
        captions.off_text(line.row for line in beside.lines),
        beside.order,
        f"Source: {beside.source}.",
    )
    notes = {mark: (reason.topic, reason.text) for mark, reason in beside.notes.items()}
    parts: list[Block] = [
        Heading("Next to the paper"),
        Text(beside.summary, "verdict" if beside.comparable else "verdict warned"),
        paper_table(section, beside),
        Text(caption, "caption"),
    ]
    return [*parts, Notes("What is known to differ:", notes)] if notes else parts
