"""A report as one HTML page and as Markdown, from templates in this folder, and where it is written.

Every text may come from a record, so both templates escape every text: no name can break a table, open
a link or become HTML.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd
from markupsafe import Markup

from polarstep_lab.report.figures import Drawing, Look
from polarstep_lab.report.rows import Section
from polarstep_lab.report.runs import STATUSES, Runs
from polarstep_lab.storage import (
    StorageError,
    read_json,
    refuse_unwritable,
    write_atomically,
    write_json,
)
from polarstep_lab.wording import plural

__all__ = [
    "Block",
    "Commands",
    "Heading",
    "Table",
    "Text",
    "html_page",
    "markdown_page",
    "part",
    "write_folder",
]


class Heading(NamedTuple):
    """The title of the blocks below it, up to the next heading; a section's title has level 2."""

    text: str
    level: int = 3


class Text(NamedTuple):
    """A paragraph; ``style`` is its class on the page."""

    text: str
    style: str = "caption"


class Commands(NamedTuple):
    """The label of each row, and the commands that repeat its runs."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class Table:
    """A table of texts. The second cell of the row ``best`` is bold.

    On the page, ``looks`` shows beside each row how its curve is drawn in the figures.
    """

    name: str
    cells: pd.DataFrame
    best: int | None = None
    looks: Sequence[Look] = ()

    @property
    def header(self) -> list[str]:
        """The titles of the columns."""
        return [*self.cells]

    @property
    def rows(self) -> list[list[str]]:
        """The texts, row by row."""
        return self.cells.to_numpy().tolist()

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, to be aligned on the right; the first never does."""
        number = re.compile(r"[-+−±—\d∞].*|recipe|means|")
        numbers = self.cells.iloc[:, 1:].map(lambda cell: bool(number.fullmatch(cell))).all()
        return [False, *numbers]


Block = Heading | Text | Commands | Table | Drawing


def part(table: Table, caption: str, figures: Sequence[Drawing | None]) -> list[Block]:
    """A table below its name with its caption, then figures; nothing where the table is empty."""
    shown = [figure for figure in figures if figure is not None]
    return [Heading(table.name), table, Text(caption), *shown] if table.rows else []


# --- the page and the Markdown file ---------------------------------------------------------------


def html_page(
    title: str, runs: Runs, sections: Mapping[Section, Sequence[Block]], notices: Sequence[str]
) -> str:
    """The page as HTML."""
    counts = runs.frame["status"].value_counts()
    return _rendered(
        "page.html",
        title=title,
        counts={s: f"{plural(int(counts[s]), 'run')} {s}" for s in STATUSES if s in counts},
        notices=notices,
        sections=sections,
        tables=[table for table in (_lost(runs), _environments(runs)) if table.rows],
        css=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
    )


def markdown_page(sections: Mapping[Section, Sequence[Block]], notices: Sequence[str]) -> str:
    """All tables and the commands behind them, as one Markdown document."""
    blocks: list[Block] = [Heading("Results", 1), *(Text(text, "notice") for text in notices)]
    for section, shown in sections.items():
        blocks += [Heading(section.title, 2)]
        blocks += [block for block in shown if not isinstance(block, Drawing)]
    return _rendered("summary.jinja", blocks=blocks)


_SPECIAL = re.compile(r"[\\`*|\[\]~]|(?<!\w)_|_(?!\w)|^[-+=#](?=\s)")


def _escaped(text: Any) -> Any:
    """``text`` as Markdown that shows exactly that text, on one line; ``Markup`` stays as it is.

    >>> print(_escaped("a|b\\n<i>*_train_*</i>"), _escaped("micro_batch"), _escaped("# no heading"))
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
        finalize=None if template.endswith(".html") else _escaped,
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


# --- the folder -----------------------------------------------------------------------------------

MANIFEST = ".polarstep-report.json"
"""The list of a report's files, beside them: only what is in the list is replaced or removed."""


def write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Write ``files`` (path within the folder → content), in place of an earlier report's.

    A file of the same name that no report wrote stops the report before anything is written.
    """
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; --out expects a folder, new or made by a report")
    if folder.suffix.lower() in (".html", ".htm") and not folder.exists():
        raise StorageError(
            f"{folder} has the name of a page: --out expects a folder, as --out "
            f"{folder.with_suffix('')}, in which the page is index.html"
        )
    manifest = folder / MANIFEST
    refuse_unwritable(manifest, "--out")
    owned = read_json(manifest)["files"] if manifest.exists() else []
    foreign = [name for name in files if name not in owned and (folder / name).exists()]
    if foreign:
        raise StorageError(
            f"{folder} holds files that no report wrote: {', '.join(foreign[:4])}. Nothing was "
            "changed; choose another --out, or move these files away"
        )
    # First the files of both reports, so that a report that was killed half-way can be repeated.
    write_json(manifest, {"files": sorted({*owned, *files})})
    for name, content in files.items():
        write_atomically(
            folder / name,
            lambda file, content=content: file.write(content.encode()),  # type: ignore[misc]
        )
    for name in set(owned) - set(files):
        (folder / name).unlink(missing_ok=True)
    write_json(manifest, {"files": sorted(files)})
