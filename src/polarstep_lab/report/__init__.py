"""The report: a page of tables and figures, made from the records of runs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from polarstep_lab.report.ablations import ablation_blocks
from polarstep_lab.report.comparison import comparison_blocks, headline
from polarstep_lab.report.figures import Drawing
from polarstep_lab.report.gamma import gamma_blocks
from polarstep_lab.report.gradient_noise import noise_blocks
from polarstep_lab.report.page import (
    Block,
    Commands,
    Heading,
    html_page,
    markdown_page,
    write_folder,
)
from polarstep_lab.report.rows import Section, sections_of
from polarstep_lab.report.runs import RUN_COLUMNS, Runs, collect_runs
from polarstep_lab.storage import StorageError

__all__ = ["report_files", "summary_of", "write_report"]

_TITLE = "polarstep: results"


def write_report(
    paths: Sequence[Path | str],
    out: Path,
    title: str = _TITLE,
    progress: Callable[[str], object] = lambda _: None,
) -> Path:
    """Write the report of all runs below ``paths`` into the folder ``out``; return its page."""
    write_folder(out, report_files(paths, title, progress))
    return out / "index.html"


def report_files(
    paths: Sequence[Path | str],
    title: str = _TITLE,
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, str]:
    """All files of a report, by their path in its folder; they depend on the records alone."""
    runs, shown, notices = _read(paths)
    figures: dict[str, str] = {}
    for section, blocks in shown.items():
        progress(section.recipe)
        drawings = (block for block in blocks if isinstance(block, Drawing))
        figures |= {f"figures/{drawing.name}.svg": drawing.svg for drawing in drawings}
    return {
        "index.html": html_page(title, runs, shown, notices),
        "summary.md": markdown_page(shown, notices),
        "runs.csv": runs.frame.to_csv(columns=RUN_COLUMNS, index=False, lineterminator="\n"),
        **figures,
    }


def summary_of(paths: Sequence[Path | str]) -> str:
    """The text and the tables of a report as Markdown, without its figures, which take the time."""
    _, shown, notices = _read(paths)
    return markdown_page(shown, notices)


def blocks_of(section: Section) -> list[Block]:
    """All parts of a section, in the order in which they are read."""
    rows = [(row.label, row.commands) for row in section.rows]
    rows += [
        (f"{row.label}, {a.subject}", row.commands) for a in section.ablations for row in a.rows
    ]
    return [
        *headline(section),
        *comparison_blocks(section),
        *ablation_blocks(section),
        *noise_blocks(section),
        *gamma_blocks(section),
        Heading("Commands"),
        Commands(rows),
    ]


def _read(paths: Sequence[Path | str]) -> tuple[Runs, dict[Section, list[Block]], tuple[str, ...]]:
    """The runs below ``paths``, the blocks of each of their sections, and notices for the reader."""
    runs = collect_runs(paths)
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
    return runs, {each: blocks_of(each) for each in sections}, (*runs.notices, *left_out)
