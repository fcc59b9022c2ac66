"""A page one can send, made from run directories and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from polarstep.storage import StorageError
from polarstep_lab.report.figures import ablation_figures, cost_figure, trajectory_figure
from polarstep_lab.report.folder import write_folder
from polarstep_lab.report.grouping import Runs, collect, sections_of
from polarstep_lab.report.inexactness_heatmap import gamma_figure
from polarstep_lab.report.inexactness_page import polar_of
from polarstep_lab.report.noise_page import gamma_lines, noise_figure
from polarstep_lab.report.page import Drawings, render
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.spreadsheets import runs_csv, summary_csv
from polarstep_lab.report.tables import markdown

__all__ = ["report_files", "stale_tables", "write_report"]

TABLES = ("summary.md", "summary.csv", "runs.csv")


def report_files(
    paths: Sequence[Path | str],
    title: str = "polarstep: results",
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, bytes]:
    """All files of a report, by their path in its folder; a function of the records alone."""
    runs, sections, notices = _read(paths)
    drawings = []
    for section in sections:
        progress(section.recipe)
        drawings.append(_draw(section))
    files = {"index.html": render(title, runs, sections, drawings, notices).encode()}
    files |= _tables(runs, sections, notices)
    for group in drawings:
        for drawing in group.all:
            files[f"figures/{drawing.name}.svg"] = drawing.svg.encode()
            files[f"figures/{drawing.name}.png"] = drawing.png
    return files


def _read(paths: Sequence[Path | str]) -> tuple[Runs, tuple[Section, ...], tuple[str, ...]]:
    """The runs below ``paths``, grouped, and what the reader should be told about them."""
    runs = collect(paths)
    if not runs.records:
        detail = f" ({'; '.join(runs.notices)})" if runs.notices else ""
        raise StorageError(
            f"no run directories in {', '.join(map(str, paths))}{detail}: expected folders with a "
            "config.json, as `polarstep run` and `polarstep compare` make them"
        )
    if not any(run.status == "finished" for run in runs.records):
        found = ", ".join(f"{runs.names[r.directory]}: {r.status}" for r in runs.records[:5])
        raise StorageError(
            f"none of the {len(runs.records)} runs has finished ({found}"
            f"{', …' if len(runs.records) > 5 else ''}): there is no figure to report; resume them "
            "with `polarstep run … --resume`"
        )
    sections, left_out = sections_of(runs)
    return runs, sections, (*runs.notices, *left_out)


def _tables(runs: Runs, sections: Sequence[Section], notices: Sequence[str]) -> dict[str, bytes]:
    texts = (markdown(sections, notices), summary_csv(sections), runs_csv(runs))
    return {name: text.encode() for name, text in zip(TABLES, texts, strict=True)}


def stale_tables(paths: Sequence[Path | str], out: Path) -> list[str]:
    """The tables in the folder ``out`` that are missing or not what the records say."""
    expected = _tables(*_read(paths))
    return [
        name
        for name, content in expected.items()
        if not (out / name).is_file() or (out / name).read_bytes() != content
    ]


def write_report(
    paths: Sequence[Path | str],
    out: Path,
    title: str = "polarstep: results",
    progress: Callable[[str], object] = lambda _: None,
) -> Path:
    """Make the report of all runs below ``paths`` in the folder ``out``; returns its page."""
    write_folder(out, report_files(paths, title, progress))
    return out / "index.html"


def _draw(section: Section) -> Drawings:
    slug = section.slug
    comparison = (
        trajectory_figure(section, f"{slug}-trajectories"),
        cost_figure(section, f"{slug}-cost"),
    )
    monitored = _monitored(section)
    heatmaps = [gamma_lines(rows, f"{slug}-gamma-lines-{i}") for i, rows in enumerate(monitored)]
    heatmaps += [gamma_figure(rows, f"{slug}-gamma-{i}") for i, rows in enumerate(monitored)]
    noise = [noise_figure(row, f"{slug}-noise-{i}") for i, row in enumerate(section.all_rows)]
    return Drawings(
        comparison=tuple(drawing for drawing in comparison if drawing),
        ablations=ablation_figures(section, f"{slug}-ablations"),
        heatmaps=tuple(drawing for drawing in heatmaps if drawing),
        noise=tuple(drawing for drawing in noise if drawing),
    )


def _monitored(section: Section) -> list[list[Row]]:
    """Rows whose γ and ν stand side by side: methods, and each axis with the recipe's own value."""
    groups, taken = [], set()
    for ablation in section.ablations:
        if any(run.gamma for row in ablation.rows for run in row.runs):
            groups.append([_labelled(name, row, ablation.axis) for name, row in ablation.named])
            taken |= {id(row) for _, row in ablation.named}
    watched = [row for row in section.rows if any(run.gamma for run in row.runs)]
    if len(watched) == 1 and id(watched[0]) in taken:
        return groups
    return [watched, *groups]


def _labelled(name: str, row: Row, axis: str) -> Row:
    """The row, called by its value on the axis also where it is the recipe's own."""
    if name != "recipe":
        return row
    value = polar_of(row).get(axis)
    return replace(row, label="recipe" if value is None else f"{axis} = {value} (recipe)")
