"""``polarstep demo``: AdamW, two Muons and the default of this package on a small GPT, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from polarstep_lab.cli.extras import REPORT, need
from polarstep_lab.cli.failures import ERROR, clear_errors
from polarstep_lab.cli.making import make_jobs
from polarstep_lab.demo import DEFAULT, DEMO
from polarstep_lab.estimates import Estimate
from polarstep_lab.jobs.job import Job, jobs_of
from polarstep_lab.jobs.local import available_cores
from polarstep_lab.records.record import Result

__all__ = ["demo"]

PAPER = "polarstep compare nanogpt-toy --seeds 1,2 --workers 2"


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
    """Compare the default with AdamW and two Muons on the text in the package, and make the report."""
    console, errors = Console(), Console(stderr=True)
    with clear_errors("Run the same command again to go on."):
        need("the report of the demonstration", *REPORT)
        jobs = jobs_of(DEMO, out / "runs")
        console.print(
            f"{len(jobs)} runs of {DEMO.recipe}: {len(DEMO.variants)} methods, seeds "
            f"{' and '.join(map(str, DEMO.seeds))}; about three minutes on two cores.\n"
            f"{DEFAULT} is muon_for(model) without an option. The rates of the others are the best of "
            "nine trials on seed 0.",
            highlight=False,
        )
        team = workers or min(available_cores(), len(jobs))
        failed = make_jobs(jobs, "home", team, force, tensorboard=False)

        # matplotlib takes a second to import, and half a minute when it first lists the fonts.
        with errors.status("Drawing the report …"):
            from polarstep_lab.report import write_report

            page = write_report([out / "runs"], out / "report", "A small GPT with four optimizers")
        console.print(_sentence(jobs), highlight=False)
        console.print(_table(jobs))
        console.print(f"The seven methods of the paper: {PAPER}", highlight=False)
        console.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(ERROR)


def _perplexities(jobs: list[Job], name: str) -> list[Result]:
    found = [Result.load(job.directory) for job in jobs if job.spec.study["variant"] == name]
    return [result for result in found if result is not None and result.status == "finished"]


def _sentence(jobs: list[Job]) -> str:
    """The perplexities of the default and of AdamW, and how far apart they are."""
    means = [
        Estimate.of([result.value for result in _perplexities(jobs, name)])
        for name in (DEFAULT, DEMO.against or "")
    ]
    if None in means:
        return f"{DEFAULT} and {DEMO.against} cannot be compared: one of them has no finished run."
    ours, theirs = (mean.mean for mean in means if mean is not None)
    change = 100 * (ours / theirs - 1)
    return (
        f"{DEFAULT} ends at a test perplexity of {ours:.2f}, {DEMO.against} at {theirs:.2f}: "
        f"{abs(change):.0f}% {'lower' if change < 0 else 'higher'} after as many steps."
    )


def _table(jobs: list[Job]) -> Table:
    """A row for each method, the best in bold."""
    rows = [(variant.name, _perplexities(jobs, variant.name)) for variant in DEMO.variants]
    means = {name: Estimate.of([result.value for result in found]) for name, found in rows}
    best = min((e.mean for e in means.values() if e is not None), default=None)
    table = Table()
    table.add_column("method", no_wrap=True)
    for header in ("test perplexity", "seeds", "optimizer ms", "step ms"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, found in rows:
        mean = means[name]
        if mean is None:
            table.add_row(name, "no run finished", "0", "", "")
            continue
        table.add_row(
            name,
            mean.text(2),
            str(mean.n),
            f"{sum(r.optimizer_ms_per_step for r in found) / len(found):.1f}",
            f"{sum(r.step_ms for r in found) / len(found):.1f}",
            style="bold" if mean.mean == best else "",
        )
    return table
