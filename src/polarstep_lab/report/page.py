"""The page: one HTML file that holds its style, its script and its figures.

Figures are inlined as SVG whose colours are CSS variables, so that one file serves a light screen,
a dark one and paper. Every text that comes from a record is escaped by the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import jinja2
import pandas as pd
from markupsafe import Markup

from polarstep_lab.report.blocks import Block, Table
from polarstep_lab.report.grouping import Runs
from polarstep_lab.report.palette import all_looks
from polarstep_lab.report.rows import STATUSES, Section
from polarstep_lab.report.texts import plural

__all__ = ["render"]


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
    return environment.from_string(_resource("page.html")).render(
        title=title,
        counts=[
            (status, f"{plural(int(counts[status]), 'run')} {status}")
            for status in STATUSES
            if status in counts
        ],
        notices=notices,
        sections=sections,
        tables=[table for table in (_lost(runs), _environments(runs)) if table.rows],
        variables=Markup(_variables()),
        css=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
    )


def _lost(runs: Runs) -> Table:
    """The runs that did not finish, and what they said about it."""
    lost = runs.frame[runs.frame["status"] != "finished"].sort_values("run")
    columns = ["run", "method", "seed", "status", "message"]
    cells = lost[columns].fillna("no result recorded").astype(str).to_numpy().tolist()
    return Table("Runs that did not finish", [name.capitalize() for name in columns], cells)


def _environments(runs: Runs) -> Table:
    """A column for each distinct machine and set of versions, with the number of its runs."""
    records = list(runs.frame["record"])
    told = [{**run.environment, **(run.environment.get("packages") or {})} for run in records]
    elsewhere = ["packages", "device", "device_name", "threads", "started"]
    found = pd.DataFrame(told, dtype=object).drop(columns=elsewhere, errors="ignore")
    found = found.fillna("not recorded").astype(str)
    found.insert(0, "device", list(runs.frame["device"]))
    sizes = found.groupby([*found]).size().reset_index(name="runs")
    names = [column.replace("_", " ") for column in sizes]
    cells = [[name, *map(str, sizes[column])] for name, column in zip(names, sizes, strict=True)]
    return Table("Environment", cells[0], [cells[-1], *cells[1:-1]])


def _variables() -> str:
    """The palette as CSS variables: light by default, dark where the reader prefers it."""
    light = "".join(f"{look.variable}:{look.light};" for look in all_looks())
    dark = "".join(f"{look.variable}:{look.dark};" for look in all_looks())
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
