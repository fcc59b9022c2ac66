"""The results of archived runs for the pages: their tables, and the commands that repeat the runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pages import ROOT

COMMAND_WIDTH = 78  # of a block of code on the site


def results_tables(folder: Path, up: str) -> str:
    """Tables that compare the methods of the archived runs below a folder, with their sources.

    ``up`` leads from the page to the repository's root.
    """
    archives = sorted(folder.rglob("records.jsonl"))
    if not archives:
        return ""
    from polarstep_lab.report.grouping import sections_of
    from polarstep_lab.report.pages import brief_lines
    from polarstep_lab.report.runs import collect_runs

    sections, _ = sections_of(collect_runs([folder]))
    blocks = []
    for section in sections:
        if not section.rows:
            continue
        seeds = sorted({row.seeds_text for row in section.rows})
        devices = sorted({device for row in section.rows for device in row.devices})
        links = [f"[report]({up}{folder.relative_to(ROOT)})"]
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
