"""What stands below a table: what its columns mean, and where its times were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from polarstep_lab.paper import ABLATIONS_SOURCE
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.texts import MISSING, OFF, listed, number
from polarstep_lab.report.timing import at_a_time, commit_of, runtime_of

__all__ = [
    "SHARED",
    "ablation_caption",
    "comparison_caption",
    "joined",
    "off_text",
    "time_cells",
    "unlike_text",
]

SHARED = "†"
"""The mark of times that shared a device, where others of the same tables did not."""

_DIFFERENCE = (
    "Difference: from the recipe's own value, the config in which the axes meet, on the seeds that "
    "both have: the mean of the differences ± its standard error, unknown for a single seed; where no "
    "seed is common, the difference of the means. A seed fixes initial weights and order of data, so "
    "this need not be the difference of the two means where one has more seeds."
)

Named = Sequence[tuple[str, Row]]


def comparison_caption(section: Section) -> str:
    """What the columns of the comparison mean, and where they were measured."""
    named = [(row.label, row) for row in section.rows]
    return joined(
        f"{section.metric_name}: mean ± standard deviation over the seeds that finished.",
        "GFLOPs: the optimizer's part of a step, from the ledger.",
        _times_text(named),
        "Run s: the whole run, validation included. Times are medians over the seeds.",
        unlike_text(named),
    )


def ablation_caption(section: Section) -> str:
    """What the columns of the ablations mean."""
    shown = {}  # a base once, however many axes meet in it
    for ablation in section.ablations:
        for _, row in ablation.named:
            name = "recipe" if row is ablation.base else row.label
            shown[row] = name + section.whose(ablation)
    named = [(name, row) for row, name in shown.items()]
    authors = (
        f"Authors: {ABLATIONS_SOURCE}; the paper prints curves only, and in that file the default "
        "setting differs from axis to axis, which is the only reason we know where figures differ."
    )
    return joined(
        f"{section.metric_name}: mean ± standard deviation over the seeds that finished.",
        _DIFFERENCE if any(a.base for a in section.ablations) else "",
        _times_text(named),
        unlike_text(named),
        authors if any(row.paper for a in section.ablations for row in a.rows) else "",
        off_text(shown),
    )


def off_text(rows: Iterable[Row]) -> str:
    """What the mark at a published figure means, where some row has it."""
    return f"{OFF} more than two standard errors from ours." if any(r.differs for r in rows) else ""


def _times_text(named: Named) -> str:
    """Where times were measured, and whether the runs had the device to themselves."""
    rows = [row for _, row in named if not row.timed.empty]
    if not rows:
        return ""
    devices = sorted({device for row in rows for device in row.devices})
    text = f"Times measured on {', '.join(devices)}"
    together = at_a_time(pd.concat([row.runs for row in rows]))
    if together == 1:
        return f"{text}, one run at a time."
    counts = sorted({len(row.alone) for row in rows})
    if counts[0]:
        seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{text}, over the {seeds} seeds of a row that had it to themselves."
    shared = (
        f"with up to {together} runs at a time: they share it, so these are not the times of a run "
        "alone."
    )
    return f"{text}; {SHARED} {shared}" if counts[-1] else f"{text} {shared}"


def time_cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """Milliseconds of the optimizer and of a step, and seconds of a run, for a table of ``rows``.

    Times that shared a device have a mark where others of ``rows`` did not.
    """
    mixed = row.alone.empty and any(not other.alone.empty for other in rows)
    shared = mixed and at_a_time(pd.concat([other.runs for other in rows])) > 1
    times = [number(time, digits) for time, digits in zip(row.times, (4, 4, 3), strict=True)]
    return [time + SHARED if shared and time != MISSING else time for time in times]


def unlike_text(named: Named) -> str:
    """Why the times of a table do not all compare: other settings of speed, or another commit."""
    groups: dict[str, dict[str, list[str]]] = {}
    for name, row in named:
        runs = [runtime_of(run) | {"commit": commit_of(run)} for run in row.timed["record"]]
        for key, values in pd.DataFrame(runs).items():
            found = "/".join(sorted(values.dropna().unique()))
            groups.setdefault(str(key), {}).setdefault(found, []).append(name)
    unlike = {key: _by_rows(rows) for key, rows in groups.items() if len(rows) > 1}
    commits = unlike.pop("commit", "")
    settings = [f"{key} is {rows}" for key, rows in unlike.items()]
    return joined(
        f"Times of rows that ran under different settings do not compare: {listed(settings)}."
        if settings
        else "",
        f"Not all rows were timed at the same commit: {commits}." if commits else "",
    )


def _by_rows(groups: Mapping[str, list[str]]) -> str:
    """``A (row), B (row and row) and C (the other rows)``: the value that most rows have comes last."""
    most = max(groups, key=lambda value: len(groups[value]))
    names = {value: listed(rows) for value, rows in groups.items()}
    if len(groups[most]) > 1:
        names[most] = "the other rows"
    ordered = sorted(groups, key=lambda value: (value == most, value))
    return listed([f"{value} ({names[value]})" for value in ordered])


def joined(*sentences: str) -> str:
    """The sentences that are not empty, as one paragraph."""
    return " ".join(filter(None, sentences))
