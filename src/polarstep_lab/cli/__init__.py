"""The ``polarstep`` command: its sub-commands by name, each imported when it is called.

Most sub-commands need torch, which takes seconds to import. ``polarstep --help`` shows the
summaries below and imports none of them.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from polarstep_lab.train.interrupt import ctrl_c_ends_the_process

__all__ = ["SUBCOMMANDS", "app"]


class Subcommand(NamedTuple):
    """Where a sub-command is written, and the first paragraph of its docstring."""

    module: str
    function: str
    summary: str


SUBCOMMANDS = {
    "run": Subcommand("runs", "run", "Train one method on one recipe."),
    "compare": Subcommand(
        "runs",
        "compare",
        "Train several methods with several seeds: Table 2 and its trajectories.",
    ),
    "ablate": Subcommand(
        "runs", "ablate", "Vary one setting and keep the rest: the paper's ablations."
    ),
    "study": Subcommand(
        "runs",
        "study",
        "Run the study that a Python file defines, or go on with it, and make its report.",
    ),
    "list": Subcommand(
        "reports", "list_", "List recipes, methods and ablations; or the runs below a folder."
    ),
    "tokenize": Subcommand(
        "data", "tokenize", "Turn text files into token shards (nanoGPT's .bin format)."
    ),
    "download": Subcommand(
        "data",
        "download",
        "Download CIFAR-10, or token shards of FineWeb, and check their sums.",
    ),
    "demo": Subcommand(
        "runs",
        "demo",
        "Compare the default with AdamW and two Muons on the text in the package, and make the report.",
    ),
    "flops": Subcommand(
        "flops",
        "flops",
        "Show the optimizer GFLOPs per step of the seven methods of Table 2, and of the deflated map.",
    ),
    "pack": Subcommand(
        "reports",
        "pack",
        "Put the records of many runs into one small file, without checkpoints.",
    ),
    "rates": Subcommand(
        "rates",
        "rates",
        "Measure rates: run Muon on heavy-tailed noise and compare slopes with the theorems.",
    ),
    "report": Subcommand(
        "reports",
        "report",
        "Make one self-contained page, with its tables and figures, from any set of runs.",
    ),
    "tune": Subcommand(
        "tune",
        "tune",
        "Tune a recipe with TPE and pruning; the best config is written as a recipe to run.",
    ),
}


class Subcommands(TyperGroup):
    """Lists sub-commands by their summaries, and imports the sub-command that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, _, summary) in SUBCOMMANDS.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Name, imported sub-command and remaining arguments; None for both if it is unknown."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, None if listed is None or name is None else _imported(name), rest


def _imported(name: str) -> Any:
    """The sub-command itself, with its options."""
    module, function, _ = SUBCOMMANDS[name]
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    with ctrl_c_ends_the_process():
        imported = import_module(f"{__name__}.{module}")
    alone.command(name)(getattr(imported, function))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="polarstep",
    cls=Subcommands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)


def _print_version(asked: bool) -> None:
    """Print the version of the installed package, which is known without importing torch."""
    if asked:
        typer.echo(f"polarstep {metadata.version('polarstep')}")
        raise typer.Exit


@app.callback()
def polarstep(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Muon with exact, inexact and randomized polar steps."""
