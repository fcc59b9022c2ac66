"""The page: one HTML file that holds its style, its script and its figures.

Figures are inlined as SVG whose colours are CSS variables, so that one file serves a light screen,
a dark one and paper. Every text that comes from a record is escaped by the template.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from polarstep_lab.report.captions import ablation_caption, caption, times_of
from polarstep_lab.report.drawing import Drawing
from polarstep_lab.report.grouping import Runs
from polarstep_lab.report.inexactness_page import (
    GAMMA_CAPTION,
    NOISE_CAPTION,
    assumptions_headline,
    gamma_cells,
    noise_cells,
)
from polarstep_lab.report.palette import Look, ablation_look, all_looks, look_of
from polarstep_lab.report.paper import Beside, beside_the_paper
from polarstep_lab.report.randomized import (
    RANDOMIZED_CAPTION,
    randomized_cells,
    verdict,
)
from polarstep_lab.report.rows import STATUSES, AblationSet, Row, Section
from polarstep_lab.report.tables import beside_cells
from polarstep_lab.report.texts import (
    base_text,
    decimals_of,
    listed,
    metric_text,
    number,
    paper_text,
)
from polarstep_lab.report.timing import device_of

__all__ = ["Drawings", "render"]

_BENCHMARKS = {"nanogpt": "nanoGPT", "cifar10": "CIFAR-10"}


@dataclass(frozen=True)
class Drawings:
    """The figures of one section, by their place on the page."""

    comparison: tuple[Drawing, ...]
    ablations: tuple[Drawing, ...]
    heatmaps: tuple[Drawing, ...]
    noise: tuple[Drawing, ...] = ()

    @property
    def all(self) -> tuple[Drawing, ...]:
        """Every figure there is."""
        return (*self.comparison, *self.ablations, *self.heatmaps, *self.noise)


def render(
    title: str,
    runs: Runs,
    sections: Sequence[Section],
    drawings: Sequence[Drawings],
    notices: Sequence[str],
) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    counts = {s: sum(run.status == s for run in runs.records) for s in STATUSES}
    recipes = ", ".join(dict.fromkeys(section.recipe for section in sections))
    return environment.from_string(_resource("page.html")).render(
        title=title,
        lead=f"{len(runs.records)} runs of {recipes}.",
        chips=[{"status": s, "count": count} for s, count in counts.items() if count],
        notices=notices,
        sections=[_section(s, d) for s, d in zip(sections, drawings, strict=True)],
        environments=_environments(runs),
        runs=_runs(runs),
        variables=Markup(_variables()),
        css=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
    )


def _section(section: Section, drawings: Drawings) -> dict[str, Any]:
    beside = beside_the_paper(section)
    return {
        "slug": section.slug,
        "title": section.recipe,
        "benchmark": _BENCHMARKS.get(section.benchmark, section.benchmark),
        "watched": section.watched,
        "headline": assumptions_headline(section) if section.watched else _headline(section),
        "table": _comparison(section) if section.rows else None,
        "randomized": _cells(randomized_cells(section), RANDOMIZED_CAPTION),
        "verdict": verdict(section),
        "beside": _beside(section, beside) if beside else None,
        "drawings": [_inline(drawing) for drawing in drawings.comparison],
        "ablations": [_ablation(section, ablation) for ablation in section.ablations],
        "ablation_caption": ablation_caption(section),
        "ablation_drawings": [_inline(drawing) for drawing in drawings.ablations],
        "gamma": _cells(gamma_cells(section), GAMMA_CAPTION),
        "heatmaps": [_inline(drawing) for drawing in drawings.heatmaps],
        "noise_table": _cells(noise_cells(section), NOISE_CAPTION),
        "noise": [_inline(drawing) for drawing in drawings.noise],
    }


def _cells(cells: tuple[list[str], list[list[str]]] | None, below: str) -> dict[str, Any] | None:
    return {"header": cells[0], "rows": cells[1], "caption": below} if cells else None


def _beside(section: Section, beside: Beside) -> dict[str, Any]:
    header, cells = beside_cells(section, beside)
    return {
        "comparable": beside.comparable,
        "summary": beside.summary,
        "order": beside.order,
        "source": beside.source,
        "header": header,
        "rows": [
            {"cells": line, "differs": of.differs}
            for line, of in zip(cells, beside.lines, strict=True)
        ],
        "notes": beside.notes,
    }


def _headline(section: Section) -> str:
    """What came out, in a sentence or two, whatever it is, with ties and overlaps named."""
    scored = [(row.metric, row) for row in section.rows if row.metric]
    if not scored:
        return "No run of this comparison has finished." if section.rows else ""
    if len(scored) == 1:
        return ""
    scored.sort(key=lambda pair: pair[0].mean, reverse=section.higher_is_better)
    decimals = decimals_of(section)
    best, _ = scored[0]
    ties = [
        row.label
        for metric, row in scored
        if f"{metric.mean:.{decimals}f}" == f"{best.mean:.{decimals}f}"
    ]
    word = "highest" if section.higher_is_better else "lowest"
    text = (
        f"{listed(ties)} {'have' if len(ties) > 1 else 'has'} the {word} mean "
        f"{section.metric_name.lower()} of {len(scored)} methods: {metric_text(best, decimals)} "
        f"over {_plural(best.n, 'seed')}."
    )
    if len(ties) < len(scored):
        metric, row = scored[len(ties)]
        text += f" Next is {row.label} with {metric_text(metric, decimals)}"
        spread = math.hypot(best.std or 0.0, metric.std or 0.0)
        text += (
            ", closer than one standard deviation of the difference."
            if abs(metric.mean - best.mean) < spread
            else "."
        )
    return text


def _comparison(section: Section) -> dict[str, Any]:
    rows = section.rows
    place = _strip_scale(rows, log=not section.higher_is_better)
    best = section.marked(rows)
    return {
        "label": f"Comparison of {section.recipe}",
        "first": "Method",
        "metric": section.metric_name,
        "caption": caption(section),
        "lines": sum(len(row.commands) for row in rows),
        "rows": [
            _row(section, row, row.label, look_of(row.method), row is best, place, rows)
            for row in rows
        ],
    }


def _ablation(section: Section, ablation: AblationSet) -> dict[str, Any]:
    named = ablation.named
    rows = [row for _, row in named]
    place = _strip_scale(rows, log=not section.higher_is_better)
    best = section.marked(rows)
    lines = []
    for name, row in named:
        own = list(ablation.rows).index(row) if row in ablation.rows else None
        count = len(ablation.rows)
        look = look_of("") if own is None else ablation_look(own, count, ablation.numeric)
        line = _row(section, row, name, look, row is best, place, section.ablation_rows)
        line["is_base"] = row is ablation.base
        line["difference"] = base_text(ablation, row, decimals_of(section))
        lines.append(line)
    return {
        "axis": ablation.axis,
        "method": ablation.of,
        "label": f"Ablation of {ablation.axis}",
        "metric": section.metric_name,
        "based": ablation.base is not None,
        "lines": sum(len(row.commands) for row in rows),
        "rows": lines,
    }


def _row(
    section: Section,
    row: Row,
    label: str,
    look: Look,
    best: bool,
    place: Any,
    beside: Sequence[Row],
) -> dict[str, Any]:
    """One line of a table; ``beside`` are the rows that its times are seen next to."""
    values = [run.result.value for run in row.finished if run.result]
    counts = row.counts
    finished = counts.pop("finished", 0)
    decimals = decimals_of(section)
    optimizer_ms, step_ms, seconds = times_of(row, beside)
    return {
        "label": label,
        "variable": look.variable,
        "dash": "dashed" if look.dash == "--" else "solid",
        "metric": metric_text(row.metric, decimals),
        "best": best,
        "dots": [place(value) for value in values if math.isfinite(value)],
        "strip_label": ", ".join(f"{value:.{decimals}f}" for value in values),
        "mean_at": place(row.metric.mean) if row.metric else None,
        "paper_at": place(row.paper.mean) if row.paper else None,
        "paper": paper_text(row) if row.paper else None,
        "paper_gflops": number(row.paper.gflops) if row.paper and row.paper.gflops else None,
        "seeds": finished if not counts else f"{finished} of {len(row.runs)}",
        "losses": [{"status": status, "count": count} for status, count in counts.items()],
        "gflops": number(row.gflops),
        "optimizer_ms": optimizer_ms,
        "step_ms": step_ms,
        "seconds": seconds,
        "command": "\n".join(row.commands),
    }


def _strip_scale(rows: Sequence[Row], log: bool) -> Any:
    """A map from metric values to positions in per cent, common to all rows of a table."""
    values = [run.result.value for row in rows for run in row.finished if run.result]
    values += [row.paper.mean for row in rows if row.paper]
    values = [value for value in values if math.isfinite(value)]
    scale = math.log if log and values and min(values) > 0 else float
    low, high = (scale(min(values)), scale(max(values))) if values else (0.0, 1.0)

    def place(value: float) -> float:
        share = (scale(value) - low) / (high - low) if high > low else 0.5
        return round(4 + 92 * share, 2)

    return place


def _environments(runs: Runs) -> list[dict[str, Any]]:
    """One box for each distinct machine and set of versions, whenever its runs were started."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
    for run in runs.records:
        flat = tuple(_flatten(run.environment))
        key = (device_of(run), flat)
        groups[key] = groups.get(key, 0) + 1
    return [
        {"device": device, "entries": entries, "runs": _plural(count, "run")}
        for (device, entries), count in sorted(groups.items())
    ]


def _flatten(environment: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs = []
    for key, value in environment.items():
        if key in ("device", "device_name", "threads", "started"):
            continue
        if isinstance(value, Mapping):
            pairs += _flatten(value, f"{key} " if key not in ("packages", "versions") else "")
        else:
            text = "not recorded" if value is None else str(value)
            pairs.append((f"{prefix}{key}".replace("_", " "), text))
    return pairs


def _runs(runs: Runs) -> list[dict[str, Any]]:
    return [
        {
            "name": runs.names[run.directory],
            "label": run.identity.method
            + (f", {run.identity.ablation.axis} = {run.identity.ablation.value}"
               if run.identity.ablation else ""),
            "seed": run.identity.seed,
            "status": run.status,
            "value": number(run.result.value if run.result else None, 5),
            "message": run.result.message if run.result else "no result recorded",
        }
        for run in sorted(runs.records, key=lambda run: runs.names[run.directory])
    ]  # fmt: skip


def _inline(drawing: Drawing) -> dict[str, Any]:
    return {
        "name": drawing.name,
        "title": drawing.title,
        "caption": drawing.caption,
        "inline": Markup(drawing.inline),
    }


def _variables() -> str:
    """The palette as CSS variables: light by default, dark where the reader prefers it."""
    light = "".join(f"{look.variable}:{look.light};" for look in all_looks())
    dark = "".join(f"{look.variable}:{look.dark};" for look in all_looks())
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
