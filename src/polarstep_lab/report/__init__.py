"""A page to send, made from the records of runs and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from polarstep.storage import StorageError
from polarstep_lab.report.content import Drawings, blocks_of
from polarstep_lab.report.drawing import Drawing
from polarstep_lab.report.figures import ablation_figures, cost_figure, trajectory_figure
from polarstep_lab.report.folder import write_folder
from polarstep_lab.report.gradient_noise import noise_figure
from polarstep_lab.report.grouping import Runs, collect, sections_of
from polarstep_lab.report.inexactness import gamma_figure
from polarstep_lab.report.markdown import markdown
from polarstep_lab.report.page import render
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.report.tables import runs_csv, summary_csv

__all__ = ["report_files", "stale_tables", "write_report"]

_TITLE = "polarstep: results"


def write_report(
    paths: Sequence[Path | str],
    out: Path,
    title: str = _TITLE,
    progress: Callable[[str], object] = lambda _: None,
) -> Path:
    """Make the report of all runs below ``paths`` in the folder ``out``; returns its page."""
    write_folder(out, report_files(paths, title, progress))
    return out / "index.html"


def report_files(
    paths: Sequence[Path | str],
    title: str = _TITLE,
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, bytes]:
    """All files of a report, by their path in its folder; a function of the records alone."""
    runs, sections, notices = _read(paths)
    figures: dict[str, bytes] = {}
    shown = []
    for section in sections:
        progress(section.recipe)
        drawings = _draw(section)
        shown.append((section, blocks_of(section, drawings)))
        for drawing in (drawing for place in drawings for drawing in place):
            figures[f"figures/{drawing.name}.svg"] = drawing.svg.encode()
            figures[f"figures/{drawing.name}.png"] = drawing.png
    page = render(title, runs, shown, notices).encode()
    return {"index.html": page, **_tables(runs, sections, notices), **figures}


def stale_tables(paths: Sequence[Path | str], out: Path) -> list[str]:
    """The tables in the folder ``out`` that are missing or not what the records say."""
    return [
        name
        for name, content in _tables(*_read(paths)).items()
        if not (out / name).is_file() or (out / name).read_bytes() != content
    ]


def _read(paths: Sequence[Path | str]) -> tuple[Runs, tuple[Section, ...], tuple[str, ...]]:
    """The runs below ``paths``, grouped, and what the reader should be told about them."""
    runs = collect(paths)
    if runs.frame.empty:
        detail = f" ({'; '.join(runs.notices)})" if runs.notices else ""
        raise StorageError(
            f"no run directories in {', '.join(map(str, paths))}{detail}: expected folders with a "
            "config.json, as `polarstep run` and `polarstep compare` make them"
        )
    if "finished" not in set(runs.frame["status"]):
        found = [f"{run}: {status}" for run, status in runs.frame[["run", "status"]].values]
        shown = ", ".join(found[:5]) + ", …" * (len(found) > 5)
        raise StorageError(
            f"none of the {len(found)} runs has finished ({shown}): there is no figure to report; "
            "resume them with `polarstep run … --resume`"
        )
    sections, left_out = sections_of(runs)
    return runs, sections, (*runs.notices, *left_out)


def _tables(runs: Runs, sections: Sequence[Section], notices: Sequence[str]) -> dict[str, bytes]:
    tables = {
        "summary.md": markdown(sections, notices),
        "summary.csv": summary_csv(sections),
        "runs.csv": runs_csv(runs),
    }
    return {name: text.encode() for name, text in tables.items()}


def _draw(section: Section) -> Drawings:
    """All figures of a section that its runs have something for."""
    slug = section.slug
    monitored = enumerate(_monitored(section))
    inexactness = [gamma_figure(rows, f"{slug}-gamma-{i}") for i, rows in monitored]
    noise = [noise_figure(row, f"{slug}-noise-{i}") for i, row in enumerate(section.all_rows)]
    return Drawings(
        _drawn(
            trajectory_figure(section, f"{slug}-trajectories"), cost_figure(section, f"{slug}-cost")
        ),
        ablation_figures(section, f"{slug}-ablations"),
        _drawn(*inexactness),
        _drawn(*noise),
    )


def _drawn(*drawings: Drawing | None) -> list[Drawing]:
    return [drawing for drawing in drawings if drawing]


def _monitored(section: Section) -> list[list[Row]]:
    """Rows whose γ and ν stand side by side: methods, and each axis with the recipe's own value."""
    groups, taken = [], set()
    for ablation in section.ablations:
        if any(row.first_with("gamma") for row in ablation.rows):
            groups.append([_labelled(name, row, ablation.axis) for name, row in ablation.named])
            taken |= {row for _, row in ablation.named}
    watched = [row for row in section.rows if row.first_with("gamma")]
    return groups if len(watched) == 1 and watched[0] in taken else [watched, *groups]


def _labelled(name: str, row: Row, axis: str) -> Row:
    """The row, called by its value on the axis also where it is the recipe's own."""
    if name != "recipe":
        return row
    value = row.polar.get(axis)
    return replace(row, label="recipe" if value is None else f"{axis} = {value} (recipe)")
