"""``polarstep report``: a page from run directories and archives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polarstep_lab.cli.extras import REPORT, need
from polarstep_lab.cli.failures import clear_errors

__all__ = ["report"]


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Run directories, archives, folders that hold some."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder to write the report to.")
    ] = Path("report"),
    title: Annotated[str, typer.Option(help="The heading of the page.")] = "polarstep: results",
) -> None:
    """Make one self-contained page, with its tables and figures, from any set of runs."""
    with clear_errors(""):
        need("a report", *REPORT)
        # pandas and matplotlib take a second to import: only a report should wait for them.
        from polarstep_lab.report import write_report

        with Console(stderr=True).status("Reading the runs …") as status:
            page = write_report(
                directories, out, title, lambda recipe: status.update(f"Drawing {recipe} …")
            )
    Console().print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
