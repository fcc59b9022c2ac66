"""What a report says about a section: its parts, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Sequence

from polarstep_lab.report.blocks import Block, Commands, Heading, Text
from polarstep_lab.report.gamma import gamma_blocks
from polarstep_lab.report.gradient_noise import noise_blocks
from polarstep_lab.report.panels import Drawing
from polarstep_lab.report.paper_comparison import paper_blocks
from polarstep_lab.report.rows import Section
from polarstep_lab.report.tables import ablation_blocks, comparison_blocks
from polarstep_lab.wording import MISSING, listed

__all__ = ["blocks_of", "brief_blocks", "headline"]


def blocks_of(section: Section) -> list[Block]:
    """All parts of a section. Noise, γ and ν come first where every row was made to measure them."""
    seen = [*noise_blocks(section), *gamma_blocks(section)]
    runs = [*comparison_blocks(section), *paper_blocks(section)]
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
    """What a front page has of a section: the comparison."""
    comparison = [b for b in comparison_blocks(section) if not isinstance(b, Drawing)]
    return _shown(comparison)


def _shown(blocks: Sequence[Block | None]) -> list[Block]:
    """The blocks that have something to show: no missing figure or table, no empty text."""
    return [b for b in blocks if b is not None and not (isinstance(b, Text) and not b.text)]


def headline(section: Section) -> Text:
    """The best row against what the study compares with, which is AdamW unless it says otherwise.

    Rows that differ in their task are not weighed against each other.
    """
    if section.apart:
        text = f"The rows differ in {listed(section.apart)}, so that no best of them is named."
        return Text(text, "headline")
    best, base, metric = section.best(section.rows), section.against, section.metric
    if best is None:
        none = section.rows and "No run of this comparison has finished."
        return Text(none or "", "headline")
    shown = best.metric.text(metric.decimals) if best.metric else MISSING
    if base is None or best is base:
        scored = [row for row in section.rows if row.metric]
        if len(scored) == 1:
            return Text("", "headline")
        return Text(
            f"{best.label} has the {'highest' if metric.higher_is_better else 'lowest'} "
            f"{metric.name.lower()} of {len(scored)} rows, {shown}.",
            "headline",
        )
    difference = best.minus(base)
    assert difference is not None
    assert base.metric is not None
    text = (
        f"{best.label} has {metric.name.lower()} {shown}, {base.label} "
        f"{base.metric.text(metric.decimals)}: {difference.sentence(metric.decimals)}"
    )
    time = best.times["step_ms"] / base.times["step_ms"]
    if time == time and best.devices == base.devices:
        text += f"; a whole step takes {time:.2f} times as long"
    return Text(f"{text}.", "headline")
