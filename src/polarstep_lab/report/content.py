"""What a report says about a section, part by part, in the order in which it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from polarstep_lab.report.beside_paper import beside_the_paper
from polarstep_lab.report.blocks import Block, Commands, Heading, Notes, Text
from polarstep_lab.report.captions import (
    ablation_caption,
    comparison_caption,
    joined,
    off_text,
)
from polarstep_lab.report.drawing import Drawing
from polarstep_lab.report.gradient_noise import NOISE_CAPTION, noise_sentence, noise_table
from polarstep_lab.report.inexactness import GAMMA_CAPTION, gamma_sentence, gamma_table
from polarstep_lab.report.palette import look_of
from polarstep_lab.report.randomized import Pair, change_text, pairs_of, verdict
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.tables import (
    RANDOMIZED_CAPTION,
    ablation_table,
    comparison_table,
    paper_table,
    randomized_table,
)
from polarstep_lab.report.texts import listed, metric_text, number, plural, share_text

__all__ = ["Drawings", "blocks_of", "headline"]


class Drawings(NamedTuple):
    """The figures of one section, by their place."""

    comparison: Sequence[Drawing] = ()
    ablations: Sequence[Drawing] = ()
    inexactness: Sequence[Drawing] = ()
    noise: Sequence[Drawing] = ()


def blocks_of(section: Section, drawings: Drawings) -> list[Block]:
    """All parts of a section. Where its runs were made to be watched, what was seen comes first."""
    watched = _watched(section, drawings)
    if section.watched:
        parts = [Text(_watched_headline(section), "headline"), *watched]
        parts += [Heading("The runs")] if section.rows else []
    else:
        parts = [Text(headline(section), "headline")]
    if section.rows:
        parts += [comparison_table(section), Text(comparison_caption(section), "caption")]
        parts += [*drawings.comparison, *_randomized(section), *_beside_the_paper(section)]
    parts += drawings.ablations
    for ablation in section.ablations:
        parts += [Heading(f"Ablation: {ablation.axis}, {ablation.of}")]
        parts += [ablation_table(section, ablation)]
    parts += [Text(ablation_caption(section), "caption")] if section.ablations else []
    parts += [] if section.watched else watched
    named = [(row.label, row) for row in section.rows]
    named += [(r.label + section.whose(a), r) for a in section.ablations for r in a.rows]
    commands = [(label, look_of(row.method), "\n".join(row.commands)) for label, row in named]
    parts += [Heading("Commands"), Commands(commands)]
    return [part for part in parts if not isinstance(part, Text) or part.text]


def headline(section: Section) -> str:
    """Quality against cost: the best method, and the best of those whose step costs less."""
    scored = [row for row in section.rows if row.metric]
    best = section.best(scored)
    if best is None or best.metric is None:
        return "No run of this comparison has finished." if section.rows else ""
    if len(scored) == 1:
        return ""
    digits = f"{best.metric.mean:.{section.decimals}f}"
    ties = [r for r in scored if r.metric and f"{r.metric.mean:.{section.decimals}f}" == digits]
    word = "highest" if section.higher_is_better else "lowest"
    text = (
        f"{listed([row.label for row in ties])} {'have' if ties[1:] else 'has'} the {word} mean "
        f"{section.metric_name.lower()} of {len(scored)} methods, "
        f"{metric_text(best.metric, section.decimals)} over {plural(best.metric.n, 'seed')}"
    )
    costs = {row: row.gflops for row in scored if row.gflops}
    best = min(ties, key=lambda row: costs.get(row, float("inf")))
    if best not in costs:
        return f"{text}."
    text += f", for {number(costs[best], 3)} GFLOPs of optimizer per step"
    cheaper = section.best([row for row, cost in costs.items() if cost < 0.999 * costs[best]])
    if cheaper is None:
        return f"{text}; no other method costs less."
    return f"{text}; {_trade(section, Pair(cheaper.label, cheaper, best))}."


def _trade(section: Section, pair: Pair) -> str:
    """What a cheaper row saves in FLOPs and in time, and what it gives up for that."""
    text = f"the best that costs less, {pair.label}, takes {share_text(pair.gflops)} of these"
    if pair.step is not None:
        text += f" and {pair.step:.2f} times as long for a whole step"
    return f"{text}, and its {change_text(section, pair.difference)}"


def _watched_headline(section: Section) -> str:
    """The worst noise and the worst γ and ν, in a few sentences."""
    lost = [row for row in section.all_rows if row.finished.empty]
    ways = sorted({status for row in lost for status in row.counts})
    return joined(
        *map(noise_sentence, section.all_rows),
        gamma_sentence([row for row in section.all_rows if row not in lost]),
        f"What is marked {listed(ways)} is shown as far as it went." if lost else "",
    )


def _watched(section: Section, drawings: Drawings) -> list[Block]:
    """Noise, γ and ν, where they were measured."""
    parts: list[Block] = []
    for title, table, caption, figures in (
        ("Noise of the gradient", noise_table(section.all_rows), NOISE_CAPTION, drawings.noise),
        (
            "How inexact each step was",
            gamma_table(section.all_rows),
            GAMMA_CAPTION,
            drawings.inexactness,
        ),
    ):
        if table or figures:
            parts += [Heading(title), *([table, Text(caption, "caption")] if table else []), *figures]
    return parts


def _randomized(section: Section) -> list[Block]:
    """Randomized rows next to full space, where there are both."""
    pairs = pairs_of(section)
    if not pairs:
        return []
    parts = [Heading("Randomized next to full space"), Text(verdict(section))]
    return [*parts, randomized_table(section, pairs), Text(RANDOMIZED_CAPTION, "caption")]


def _beside_the_paper(section: Section) -> list[Block]:
    """The section next to the paper, with what is known to differ."""
    beside = beside_the_paper(section)
    if beside is None:
        return []
    rows: list[Row] = [line.row for line in beside.lines]
    meaning = "Difference: here less the paper, ± its standard error." if beside.comparable else ""
    parts: list[Block] = [
        Heading("Next to the paper"),
        Text(beside.summary, "verdict" if beside.comparable else "verdict warned"),
        paper_table(section, beside),
        Text(joined(meaning, off_text(rows), beside.order, f"Source: {beside.source}."), "caption"),
    ]
    if beside.notes:
        items = [(note.mark, note.reason.topic, note.reason.text) for note in beside.notes]
        parts.append(Notes("What is known to differ:", items))
    return parts
