"""Our figures next to the paper's: by how much they differ, in which order methods come, and why.

Where a recipe is the paper's own setting, digits are compared. Where a recipe asks the same question
of another model and other text, only the order of the methods and the relative cost of their steps are.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping
from dataclasses import dataclass

from polarstep_lab.methods import find_method
from polarstep_lab.paper import Setting
from polarstep_lab.report.estimates import Difference, Estimate
from polarstep_lab.report.published import in_table_2
from polarstep_lab.report.reasons import Facts, Reason, reasons
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.texts import plural

__all__ = ["Beside", "Line", "Note", "beside_the_paper"]

REFERENCE = "Muon (Nesterov)"
"""The method that costs are given relative to where models differ."""
_SAME_COST = 5e-4  # as relative difference: the paper's figures have four decimals


@dataclass(frozen=True)
class Note:
    """A known difference, its letter, and the methods it is true of."""

    mark: str
    reason: Reason
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """One method here and in the paper; ``difference`` only where digits can be compared."""

    row: Row
    published: Estimate
    published_gflops: float
    difference: Difference | None
    place: int | None
    paper_place: int
    relative_gflops: float | None
    paper_relative_gflops: float | None
    marks: tuple[str, ...]


@dataclass(frozen=True)
class Beside:
    """A section next to the paper."""

    comparable: bool
    summary: str
    order: str
    lines: tuple[Line, ...]
    notes: tuple[Note, ...]
    source: str


def beside_the_paper(section: Section) -> Beside | None:
    """The comparison of a section with Table 2; ``None`` where there is nothing to compare.

    Without comparable digits, one method alone has nothing to be ranked against.
    """
    setting = in_table_2(section.recipe, section.benchmark)
    rows = _row_of_each_method(section, setting) if setting else {}
    means = {method: row.metric.mean for method, row in rows.items() if row.metric}
    comparable = any(row.paper for row in rows.values())
    if setting is None or len(means) < (1 if comparable else 2):
        return None
    notes = _notes(rows, section, setting, comparable)
    theirs = {method: setting.rows[method] for method in rows}
    places = _places(means, section)
    paper_places = _places({method: figure.mean for method, figure in theirs.items()}, section)
    costs = {method: row.gflops for method, row in rows.items()}
    paper_costs = {method: figure.gflops for method, figure in theirs.items()}
    lines = tuple(
        Line(
            row,
            Estimate(theirs[method].mean, theirs[method].std, theirs[method].seeds),
            theirs[method].gflops or 0.0,
            row.off_the_paper,
            places.get(method),
            paper_places[method],
            _relative(costs, method),
            _relative(paper_costs, method),
            tuple(note.mark for note in notes if method in note.methods),
        )
        for method, row in rows.items()
    )
    summary = _agreement(lines, section) if comparable else _not_comparable(section, setting)
    return Beside(comparable, summary, _order(lines, section), lines, notes, setting.source)


def _row_of_each_method(section: Section, setting: Setting) -> dict[str, Row]:
    """The row of each method of Table 2: in the paper's setting first, then with the most seeds."""
    chosen: dict[str, Row] = {}
    for row in sorted(section.rows, key=lambda row: (row.paper is None, -len(row.finished))):
        chosen.setdefault(row.method, row)
    return {method: chosen[method] for method in setting.rows if method in chosen}


def _notes(
    rows: Mapping[str, Row], section: Section, setting: Setting, comparable: bool
) -> tuple[Note, ...]:
    """Every known difference once, with a letter; only those that some shown figure asks for."""
    told: dict[Reason, list[str]] = {}
    for method, row in rows.items():
        off, paper_gflops = row.off_the_paper, setting.rows[method].gflops
        metric = not comparable or (off is not None and (off.clear or off.error is None))
        cost = not comparable or bool(
            row.gflops and paper_gflops and abs(row.gflops / paper_gflops - 1) > _SAME_COST
        )
        run = row.records[0]
        device = str(run.environment.get("device", ""))
        facts = Facts(
            find_method(method), section.benchmark, row.config, device, _data_of(row, section)
        )
        for reason in reasons(facts):
            if metric or (cost and reason.cost):
                told.setdefault(reason, []).append(method)
    letters = zip(string.ascii_lowercase, told.items(), strict=False)
    return tuple(Note(mark, reason, tuple(methods)) for mark, (reason, methods) in letters)


def _data_of(row: Row, section: Section) -> str:
    """What a row was trained on: by its own records, or by others that name the same shards.

    Older records do not say. Where two records say different things of one pattern, neither speaks for
    a third.
    """
    same = [o for o in section.all_rows if o.config.get("data") == row.config.get("data")]
    for rows in ([row], same):
        known = {run.environment.get("data") for r in rows for run in r.records} - {None, ""}
        if known:
            return str(known.pop()) if len(known) == 1 else ""
    return ""


def _places(means: Mapping[str, float], section: Section) -> dict[str, int]:
    """1 for the best method, and so on."""
    ordered = sorted(means, key=lambda method: means[method], reverse=section.higher_is_better)
    return {method: place for place, method in enumerate(ordered, start=1)}


def _relative(gflops: Mapping[str, float | None], method: str) -> float | None:
    own, reference = gflops[method], gflops.get(REFERENCE)
    return own / reference if own and reference else None


def _agreement(lines: tuple[Line, ...], section: Section) -> str:
    """How many methods agree with the paper, and in which direction the others are off."""
    judged = [d for line in lines if (d := line.difference) and d.error is not None]
    if not judged:
        return "One seed has no spread: whether a difference from the paper is one cannot be told."
    off = [d for d in judged if d.clear]
    better = sum((d.value > 0) is section.higher_is_better for d in off)
    directions = [
        f"{count} {'is' if count == 1 else 'are'} {word}"
        for count, word in ((better, "better"), (len(off) - better, "worse"))
        if count
    ]
    text = (
        f"{len(judged) - len(off)} of {plural(len(judged), 'method')} agree with the paper within two "
        "standard errors of the difference"
    )
    return f"{text}; {' and '.join(directions)}." if off else f"{text}."


def _not_comparable(section: Section, setting: Setting) -> str:
    return (
        f"Not comparable in digits: the paper's {section.metric_name.lower()} is that of another "
        f"model on other data ({setting.data}). What can be compared is the order of the methods and "
        f"the cost of a step relative to {REFERENCE}."
    )


def _order(lines: tuple[Line, ...], section: Section) -> str:
    """Which pairs of methods come in the paper's order, of those that the paper tells apart."""
    same, unclear, reversed_ = 0, 0, []
    scored = [(line, line.row.metric) for line in lines if line.row.metric]
    for (a, ours), (b, other) in itertools.combinations(scored, 2):
        paper, here = a.published.minus(b.published), ours.minus(other)
        if not paper.clear:
            continue
        if not here.clear:
            unclear += 1
        elif (here.value > 0) == (paper.value > 0):
            same += 1
        else:
            first, second = (a, b) if (here.value > 0) is section.higher_is_better else (b, a)
            reversed_.append(f"{first.row.method} before {second.row.method}")
    pairs = same + unclear + len(reversed_)
    if not pairs:
        return ""
    text = (
        f"Of {'the' if pairs > 1 else 'only'} {plural(pairs, 'pair')} of methods that the "
        f"paper tells apart by more than two standard errors, {same or 'none'} "
        f"come{'s' * (same < 2)} in the same order here"
    )
    if unclear:
        text += f", {unclear} {'is' if unclear == 1 else 'are'} not told apart by these seeds"
    if reversed_:
        text += f", {len(reversed_)} the other way round ({'; '.join(reversed_)})"
    return f"{text}."
