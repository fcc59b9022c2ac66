"""Write the measured tables and the figure into the pages that show them: no number is typed in.

    python benchmarks/update_docs.py            # write
    python benchmarks/update_docs.py --check    # fail if a page is not what its record says

After a marker ``<!-- KIND: RECORD -->``, with a kind of :data:`TABLES`, a page has the table made from
the record, up to the next blank line. Between ``<!-- results: FOLDER -->`` and ``<!-- end -->`` are
the results of the archived runs below the folder; it is empty without runs. The figure of
docs/assets/step-cost.svg is drawn from the times of results/step-cost/h200-deflated.json.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polarstep.storage import write_atomically

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/precision.md", "docs/results.md", "docs/speed.md", "docs/which.md")
FIGURE = "docs/assets/step-cost.svg"
TIMES = "results/step-cost/h200-deflated.json"
RESULTS = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
MARKER = re.compile(r"(<!-- ([a-z-]+): (\S+) -->\n)\n(?:\|.*\n)*\n?")
# Maps whose cost and quality stand side by side: the title, the optimizer's name in the times, and
# the map's in the table of perplexities; None where the record does not have it.
WEIGHED = (
    ("AdamW, fused", "AdamW, fused", None),
    ("full space", "full space, PolarExpress 5", "full space, PolarExpress 5"),
    ("full space, `NormalizedRows`", None, "full space, PolarExpress 5, rows normalized"),
    (
        '`Deflated`, rank 48, warm: `polar="auto"`',
        "Deflated 48, warm, one step",
        "48+8, warm, one step of degree 17, rate 0.02",
    ),
    (
        "… with `NormalizedRows`",
        None,
        "48+8, warm, one step of degree 17, rows normalized, rate 0.02",
    ),
    (
        "`Deflated`, rank 48, h = 1",
        "Deflated 48, Gaussian h=1, one step",
        "48+8, h = 1, one step of degree 17",
    ),
    ("`LowRank(200)`, no power iteration", "LowRank, Gaussian h=0", "LowRank(200+8), h = 0"),
    ("… with its basis kept 4 steps", "LowRank, Gaussian h=0, kept 4 steps", None),
    ("`LowRank(200)`, warm", "LowRank, warm", None),
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
    found = json.loads(record.read_text())
    steps = found["steps"]
    loads = list(dict.fromkeys(row["workload"] for row in steps))
    device = "cpu" if found["machine"].startswith("CPU") else "cuda"
    titles = [f"{load}{', `LowRank` in full space' * _unsketched(load, device)}" for load in loads]
    lines = ["| optimizer | " + " | ".join(titles) + " |", "|---|" + "---|" * len(loads)]
    for name in dict.fromkeys(row["optimizer"] for row in steps):
        rows = {row["workload"]: row for row in steps if row["optimizer"] == name}
        cells = [cell(rows[load]) for load in loads]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(each or "–" for each in cells) + " |")
    return "\n".join(lines)


def _unsketched(load: str, device: str) -> bool:
    """Whether no row of LowRank sketches a matrix of the workload: all of them run the inner map."""
    import torch

    from step_cost import WORKLOADS, maps

    if load not in WORKLOADS:
        return False
    shapes, rank, oversample = WORKLOADS[load]
    rows = [make() for name, make in maps(rank, oversample).items() if name.startswith("LowRank")]
    on = torch.device(device)
    return all(polar.full_space_reason(m, n, on) for polar in rows for _, m, n in shapes)


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


def frontier_table(summary: Path) -> str:
    """The table that frontier.py made, as it is."""
    return summary.read_text().rstrip("\n")


def weighed_table(summary: Path) -> str:
    """What a step of each map costs, against AdamW's, and what the map does to perplexity."""
    cells = [line.strip("| ").split(" | ") for line in summary.read_text().splitlines()[2:]]
    quality = {name: told for name, _, told in cells}
    ratios = _ratios(ROOT / TIMES)
    loads = ("nanoGPT", "8B layer")
    lines = [
        f"| map | {' | '.join(f'step, {load}' for load in loads)} | perplexity, to full space |",
        "|---|" + "--:|" * (len(loads) + 1),
    ]
    for title, timed, trained in WEIGHED:
        if trained and trained not in quality:
            raise SystemExit(f"{summary} has no row {trained!r}: correct WEIGHED in this file")
        times = [f"{ratios[timed, load]:.2f}×" if timed else "not timed" for load in loads]
        told = quality[trained] if trained else "not run"
        lines.append(f"| {title} | {' | '.join(times)} | {told} |")
    return "\n".join(lines)


def _ratios(record: Path) -> dict[tuple[str, str], float]:
    """Time of a step over AdamW's, by optimizer and workload."""
    steps = json.loads(record.read_text())["steps"]
    return {(row["optimizer"], row["workload"]): row["ratio"] for row in steps}


def figure(record: Path) -> str:
    """SVG: a bar for the time of each optimizer's step over AdamW's, on two sets of matrices."""
    ratios = _ratios(record)
    names = [name for _, name, _ in WEIGHED if name]
    width, left, right, row, top = 760, 270, 60, 24, 34
    longest = math.log(
        max(ratios[name, load] for name in names for load in ("nanoGPT", "8B layer"))
    )
    shapes, y = [], 0
    for load, words in (
        ("nanoGPT", "the 64 matrices of nanoGPT"),
        ("8B layer", "a layer of an 8B model"),
    ):
        shapes.append(
            f'<text x="0" y="{y + 20}" class="title">{words}: time of a step ÷ AdamW\'s</text>'
        )
        for i, name in enumerate(names):
            ratio, line = ratios[name, load], y + top + row * i
            # On a logarithmic scale, from half of AdamW's time on.
            length = (width - left - right) * math.log(2 * ratio) / (longest + math.log(2))
            kind = "low" if name.startswith(("LowRank", "Deflated")) else "other"
            bar = f'width="{length:.1f}" height="{row - 7}" class="{kind}"'
            shapes += [
                f'<text x="{left - 8}" y="{line + 15}" text-anchor="end">{name}</text>',
                f'<rect x="{left}" y="{line + 2}" {bar}/>',
                f'<text x="{left + length + 6:.1f}" y="{line + 15}">{ratio:.2f}×</text>',
            ]
        y += top + row * len(names) + 14
    style = (
        "text{font:14px sans-serif;fill:#333}.title{font-weight:bold}.low{fill:#3f6fb5}"
        ".other{fill:#a8a8a8}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" role="img">'
    return "\n".join([head, f"<style>{style}</style>", *shapes, "</svg>\n"])


TABLES: dict[str, Callable[[Path], str]] = {
    "table": step_table,
    "device": device_table,
    "speedup": speedup_table,
    "accuracy": accuracy_table,
    "frontier": frontier_table,
    "low-precision": low_precision_table,
    "weighed": weighed_table,
}


def results_tables(folder: Path, up: str) -> str:
    """Tables that compare the methods of the archived runs below a folder, with their sources.

    ``up`` leads from the page to the repository's root.
    """
    archives = sorted(folder.rglob("records.jsonl"))
    if not archives:
        return ""
    from polarstep_lab.report.grouping import sections_of
    from polarstep_lab.report.pages import brief_lines
    from polarstep_lab.report.runs import collect

    sections, _ = sections_of(collect([folder]))
    blocks = []
    for section in sections:
        if not section.rows:
            continue
        seeds = sorted({row.seeds_text for row in section.rows})
        devices = sorted({device for row in section.rows for device in row.devices})
        links = [f"[report]({up}{(folder / 'summary.md').relative_to(ROOT)})"]
        links += [f"[{path.parent.name}]({up}{path.relative_to(ROOT)})" for path in archives]
        blocks.append(
            f"**{section.recipe}**, seeds: {' or '.join(seeds)}, {', '.join(devices)} "
            f"({', '.join(links)}):\n\n" + "\n".join(brief_lines(section))
        )
    return "\n" + "\n\n".join(blocks) + "\n\n"


def filled(text: str, page: str) -> str:
    """``text`` of the page with this path in the repository, with every marked table made anew."""
    up = "../" * page.count("/")

    def table(match: re.Match[str]) -> str:
        marker, kind, record = match.groups()
        if kind == "results":
            return match[0]
        return f"{marker}\n{TABLES[kind](ROOT / record)}\n\n"

    def results(match: re.Match[str]) -> str:
        opening, folder, end = match.groups()
        return f"{opening}{results_tables(ROOT / folder, up)}{end}"

    return RESULTS.sub(results, MARKER.sub(table, text))


def main() -> int:
    """Write the pages and the figure, or with --check compare them."""
    made = {page: filled((ROOT / page).read_text(), page) for page in PAGES}
    made[FIGURE] = figure(ROOT / TIMES)
    stale = [
        name
        for name, text in made.items()
        if not (ROOT / name).exists() or (ROOT / name).read_text() != text
    ]
    if "--check" not in sys.argv:
        for name in stale:
            data = made[name].encode()
            write_atomically(ROOT / name, lambda file, data=data: file.write(data))
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
