"""The command line: one file per family of commands, put together here."""

from __future__ import annotations

import typer

from polarstep.cli import flops, report, tune

__all__ = ["app"]

app = typer.Typer(
    name="polarstep",
    help="Muon with exact, inexact and randomized polar steps.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)


@app.callback()
def polarstep() -> None:
    """Muon with exact, inexact and randomized polar steps."""


app.command()(flops.flops)
app.command()(report.report)
app.command()(tune.tune)
