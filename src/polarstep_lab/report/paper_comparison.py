"""Our figures next to the paper's: by how much they differ, in which order methods come, and why.

Where a recipe is the paper's own setting, digits are compared. Where a recipe has another model and
other text, only the order of the methods and the relative cost of their steps are compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from polarstep_lab.paper import DIFFERENCES, PublishedTable
from polarstep_lab.report.blocks import Block, Table, Text, part
from polarstep_lab.report.grouping import in_table_2
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.wording import MISSING, in_digits, joined, plural

__all__ = ["Beside", "beside_the_paper", "paper_blocks"]

REFERENCE = "Muon (Nesterov)"
"""The method whose cost is the unit of relative costs."""


@dataclass(frozen=True)
class Beside:
    """A section next to the paper.

    ``lines`` has a line for each method of Table 2 that has a row: the ``row``, its ``place`` and
    ``paper_place`` by the metric, from 1 for the best, and ``cost`` and ``paper_cost``, its GFLOPs in
    parts of :data:`REFERENCE`'s. An unknown number is NaN.
    """

    comparable: bool
    summary: str
    order: str
    lines: pd.DataFrame
    setting: PublishedTable


def beside_the_paper(section: Section) -> Beside | None:
    """The comparison of a section with Table 2; ``None`` where there is nothing to compare.

    Where digits do not compare, only the order of methods does, which takes two of them.
    """
    setting = in_table_2(section.recipe, section.benchmark)
    if setting is None:
        return None
    found = section.by_method
    rows = _of_one_task({method: found[method] for method in setting.rows if method in found})
    comparable = any(row.paper for row in rows.values())
    means = pd.Series({method: row.metric.mean for method, row in rows.items() if row.metric})
    if len(means) < (1 if comparable else 2):
        return None
    paper = pd.DataFrame([vars(setting.rows[method]) for method in rows], index=[*rows])
    gflops = pd.Series({method: row.gflops for method, row in rows.items()}, dtype=float)
    rank = {"ascending": not section.metric.higher_is_better, "method": "first"}
    columns = {
        "row": rows,
        "place": means.rank(**rank),
        "paper_place": paper["mean"].rank(**rank),
        "cost": gflops / gflops.get(REFERENCE, math.nan),
        "paper_cost": paper["gflops"] / paper["gflops"].get(REFERENCE, math.nan),
    }
    if comparable:
        summary = _agreement(rows, section)
    else:
        summary = (
            f"Not comparable in digits: the paper's {section.metric.name.lower()} is that of another "
            f"model on other data ({setting.data}). What can be compared is the order of the methods "
            f"and the cost of a step relative to {REFERENCE}."
        )
    order, lines = _order(rows, setting, section), pd.DataFrame(columns, index=[*rows])
    return Beside(comparable, summary, order, lines, setting)


def _of_one_task(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows of the paper's own setting, or else of the task that most rows have."""
    tasks = Counter(row.task for row in rows.values() if row.paper)
    tasks = tasks or Counter(row.task for row in rows.values())
    common = max(tasks, key=lambda task: tasks[task], default="")
    return {method: row for method, row in rows.items() if row.task == common}


def paper_blocks(section: Section) -> list[Block | None]:
    """The table of a section next to the paper, and what is known to differ between the two."""
    beside = beside_the_paper(section)
    if beside is None:
        return []
    lines, paper = beside.lines, beside.setting.rows
    rows = lines["row"]
    place, cost = "{:.0f}".format, "{:.2%}".format
    cells = {
        "Method": [row.label for row in rows],
        "Place": lines["place"].map(place, na_action="ignore"),
        "Place in the paper": lines["paper_place"].map(place, na_action="ignore"),
        "GFLOPs": [in_digits(row.gflops) for row in rows],
        "Paper GFLOPs": [in_digits(paper[method].gflops) for method in rows.index],
        "Relative GFLOPs": lines["cost"].map(cost, na_action="ignore"),
        "in the paper": lines["paper_cost"].map(cost, na_action="ignore"),
    }
    table = Table("Next to the paper", pd.DataFrame(cells, dtype=object).fillna(MISSING))
    relative = f"Relative GFLOPs: in per cent of {REFERENCE}'s."
    caption = joined(relative, beside.order, f"Source: {beside.setting.source}.")
    lead = Text(beside.summary, "verdict" if beside.comparable else "verdict warned")
    notes = [Text(note, "note") for note in DIFFERENCES[section.benchmark]]
    return [*part(table, caption, lead=lead), Text("What is known to differ:", "known"), *notes]


def _agreement(rows: Mapping[str, Row], section: Section) -> str:
    """How many methods agree with the paper, and in which direction the others are off."""
    judged = [d for r in rows.values() if (d := r.off_the_paper) and d.error is not None]
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


def _order(rows: Mapping[str, Row], setting: PublishedTable, section: Section) -> str:
    """How many pairs of methods that the paper tells apart come in the same order here."""
    found = {method: row.metric for method, row in rows.items() if row.metric}
    same, unclear, turned = setting.order(found)
    if not (pairs := same + unclear + len(turned)):
        return ""
    parts = [
        f"Of {plural(pairs, 'pair')} of methods that the paper tells apart at 95%, {same or 'none'} "
        f"come{'s' if same < 2 else ''} in the same order here"
    ]
    if unclear:
        parts.append(f"{unclear} {'is' if unclear == 1 else 'are'} not told apart by these seeds")
    if turned:
        better = section.metric.higher_is_better
        told = [f"{a} before {b}" if better else f"{b} before {a}" for a, b in turned]
        parts.append(f"{len(turned)} the other way round ({'; '.join(told)})")
    return f"{', '.join(parts)}."
