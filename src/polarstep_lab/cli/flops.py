"""``polarstep flops``: the cost of an optimizer step, in one process and on many ranks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from polarstep.ranks.plans import PLANS
from polarstep_lab.flops import (
    METHODS,
    OURS,
    TABLE_2,
    Workload,
    gflops,
    ledger,
    relative_difference,
)
from polarstep_lab.flops.communication import (
    Mesh,
    MeshName,
    costs,
    maps_of,
    mesh_of,
    shares,
)
from polarstep_lab.flops.ledger import percent
from polarstep_lab.flops.workload import workload_named, workload_names

__all__ = ["flops"]


def flops(
    name: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help=f"A benchmark of the paper or an 8B model: {', '.join(workload_names())}.",
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: GFLOPs by method, unrounded.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what each method spends, item by item.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Show bytes and FLOPs of each of so many ranks, plan by plan."),
    ] = None,
    mesh: Annotated[
        MeshName, typer.Option(help="How parameters lie on the ranks; hsdp shards by eights.")
    ] = "fsdp",
) -> None:
    """Show the optimizer GFLOPs per step of the seven methods of Table 2, and of the deflated map.

    With --ranks: what a step of Muon costs each rank, plan by plan.
    """
    try:
        workload = workload_named(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="WORKLOAD") from error
    if ranks is not None:
        _on_ranks(workload, mesh_of(mesh, ranks), as_json)
    elif as_json:
        typer.echo(json.dumps(gflops(workload) | gflops(workload, OURS), indent=2))
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
        published = []
        if difference is not None:
            published = [f"{TABLE_2[workload.name][method]:.4f}", percent(difference)]
        table.add_row(method, f"{ours:.4f}", *published)
    table.add_section()
    for method, ours in gflops(workload, OURS).items():
        table.add_row(method, f"{ours:.4f}")
    return table


def _on_ranks(workload: Workload, mesh: Mesh, as_json: bool) -> None:
    """Print what each plan costs a rank, and which plan each shape takes."""
    maps = maps_of(workload)
    found = {name: costs(workload, polar, mesh) for name, polar in maps.items()}
    if as_json:
        plain = {
            name: {plan: asdict(cost) for plan, cost in by_plan.items()}
            for name, by_plan in found.items()
        }
        typer.echo(json.dumps(plain, indent=2, ensure_ascii=False))
        return
    sharded = f", {mesh.shards} shards a copy" if mesh.name == "hsdp" else ""
    table = Table(title=f"Per rank and step, {workload.name}, {mesh.name} on {mesh.ranks}{sharded}")
    table.add_column("map", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    for header in ("MB received", "GFLOP"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("chosen for")
    for name, polar in maps.items():
        takers: dict[str, Counter[str]] = {}
        for share in shares(workload, polar, mesh):
            its = share.matrices
            takers.setdefault(share.chosen, Counter())[f"{its.m}×{its.n}"] += its.count
        for i, plan in enumerate((*PLANS, "chosen")):
            cost = found[name].get(plan)
            figures = ["–", "–"]
            if cost is not None:
                figures = [f"{cost.nbytes / 1e6:,.2f}", f"{cost.flops / 1e9:,.1f}"]
            shapes = [f"{count} of {shape}" for shape, count in takers.get(plan, {}).items()]
            table.add_row(name if i == 0 else "", plan, *figures, ", ".join(shapes))
        table.add_section()
    console = Console()
    console.print(table)
    console.print(
        "–: not possible for this map on this mesh. Muon's matrices alone; M and T in bfloat16, sums "
        "and gather in float32.",
        style="dim",
    )


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
