"""How inexact each polar step was: γ and ν of monitored runs, in a table and in a figure.

γ and ν are those of the paper's inexactness assumption: ⟨M, T⟩ ≥ (1 − γ)‖M‖_* and ‖T‖_op ≤ 1 + ν.
They come from ``gamma.jsonl``. The table shows the worst of each run, since an assumption has to hold
throughout. The figure shows rows side by side on one scale, since the question is which of them gives
up more.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from polarstep.theory.bounds.polar import COVERED
from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.blocks import Table
from polarstep_lab.report.drawing import Drawing, draw, style_axes
from polarstep_lab.report.palette import look_of, ordinal_looks
from polarstep_lab.report.rows import Row
from polarstep_lab.report.texts import MISSING, number

__all__ = ["GAMMA_CAPTION", "gamma_figure", "gamma_of", "gamma_sentence", "gamma_table"]

GAMMA_CAPTION = (
    "γ is the alignment that a polar step gave up and ν by how much its operator norm exceeded one, "
    "from singular values, over all sampled steps and matrices. The theorems ask for a γ below 1 "
    "throughout. ν, proved: what Propositions 1 (full space) and 2 (Gaussian sketch) say of exact "
    "arithmetic, so that anything more is rounding. They give γ by the singular values of each matrix "
    "alone, which records do not keep."
)
_SYMBOLS = {"gamma": "γ", "nu": "ν"}
_LEAST = {"gamma": 1e-3, "nu": 0.01}  # the shortest axes: rounding must not look like something
_AT_MOST = 8  # panels that can still be read side by side


def gamma_of(runs: Sequence[RunRecord]) -> pd.DataFrame:
    """``step``, ``matrix``, ``gamma`` and ``nu`` of monitored runs, a line for each sampled matrix.

    A zero matrix has no polar factor to miss: its lines are left out.
    """
    entries = [entry for run in runs for entry in run.gamma if entry.get("stable_rank") != 0]
    log = pd.DataFrame(entries).reindex(columns=["step", "gamma", "nu"])
    log["matrix"] = [
        str(entry["parameter"]).removesuffix(".weight")
        + (f" [{entry['block']}]" if entry.get("block") else "")  # of several in a parameter
        for entry in entries
    ]
    return log.astype({"gamma": float, "nu": float})


def gamma_table(rows: Sequence[Row]) -> Table | None:
    """A line for each monitored row: which polar map, how inexact it was, and where most."""
    header = ["Method", "Polar map", "Runs", "Sampled steps", "γ, median", "γ, largest"]
    cells = []
    for row, log in _monitored(rows).items():
        steps = log["step"].unique()
        worst = log.loc[log["gamma"].idxmax()]
        covered = not row.polar.get("rank") or row.polar.get("sketch") == "gaussian"
        covered = covered and row.polar.get("rest", "dropped") == "dropped"
        cells.append(
            [
                row.method,
                _polar_map(row),
                _runs(row),
                f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)}, last {max(steps)}",
                *map(_decimal, (log["gamma"].median(), worst["gamma"], log["nu"].max())),
                "0" if covered and row.polar.get("solver") in COVERED else MISSING,
                f"{worst['matrix']}, step {worst['step']}",
            ]
        )
    header += ["ν, largest", "ν, proved", "Largest γ in"]
    return Table("How inexact each step was", header, cells) if cells else None


def gamma_sentence(rows: Sequence[Row]) -> str:
    """The largest γ and ν among ``rows``, and the polar maps that they are of."""
    logs = _monitored(rows)
    if not logs:
        return ""
    largest = {
        key: pd.Series({row: log[key].max() for row, log in logs.items()}) for key in _SYMBOLS
    }
    gamma, nu = (
        f"at most {_decimal(values.max())} ({values.idxmax().method}: {_polar_map(values.idxmax())})"
        for values in largest.values()
    )
    return f"In the runs that finished, γ is {gamma} and ν {nu}."


def gamma_figure(rows: Sequence[Row], name: str) -> Drawing | None:
    """γ and ν of each monitored row against the step: the median matrix, and the band of all."""
    watched = [(row, run) for row in rows if (run := row.first_with("gamma"))]
    shown = watched[:_AT_MOST]
    if not shown:
        return None
    logs = [gamma_of([run]) for _, run in shown]
    methods = {row.method for row, _ in watched}
    looks = [look_of(row.method) for row, _ in shown]
    if len({row.method for row, _ in shown}) < len(shown):  # an ablation
        looks = ordinal_looks(len(shown), ordered=False)
    # A run that diverged would leave nothing to see of the others.
    sound = [log for log, (_, run) in zip(logs, shown, strict=True) if run.status != "diverged"]

    def paint(figure: Figure) -> None:
        panels = figure.subplots(2, len(shown), sharex=True, sharey="row", squeeze=False)
        for (key, symbol), line in zip(_SYMBOLS.items(), panels, strict=True):
            limit = 1.08 * max(_LEAST[key], pd.concat(sound or logs)[key].fillna(0.0).max())
            line[0].set_ylim(0, limit)
            for index, (axes, log, look) in enumerate(zip(line, logs, looks, strict=True)):
                style_axes(axes, "", symbol if index == 0 else "")
                if key == "gamma":
                    axes.set_title(_panel_title(*shown[index]), fontsize=8.5)
                band = log.assign(shown=log[key].clip(lower=0.0)).groupby("step")["shown"]
                band = band.agg(["min", "median", "max"]).dropna()
                alone = len(band) == 1  # a run that was lost early
                style = {"color": look.light, "linewidth": 1.8 if alone else 0.0, "alpha": 0.2}
                axes.fill_between(band.index, band["min"], band["max"], **style)
                axes.plot(band.index, band["median"], color=look.light, marker="o" * alone)
                if (top := log[key].max()) > limit:
                    axes.annotate(f"↑ {top:.4g}", (0.08, 0.9), xycoords="axes fraction", fontsize=8)
            line[0].yaxis.label.set(rotation=0, ha="right")
        figure.supxlabel("Training step", fontsize=10)

    seeds = ", ".join(map(str, sorted({run.identity.seed for _, run in shown})))
    caption = (
        f"{f'{methods.pop()}. ' if len(methods) == 1 else ''}What each polar step gave up (γ) and by "
        "how much its operator norm exceeded one (ν), from exact singular values: the median over "
        f"matrices, and the band of all of them. Seed {seeds}."
    )
    if len(watched) > len(shown):
        caption += f" The first {_AT_MOST} of {len(watched)} monitored rows."
    if len(sound) < len(logs):
        caption += " An arrow marks what lies above the axis."
    return draw(name, "γ and ν along the run", caption, (10.5, 4.6), paint)


def _monitored(rows: Sequence[Row]) -> dict[Row, pd.DataFrame]:
    """γ and ν of all runs of each row that has values of both."""
    logs = {row: gamma_of(row.records) for row in rows if row.first_with("gamma")}
    return {row: log for row, log in logs.items() if log[["gamma", "nu"]].notna().any().all()}


def _runs(row: Row) -> str:
    """How many runs, and how they ended where they did not finish."""
    if row.counts.keys() == {"finished"}:
        return str(len(row.runs))
    return ", ".join(f"{count} {status}" for status, count in row.counts.items())


def _polar_map(row: Row) -> str:
    """Polynomial, steps, rank, sketch and rest by the config; the label where the config has none."""
    polar = row.polar
    if not polar.get("solver"):
        return row.label
    words = [str(polar["solver"])]
    words += [f"{polar['steps']} steps"] if polar.get("steps") else []
    words += [f"rank {polar['rank']}"] if polar.get("rank") else []
    sketched = polar.get("rank") and polar.get("sketch") != "gaussian"
    words += [str(polar.get("sketch"))] if sketched else []
    words += [f"rest {rest}"] if (rest := polar.get("rest", "dropped")) != "dropped" else []
    return ", ".join(words)


def _decimal(value: float) -> str:
    """Four decimals: less is rounding.

    >>> _decimal(0.02761), _decimal(-4e-5), _decimal(1998.4756)
    ('0.0276', '0.0000', '1998')
    """
    if value >= 10:
        return number(value)
    return f"{value:.4f}".replace("-0.0000", "0.0000").replace("-", "−")


def _panel_title(row: Row, run: RunRecord) -> str:
    """A label on two lines, to fit above a narrow panel; how the run ended if it did not finish."""
    label = row.label.replace(" (", "\n(", 1)
    return label if run.status == "finished" else f"{label}\n({run.status})"
