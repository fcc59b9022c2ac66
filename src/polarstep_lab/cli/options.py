"""The options that ``run``, ``compare`` and ``ablate`` share, and how their values are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from polarstep_lab.cli.making import Where
from polarstep_lab.config import ConfigError
from polarstep_lab.settings_by_name import parse_assignment
from polarstep_lab.train.ranks import Parallel

__all__ = [
    "BoardOption",
    "DeviceOption",
    "ForceOption",
    "MonitorOption",
    "NoiseOption",
    "OnOption",
    "ParallelOption",
    "RecipeArgument",
    "SeedsOption",
    "SetOption",
    "WorkersOption",
    "overrides_of",
    "seeds_of",
]

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
