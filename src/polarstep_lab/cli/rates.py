"""``polarstep rates``: measure convergence rates under heavy-tailed noise against the theorems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

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

from polarstep.theory.checks import tail_index
from polarstep_lab.checks.convergence import FEWEST_HORIZONS, Setup
from polarstep_lab.checks.rate_studies import (
    SOLVERS,
    StudyRow,
    batch_study,
    rate_study,
    tuning_study,
)
from polarstep_lab.storage import StorageError, refuse_unwritable, write_json

__all__ = ["rates"]


def rates(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The file of the measurements, as JSON."),
    ] = Path("rates.json"),
    alphas: Annotated[str, typer.Option(help="Tail indices in (1, 2], comma-separated.")] = (
        "1.2,1.4,1.6,1.8,2"
    ),
    solvers: Annotated[
        str, typer.Option(help=f"Polar maps, comma-separated: some of {', '.join(SOLVERS)}.")
    ] = ",".join(SOLVERS),
    shortest: Annotated[int, typer.Option(help="The smallest horizon K.", min=2)] = 64,
    longest: Annotated[
        int, typer.Option(help="The largest horizon; horizons double from the smallest.")
    ] = 2048,
    replicas: Annotated[int, typer.Option(help="Independent runs of each case.", min=2)] = 24,
    seed: Annotated[int, typer.Option(help="Seed of starts, noise and sketches.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: short horizons, fewer cases.")
    ] = False,
    examples: Annotated[
        bool, typer.Option(help="Also run the examples about tuning and batch size.")
    ] = True,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the results of an earlier run.")
    ] = False,
) -> None:
    """Measure rates: run Muon on heavy-tailed noise and compare slopes with the theorems."""
    _check_place(out, force)
    names = tuple(name.strip() for name in solvers.split(","))
    chosen = _tail_indices(alphas)
    if quick:
        chosen, names = (1.2, 1.6, 2.0), ("newton-schulz", "gaussian")
        shortest, longest, replicas = 32, 256, min(replicas, 12)
    _check_solvers(names)
    setup = Setup(horizons=_horizons(shortest, longest), replicas=replicas, seed=seed)
    long = (64, 256, 1024) if quick else (256, 1024, 4096, 16384)
    tuned = Setup(shape=(3, 4), distance=0.5, replicas=4 * replicas, horizons=long, seed=seed)
    batched = Setup(distance=1.0, replicas=replicas, horizons=(64, 256, 1024), seed=seed)
    console = Console(stderr=True)
    tuning = batches = None
    with _steps_progress(console) as progress:

        def ticking(title: str, its: Setup, shown: bool = True) -> Callable[[int], None]:
            """A line of the display for the steps of a study, and what advances it."""
            task = progress.add_task(title, total=its.steps, visible=shown)
            return lambda done: progress.advance(task, done)

        of_rates = ticking("rates", setup)
        of_tuning = ticking("tuning", tuned, examples)
        of_batches = ticking("batch size", batched, examples)
        found = rate_study(setup, chosen, names, tick=of_rates)
        if examples:
            tuning = tuning_study(tuned, tick=of_tuning)
            batches = batch_study(batched, tick=of_batches)
    write_json(
        out,
        {
            "seed": seed,
            "setup": asdict(setup),
            "rates": [asdict(row) for row in found],
            "tuning": tuning and {"setup": asdict(tuned), "rows": [asdict(r) for r in tuning]},
            "batch": batches and {"setup": asdict(batched), "rows": [asdict(r) for r in batches]},
        },
    )
    Console().print(_table(found))
    console.print(f"wrote {out}")


def _check_place(record: Path, force: bool) -> None:
    """Raise where the results may not be written."""
    if record.exists() and not force:
        raise typer.BadParameter(
            f"{record} exists: give another file, or --force to replace it", param_hint="--out"
        )
    try:
        refuse_unwritable(record, "--out")
    except StorageError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error


def _tail_indices(alphas: str) -> tuple[float, ...]:
    """The numbers in ``alphas``, each checked."""
    try:
        return tuple(tail_index(float(alpha)) for alpha in alphas.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{alphas!r}: expected numbers in (1, 2], such as 1.2,1.6,2", param_hint="--alphas"
        ) from None


def _check_solvers(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in SOLVERS]
    if unknown:
        raise typer.BadParameter(
            f"{unknown[0]!r}: expected some of {', '.join(SOLVERS)}", param_hint="--solvers"
        )


def _horizons(shortest: int, longest: int) -> tuple[int, ...]:
    """``shortest``, and its doubles up to ``longest``: at least three, to fit a slope."""
    horizons = [shortest]
    while 2 * horizons[-1] <= longest:
        horizons.append(2 * horizons[-1])
    if len(horizons) < FEWEST_HORIZONS:
        raise typer.BadParameter(
            f"{longest} with --shortest {shortest} leaves {', '.join(map(str, horizons))}: expected at "
            f"least {FEWEST_HORIZONS} horizons to fit a slope; give {4 * shortest} or more",
            param_hint="--longest",
        )
    return tuple(horizons)


def _steps_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _table(rows: list[StudyRow]) -> Table:
    table = Table(
        "solver", "momentum", "α", "promised", "measured slope", "95%", "attains", "< bound"
    )
    for row in rows:
        line, details = row.fit["minimum"], row.details
        proven = details["bound"][0] is not None
        table.add_row(
            details["solver"],
            details["momentum"],
            f"{row.alpha:g}",
            f"{row.predicted:.3f}",
            f"{line['slope']:.3f}",
            f"{line['low']:.3f} to {line['high']:.3f}",
            "yes" if details["attains"] else "no",
            ("yes" if details["below_bound"] else "no") if proven else "–",
        )
    return table
