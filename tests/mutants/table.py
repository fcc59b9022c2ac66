"""The score of every room, as a table for the docs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.mutants.record import Verdict, reasons
from tests.mutants.rooms import ROOMS

__all__ = ["report", "table", "write"]

PAGE = Path("docs/reliability.md")
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->"
LEAST_KILLED = 0.95


def table(verdicts: Iterable[Verdict]) -> str:
    """The table, and the survivors with their reasons.

    The score is the share of killed mutants among those that change something.
    """
    verdicts = sorted(verdicts, key=lambda each: (each.file, each.line, each.name))
    seeds = ", ".join(sorted({str(each.seed) for each in verdicts}))
    lines = [
        f"| room (seed {seeds}) | mutants possible | drawn | change nothing | killed | score |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    possible = 0
    for name in ROOMS:
        of_room = [each for each in verdicts if each.room == name]
        if of_room:
            possible += of_room[0].possible
            lines.append(_row(f"`{name}`", of_room[0].possible, of_room))
    lines.append(_row("**all**", possible, verdicts))
    missing = [f"`{name}`" for name in ROOMS if name not in {each.room for each in verdicts}]
    if missing:
        lines += ["", f"Not drawn yet: {', '.join(missing)}."]
    survivors = [each for each in verdicts if each.killed_by is None]
    if survivors:
        lines += ["", "Survivors:", ""]
        lines += [f"- {_place(each)}: {_reason(each)}" for each in survivors]
    return "\n".join(lines) + "\n"


def _row(name: str, possible: int, verdicts: list[Verdict]) -> str:
    nothing = sum(_changes_nothing(each) for each in verdicts)
    killed = sum(each.killed_by is not None for each in verdicts)
    numbers = f"{possible:,} | {len(verdicts)} | {nothing} | {killed}"
    percent = 100 * killed // max(1, len(verdicts) - nothing)  # 100% is all of them
    return f"| {name} | {numbers} | {percent}% |"


def _score(verdicts: list[Verdict]) -> float:
    killed = sum(each.killed_by is not None for each in verdicts)
    return killed / max(1, len(verdicts) - sum(_changes_nothing(each) for each in verdicts))


def _changes_nothing(each: Verdict) -> bool:
    known = reasons().get(each.name)
    return each.killed_by is None and known is not None and known.changes_nothing


def _place(each: Verdict) -> str:
    file = each.file.removeprefix("src/polarstep/")
    return f"`{file}`, `{each.where or 'module'}`: `{each.was}` → `{each.now}`"


def _reason(each: Verdict) -> str:
    known = reasons().get(each.name)
    if known is None:
        return "a test is missing."
    return known.text if known.changes_nothing else f"untested. {known.text}"


def write(verdicts: list[Verdict]) -> None:
    """Put the table into the docs, in place of the last."""
    # Not above: what the run has imported, a child would not import from its changed copy.
    from polarstep.storage import write_atomically

    before, _, rest = PAGE.read_text().partition(BEGIN)
    text = before + BEGIN + "\n" + table(verdicts) + "\n" + END + rest.partition(END)[2]
    write_atomically(PAGE, lambda file: file.write(text.encode()))


def report(verdicts: list[Verdict]) -> int:
    """Print the table; return 0 if the score suffices and every survivor has a reason."""
    print(table(verdicts))
    survivors = [each for each in verdicts if each.killed_by is None]
    unexplained = sum(each.name not in reasons() for each in survivors)
    print(f"{_score(verdicts):.1%}; {unexplained} of {len(survivors)} survivors have no reason")
    return 0 if _score(verdicts) >= LEAST_KILLED and unexplained == 0 else 1
