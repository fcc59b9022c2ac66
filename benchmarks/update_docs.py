"""Write the measured tables into the pages that show them: no number is typed in.

    python benchmarks/update_docs.py            # write
    python benchmarks/update_docs.py --check    # fail if a page is not what its record says

After a marker ``<!-- KIND: RECORD -->``, of kind table, device, speedup, accuracy or low-precision, a
page has the table made from the record, up to the next blank line. Between ``<!-- results: FOLDER -->``
and ``<!-- end -->`` are the results of the archived runs below the folder; it is empty without runs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/speed.md", "docs/precision.md")
RESULTS = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
MARKER = re.compile(
    r"(<!-- (table|device|speedup|accuracy|low-precision): (\S+) -->\n)\n(?:\|.*\n)*\n?"
)


def step_table(record: Path) -> str:
    """Times and ratios of whole steps, from what step_cost.py wrote."""
    return _by_workload(record, lambda row: f"{row['ms']:.2f} ms, {row['ratio']:.2f}×")


def device_table(record: Path) -> str:
    """Times of the same steps on the device alone, for steps that are one graph."""
    return _by_workload(
        record, lambda row: f"{row['device_ms']:.3f} ms" if "device_ms" in row else None
    )


def speedup_table(record: Path) -> str:
    """How many times as fast as the loop of seven steps, for workloads where it was timed."""
    steps = json.loads(record.read_text())["steps"]
    loop = {row["workload"]: row["ms"] for row in steps if row["optimizer"].endswith("Schulz 7")}

    def cell(row: dict[str, Any]) -> str | None:
        compared = row["optimizer"].startswith(("LowRank", "full space", "a loop of batches"))
        return f"{loop[row['workload']] / row['ms']:.1f}" if compared else None

    return _by_workload(record, cell)


def _by_workload(record: Path, cell: Callable[[dict[str, Any]], str | None]) -> str:
    """A row for each optimizer and a column for each workload, without rows that are empty."""
    steps = json.loads(record.read_text())["steps"]
    loads = list(dict.fromkeys(row["workload"] for row in steps))
    lines = ["| optimizer | " + " | ".join(loads) + " |", "|---|" + "---|" * len(loads)]
    for name in dict.fromkeys(row["optimizer"] for row in steps):
        rows = {row["workload"]: row for row in steps if row["optimizer"] == name}
        cells = [cell(rows[load]) for load in loads]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(each or "–" for each in cells) + " |")
    return "\n".join(lines)


def accuracy_table(record: Path) -> str:
    """The largest Δγ and ν of each map over the matrices that step_accuracy.py printed."""
    rows = re.findall(r"^  \S.*?\s{2,}(\S.*?)\s+Δγ\s+(\S+)\s+ν (\S+)$", record.read_text(), re.M)
    lines = ["| map | largest Δγ | largest ν |", "|---|---|---|"]
    for name in dict.fromkeys(row[0] for row in rows):
        gamma, nu = (max(float(row[i]) for row in rows if row[0] == name) for i in (1, 2))
        lines.append(f"| {name} | {gamma:.4f} | {nu:.4f} |")
    return "\n".join(lines)


def low_precision_table(record: Path) -> str:
    """Losses and bytes of state, from what low_precision.py wrote."""
    from low_precision import table

    return "\n".join(table([json.loads(line) for line in record.read_text().splitlines()]))


def results_tables(folder: Path) -> str:
    """Tables that compare the methods of the archived runs below a folder, with their sources."""
    archives = sorted(folder.rglob("records.jsonl"))
    if not archives:
        return ""
    from polarstep_lab.report.grouping import collect, sections_of
    from polarstep_lab.report.markdown import brief_lines
    from polarstep_lab.report.texts import seeds_text

    sections, _ = sections_of(collect([folder]))
    blocks = []
    for section in sections:
        if not section.rows:
            continue
        seeds = sorted({seeds_text(row) for row in section.rows})
        devices = sorted({device for row in section.rows for device in row.devices})
        links = [f"[report]({(folder / 'summary.md').relative_to(ROOT)})"]
        links += [f"[{path.parent.name}]({path.relative_to(ROOT)})" for path in archives]
        blocks.append(
            f"**{section.recipe}**, seeds: {' or '.join(seeds)}, {', '.join(devices)} "
            f"({', '.join(links)}):\n\n" + "\n".join(brief_lines(section))
        )
    return "\n" + "\n\n".join(blocks) + "\n\n"


def filled(text: str) -> str:
    """``text`` with every marked table made anew."""

    def table(match: re.Match[str]) -> str:
        marker, kind, record = match.groups()
        make = {
            "table": step_table,
            "device": device_table,
            "speedup": speedup_table,
            "accuracy": accuracy_table,
            "low-precision": low_precision_table,
        }[kind]
        return f"{marker}\n{make(ROOT / record)}\n\n"

    def results(match: re.Match[str]) -> str:
        opening, folder, end = match.groups()
        return f"{opening}{results_tables(ROOT / folder)}{end}"

    return RESULTS.sub(results, MARKER.sub(table, text))


def main() -> int:
    """Write the pages, or with --check compare them."""
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text()
        if filled(text) != text:
            stale.append(page)
            if "--check" not in sys.argv:
                path.write_text(filled(text))
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
