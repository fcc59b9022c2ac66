"""``polarstep pack``: put run directories into one file to commit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polarstep_lab.cli.failures import clear_errors
from polarstep_lab.records.pack import pack as pack_runs

__all__ = ["pack"]


def pack(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Run directories, folders that hold some, archives."),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The folder whose records.jsonl.gz to make or extend."),
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace archived runs of the same name with another config or metric."
        ),
    ] = False,
) -> None:
    """Put the records of many runs into one small file, without checkpoints.

    The commands report, list and pack read the file in place of the run directories.
    """
    with clear_errors(""), Console(stderr=True).status("Reading the runs …"):
        done = pack_runs(directories, out, force=force)
    size = done.archive.stat().st_size
    kept = f", {done.kept} kept as they had ended" if done.kept else ""
    Console().print(
        f"{done.archive}: {done.runs} runs, {size / 1e6:.2f} MB ({done.added} new, "
        f"{done.replaced} replaced{kept})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
