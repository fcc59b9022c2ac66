"""``polarstep report``, ``pack`` and ``list``: what is made of the records of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from polarstep_lab.axes import AXES
from polarstep_lab.cli.errors import REPORT, clear_errors, need
from polarstep_lab.methods import METHODS, all_methods, find_method
from polarstep_lab.recipes import RECIPES
from polarstep_lab.records.pack import pack as pack_runs
from polarstep_lab.records.record import UNREADABLE, RunRecord, find_runs
from polarstep_lab.storage import StorageError

__all__ = ["list_", "pack", "report"]


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
    typer.echo(f"Report: {page}")


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
    typer.echo(
        f"{done.archive}: {done.runs} runs, {size / 1e6:.2f} MB ({done.added} new, "
        f"{done.replaced} replaced{kept})"
    )


def list_(
    folder: Annotated[
        Path | None, typer.Argument(help="List the runs below this folder instead.")
    ] = None,
) -> None:
    """List recipes, methods and ablations; or the runs below a folder."""
    console = Console()
    if folder is not None:
        with clear_errors(""):
            _list_runs(folder, console)
        return
    needs = Column("needs", overflow="fold")
    recipes = Table("recipe", "what", needs, title="Recipes", title_justify="left")
    for recipe in RECIPES.values():
        recipes.add_row(recipe.name, recipe.summary, recipe.needs)
    methods = Table("method", "row of Table 2", title="Methods", title_justify="left")
    for method in METHODS:
        methods.add_row(method.slug, method.name)
    beside = Table("method", "row", title="Methods beside Table 2", title_justify="left")
    for method in all_methods()[len(METHODS) :]:
        beside.add_row(method.slug, method.name)
    axes = Table(
        "axis",
        "",
        "nanogpt",
        "cifar10",
        title="Ablations",
        title_justify="left",
    )
    for axis in AXES:
        values = [", ".join(map(str, found)) for found in (axis.nanogpt, axis.cifar10)]
        axes.add_row(
            axis.name, axis.symbol, *(["½ to 2 × the recipe's"] * 2 if axis.around else values)
        )
    console.print(recipes, methods, beside, axes)
    relative = " and ".join(axis.name for axis in AXES if axis.relative)
    *some, last = [axis.name for axis in AXES if axis.ours]
    ours = f"{', '.join(some)} and {last}"
    others = [f"{axis.name} also takes {', '.join(axis.also)}" for axis in AXES if axis.also]
    console.print(
        f"Other recipes vary {relative} in the same proportion to their own. "
        f"Not the paper's: {ours}; {'; '.join(others)} (--values).",
        style="dim",
        highlight=False,
    )


def _list_runs(folder: Path, console: Console) -> None:
    table = Table(title=f"Runs in {folder}", title_justify="left")
    table.add_column("run", overflow="fold", min_width=16)
    for header in ("method", "seed", "status", "steps", "value"):
        table.add_column(header, no_wrap=True)
    damaged: list[str] = []
    recipe, found = "", find_runs([folder], lambda _, error: damaged.append(str(error)))
    if not found and not damaged:
        typer.echo(
            f"no runs in {folder}: expected folders with a config.json, as `polarstep run` and "
            "`polarstep compare` make them, or an archive of `polarstep pack`"
        )
        return
    for directory in found:
        try:
            run = RunRecord.load(directory)
            method = find_method(run.spec.method).slug
        except UNREADABLE as error:
            reason = str(error)
            damaged.append(reason if str(directory) in reason else f"{directory}: {reason}")
            continue
        spec = run.spec
        if spec.recipe != recipe:
            recipe = spec.recipe
            table.add_row(recipe, style="bold")
        table.add_row(
            str(directory.relative_to(folder)),
            method,
            str(spec.seed),
            run.status,
            str(run.metrics[-1].step if run.metrics else 0),
            f"{run.result.value:.4f}" if run.result else "",
        )
    if table.row_count:
        console.print(table)
    if damaged:
        raise StorageError("\n".join(["these could not be read and are not shown", *damaged]))
