"""The figure of ``polarstep flops --figure``: bytes and FLOPs per rank over the number of ranks."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polarstep.maps import PolarMap
from polarstep_lab.flops.communication import MeshName, RankCost, costs, maps_of, mesh_of
from polarstep_lab.flops.workload import Workload
from polarstep_lab.report.panels import Drawing, style_axes
from polarstep_lab.storage import write_atomically

__all__ = ["RANKS", "communication_figure", "write_figure"]

RANKS = tuple(2**k for k in range(11))
"""N = 1 … 1024."""

COLOURS = {
    "gather": "#c97a04",
    "owner": "#2a62f0",
    "local": "#6b6875",
    "replicated": "#1f9a5f",
}
FORMULAS = {
    "gather": "gather: M to all, (N − 1)/N · mn",
    "owner": "owner: M there, T back, ≤ 2(N − 1)/N² · mn",
    "local": "local: every rank computes everything",
    "replicated": "replicated: T or its factors to all",
}


def communication_figure(workload: Workload, mesh: MeshName) -> Drawing:
    """Two panels for each map of ``workload``: GB received and TFLOP per rank, both over N."""
    maps = maps_of(workload)

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(maps), 2, squeeze=False, sharex=True)
        for row, (name, polar) in zip(grid, maps.items(), strict=True):
            found = _over_ranks(workload, polar, mesh)
            _panel(row[0], found, "nbytes", 1e9, f"{name}: GB received per rank")
            _panel(row[1], found, "flops", 1e12, f"{name}: TFLOP per rank")
            row[0].legend(fontsize=8, loc="best")
        figure.suptitle(f"One step of Muon, {workload.name}, {mesh}")
        for axes in grid[-1]:
            axes.set_xlabel("ranks N")

    caption = (
        f"One step of Muon's matrices of {workload.name} on a {mesh} mesh, by the formulas of the "
        "ledger. The dotted line is what the chosen plans cost together."
    )
    return Drawing(f"communication-{workload.name}-{mesh}", caption, caption, (11, 8), paint)


def write_figure(path: Path, workload: Workload, mesh: MeshName) -> None:
    """Write the figure to ``path``: as SVG if that is its suffix, otherwise as PNG."""
    svg, png = communication_figure(workload, mesh).files
    content = svg.encode() if path.suffix == ".svg" else png
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(content))


def _over_ranks(
    workload: Workload, polar: PolarMap, mesh: MeshName
) -> dict[str, dict[int, RankCost]]:
    """For each plan, and for the chosen plans, the cost at every N that allows it."""
    found: dict[str, dict[int, RankCost]] = {}
    for ranks in RANKS:
        for plan, cost in costs(workload, polar, mesh_of(mesh, ranks)).items():
            found.setdefault(plan, {})[ranks] = cost
    return found


def _panel(
    axes: Axes, found: dict[str, dict[int, RankCost]], field: str, unit: float, title: str
) -> None:
    for plan, by_ranks in found.items():
        # Nothing is sent at N = 1, which a logarithmic axis cannot show.
        points = [(n, getattr(cost, field) / unit) for n, cost in by_ranks.items()]
        points = [(n, value) for n, value in points if value > 0]
        if not points:
            continue
        if plan == "chosen":
            axes.plot(
                *zip(*points, strict=True), ":", color="black", lw=3, label="the chosen plans"
            )
        else:
            axes.plot(
                *zip(*points, strict=True), "o-", ms=3.5, color=COLOURS[plan], label=FORMULAS[plan]
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(RANKS, [str(n) for n in RANKS])
    axes.minorticks_off()
    style_axes(axes, "", "", title)
