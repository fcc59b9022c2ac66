"""``polarstep demo``: train a small GPT with seven methods in a few minutes, and make a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from polarstep_lab.cli.extras import REPORT, need
from polarstep_lab.cli.failures import ERROR, clear_errors
from polarstep_lab.demo import RECIPE, SEEDS, demo_runs, tuning_budget
from polarstep_lab.methods import METHODS
from polarstep_lab.suites.parallel import available_cores, run_in_processes
from polarstep_lab.suites.progress import follow
from polarstep_lab.suites.suite import pending

__all__ = ["demo"]


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the runs and their report.")
    ] = Path("runs/demo"),
    force: Annotated[
        bool, typer.Option("--force", help="Replace runs that are already there.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, one thread each; by default one per core.")
    ] = None,
) -> None:
    """Compare the seven methods on the text shipped with the package, and make the report."""
    console, errors = Console(), Console(stderr=True)
    with clear_errors("Run the same command again to go on."):
        need("the report of the demonstration", *REPORT)
        runs = demo_runs(out / "runs")
        console.print(_introduction(len(runs)), highlight=False)
        todo = pending(runs, force)
        if len(todo) < len(runs):
            done = len(runs) - len(todo)
            were = "is" if done == 1 else "are"
            console.print(f"{done} of them {were} finished already; --force makes them again.")
        team = workers or min(available_cores(), len(METHODS))
        failed = follow(run_in_processes(todo, team, force), len(todo), errors)

        # matplotlib takes a second to import, and half a minute when it first lists the fonts.
        with errors.status("Drawing the report …"):
            from polarstep_lab.report import write_report

            page = write_report([out / "runs"], out / "report", "Seven methods on a small GPT")
        console.print(_results(out / "runs"))
        console.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(ERROR)


def _introduction(runs: int) -> str:
    text = f"{runs} runs of {RECIPE}: seven methods, seeds {' and '.join(map(str, SEEDS))}."
    tuning = tuning_budget()
    if tuning is None:
        return text + " Learning rates are the recipe's own; they were not tuned alike."
    return (
        f"{text}\nLearning rates were tuned on seed 0 with {tuning.trials} trials for each method:"
        f"\n  {tuning.command}"
    )


def _results(folder: Path) -> Table:
    """The results in the order of Table 2, the best in bold."""
    from polarstep_lab.report.grouping import sections_of
    from polarstep_lab.report.runs import collect_runs
    from polarstep_lab.wording import MISSING, in_digits

    (section, *_), _ = sections_of(collect_runs([folder]))
    best = section.best(section.rows)
    seeds = {row.seeds_text for row in section.rows}
    title = f"{section.metric.name}, {section.recipe}"
    table = Table(title=f"{title}, {seeds.pop()} seeds" if len(seeds) == 1 else title)
    table.add_column("method", no_wrap=True)
    for header in ("perplexity", "GFLOPs", "opt. ms", "step ms"):
        table.add_column(header, justify="right", no_wrap=True)
    if len(seeds) > 0:  # the rows differ in their seeds: a column shows which runs are missing
        table.add_column("seeds")
    for row in section.rows:
        table.add_row(
            row.label,
            row.metric.text(3) if row.metric else MISSING,
            in_digits(row.gflops, 3),
            in_digits(row.times["optimizer_ms_per_step"], 3),
            in_digits(row.times["step_ms"], 3),
            *([row.seeds_text] if seeds else []),
            style="bold" if row is best else "",
        )
    return table
