"""``polarstep run``: train one method on one recipe."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from polarstep_lab.cli.failures import DIVERGED, INTERRUPTED, clear_errors
from polarstep_lab.cli.making import check_peers, run_one_by_one
from polarstep_lab.cli.options import (
    BoardOption,
    DeviceOption,
    ForceOption,
    MonitorOption,
    NoiseOption,
    ParallelOption,
    RecipeArgument,
    SetOption,
    overrides_of,
)
from polarstep_lab.jobs.job import plan_run
from polarstep_lab.records.directory import state_of
from polarstep_lab.settings_by_name import parse_assignment
from polarstep_lab.storage import StorageError
from polarstep_lab.train.interrupt import Interrupted
from polarstep_lab.train.ranks import launched, world_size

__all__ = ["run"]


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
