"""A report as one HTML page and as Markdown, both from templates in this folder.

Every text may come from a record, so both templates escape every text: no name can break a table, open
a link or become HTML. On the page, figures are inlined as SVG whose colours are CSS variables, so that
the same page can be read on a light screen, on a dark screen and on paper.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from polarstep_lab.report.blocks import Block, Heading, Table, Text
from polarstep_lab.report.content import brief_blocks
from polarstep_lab.report.palette import ALL_LOOKS
from polarstep_lab.report.panels import Drawing
from polarstep_lab.report.rows import Section
from polarstep_lab.report.runs import STATUSES, Runs
from polarstep_lab.wording import plural

__all__ = ["brief_lines", "escaped", "html_page", "markdown_page"]

_SPECIAL = re.compile(r"[\\`*|\[\]~]|(?<!\w)_|_(?!\w)|^[-+=#](?=\s)")


def html_page(
    title: str, runs: Runs, sections: Mapping[Section, Sequence[Block]], notices: Sequence[str]
) -> str:
    """The page as HTML."""
    counts = runs.frame["status"].value_counts()
    light, dark = (
        "".join(f"{look.variable}:{getattr(look, theme)};" for look in ALL_LOOKS)
        for theme in ("light", "dark")
    )
    dark = f"@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}"
    return _rendered(
        "page.html",
        title=title,
        counts={s: f"{plural(int(counts[s]), 'run')} {s}" for s in STATUSES if s in counts},
        notices=notices,
        sections=sections,
        tables=[table for table in (_lost(runs), _environments(runs)) if table.rows],
        css=Markup(f":root{{{light}}}\n{dark}\n{_resource('page.css')}"),
        script=Markup(_resource("page.js")),
    )


def markdown_page(sections: Mapping[Section, Sequence[Block]], notices: Sequence[str]) -> str:
    """All tables and the commands behind them, as one Markdown document."""
    blocks: list[Block] = [Heading("Results", 1), *(Text(text, "notice") for text in notices)]
    for section, shown in sections.items():
        blocks += [Heading(section.title, 2)]
        blocks += [block for block in shown if not isinstance(block, Drawing)]
    return _rendered("summary.jinja", blocks=blocks)


def brief_lines(section: Section) -> list[str]:
    """The comparison for a front page, as lines of Markdown."""
    return _rendered("summary.jinja", blocks=brief_blocks(section)).splitlines()


def escaped(text: Any) -> Any:
    """``text`` as Markdown that shows exactly that text, on one line; ``Markup`` stays as it is.

    >>> print(escaped("a|b\\n<i>*_train_*</i>"), escaped("micro_batch"), escaped("# no heading"))
    a\\|b &lt;i&gt;\\*\\_train\\_\\*&lt;/i&gt; micro_batch \\# no heading
    """
    if isinstance(text, Markup):
        return text
    plain = html.escape(" ".join(str(text).split()), quote=False)
    return _SPECIAL.sub(lambda match: "\\" + match[0], plain)


def _rendered(template: str, **values: Any) -> str:
    """A template of this folder with its values."""
    environment = jinja2.Environment(
        autoescape=template.endswith(".html"),
        finalize=None if template.endswith(".html") else escaped,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["fence"] = _fence
    return environment.from_string(_resource(template)).render(values).rstrip() + "\n"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _fence(command: str) -> Markup:
    """The backticks around a block of code: more of them than the command has in a row."""
    return Markup("`" * max([3, *(1 + len(ticks) for ticks in re.findall("`+", command))]))


def _lost(runs: Runs) -> Table:
    """The runs that did not finish, each with its recorded message."""
    lost = runs.frame[runs.frame["status"] != "finished"].sort_values("run")
    columns = ["run", "method", "seed", "status", "message"]
    cells = lost[columns].fillna("no result recorded").astype(str)
    return Table("Runs that did not finish", cells.rename(columns=str.capitalize))


def _environments(runs: Runs) -> Table:
    """A column for each distinct machine and set of versions, with the number of its runs."""
    records = list(runs.frame["record"])
    told = [{**run.environment, **(run.environment.get("packages") or {})} for run in records]
    elsewhere = ["packages", "device", "device_name", "threads", "started"]
    found = pd.DataFrame(told, dtype=object).drop(columns=elsewhere, errors="ignore")
    found = found.fillna("not recorded").astype(str)
    found.insert(0, "device", list(runs.frame["device"]))
    sizes = found.groupby([*found]).size().reset_index(name="runs")
    cells = sizes[["runs", *found.columns[1:]]].astype(str).T.set_axis(sizes["device"], axis=1)
    cells.insert(0, "device", cells.index.str.replace("_", " "))
    return Table("Environment", cells)
