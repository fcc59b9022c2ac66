"""``polarstep demo``: seven methods, one small GPT, a report; a few minutes on two cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from polarstep.storage import StorageError

if TYPE_CHECKING:
    from polarstep.experiments.demo import Event, Plan

__all__ = ["demo"]


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the runs and their report.")
    ] = Path("runs/demo"),
    again: Annotated[
        bool, typer.Option("--again", help="Run anew what an earlier demonstration left there.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, one thread each; by default the cores.")
    ] = None,
) -> None:
    """Compare the seven methods on the text shipped with the package, and make the report."""
    # torch takes seconds to import: not for those who only ask for help.
    from polarstep.experiments.demo import RECIPE, SEEDS, default_workers, plan, run_all
    from polarstep.experiments.report import write_report

    console, errors = Console(), Console(stderr=True)
    try:
        plans = plan(out / "runs", again)
        console.print(_introduction(len(plans), RECIPE, SEEDS), highlight=False)
        if all(each.finished for each in plans):
            console.print("All runs are there from before; --again makes them anew.")
        else:
            _follow(plans, run_all(plans, workers or default_workers(), again), errors)
        with errors.status("Drawing the report …"):
            page = write_report([out / "runs"], out / "report", "Seven methods on a small GPT")
    except KeyboardInterrupt:
        errors.print("Stopped. The same command goes on from here.")
        raise typer.Exit(130) from None
    except (StorageError, ValueError, RuntimeError) as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print(_results(out / "runs"))
    console.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)


def _introduction(runs: int, recipe: str, seeds: tuple[int, ...]) -> str:
    from polarstep.experiments.demo import tuning_budget

    text = f"{runs} runs of {recipe}: seven methods, seeds {', '.join(map(str, seeds))}."
    tuning = tuning_budget()
    if tuning is None:
        return text + " Learning rates are the recipe's own; they were not tuned alike."
    return (
        text + f" Learning rates were tuned on seed 0 with {tuning.trials} trials for each method, "
        f"by\n  {tuning.command}"
    )


def _follow(plans: list[Plan], events: Iterator[Event], errors: Console) -> None:
    """Show the runs as they go: one line for all, one for each that is under way."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    failed: list[str] = []
    lines = {}
    with Progress(*columns, console=errors) as bars:
        due = [index for index, each in enumerate(plans) if not each.finished]
        total = bars.add_task("All runs (steps)", total=None, note="")
        steps: dict[int, int] = {}
        for event in events:
            title = plans[event.run].title
            if event.steps:
                steps[event.run] = event.step
                if event.run not in lines:
                    lines[event.run] = bars.add_task(title, total=event.steps, note="")
                bars.update(lines[event.run], completed=event.step)
                bars.update(total, completed=sum(steps.values()), total=event.steps * len(due))
            if event.loss is not None:
                bars.update(lines[event.run], note=f"validation loss {event.loss:.3f}")
            if event.error:
                failed.append(f"{title}: {event.error}")
            elif event.status and event.status != "finished":
                errors.print(f"{title}: {event.status}", style="yellow", markup=False)
            if (event.status or event.error) and event.run in lines:
                bars.remove_task(lines[event.run])
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(plans)} runs failed: {'; '.join(failed)}")


def _results(folder: Path) -> Table:
    """What came out, in the order of Table 2, the best in bold."""
    from polarstep.experiments.report.rows import collect, sections_of
    from polarstep.experiments.report.tables import metric_text, number, seeds_text

    (section, *_), _ = sections_of(collect([folder]))
    best = section.best(section.rows)
    table = Table(title=f"{section.metric_name}, {section.recipe}")
    table.add_column("method", no_wrap=True)
    for header in ("perplexity", "seeds", "GFLOPs/step", "optimizer ms", "step ms"):
        table.add_column(header, justify="right")
    for row in section.rows:
        table.add_row(
            row.label,
            metric_text(row.metric, 3),
            seeds_text(row),
            number(row.gflops, 3),
            number(row.optimizer_ms.mean if row.optimizer_ms else None, 3),
            number(row.step_ms.mean if row.step_ms else None, 3),
            style="bold" if row is best else "",
        )
    return table
