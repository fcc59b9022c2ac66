"""``polarstep run``, ``compare``, ``ablate`` and ``list``: the paper's experiments."""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from polarstep.storage import StorageError
from polarstep_lab.ablations import AXES
from polarstep_lab.cli.extras import need
from polarstep_lab.cli.failures import DIVERGED, ERROR, clear_errors
from polarstep_lab.config import ConfigError
from polarstep_lab.methods import METHODS, all_methods, find_method, find_methods
from polarstep_lab.peers import find_peer, load
from polarstep_lab.recipes import RECIPES
from polarstep_lab.records.directory import state_of
from polarstep_lab.records.record import Result, RunRecord, find_runs
from polarstep_lab.structure import parse_assignment
from polarstep_lab.suites.board import TensorBoard
from polarstep_lab.suites.places import Where, place_for
from polarstep_lab.suites.progress import ProgressBar, follow, progress_display
from polarstep_lab.suites.suite import (
    PlannedRun,
    ablation_runs,
    comparison_runs,
    pending,
    plan_run,
)
from polarstep_lab.training.ranks import Parallel, Ranks, launched, refuse_launcher, world_size
from polarstep_lab.training.train import Observer, train

__all__ = ["ablate", "compare", "list_", "run"]

RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe by name (see polarstep list), or a recipe file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as optimizer.lr=0.02."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N (runtime.device).")
]
SeedsOption = Annotated[
    str, typer.Option("--seeds", help="How many seeds (3 is 0, 1, 2), or which ones (0,4,7).")
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Replace runs that are already there; says what it removes."),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers", "-w", min=1, help="Runs at a time [1; on ray: all that the cluster takes]."
    ),
]
OnOption = Annotated[
    Where, typer.Option("--on", help="Where runs are made: home, or ray (a Ray cluster).")
]
MonitorOption = Annotated[
    int | None,
    typer.Option("--monitor", min=1, help="Record γ and ν every N steps (runtime.monitor_every)."),
]
NoiseOption = Annotated[
    int | None,
    typer.Option(
        "--noise", min=2, help="Measure gradient noise at N points of a run (runtime.noise)."
    ),
]
ParallelOption = Annotated[
    Parallel | None,
    typer.Option(
        "--parallel",
        help="How the processes of torchrun share the model: ddp (copies) or fsdp (shards) [ddp].",
    ),
]
BoardOption = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")
]


def run(
    recipe: RecipeArgument,
    method: Annotated[
        str | None,
        typer.Option("--method", "--methods", "-m", help="A method by name (see polarstep list)."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Seed of weights, data, sketches.")] = 0,
    settings: SetOption = None,
    vary: Annotated[
        str | None, typer.Option("--vary", metavar="AXIS=VALUE", help="One point of an ablation.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Run directory [runs/RECIPE/METHOD/seed-N]."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run.")
    ] = False,
    force: ForceOption = False,
    device: DeviceOption = None,
    monitor: MonitorOption = None,
    noise: NoiseOption = None,
    tensorboard: BoardOption = False,
    parallel: ParallelOption = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the complete config as JSON and do nothing.")
    ] = False,
) -> None:
    """Train one method on one recipe.

    Started by torchrun, its processes train together, each on its part of every batch.
    """
    again = shlex.join(
        [*_launcher(), *(a for a in sys.argv[1:] if a not in ("--resume", "--force"))]
    )
    with clear_errors(f"Go on with: {again} --resume"), launched(parallel) as ranks:
        overrides = _overrides(settings, device, monitor, noise)
        axis = None if vary is None else parse_assignment(vary)
        planned = plan_run(recipe, method, seed, overrides, out, axis)
        _check_peers([planned])
        if show:
            if ranks.first:
                typer.echo(json.dumps(planned.config.to_dict(), indent=2))
            return
        if resume and not force:
            ranks.from_first(lambda: _check_resumable(planned.directory))
        result = _run_all([planned], resume, force, tensorboard, ranks)[0]
    if ranks.first:
        typer.echo(f"recorded in {planned.directory}")
    if result.status == "diverged":
        raise typer.Exit(DIVERGED)


def _launcher() -> list[str]:
    """The words with which this process was started, up to the name of the sub-command."""
    processes = world_size()
    if processes is None:
        return ["polarstep"]
    return ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "polarstep"]


def _check_resumable(directory: Path) -> None:
    """Raise where ``--resume`` finds no run to go on with."""
    if state_of(directory) == "empty":
        raise StorageError(
            f"--resume: there is no run in {directory} to go on with; leave --resume out to start "
            "one, or give the --out of the run that was interrupted"
        )


def compare(
    recipe: RecipeArgument,
    methods: Annotated[
        str,
        typer.Option(
            "--methods", "-m", "--method", help="all (of Table 2), ours, or some: adamw,muon,auto."
        ),
    ] = "all",
    seeds: SeedsOption = "1",
    settings: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of all runs [runs/RECIPE-compare].")
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
        overrides = _overrides(settings, device, monitor, noise)
        runs = comparison_runs(recipe, find_methods(methods), _seeds(seeds), overrides, folder)
        _run_suite(runs, folder, on, workers, force, tensorboard)


def ablate(
    recipe: RecipeArgument,
    axis: Annotated[
        str, typer.Argument(help=f"What to vary: {', '.join(axis.name for axis in AXES)}.")
    ],
    values: Annotated[
        str | None, typer.Option("--values", help="Values, as 16,32,64 [the paper's, see list].")
    ] = None,
    method: Annotated[
        str, typer.Option("--method", "--methods", "-m", help="The method.")
    ] = "rand-muon",
    seeds: SeedsOption = "1",
    settings: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of all runs [runs/RECIPE-AXIS].")
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
        parsed = [parse_assignment(f"v={v}")[1] for v in values.split(",")] if values else []
        folder = out or Path("runs") / f"{Path(recipe).stem}-{axis}"
        runs = ablation_runs(
            recipe,
            find_method(method),
            axis,
            parsed,
            _seeds(seeds),
            _overrides(settings, device, monitor, noise),
            folder,
        )
        _run_suite(runs, folder, on, workers, force, tensorboard)


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
    recipe = ""
    for directory in find_runs([folder]):
        run = RunRecord.load(directory)
        identity = run.identity
        if identity.recipe != recipe:
            recipe = identity.recipe
            table.add_row(recipe, style="bold")
        table.add_row(
            str(directory.relative_to(folder)),
            find_method(identity.method).slug,
            str(identity.seed),
            run.status,
            str(run.metrics[-1].step if run.metrics else 0),
            f"{run.result.value:.4f}" if run.result else "",
        )
    console.print(table)


def _overrides(
    settings: Sequence[str] | None, device: str | None, monitor: int | None, noise: int | None
) -> dict[str, Any]:
    """The settings given with ``--set``, and those given with an option of their own."""
    overrides = dict(parse_assignment(text) for text in settings or [])
    own = {
        "runtime.device": device,
        "runtime.monitor_every": monitor,
        "runtime.noise.points": noise,
    }
    return overrides | {key: value for key, value in own.items() if value is not None}


def _seeds(text: str) -> list[int]:
    """Seeds from ``"3"`` (0, 1, 2) or ``"0,4,7"``.

    >>> _seeds("3"), _seeds("0,4,7")
    ([0, 1, 2], [0, 4, 7])
    """
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or numbers == [0]:
        raise ConfigError(f"--seeds {text}: expected a number of seeds, as 3, or a list, as 0,4,7")
    if len(numbers) > 1 or "," in text:
        return numbers
    return list(range(numbers[0]))


def _check_peers(runs: Sequence[PlannedRun]) -> None:
    """Raise if the package of a peer is missing, before the first run is made."""
    for name in dict.fromkeys(planned.config.rule.peer for planned in runs):
        if name is not None:
            load(find_peer(name))


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
    todo = runs if force else pending(runs)
    _check_peers(todo)
    if len(todo) < len(runs):
        console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are finished already")
    failed = 0
    if on == "home" and workers in (None, 1):
        _run_all(todo, resume=True, force=force, tensorboard=tensorboard)
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


def _run_all(
    runs: Sequence[PlannedRun],
    resume: bool,
    force: bool,
    tensorboard: bool,
    ranks: Ranks | None = None,
) -> list[Result]:
    """Make runs one after the other in one display, and return their results."""
    if tensorboard:
        need("--tensorboard", "tensorboard")
    results = []
    ranks = ranks or Ranks()
    with progress_display(Console(stderr=True, quiet=not ranks.first)) as display:
        whole = display.add_task("all runs", total=len(runs), figures="", visible=len(runs) > 1)
        for done, planned in enumerate(runs):
            observers: list[Observer] = [ProgressBar(display, planned.label, whole, done)]
            if tensorboard:
                observers.append(TensorBoard(planned.directory / "tensorboard"))
            result = train(
                planned.config,
                planned.directory,
                identity=planned.identity,
                resume=resume,
                force=force,
                observers=observers,
                tell=partial(_tell, display.console),
                ranks=ranks,
            )
            results.append(result)
            display.update(whole, completed=done + 1)
    return results


def _tell(console: Console, text: str) -> None:
    """Print what a run has to say, above its progress bar."""
    console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _summary(runs: Sequence[PlannedRun]) -> Table:
    """Mean and standard deviation over seeds, by method or by the value of an ablation."""
    rows: dict[str, list[Result]] = {}
    for planned in runs:
        identity = planned.identity
        varied = identity.ablation
        name = planned.config.rule.named(planned.config.optimizer.polar.sketch)
        if varied is not None:
            name = f"{varied.axis}={varied.value}"
        result = Result.load(planned.directory)
        rows.setdefault(name, []).extend([result] if result else [])
    title = "test accuracy" if runs[0].config.benchmark == "cifar10" else "test perplexity"
    table = Table("", title, "seeds", "GFLOPs/step", "optimizer ms/step", "step ms")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, results in rows.items():
        done = [result for result in results if result.status == "finished"]
        others = ", ".join(result.status for result in results if result.status != "finished")
        table.add_row(
            name,
            " ".join(filter(None, [_mean_and_deviation([r.value for r in done]), others])),
            str(len(done)),
            f"{_mean([r.optimizer_gflops_per_step for r in results]):.4g}",
            f"{_mean([r.optimizer_ms_per_step for r in results]):.2f}",
            f"{_mean([r.step_ms for r in results]):.1f}",
        )
    return table


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _mean_and_deviation(values: list[float]) -> str:
    """Mean ± sample standard deviation; for a single value, the value."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"
