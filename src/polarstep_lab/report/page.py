"""The page: one HTML file that holds its style, its script and its figures.

Figures are inlined as SVG whose colours are CSS variables, so that one file serves a light screen,
a dark one and paper. Every text that comes from a record is escaped by the template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from polarstep_lab.report.blocks import Block, Table
from polarstep_lab.report.grouping import Runs
from polarstep_lab.report.palette import all_looks
from polarstep_lab.report.rows import STATUSES, Section
from polarstep_lab.report.texts import plural
from polarstep_lab.report.timing import device_of

__all__ = ["render"]

_BENCHMARKS = {"nanogpt": "nanoGPT", "cifar10": "CIFAR-10"}


def render(
    title: str,
    runs: Runs,
    sections: Sequence[tuple[Section, Sequence[Block]]],
    notices: Sequence[str],
) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    counts = runs.frame["status"].value_counts()
    recipes = ", ".join(dict.fromkeys(section.recipe for section, _ in sections))
    return environment.from_string(_resource("page.html")).render(
        title=title,
        lead=f"{plural(len(runs.frame), 'run')} of {recipes}.",
        counts=[(status, counts[status]) for status in STATUSES if status in counts],
        notices=notices,
        sections=sections,
        benchmarks=_BENCHMARKS,
        environments=_environments(runs),
        lost=_lost(runs),
        variables=Markup(_variables()),
        css=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
    )


def _lost(runs: Runs) -> Table | None:
    """The runs that did not finish, and what they said about it."""
    lost = runs.frame[runs.frame["status"] != "finished"].sort_values("run")
    columns = {"run": "Run", "method": "Method", "seed": "Seed", "status": "Status"}
    cells = lost[[*columns, "message"]].fillna("no result recorded").astype(str).values.tolist()
    header = [*columns.values(), "Message"]
    return Table("Runs that did not finish", header, cells) if cells else None


def _environments(runs: Runs) -> list[tuple[str, str, tuple[tuple[str, str], ...]]]:
    """Each distinct machine and set of versions: its device, its number of runs, its entries."""
    boxes = Counter((device_of(run), tuple(_flat(run.environment))) for run in runs.frame["record"])
    return [(device, plural(boxes[device, all_], "run"), all_) for device, all_ in sorted(boxes)]


def _flat(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The entries of an environment by name, without what a box has elsewhere and when it began."""
    pairs = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            prefix = "" if key in ("packages", "versions") else f"{key} "
            pairs += [(f"{prefix}{name}", text) for name, text in _flat(value)]
        elif key not in ("device", "device_name", "threads", "started"):
            text = "not recorded" if value is None else str(value)
            pairs.append((key.replace("_", " "), text))
    return pairs


def _variables() -> str:
    """The palette as CSS variables: light by default, dark where the reader prefers it."""
    light = "".join(f"{look.variable}:{look.light};" for look in all_looks())
    dark = "".join(f"{look.variable}:{look.dark};" for look in all_looks())
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
