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
    """The table, and the survivors with their reasons."""
    verdicts = sorted(verdicts, key=lambda each: (each.file, each.line, each.name))
    seeds = ", ".join(sorted({str(each.seed) for each in verdicts}))
    lines = [
        f"| room (seed {seeds}) | mutants possible | drawn | killed | survived, with a reason | score |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    total = [0, 0, 0, 0]
    for name in ROOMS:
        of_room = [each for each in verdicts if each.room == name]
        if not of_room:
            continue
        killed = sum(each.killed_by is not None for each in of_room)
        explained = sum(each.killed_by is None and _reason(each) is not None for each in of_room)
        row = [of_room[0].possible, len(of_room), killed, explained]
        total = [a + b for a, b in zip(total, row, strict=True)]
        lines.append(_row(f"`{name}`", row))
    lines.append(_row("**all**", total))
    survivors = [each for each in verdicts if each.killed_by is None]
    if survivors:
        lines += ["", "Survivors:", ""]
        lines += [
            f"- {_place(each)}: {_reason(each) or 'a test is missing.'}" for each in survivors
        ]
    return "\n".join(lines) + "\n"


def _row(name: str, row: list[int]) -> str:
    possible, drawn, killed, explained = row
    numbers = f"{possible:,} | {drawn} | {killed} | {explained}"
    return f"| {name} | {numbers} | {killed / max(1, drawn):.0%} |"


def _place(each: Verdict) -> str:
    file = each.file.removeprefix("src/polarstep/")
    return f"`{file}`, `{each.where or 'module'}`: `{each.was}` → `{each.now}`"


def _reason(each: Verdict) -> str | None:
    return reasons().get(each.name)


def write(verdicts: list[Verdict]) -> None:
    """Put the table into the docs, in place of the last."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table(verdicts) + "\n" + END + rest.partition(END)[2])


def report(verdicts: list[Verdict]) -> int:
    """Print the table; return 0 if enough were killed and every survivor has a reason."""
    print(table(verdicts))
    survivors = [each for each in verdicts if each.killed_by is None]
    unexplained = sum(_reason(each) is None for each in survivors)
    share = 1 - len(survivors) / max(1, len(verdicts))
    print(f"{share:.1%} killed; {unexplained} of {len(survivors)} survivors have no reason")
    return 0 if share >= LEAST_KILLED and unexplained == 0 else 1
