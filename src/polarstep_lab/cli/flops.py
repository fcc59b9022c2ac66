"""``polarstep flops``: the cost of an optimizer step, compared with the paper's Table 2."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from polarstep_lab.flops import (
    METHODS,
    OURS,
    TABLE_2,
    Workload,
    gflops,
    ledger,
    markdown,
    relative_difference,
)
from polarstep_lab.flops.ledger import percent
from polarstep_lab.flops.workload import named, names

__all__ = ["flops"]


def flops(
    name: Annotated[
        str,
        typer.Argument(metavar="WORKLOAD", help=f"A benchmark of the paper: {', '.join(names())}."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: GFLOPs by method, unrounded.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of docs/flops.md.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what each method spends, item by item.")
    ] = False,
) -> None:
    """Show the optimizer GFLOPs per step of the seven methods of Table 2, and of the deflated map."""
    try:
        workload = named(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="WORKLOAD") from error
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown: expected at most one of the two")
    if as_json:
        typer.echo(json.dumps(gflops(workload), indent=2))
    elif as_markdown:
        typer.echo(markdown(workload))
    else:
        console = Console()
        console.print(_comparison(workload))
        console.print(_settings(workload), style="dim")
        if verbose:
            console.print(_breakdown(workload))


def _comparison(workload: Workload) -> Table:
    table = Table(title=f"Optimizer GFLOPs per step, {workload.name}")
    table.add_column("method", no_wrap=True)
    for header in ("GFLOPs", "Table 2", "difference"):
        table.add_column(header, justify="right", no_wrap=True)
    for method, ours in gflops(workload).items():
        difference = relative_difference(workload, method)
        assert difference is not None, "every named workload is a column of Table 2"
        paper = TABLE_2[workload.name][method]
        table.add_row(method, f"{ours:.4f}", f"{paper:.4f}", percent(difference))
    table.add_section()
    for method, ours in gflops(workload, OURS).items():
        table.add_row(method, f"{ours:.4f}", "", "")
    return table


def _breakdown(workload: Workload) -> Table:
    table = Table(title="Item by item")
    table.add_column("method", no_wrap=True)
    table.add_column("item", no_wrap=True)
    table.add_column("GFLOPs", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for method, total in gflops(workload, (*METHODS, *OURS)).items():
        items = ledger(workload, method).items()
        for i, (item, cost) in enumerate(items):
            share = cost / 1e9 / total
            table.add_row(method if i == 0 else "", item, f"{cost / 1e9:.4f}", f"{share:.2%}")
        table.add_section()
    return table


def _settings(workload: Workload) -> str:
    shapes = ", ".join(f"{count} of {m}×{n}" for (m, n), count in workload.matrices)
    return (
        f"Muon's matrices: {shapes}; {workload.elementwise:,.0f} parameters element-wise; "
        f"(s, p, h, q) = ({workload.rank}, {workload.oversample}, {workload.power:g}, "
        f"{workload.steps})"
    )
