"""What stands below a table: what its columns mean, and where its times were measured."""

from __future__ import annotations

from collections.abc import Sequence

from polarstep.experiments.report.published import ABLATIONS_SOURCE
from polarstep.experiments.report.rows import Row, Section
from polarstep.experiments.report.timing import at_a_time

__all__ = ["ablation_caption", "caption", "times_text"]


def caption(section: Section) -> str:
    """What the columns of the comparison mean, and where they were measured."""
    text = (
        f"{section.metric_name}: mean ± standard deviation over the seeds that finished. GFLOPs: "
        f"the optimizer's part of a step, from the ledger. {times_text(section.rows)} Run s: the "
        "whole run, validation included."
    )
    return text + (f" The paper's figures: {section.paper.source}." if section.paper else "")


def times_text(rows: Sequence[Row]) -> str:
    """Where times were measured, and whether the runs had the device to themselves."""
    devices = sorted({device for row in rows for device in row.devices})
    together = at_a_time(run for row in rows for run in row.runs)
    text = f"Times measured on {', '.join(devices)}"
    if together == 1:
        return f"{text}, one run at a time."
    if all(row.alone for row in rows):
        counts = sorted({len(row.alone) for row in rows})
        seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{text}, over the {seeds} seeds of a row that had it to themselves."
    return (
        f"{text} with up to {together} runs at a time: they share it, so these are not the times of "
        "a run alone."
    )


def ablation_caption(section: Section) -> str:
    """What the columns of the ablations mean."""
    text = f"{section.metric_name}: mean ± standard deviation over the seeds that finished."
    if any(ablation.base for ablation in section.ablations):
        text += (
            " Difference: from the recipe's own value, ± its standard error; that is the config in "
            "which the axes meet."
        )
    text += " " + times_text([row for ablation in section.ablations for row in ablation.rows])
    if any(row.paper for ablation in section.ablations for row in ablation.rows):
        text += (
            f" Authors: {ABLATIONS_SOURCE}; the paper prints curves only, and in that file the "
            "default setting differs from axis to axis."
        )
    return text
