"""``polarstep compare`` and ``ablate``: many runs, and a table of what they reached."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from polarstep_lab.axes import AXES
from polarstep_lab.cli.failures import DIVERGED, ERROR, clear_errors
from polarstep_lab.cli.one_by_one import check_peers, run_one_by_one
from polarstep_lab.cli.options import (
    BoardOption,
    DeviceOption,
    ForceOption,
    MonitorOption,
    NoiseOption,
    OnOption,
    RecipeArgument,
    SeedsOption,
    SetOption,
    WorkersOption,
    overrides_of,
    seeds_of,
)
from polarstep_lab.config import ConfigError
from polarstep_lab.estimates import Estimate
from polarstep_lab.methods import find_method, find_methods
from polarstep_lab.records.record import Result
from polarstep_lab.settings_by_name import parse_assignment
from polarstep_lab.suites.places import Where, place_for
from polarstep_lab.suites.progress import follow
from polarstep_lab.suites.suite import PlannedRun, ablation_runs, comparison_runs, pending
from polarstep_lab.train.ranks import refuse_launcher

__all__ = ["ablate", "compare"]


def compare(
    recipe: RecipeArgument,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods", "-m", "--method", help="all (of Table 2), ours, or some: adamw,muon,auto."
        ),
    ] = None,
    seeds: SeedsOption = "1",
    settings: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of all runs; by default runs/RECIPE-compare."),
    ] = None,
    workers: WorkersOption = None,
    on: OnOption = "home",
    force: ForceOption = False,
    device: DeviceOption = None,
    monitor: MonitorOption = None,
    noise: NoiseOption = None,
    tensorboard: BoardOption = False,
) -> None:
    """Train several methods with several seeds: Table 2 and its trajectories.

    Started again, it leaves finished runs alone and resumes the others.
    """
    with clear_errors("Run the same command again to go on."):
        refuse_launcher("compare")
        folder = out or Path("runs") / f"{Path(recipe).stem}-compare"
        overrides = overrides_of(settings, device, monitor, noise)
        chosen = find_methods(",".join(methods or ["all"]))
        runs = comparison_runs(recipe, chosen, seeds_of(seeds), overrides, folder)
        _run_suite(runs, folder, on, workers, force, tensorboard)


def ablate(
    recipe: RecipeArgument,
    axis: Annotated[
        str, typer.Argument(help=f"What to vary: {', '.join(axis.name for axis in AXES)}.")
    ],
    values: Annotated[
        str | None,
        typer.Option("--values", help="Values, as 16,32,64; by default the paper's, see list."),
    ] = None,
    method: Annotated[
        str, typer.Option("--method", "--methods", "-m", help="The method.")
    ] = "rand-muon",
    seeds: SeedsOption = "1",
    settings: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of all runs; by default runs/RECIPE-AXIS."),
    ] = None,
    workers: WorkersOption = None,
    on: OnOption = "home",
    force: ForceOption = False,
    device: DeviceOption = None,
    monitor: MonitorOption = None,
    noise: NoiseOption = None,
    tensorboard: BoardOption = False,
) -> None:
    """Vary one setting and keep the rest: the paper's ablations."""
    with clear_errors("Run the same command again to go on."):
        refuse_launcher("ablate")
        parsed = _values_of(values)
        folder = out or Path("runs") / f"{Path(recipe).stem}-{axis}"
        runs = ablation_runs(
            recipe,
            find_method(method),
            axis,
            parsed,
            seeds_of(seeds),
            overrides_of(settings, device, monitor, noise),
            folder,
        )
        _run_suite(runs, folder, on, workers, force, tensorboard)


def _values_of(text: str | None) -> list[Any]:
    """The values of ``--values``; none without the option, for the paper's."""
    if text is None:
        return []
    parts = text.split(",")
    if not all(map(str.strip, parts)):
        raise ConfigError(
            f"--values {text!r}: expected values, as 16,32,64; without the option the paper's are taken"
        )
    return [parse_assignment(f"v={part}")[1] for part in parts]


def _run_suite(
    runs: list[PlannedRun],
    folder: Path,
    on: Where,
    workers: int | None,
    force: bool,
    tensorboard: bool,
) -> None:
    """Make the runs that are not finished, and print the table of all runs."""
    console = Console(stderr=True)
    todo = pending(runs, force)
    check_peers(todo)
    if len(todo) < len(runs):
        console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are finished already")
    failed = 0
    if on == "home" and workers in (None, 1):
        run_one_by_one(todo, resume=True, force=force, tensorboard=tensorboard)
    elif tensorboard:
        raise ConfigError("--tensorboard needs one run at a time: leave out --workers and --on")
    else:
        with place_for(on, workers, runs[0].config.runtime.device) as place:
            failed = follow(place.make(todo, force), len(todo), console)
    if failed == len(runs):
        console.print(f"none of {len(runs)} runs was made", style="red", highlight=False)
        raise typer.Exit(ERROR)
    Console().print(_summary(runs))
    typer.echo(f"{len(runs)} runs in {folder}; for the page: polarstep report {folder}")
    if failed:
        raise typer.Exit(ERROR)
    results = [Result.load(planned.directory) for planned in runs]
    if any(result is not None and result.status == "diverged" for result in results):
        raise typer.Exit(DIVERGED)


def _summary(runs: Sequence[PlannedRun]) -> Table:
    """Mean and standard deviation over seeds, by method or by the value of an ablation."""
    rows: dict[str, list[Result]] = {}
    for planned in runs:
        identity = planned.identity
        varied = identity.ablation
        polar = planned.config.optimizer.polar
        name = planned.config.rule.named(polar.sketch, polar.auto)
        if varied is not None:
            name = f"{varied.axis}={varied.value}"
        result = Result.load(planned.directory)
        rows.setdefault(name, []).extend([result] if result else [])
    title = "test accuracy" if runs[0].config.benchmark == "cifar10" else "test perplexity"
    table = Table("", title, "seeds", "GFLOPs/step", "optimizer ms/step", "step ms")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    for name, results in rows.items():
        done = [result for result in results if result.status == "finished"]
        others = ", ".join(result.status for result in results if result.status != "finished")
        metric = Estimate.of([result.value for result in done])
        table.add_row(
            name,
            " ".join(filter(None, [metric.text(4) if metric else "", others])),
            str(len(done)),
            f"{_mean([r.optimizer_gflops_per_step for r in results]):.4g}",
            f"{_mean([r.optimizer_ms_per_step for r in results]):.2f}",
            f"{_mean([r.step_ms for r in results]):.1f}",
        )
    return table


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan
