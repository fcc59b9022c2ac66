"""A page to send, made from the records of runs and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from polarstep.storage import StorageError
from polarstep_lab.report.content import blocks_of
from polarstep_lab.report.drawing import Drawing
from polarstep_lab.report.folder import write_folder
from polarstep_lab.report.grouping import sections_of
from polarstep_lab.report.pages import html_page, markdown
from polarstep_lab.report.rows import Section
from polarstep_lab.report.runs import Runs, collect
from polarstep_lab.report.tables import runs_csv, summary_csv

__all__ = ["report_files", "stale_tables", "write_report"]

_TITLE = "polarstep: results"

Found = tuple[Runs, tuple[Section, ...], tuple[str, ...]]


def write_report(
    paths: Sequence[Path | str],
    out: Path,
    title: str = _TITLE,
    progress: Callable[[str], object] = lambda _: None,
) -> Path:
    """Make the report of all runs below ``paths`` in the folder ``out``; returns its page."""
    write_folder(out, report_files(paths, title, progress))
    return out / "index.html"


def report_files(
    paths: Sequence[Path | str],
    title: str = _TITLE,
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, bytes]:
    """All files of a report, by their path in its folder; a function of the records alone."""
    runs, sections, notices = found = _read(paths)
    figures: dict[str, bytes] = {}
    shown = {}
    for section in sections:
        progress(section.recipe)
        shown[section] = blocks_of(section)
        for drawing in (block for block in shown[section] if isinstance(block, Drawing)):
            svg, png = drawing.files
            figures |= {
                f"figures/{drawing.name}.svg": svg.encode(),
                f"figures/{drawing.name}.png": png,
            }
    page = html_page(title, runs, shown, notices).encode()
    return {"index.html": page, **_tables(found), **figures}


def stale_tables(paths: Sequence[Path | str], out: Path) -> list[str]:
    """The tables in the folder ``out`` that are missing or not what the records say."""
    return [
        name
        for name, content in _tables(_read(paths)).items()
        if not (out / name).is_file() or (out / name).read_bytes() != content
    ]


def _read(paths: Sequence[Path | str]) -> Found:
    """The runs below ``paths``, grouped, and what the reader should be told about them."""
    runs = collect(paths)
    if runs.frame.empty:
        detail = f" ({'; '.join(runs.notices)})" if runs.notices else ""
        raise StorageError(
            f"no run directories in {', '.join(map(str, paths))}{detail}: expected folders with a "
            "config.json, as `polarstep run` and `polarstep compare` make them"
        )
    if "finished" not in set(runs.frame["status"]):
        found = [f"{run}: {status}" for run, status in runs.frame[["run", "status"]].values]
        shown = ", ".join(found[:5]) + ", …" * (len(found) > 5)
        raise StorageError(
            f"none of the {len(found)} runs has finished ({shown}): there is no figure to report; "
            "resume them with `polarstep run … --resume`"
        )
    sections, left_out = sections_of(runs)
    return runs, sections, (*runs.notices, *left_out)


def _tables(found: Found) -> dict[str, bytes]:
    runs, sections, notices = found
    tables = {
        "summary.md": markdown(sections, notices),
        "summary.csv": summary_csv(sections),
        "runs.csv": runs_csv(runs),
    }
    return {name: text.encode() for name, text in tables.items()}
