"""Our figures next to the paper's: by how much they differ, in which order methods come, and why.

Where a recipe is the paper's own setting, digits are compared. Where a recipe asks the same question
of another model and other text, only the order of the methods and the relative cost of their steps are.
"""

from __future__ import annotations

import itertools
import math
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from polarstep_lab.estimates import MISSING, joined, number, plural
from polarstep_lab.methods import find_method
from polarstep_lab.paper import Published
from polarstep_lab.report.blocks import Block, Heading, Table, Text
from polarstep_lab.report.grouping import in_table_2
from polarstep_lab.report.reasons import Facts, Reason, reasons
from polarstep_lab.report.rows import Row, Section

__all__ = ["Beside", "beside_the_paper", "paper_blocks"]

REFERENCE = "Muon (Nesterov)"
"""Relative costs are in parts of the cost of this method."""
_SAME_COST = 5e-4  # as relative difference: the paper's figures have four decimals


@dataclass(frozen=True)
class Line:
    """A method next to the paper; what is not known is NaN.

    ``place`` and ``paper_place`` are among the methods, ``cost`` and ``paper_cost`` in parts of the
    reference's, and ``marks`` are the letters of the notes.
    """

    row: Row
    paper: Published
    place: float
    paper_place: float
    cost: float
    paper_cost: float
    marks: str


@dataclass(frozen=True)
class Beside:
    """A section next to the paper, with a line for each method of Table 2 that has a row."""

    comparable: bool
    summary: str
    order: str
    lines: tuple[Line, ...]
    notes: dict[str, Reason]
    source: str


def beside_the_paper(section: Section) -> Beside | None:
    """The comparison of a section with Table 2; ``None`` where there is nothing to compare.

    Without comparable digits, one method alone has nothing to be ranked against.
    """
    setting = in_table_2(section.recipe, section.benchmark)
    if setting is None:
        return None
    found = section.by_method
    rows = {method: found[method] for method in setting.rows if method in found}
    comparable = any(row.paper for row in rows.values())
    means = pd.Series({method: row.metric.mean for method, row in rows.items() if row.metric})
    if len(means) < (1 if comparable else 2):
        return None
    paper = pd.DataFrame([vars(setting.rows[method]) for method in rows], index=[*rows])
    gflops = pd.Series({method: row.gflops for method, row in rows.items()}, dtype=float)
    rank = {"ascending": not section.metric.higher_is_better, "method": "first"}
    numbers = pd.DataFrame(
        {
            "place": means.rank(**rank),
            "paper_place": paper["mean"].rank(**rank),
            "cost": gflops / gflops.get(REFERENCE, math.nan),
            "paper_cost": paper["gflops"] / paper["gflops"].get(REFERENCE, math.nan),
        }
    )
    told = {m: _reasons(row, section, setting.rows[m], comparable) for m, row in rows.items()}
    distinct = dict.fromkeys(reason for found in told.values() for reason in found)
    notes = dict(zip(string.ascii_lowercase, distinct, strict=False))
    marks = {m: ", ".join(k for k, r in notes.items() if r in told[m]) for m in rows}
    lines = tuple(
        Line(row=row, paper=setting.rows[m], marks=marks[m], **numbers.loc[m])
        for m, row in rows.items()
    )
    summary = _agreement(lines, section) if comparable else (
        f"Not comparable in digits: the paper's {section.metric.name.lower()} is that of another "
        f"model on other data ({setting.data}). What can be compared is the order of the methods and "
        f"the cost of a step relative to {REFERENCE}."
    )  # fmt: skip
    return Beside(comparable, summary, _order(lines, section), lines, notes, setting.source)


def paper_blocks(section: Section) -> list[Block | None]:
    """The section next to Table 2: digits where they compare, and else places and relative costs."""
    beside = beside_the_paper(section)
    if beside is None:
        return []
    lines = []
    for line in beside.lines:
        cells = {
            "Method": line.row.label,
            "Place": _shown(line.place, ".0f"),
            "Place in the paper": _shown(line.paper_place, ".0f"),
            "GFLOPs": number(line.row.gflops),
            "Paper GFLOPs": number(line.paper.gflops),
            "Relative GFLOPs": _shown(line.cost, ".2%"),
            "in the paper": _shown(line.paper_cost, ".2%"),
        }
        if any(other.marks or other.row.differs for other in beside.lines):
            cells["Notes"] = line.marks or ("no reason known" if line.row.differs else "")
        lines.append(cells)
    relative = f"Relative GFLOPs: in per cent of {REFERENCE}'s."
    notes = [f"({mark}) {r.topic}: {r.text}" for mark, r in beside.notes.items()]
    return [
        Heading("Next to the paper"),
        Text(beside.summary, "verdict" if beside.comparable else "verdict warned"),
        Table("Next to the paper", pd.DataFrame(lines)),
        Text(joined(relative, beside.order, f"Source: {beside.source}."), "caption"),
        Text("What is known to differ:" if notes else "", "known"),
        *(Text(note, "note") for note in notes),
    ]


def _shown(value: float, form: str) -> str:
    return MISSING if value != value else format(value, form)


def _reasons(row: Row, section: Section, paper: Published, comparable: bool) -> list[Reason]:
    """The known differences from the authors' runs that may explain a figure of this row.

    Older records do not name the data of their run. If other rows of the section were trained on the
    same shards and all name the same data, that name is used.
    """
    off = row.off_the_paper
    metric = not comparable or (off is not None and (off.clear or off.error is None))
    dearer = row.gflops and paper.gflops and abs(row.gflops / paper.gflops - 1) > _SAME_COST
    same = [o for o in section.all_rows if o.config.get("data") == row.config.get("data")]
    named = [
        {run.environment.get("data") for r in rows for run in r.runs["record"]}
        for rows in ([row], same)
    ]
    known = next(filter(None, (names - {None, ""} for names in named)), set())
    data = str(known.pop()) if len(known) == 1 else ""
    device = str(row.first.environment.get("device", ""))
    found = reasons(Facts(find_method(row.method), section.benchmark, row.config, device, data))
    return [reason for reason in found if metric or (reason.cost and (dearer or not comparable))]


def _agreement(lines: Sequence[Line], section: Section) -> str:
    """How many methods agree with the paper, and in which direction the others are off."""
    judged = [d for line in lines if (d := line.row.off_the_paper) and d.error is not None]
    if not judged:
        return "One seed has no spread: whether a difference from the paper is one cannot be told."
    better = section.metric.higher_is_better
    off = Counter("better" if (d.value > 0) is better else "worse" for d in judged if d.clear)
    text = (
        f"{len(judged) - off.total()} of {plural(len(judged), 'method')} agree with the paper: the 95% "
        "interval of the difference contains zero"
    )
    ways = [f"{n} {'is' if n == 1 else 'are'} {way}" for way, n in sorted(off.items())]
    return f"{text}; {' and '.join(ways)}." if ways else f"{text}."


def _order(lines: Sequence[Line], section: Section) -> str:
    """Which pairs of methods come in the paper's order, of those that the paper tells apart."""
    same, unclear, turned = 0, 0, []
    judged = [(line, line.row.metric) for line in lines if line.row.metric]
    for (a, ours), (b, other) in itertools.combinations(judged, 2):
        paper, here = a.paper.estimate.minus(b.paper.estimate), ours.minus(other)
        if paper.clear and not here.clear:
            unclear += 1
        elif paper.clear and (here.value > 0) == (paper.value > 0):
            same += 1
        elif paper.clear:
            first, second = (
                (a, b) if (here.value > 0) is section.metric.higher_is_better else (b, a)
            )
            turned.append(f"{first.row.method} before {second.row.method}")
    if not (pairs := same + unclear + len(turned)):
        return ""
    parts = [
        f"Of {plural(pairs, 'pair')} of methods that the paper tells apart at 95%, {same or 'none'} "
        f"come{'s' if same < 2 else ''} in the same order here"
    ]
    if unclear:
        parts.append(f"{unclear} {'is' if unclear == 1 else 'are'} not told apart by these seeds")
    if turned:
        parts.append(f"{len(turned)} the other way round ({'; '.join(turned)})")
    return f"{', '.join(parts)}."
