"""The command line: one file per family of commands, put together here."""

from __future__ import annotations

import typer

from polarstep_lab.cli import data, demo, experiments, flops, pack, rates, report, tune

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


app.command()(experiments.run)
app.command()(experiments.compare)
app.command()(experiments.ablate)
app.command("list")(experiments.list_)
app.command()(data.tokenize)
app.command()(data.download)
app.command()(demo.demo)
app.command()(flops.flops)
app.command()(pack.pack)
app.command()(rates.rates)
app.command()(report.report)
app.command()(tune.tune)
