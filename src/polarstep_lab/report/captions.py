"""What stands below a table: what its columns mean, and where its times were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from polarstep_lab.report.published import ABLATIONS_SOURCE
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.texts import MISSING, OFF, listed, number
from polarstep_lab.report.timing import at_a_time, commit_of, runtime_of

__all__ = [
    "SHARED",
    "ablation_caption",
    "caption",
    "commits_text",
    "settings_text",
    "times_of",
    "times_text",
]

SHARED = "†"
"""The mark of times that shared a device, where others of the same tables did not."""

Named = Sequence[tuple[str, Row]]


def caption(section: Section) -> str:
    """What the columns of the comparison mean, and where they were measured."""
    named = [(row.label, row) for row in section.rows]
    return _joined(
        f"{section.metric_name}: mean ± standard deviation over the seeds that finished.",
        "GFLOPs: the optimizer's part of a step, from the ledger.",
        times_text(named),
        "Run s: the whole run, validation included. Times are medians over the seeds.",
        settings_text(named),
        commits_text(named),
        f"The paper's figures: {section.paper.source}." if section.paper else "",
        _off_text(section.rows),
    )


def ablation_caption(section: Section) -> str:
    """What the columns of the ablations mean."""
    shown = {}  # a base once, however many axes meet in it
    for ablation in section.ablations:
        for _, row in ablation.named:
            name = "recipe" if row is ablation.base else row.label
            shown[id(row)] = (name + section.whose(ablation), row)
    named = [*shown.values()]
    authors = any(row.paper for ablation in section.ablations for row in ablation.rows)
    return _joined(
        f"{section.metric_name}: mean ± standard deviation over the seeds that finished.",
        _differences_text(section),
        times_text(named),
        settings_text(named),
        commits_text(named),
        f"Authors: {ABLATIONS_SOURCE}; the paper prints curves only, and in that file the default "
        "setting differs from axis to axis, which is the only reason we know where figures differ."
        if authors
        else "",
        _off_text(row for _, row in named),
    )


def _off_text(rows: Iterable[Row]) -> str:
    """What the mark at a published figure means, where there is one."""
    off = any(row.differs for row in rows)
    return f"{OFF} more than two standard errors from ours." if off else ""


def times_text(named: Named) -> str:
    """Where times were measured, and whether the runs had the device to themselves."""
    named = [(name, row) for name, row in named if row.timed]
    if not named:
        return ""
    devices = sorted({device for _, row in named for device in row.devices})
    together = at_a_time(run for _, row in named for run in row.runs)
    text = f"Times measured on {', '.join(devices)}"
    if together == 1:
        return f"{text}, one run at a time."
    alone = [name for name, row in named if row.alone]
    if len(alone) == len(named):
        counts = sorted({len(row.alone) for _, row in named})
        seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{text}, over the {seeds} seeds of a row that had it to themselves."
    shared = (
        f"with up to {together} runs at a time: they share it, so these are not the times of a run "
        "alone."
    )
    return f"{text}; {SHARED} {shared}" if alone else f"{text} {shared}"


def times_of(row: Row, rows: Sequence[Row]) -> tuple[str, str, str]:
    """Milliseconds of the optimizer and of a step and seconds of a run, as ``rows`` show them.

    Times that shared a device have a mark where others in these rows did not.
    """
    lone = any(other.alone for other in rows)
    shared = lone and not row.alone and at_a_time(run for r in rows for run in r.runs) > 1
    times = (number(row.optimizer_ms), number(row.step_ms), number(row.seconds, 3))
    optimizer, step, run = (t + SHARED if shared and t != MISSING else t for t in times)
    return optimizer, step, run


def settings_text(named: Named) -> str:
    """That the rows of a table did not all run under the same settings of speed, where that is so."""
    groups: dict[str, dict[str, list[str]]] = {}
    for name, row in named:
        values: dict[str, set[str]] = {}
        for run in row.timed:
            for setting, value in runtime_of(run).items():
                values.setdefault(setting, set()).add(value)
        for setting, found in values.items():
            rows_of = groups.setdefault(setting, {})
            rows_of.setdefault("/".join(sorted(found)), []).append(name)
    differing = [f"{key} is {_by_rows(rows)}" for key, rows in groups.items() if len(rows) > 1]
    if not differing:
        return ""
    return f"Times of rows that ran under different settings do not compare: {listed(differing)}."


def commits_text(named: Named) -> str:
    """That the times of a table are not all of the same code, where that is so."""
    groups: dict[str, list[str]] = {}
    for name, row in named:
        commits = sorted({commit_of(run) or "not recorded" for run in row.timed})
        if commits:
            groups.setdefault("/".join(commits), []).append(name)
    if len(groups) < 2:
        return ""
    return f"Not all rows were timed at the same commit: {_by_rows(groups)}."


def _by_rows(groups: Mapping[str, list[str]]) -> str:
    """``A (row), B (row and row) and C (the other rows)``: the value that most rows have comes last."""
    most = max(groups, key=lambda value: len(groups[value]))
    names = {value: listed(rows) for value, rows in groups.items()}
    if len(groups[most]) > 1:
        names[most] = "the other rows"
    ordered = sorted(groups, key=lambda value: (value == most, value))
    return listed([f"{value} ({names[value]})" for value in ordered])


def _differences_text(section: Section) -> str:
    """What a difference is one of: pairs of runs with one seed, or two means."""
    found = [d for a in section.ablations for row in a.rows if (d := a.difference(row))]
    if not found:
        return ""
    meet = "the recipe's own value, the config in which the axes meet"
    if not any(d.pairs for d in found):
        return f"Difference: of the mean from that of {meet}, ± its standard error."
    return _joined(
        f"Difference: from {meet}, on the seeds that both have: the mean of the differences ± its "
        "standard error, unknown for a single seed. A seed fixes initial weights and order of data, "
        "so this need not be the difference of the two means where one has more seeds.",
        "" if all(d.pairs for d in found) else "Where no seed is common, it is that of the means.",
    )


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))
