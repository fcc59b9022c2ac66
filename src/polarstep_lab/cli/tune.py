"""``polarstep tune``: search the settings that a recipe marks, by the validation loss."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from polarstep_lab.cli.errors import clear_errors, need
from polarstep_lab.cli.making import Where, workers_for
from polarstep_lab.jobs.local import Workers
from polarstep_lab.jobs.progress import progress_display
from polarstep_lab.methods import find_method, find_methods
from polarstep_lab.settings_by_name import ConfigError, parse_assignment
from polarstep_lab.train.ranks import refuse_launcher

if TYPE_CHECKING:
    from polarstep_lab.tune import Search

__all__ = ["tune"]


def tune(
    recipe: Annotated[str, typer.Argument(help="A recipe by name (see polarstep list).")],
    method: Annotated[
        str,
        typer.Option("--methods", "--method", "-m", help="all, or some: adamw,muon,rand-muon."),
    ],
    trials: Annotated[
        int, typer.Option("--trials", "-n", min=1, help="Trials per method, earlier ones counted.")
    ] = 20,
    study: Annotated[
        Path | None,
        typer.Option(help="Folder of the trials, by default OUT/trials; continued."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Trials at a time; by default 1, or on ray all that the cluster takes."
        ),
    ] = None,
    on: Annotated[
        Where, typer.Option("--on", help="Where trials are made: home, or ray (a Ray cluster).")
    ] = "home",
    seed: Annotated[int, typer.Option(help="Seed of the runs and of the search.")] = 0,
    pruner: Annotated[str, typer.Option(help="median or none.")] = "median",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE for all trials, as in model.layers=2."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the best config of each method.")
    ] = Path("tuned"),
    collect: Annotated[
        Path | None,
        typer.Option(help="Also enter the best values into this file of tuned values."),
    ] = None,
) -> None:
    """Tune a recipe with TPE and pruning; the best config is written as a recipe to run."""
    with clear_errors(""):
        need("tuning", "optuna")
    # Optuna takes a second to import, which help and usage errors need not wait for.
    from polarstep_lab.tune import (
        best_recipe,
        check_recipe,
        check_tuned,
        search_of,
        write_recipe,
        write_tuned,
    )

    folder = study or out / "trials"
    command = shlex.join(["polarstep", *sys.argv[1:]])
    found = []
    with clear_errors(f"The trials so far are in {folder}; the same command continues."):
        refuse_launcher("tune")
        overrides = dict(parse_assignment(text) for text in settings or [])
        searches = [
            search_of(recipe, chosen.slug, folder, overrides, seed, cast(Any, pruner))
            for chosen in find_methods(method)
        ]
        paths = [out / f"{recipe}-{search.folder.name}.json" for search in searches]
        for search, path in zip(searches, paths, strict=True):
            _refuse_searched(search)
            check_recipe(path, search.recipe, search.method)
        if collect is not None:
            check_tuned(collect, recipe)
        device = str(overrides.get("runtime.device", "auto"))
        console = Console(stderr=True)
        with workers_for(on, workers, device, console.print) as team:
            for search, path in zip(searches, paths, strict=True):
                _run(search, trials, team, console)
                best = best_recipe(search, command)
                write_recipe(path, best)
                if collect is not None:
                    write_tuned(collect, best)
                found.append((path, best))
    _show(found)


def _refuse_searched(search: Search) -> None:
    """Raise if a setting that is to hold for all trials is one that the trials try values of."""
    for key, searched in search.space.items():
        if key in search.overrides:
            raise ConfigError(
                f"--set {key}={search.overrides[key]}: tuning {search.method} tries {key} from "
                f"{searched.low:g} to {searched.high:g}, so that it cannot be the same for all trials; "
                "leave it out, or train with it by `polarstep run`"
            )


def _run(search: Search, trials: int, team: Workers, console: Console) -> None:
    """Tune one method and show a bar of trials, with the best loss and the time left."""
    from polarstep_lab.tune import Standing, tune

    told = 0
    with progress_display(console) as display:
        bar = display.add_task(search.method, total=trials, figures="")

        def show(now: Standing) -> None:
            nonlocal told
            best = "no trial finished" if now.best is None else f"best loss {now.best:.4f}"
            figures = best + (f", {now.pruned} pruned" if now.pruned else "")
            display.update(bar, completed=now.done, figures=figures)
            if display.disable and now.done > told:  # not a terminal: print a line for each trial
                told = now.done
                console.print(f"{search.method}: {told} of {trials} trials, {figures}")

        tune(search, trials, team, show)


def _show(found: list[tuple[Path, dict[str, Any]]]) -> None:
    table = Table(title="Best trial of each method (validation loss)")
    for header in ("method", "loss", "trials", "settings"):
        table.add_column(header, justify="right" if header in ("loss", "trials") else "left")
    for _, best in found:
        numbers = {key: x for key, x in best["overrides"].items() if isinstance(x, float)}
        values = ", ".join(f"{key}={value:.5g}" for key, value in numbers.items())
        tuned = best["tuned"]
        name = find_method(best["method"]).name
        table.add_row(name, f"{tuned['val_loss']:.4f}", str(tuned["trials"]), values)
    Console().print(table)
    for path, _ in found:
        typer.echo(f"polarstep run {path}")
