"""``polarstep run``, ``compare``, ``ablate``, ``study`` and ``demo``: the commands that train."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polarstep_lab.axes import AXES
from polarstep_lab.cli.errors import AGAIN, DIVERGED, INTERRUPTED, REPORT, clear_errors, need
from polarstep_lab.cli.making import Where, check_peers, make_study, run_one_by_one
from polarstep_lab.config import ConfigError
from polarstep_lab.estimates import Estimate
from polarstep_lab.jobs.job import Job, plan_run
from polarstep_lab.jobs.local import available_cores
from polarstep_lab.methods import DEFAULT, find_method, find_methods
from polarstep_lab.records.directory import state_of
from polarstep_lab.records.record import Result
from polarstep_lab.settings_by_name import parse_assignment
from polarstep_lab.storage import StorageError
from polarstep_lab.studies.demo import study as DEMO
from polarstep_lab.study import ablation, comparison, load_study
from polarstep_lab.train.interrupt import Interrupted
from polarstep_lab.train.ranks import Parallel, launched, refuse_launcher, world_size

__all__ = ["ablate", "compare", "demo", "overrides_of", "run", "seeds_of", "study"]

# --- options of several commands ------------------------------------------------------------------

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
        "--workers",
        "-w",
        min=1,
        help="Runs at a time; by default 1, or on ray all that the cluster takes.",
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
        help="How the processes of torchrun share the model: ddp (copies, the default) or fsdp "
        "(shards).",
    ),
]
BoardOption = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")
]


def overrides_of(
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


def seeds_of(text: str) -> list[int]:
    """Seeds from ``"3"`` (0, 1, 2) or ``"0,4,7"``, each once; ``"4,"`` is seed 4 alone.

    >>> seeds_of("3"), seeds_of("0,4,7"), seeds_of("4,4"), seeds_of("0,")
    ([0, 1, 2], [0, 4, 7], [4], [0])
    """
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or text.strip() == "0":
        raise ConfigError(
            f"--seeds {text}: expected a number of seeds, as 3, or a list, as 0,4,7; 4, is seed 4 alone"
        )
    if "," in text:
        return list(dict.fromkeys(numbers))
    return list(range(numbers[0]))


# --- one run ---------------------------------------------------------------------------------------


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
        typer.Option("--out", "-o", help="Run directory; by default runs/RECIPE/METHOD/seed-N."),
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
        overrides = overrides_of(settings, device, monitor, noise)
        axis = None if vary is None else parse_assignment(vary)
        planned = plan_run(recipe, method, seed, overrides, out, axis)
        check_peers([planned])
        if show:
            if ranks.first:
                typer.echo(json.dumps(planned.config.to_dict(), indent=2))
            return
        if resume and not force:
            ranks.on_rank_zero(lambda: _check_resumable(planned.directory))
        try:
            result = run_one_by_one([planned], resume, force, tensorboard, ranks)[0]
        except Interrupted as stopped:
            if not stopped.ended:
                raise
            typer.echo(str(stopped), err=True)  # there is nothing to go on with
            raise typer.Exit(INTERRUPTED) from None
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


# --- many runs -------------------------------------------------------------------------------------


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
    with clear_errors(AGAIN):
        refuse_launcher("compare")
        overrides = overrides_of(settings, device, monitor, noise)
        chosen = find_methods(",".join(methods or ["all"]))
        found = comparison(recipe, chosen, seeds_of(seeds), overrides)
        folder = out or Path("runs") / f"{Path(recipe).stem}-compare"
        _end(folder, *make_study(found, folder, on, workers, force, tensorboard))


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
    with clear_errors(AGAIN):
        refuse_launcher("ablate")
        overrides = overrides_of(settings, device, monitor, noise)
        parsed, chosen = _values_of(values), find_method(method)
        found = ablation(recipe, chosen, axis, parsed, seeds_of(seeds), overrides)
        folder = out or Path("runs") / f"{Path(recipe).stem}-{axis}"
        _end(folder, *make_study(found, folder, on, workers, force, tensorboard))


def _end(folder: Path, jobs: Sequence[Job], status: int) -> None:
    """Say what makes the page of these runs, and exit with their status."""
    typer.echo(f"{len(jobs)} runs in {folder}; for the page: polarstep report {folder}")
    raise typer.Exit(status)


def study(
    program: Annotated[
        Path, typer.Argument(metavar="FILE.py", help="The file that defines the Study.")
    ],
    settings: SetOption = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="Other seeds than those of the study, as 0,4,7.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of runs and report; by default runs/NAME."),
    ] = None,
    workers: WorkersOption = None,
    on: OnOption = "home",
    force: ForceOption = False,
    device: DeviceOption = None,
    monitor: MonitorOption = None,
    noise: NoiseOption = None,
    tensorboard: BoardOption = False,
) -> None:
    """Run the study that a Python file defines, or go on with it, and make its report."""
    with clear_errors(AGAIN):
        refuse_launcher("study")
        need("the report of a study", *REPORT)
        found = load_study(program)
        overrides = overrides_of(settings, device, monitor, noise)
        found = replace(found, overrides={**found.overrides, **overrides})
        if seeds is not None:
            found = replace(found, seeds=seeds_of(seeds))
        folder = out or Path("runs") / found.name
        _, status = make_study(found, folder, on, workers, force, tensorboard, program)
        _report(folder, folder / "report", found.name)
        raise typer.Exit(status)


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


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the runs and their report.")
    ] = Path("runs/demo"),
    force: ForceOption = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, one thread each; by default one per core.")
    ] = None,
) -> None:
    """Compare the default with AdamW and two Muons on the text in the package, and make the report."""
    with clear_errors(AGAIN):
        need("the report of the demonstration", *REPORT)
        runs = len(DEMO.variants) * len(DEMO.seeds)
        typer.echo(
            f"{runs} runs of {DEMO.recipe}: {len(DEMO.variants)} methods, seeds "
            f"{' and '.join(map(str, DEMO.seeds))}; about three minutes on two cores.\n"
            f"{DEFAULT.name} is muon_for(model) without an option. The rates of the others are the best "
            "of nine trials on seed 0."
        )
        team = workers or min(available_cores(), runs)
        jobs, status = make_study(DEMO, out / "runs", workers=team, force=force)
        typer.echo(_default_against_adamw(jobs))
        typer.echo("The seven methods of the paper: polarstep compare nanogpt-toy --seeds 1,2 -w 2")
        _report(out / "runs", out / "report", "A small GPT with four optimizers")
        raise typer.Exit(status)


def _default_against_adamw(jobs: Sequence[Job]) -> str:
    """The perplexities of the default and of AdamW, and how far apart they are."""
    means = []
    for name in (DEFAULT.name, "AdamW"):
        found = [Result.load(job.directory) for job in jobs if job.spec.study["variant"] == name]
        mean = Estimate.of([run.value for run in found if run and run.status == "finished"])
        if mean is None:
            return f"No run of {name} has finished, so that {DEFAULT.name} cannot be compared."
        means.append(mean.mean)
    ours, theirs = means
    change = 100 * (ours / theirs - 1)
    return (
        f"{DEFAULT.name} ends at a test perplexity of {ours:.2f}, AdamW at {theirs:.2f}: "
        f"{abs(change):.0f}% {'lower' if change < 0 else 'higher'} after as many steps."
    )


def _report(runs: Path, out: Path, title: str) -> None:
    """Write the report of a study and print where it is."""
    # matplotlib takes a second to import, and half a minute when it first lists the fonts.
    with Console(stderr=True).status("Drawing the report …"):
        from polarstep_lab.report import write_report

        page = write_report([runs], out, title)
    typer.echo(f"Report: {page}")
