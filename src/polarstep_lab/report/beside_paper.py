"""Our figures next to the paper's: by how much they differ, in which order methods come, and why.

Where a recipe is the paper's own setting, digits are compared. Where a recipe asks the same question
of another model and other text, only the order of the methods and the relative cost of their steps are.
"""

from __future__ import annotations

import itertools
import math
import string
from dataclasses import dataclass
from typing import Any

import pandas as pd

from polarstep_lab.methods import find_method
from polarstep_lab.report.blocks import Table
from polarstep_lab.report.estimates import Estimate
from polarstep_lab.report.published import in_table_2
from polarstep_lab.report.reasons import Facts, Reason, reasons
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.texts import (
    MISSING,
    difference_text,
    metric_text,
    number,
    paper_text,
    plural,
    share_text,
)

__all__ = ["Beside", "beside_the_paper", "paper_table"]

REFERENCE = "Muon (Nesterov)"
"""The method that costs are given relative to where models differ."""
_SAME_COST = 5e-4  # as relative difference: the paper's figures have four decimals


@dataclass(frozen=True)
class Beside:
    """A section next to the paper.

    ``lines`` has a line for each method of Table 2 that has a row: ``row``, ``paper`` (the published
    figure), its ``difference``, ``place`` and ``paper_place`` among the methods, ``cost`` and
    ``paper_cost`` in parts of the reference's, and ``marks``, the letters of the ``notes``.
    """

    comparable: bool
    summary: str
    order: str
    lines: tuple[Any, ...]
    notes: dict[str, Reason]
    source: str


def beside_the_paper(section: Section) -> Beside | None:
    """The comparison of a section with Table 2; ``None`` where there is nothing to compare.

    Without comparable digits, one method alone has nothing to be ranked against.
    """
    setting = in_table_2(section.recipe, section.benchmark)
    if setting is None:
        return None
    rows: dict[str, Row] = {}  # in the paper's setting first, then with the most seeds
    for row in sorted(section.rows, key=lambda row: (row.paper is None, -len(row.finished))):
        rows.setdefault(row.method, row)
    rows = {method: rows[method] for method in setting.rows if method in rows}
    frame = pd.DataFrame({"row": rows, "paper": {method: setting.rows[method] for method in rows}})
    means = pd.Series({method: row.metric.mean for method, row in rows.items() if row.metric})
    comparable = any(row.paper for row in rows.values())
    if len(means) < (1 if comparable else 2):
        return None
    rising = not section.higher_is_better
    paper = pd.DataFrame([vars(figure) for figure in frame["paper"]], index=frame.index)
    gflops = pd.Series({method: row.gflops for method, row in rows.items()}, dtype=float)
    frame["difference"] = [row.off_the_paper for row in frame["row"]]
    frame["place"] = means.rank(ascending=rising, method="first")
    frame["paper_place"] = paper["mean"].rank(ascending=rising, method="first")
    frame["cost"] = gflops / gflops.get(REFERENCE, math.nan)
    frame["paper_cost"] = paper["gflops"] / paper["gflops"].get(REFERENCE, math.nan)
    told = {
        method: _reasons(row, section, setting.rows[method], comparable)
        for method, row in rows.items()
    }
    distinct = dict.fromkeys(reason for found in told.values() for reason in found)
    notes = dict(zip(string.ascii_lowercase, distinct, strict=False))
    frame["marks"] = [
        ", ".join(mark for mark, reason in notes.items() if reason in told[method])
        for method in rows
    ]
    lines = tuple(frame.itertuples())
    summary = _agreement(lines, section) if comparable else (
        f"Not comparable in digits: the paper's {section.metric_name.lower()} is that of another "
        f"model on other data ({setting.data}). What can be compared is the order of the methods and "
        f"the cost of a step relative to {REFERENCE}."
    )  # fmt: skip
    return Beside(comparable, summary, _order(lines, section), lines, notes, setting.source)


def paper_table(section: Section, beside: Beside) -> Table:
    """The section next to Table 2: digits where they compare, and else places and relative costs."""
    header = ["Place", "Place in the paper", "Relative GFLOPs", "in the paper"]
    if beside.comparable:
        header = ["Here", "Paper", "Difference", "GFLOPs", "Paper GFLOPs"]
    cells = []
    for line in beside.lines:
        row, places, costs = line.row, (line.place, line.paper_place), (line.cost, line.paper_cost)
        shown = [MISSING if place != place else f"{place:.0f}" for place in places]
        shown += [share_text(None if cost != cost else cost) for cost in costs]
        if beside.comparable:
            shown = [metric_text(row.metric, section.decimals), paper_text(row)]
            shown += [difference_text(line.difference, section.decimals)]
            shown += [number(row.gflops), number(line.paper.gflops)]
        unexplained = "no reason known" if row.differs else ""
        cells.append([row.label, *shown, line.marks or unexplained])
    noted = any(line[-1] for line in cells)  # where all agree, there is nothing to explain
    header = ["Method", *header, *["Notes"] * noted]
    return Table("Next to the paper", header, [line[: len(header)] for line in cells])


def _reasons(row: Row, section: Section, paper: Any, comparable: bool) -> list[Reason]:
    """What is known to differ for a row and bears on a figure that differs."""
    off = row.off_the_paper
    metric = not comparable or (off is not None and (off.clear or off.error is None))
    cost = not comparable or bool(row.gflops and abs(row.gflops / paper.gflops - 1) > _SAME_COST)
    device = str(row.records[0].environment.get("device", ""))
    method = find_method(row.method)
    facts = Facts(method, section.benchmark, row.config, device, _data_of(row, section))
    return [reason for reason in reasons(facts) if metric or (cost and reason.cost)]


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


def _agreement(lines: tuple[Any, ...], section: Section) -> str:
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


def _order(lines: tuple[Any, ...], section: Section) -> str:
    """Which pairs of methods come in the paper's order, of those that the paper tells apart."""
    same, unclear, reversed_ = 0, 0, []
    for a, b in itertools.combinations([line for line in lines if line.row.metric], 2):
        theirs = [Estimate(line.paper.mean, line.paper.std, line.paper.seeds) for line in (a, b)]
        paper, here = theirs[0].minus(theirs[1]), a.row.metric.minus(b.row.metric)
        if paper.clear and not here.clear:
            unclear += 1
        elif paper.clear and (here.value > 0) == (paper.value > 0):
            same += 1
        elif paper.clear:
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
