"""Write the measured tables, claims and figures into the pages that show them: no number is typed in.

    python benchmarks/update_docs.py            # write
    python benchmarks/update_docs.py --check    # fail if a page is not what its record says

After a marker ``<!-- KIND: RECORD -->``, with a kind of :data:`TABLES`, a page has the table made from
the record, up to the next blank line. Between ``<!-- claim: NAME -->`` and ``<!-- end -->`` is a claim
of ``docs_claims``. Between ``<!-- results: FOLDER -->`` and ``<!-- end -->`` are the results of the
archived runs below the folder, with the commands that repeat them; it is empty without runs. The figures
in ``docs/assets`` are those of ``docs_figures.py``.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from docs_claims import made
from docs_figures import FIGURES
from docs_quality import (
    HELD,
    RATES,
    TIMES,
    Weighed,
    at_chosen_rates,
    chosen,
    memory,
    peers,
    perplexities,
    quality,
    steps,
    weighed,
)
from polarstep.storage import write_atomically

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "docs/experiments.md",
    "docs/log.md",
    "docs/precision.md",
    "docs/results.md",
    "docs/speed.md",
    "docs/start.md",
    "docs/theory.md",
    "docs/which.md",
)
RESULTS = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
CLAIM = re.compile(r"(<!-- claim: (\S+) -->)(\n?).*?(<!-- end -->)", re.DOTALL)
MARKER = re.compile(r"(<!-- ([a-z-]+): (\S+) -->\n)\n(?:\|.*\n)*\n?")
WIDTH = 120  # of the lines of a page
COMMAND_WIDTH = 78  # of a block of code on the site


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


def tightness_table(record: Path) -> str:
    """The exact γ beside its cheap bound, from what certificate_tightness.py wrote."""
    lines = ["| map | γ, median (largest) | bound, median (largest) |", "|---|---|---|"]
    for row in json.loads(record.read_text())["maps"]:
        cells = [
            f"{row[f'{kind}_median']:.3f} ({row[f'{kind}_largest']:.3f})".replace("-", "−")
            for kind in ("gamma", "bound")
        ]
        lines.append(f"| {row['map']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def low_precision_table(record: Path) -> str:
    """Losses and bytes of state, from what low_precision.py wrote."""
    from low_precision import table

    return "\n".join(table([json.loads(line) for line in record.read_text().splitlines()]))


def frontier_table(summary: Path) -> str:
    """The table that frontier.py made, as it is."""
    return summary.read_text().rstrip("\n")


def chosen_table(record: Path) -> str:
    """Every map at the best of three rates, chosen on one seed and reported on others."""
    from frontier import CHOICE, FULL, maps

    rates = " | ".join(f"{rate:g}" for rate in RATES)
    lines = [
        f"| map | {rates} | chosen | other seeds, to full space |",
        "|---|" + "--:|" * (len(RATES) + 2),
    ]
    words = maps()
    for name in dict.fromkeys(name for name, _ in perplexities()):
        found, rate = at_chosen_rates(name), chosen(name)
        if found is None:
            continue
        base, *rows = name.split("+")
        title = words[base][0] + (", rows normalized" if rows else "")
        tried = [f"{perplexities()[name, each][CHOICE]:.2f}" for each in RATES]
        told = "–" if name == FULL else found.told(unit="%")
        lines.append(f"| {title} | {' | '.join(tried)} | {rate:g} | {told} |")
    return "\n".join(lines)


def scaling_table(record: Path, unit: str) -> str:
    """The gap to full space over tokens or over width."""
    from scaling import FRONTIER, recorded, table

    return "\n".join(table(recorded(record, FRONTIER), unit))


def peers_table(record: Path) -> str:
    """Prices, memory and perplexity of other libraries' optimizers, beside those of ours."""
    first = next(iter(HELD))
    loads = " | ".join(f"step, {load}" for load in HELD)
    lines = [
        f"| optimizer | {loads} | MiB, {first} | rate | perplexity, to full space |",
        "|---|" + "--:|" * (len(HELD) + 3),
    ]
    ours = [each for each in weighed() if each.timed and each.trained]
    others = peers()
    for each in (*ours, *others):
        rows = [steps().get((each.timed, load)) if each.timed else None for load in HELD]
        times = [f"{row['ms']:.2f} ms, {row['ratio']:.2f}×" if row else "not timed" for row in rows]
        times = [text.replace(" ", "\N{NO-BREAK SPACE}") for text in times]
        rate = f"{each.trained[1]:g}" if each.trained else "–"
        title = each.timed if each in others and each.timed else each.title
        lines.append(
            f"| {title} | {' | '.join(times)} | {memory(rows[0])} | {rate} | {_told(each)} |"
        )
    return "\n".join(lines)


def long_run_table(folder: Path) -> str:
    """The methods on one pass over 73 million tokens."""
    import docs_long_run

    return "\n".join(docs_long_run.table())


def accuracies_table(folder: Path) -> str:
    """Test accuracy of each method against full space on the same seeds, in points."""
    from docs_claims.cifar10 import cifar_frontier_rows

    lines = [
        "| method | test accuracy | to full space, points | optimizer ms |",
        "|---|--:|--:|--:|",
    ]
    for name, mean, found, ms in cifar_frontier_rows(folder):
        told = "–" if found is None else found.told(2)
        lines.append(f"| {name} | {100 * mean:.2f}% | {told} | {ms:.2f} |")
    return "\n".join(lines)


def headline_table(record: Path) -> str:
    """The rows of :func:`weighed_table` whose perplexity is known, and AdamW's."""
    lines = weighed_table(record).splitlines()
    return "\n".join(line for line in lines if "not run" not in line or "AdamW" in line)


def weighed_table(record: Path) -> str:
    """What a step of each map costs, against AdamW's, and what the map does to perplexity."""
    loads = " | ".join(f"step, {load}" for load in HELD)
    lines = [
        f"| map | {loads} | perplexity, to full space |",
        "|---|" + "--:|" * (len(HELD) + 1),
    ]
    for each in weighed():
        times = [
            f"{steps()[each.timed, load]['ratio']:.2f}×" if each.timed else "not timed"
            for load in HELD
        ]
        lines.append(f"| {each.name} | {' | '.join(times)} | {_told(each)} |")
    return "\n".join(lines)


def _told(each: Weighed) -> str:
    """The quality of a map, for a table."""
    if each.trained is None:
        return "not run"
    found = quality(each.trained)
    return found.told(unit="%") if found.interval or found.pairs == 1 else "–"


# Where maps were timed: the matrices, the machine, the record, and the column in it.
PLACES = (
    ("nanoGPT", "one H200", Path(TIMES).stem, "nanoGPT"),
    ("an 8B layer", "one H200", Path(TIMES).stem, "8B layer"),
    ("a tenth of nanoGPT", "two ARM cores", "cpu-arm", "nanoGPT"),
)


WIDTH_OF_RUNS = 768
"""The width of the GPT whose perplexity the tables have."""


def choice_table(folder: Path) -> str:
    """For each set of matrices and each budget the map with the lowest perplexity that fits it.

    Maps that another map beats in both time and perplexity are left out, and so are maps that were
    trained with one seed: a single run decides nothing.
    """
    lines = [
        "| matrices | machine | from, × AdamW | map | perplexity, to full space |",
        "|---|---|--:|---|--:|",
    ]
    for matrices, machine, record, load in PLACES:
        rows = steps(f"{folder.relative_to(ROOT)}/{record}.json")
        known = [
            (rows[each.timed, load]["ratio"], quality(each.trained).value, each)
            for each in weighed()
            if each.timed and each.trained and (each.timed, load) in rows
            if quality(each.trained).interval is not None
        ]
        kept: list[tuple[float, float, Weighed]] = []
        for row in sorted(known, key=lambda row: row[0]):
            if not kept or row[1] < kept[-1][1]:
                kept.append(row)
        for ratio, _, each in kept:
            told = _told(each) if _told(each) != "–" else "the baseline"
            if each.columns and HELD.get(load) != WIDTH_OF_RUNS:
                told += f", at width {WIDTH_OF_RUNS}"
            lines.append(f"| {matrices} | {machine} | {ratio:.1f}× | {each.title} | {told} |")
            matrices = machine = ""
    return "\n".join(lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "table": step_table,
    "device": device_table,
    "speedup": speedup_table,
    "accuracy": accuracy_table,
    "frontier": frontier_table,
    "tightness": tightness_table,
    "low-precision": low_precision_table,
    "headline": headline_table,
    "weighed": weighed_table,
    "chosen": chosen_table,
    "over-tokens": partial(scaling_table, unit="tokens"),
    "over-width": partial(scaling_table, unit="width"),
    "peers": peers_table,
    "long-run": long_run_table,
    "accuracies": accuracies_table,
    "choice": choice_table,
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
        note = f" ({section.note})" if section.note else ""
        blocks.append(
            f"**{section.recipe}**{note}, seeds: {' or '.join(seeds)}, {', '.join(devices)} "
            f"({', '.join(links)}):\n\n" + "\n".join(brief_lines(section))
        )
        records = [run for row in section.rows for run in row.runs["record"]]
        blocks.append("\n".join(["```sh", *commands_of(records), "```"]))
    return "\n" + "\n\n".join(blocks) + "\n\n"


def commands_of(records: Iterable[Any]) -> Iterator[str]:
    """The ``polarstep compare`` commands that make these runs, whatever made them."""
    seeds: dict[tuple[str, str, tuple[str, ...]], set[int]] = {}
    for run in records:
        who = run.identity
        settings = tuple(
            f"--set {shlex.quote(f'{key}={value if isinstance(value, str) else json.dumps(value)}')}"
            for key, value in who.overrides.items()
            if not key.startswith("runtime.")
        )
        seeds.setdefault((who.recipe, _slug(who.method), settings), set()).add(who.seed)
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (recipe, slug, settings), found in seeds.items():
        count = len(found)
        told = str(count) if found == set(range(count)) else ",".join(map(str, sorted(found)))
        if count == 1 and found != {0}:
            told += ","  # this seed, not a number of seeds
        groups.setdefault((recipe, told, settings), []).append(slug)
    for (recipe, told, settings), slugs in groups.items():
        line = f"polarstep compare {recipe}"
        for word in (f"--methods {','.join(slugs)}", f"--seeds {told}", *settings):
            if len(line) + len(word) > COMMAND_WIDTH:
                yield f"{line} \\"
                line = f"   {word}"
            else:
                line = f"{line} {word}"
        yield line


def _slug(method: str) -> str:
    from polarstep_lab.methods import find_method

    return find_method(method).slug


def filled(text: str, page: str) -> str:
    """``text`` of the page with this path in the repository, with every marked table made anew."""
    up = "../" * page.count("/")

    def table(match: re.Match[str]) -> str:
        marker, kind, record = match.groups()
        if kind not in TABLES:
            return match[0]
        return f"{marker}\n{TABLES[kind](ROOT / record)}\n\n"

    def results(match: re.Match[str]) -> str:
        opening, folder, end = match.groups()
        return f"{opening}{results_tables(ROOT / folder, up)}{end}"

    def claim(match: re.Match[str]) -> str:
        opening, name, newline, end = match.groups()
        if not newline:
            return f"{opening}{made(name)}{end}"
        return f"{opening}\n\n{textwrap.fill(made(name), WIDTH, break_on_hyphens=False)}\n\n{end}"

    return RESULTS.sub(results, CLAIM.sub(claim, MARKER.sub(table, text)))


def main() -> int:
    """Write the pages and the figures, or with --check compare them."""
    texts = {page: filled((ROOT / page).read_text(encoding="utf-8"), page) for page in PAGES}
    texts |= {name: draw() for name, draw in FIGURES.items()}
    stale = [
        name
        for name, text in texts.items()
        if not (ROOT / name).exists() or (ROOT / name).read_text(encoding="utf-8") != text
    ]
    if "--check" not in sys.argv:
        for name in stale:
            data = texts[name].encode()
            write_atomically(ROOT / name, lambda file, data=data: file.write(data))
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
