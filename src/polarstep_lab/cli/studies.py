"""``polarstep compare``, ``ablate`` and ``study``: many runs, and a table of what they reached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from polarstep_lab.axes import AXES
from polarstep_lab.cli.extras import REPORT, need
from polarstep_lab.cli.failures import clear_errors
from polarstep_lab.cli.making import make_study
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
from polarstep_lab.methods import find_method, find_methods
from polarstep_lab.settings_by_name import parse_assignment
from polarstep_lab.study import ablation, comparison, load_study
from polarstep_lab.train.ranks import refuse_launcher

__all__ = ["ablate", "compare", "study"]

AGAIN = "Run the same command again to go on."


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
        make_study(found, folder, on, workers, force, tensorboard)


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
        make_study(found, folder, on, workers, force, tensorboard)


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
        make_study(found, folder, on, workers, force, tensorboard, program)

        from polarstep_lab.report import write_report  # matplotlib takes a second to import

        page = write_report([folder], folder / "report", found.name)
    typer.echo(f"Report: {page}")


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
