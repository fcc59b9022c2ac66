"""How inexact each polar step was: γ and ν of monitored runs, in a table and in a figure.

γ and ν are those of the paper's inexactness assumption: ⟨M, T⟩ ≥ (1 − γ)‖M‖_* and ‖T‖_op ≤ 1 + ν.
They come from ``gamma.jsonl``. The table shows the largest value of each run, since an assumption has
to hold throughout. The figure shows rows side by side on one scale, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from polarstep.theory.bounds.polar_maps import COVERED
from polarstep_lab.records.record import RunRecord
from polarstep_lab.report.blocks import Block, Table, part
from polarstep_lab.report.palette import Look, look_of, ordinal_looks
from polarstep_lab.report.panels import Drawing, Panel, Series
from polarstep_lab.report.rows import Row, Section
from polarstep_lab.wording import MISSING, in_digits

__all__ = ["gamma_blocks", "gamma_figure", "gamma_of", "gamma_table"]

_CAPTION = (
    "γ is the alignment that a polar step gave up and ν by how much its operator norm exceeded one, "
    "from singular values, over all sampled steps and matrices. The theorems ask for a γ below 1 "
    "throughout. ν, proved: what Propositions 1 (full space) and 2 (Gaussian sketch) say of exact "
    "arithmetic, so that anything more is rounding. They give γ by the singular values of each matrix "
    "alone, which records do not keep."
)
_SYMBOLS = {"gamma": "γ", "nu": "ν"}
_LEAST = {"gamma": 1e-3, "nu": 0.01}  # the shortest axes: rounding errors must not fill a panel
_AT_MOST = 8  # more panels side by side could not be read


def gamma_blocks(section: Section) -> list[Block | None]:
    """A table of all monitored rows, and figures of the methods and of each ablation with its base."""
    ablations = [a for a in section.ablations if any(row.first_with("gamma") for row in a.rows)]
    groups = [{row: row.label for row in section.rows if row.first_with("gamma")}]
    for ablation in ablations:
        named = {row: f"{ablation.axis} = {value}" for row, value in ablation.row_names.items()}
        if ablation.base in groups[0]:
            own = "as in the" if ablation.base_value is None else ablation.base_value
            named[ablation.base] = f"{ablation.axis} = {own} (recipe)"
        groups.append(named)
    if ablations and len(groups[0]) == 1 and groups[0].keys() & {a.base for a in ablations}:
        del groups[0]  # its only row is already in the figure of an axis, as the base
    figures = [gamma_figure(rows, f"{section.slug}-gamma-{i}") for i, rows in enumerate(groups)]
    return part(gamma_table(section.all_rows), _CAPTION, figures)


def gamma_of(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """``step``, ``matrix``, ``gamma`` and ``nu`` of monitored runs, a line for each sampled matrix.

    Zero matrices are left out: they have no polar factor to compare with.
    """
    entries = [entry for run in runs for entry in run.gamma if entry.get("stable_rank") != 0]
    log = pd.DataFrame(entries).reindex(columns=["step", "gamma", "nu"])
    log["matrix"] = [
        str(entry["parameter"]).removesuffix(".weight")
        + (f" [{entry['block']}]" if entry.get("block") else "")  # one of several matrices
        for entry in entries
    ]
    return log.astype({"gamma": float, "nu": float})


def gamma_table(rows: Sequence[Row]) -> Table:
    """A line for each monitored row: its polar map, how inexact it was, and where it was most so."""
    lines = []
    for row in rows:
        log = gamma_of(row.runs["record"])
        if log[["gamma", "nu"]].notna().any().all():
            worst, steps = log.loc[log["gamma"].idxmax()], log["step"].unique()
            sampled = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)}, last {max(steps)}"
            cells = {
                "Method": row.method_that_ran,
                "Polar map": _polar_map(row),
                "Runs": row.seeds_text,
                "Sampled steps": sampled,
                "γ, median": _decimal(log["gamma"].median()),
                "γ, largest": _decimal(worst["gamma"]),
                "ν, largest": _decimal(log["nu"].max()),
                "ν, proved": "0" if _covered(row.polar) else MISSING,
                "Largest γ in": f"{worst['matrix']}, step {worst['step']}",
            }
            lines.append(cells)
    return Table("How inexact each step was", pd.DataFrame(lines))


def gamma_figure(rows: Mapping[Row, str], name: str) -> Drawing | None:
    """γ and ν of each monitored row against the step: the median matrix, and the band of all."""
    watched = [(row, label, run) for row, label in rows.items() if (run := row.first_with("gamma"))]
    shown = watched[:_AT_MOST]
    if not shown:
        return None
    logs = [gamma_of([run]) for *_, run in shown]
    methods = {row.method for row, *_ in watched}
    looks = [look_of(row.method) for row, *_ in shown]
    if len({row.method for row, *_ in shown}) < len(shown):  # an ablation
        looks = ordinal_looks(len(shown), ordered=False)
    # On the scale of a run that diverged, the others would be flat.
    sound = [log for log, (*_, run) in zip(logs, shown, strict=True) if run.status != "diverged"]
    panels = []
    for key, symbol in _SYMBOLS.items():
        limit = 1.08 * max(_LEAST[key], pd.concat(sound or logs)[key].fillna(0.0).max())
        for (_, label, run), log, look in zip(shown, logs, looks, strict=True):
            ended = f"\n({run.status})" * (run.status != "finished")
            title = label.replace(" (", "\n(", 1) + ended if key == "gamma" else ""
            finish = partial(_finish, top=log[key].max(), limit=limit)
            panels.append(Panel([_band(log, key, look)], "", symbol, title, finish=finish))
    seeds = ", ".join(map(str, sorted({run.spec.seed for *_, run in shown})))
    caption = (
        f"{f'{methods.pop()}. ' if len(methods) == 1 else ''}What each polar step gave up (γ) and by "
        "how much its operator norm exceeded one (ν), from exact singular values, against the training "
        f"step: the median over matrices, and the band of all of them. Seed {seeds}."
    )
    if len(watched) > len(shown):
        caption += f" The first {_AT_MOST} of {len(watched)} monitored rows."
    if len(sound) < len(logs):
        caption += " An arrow marks what lies above the axis."
    title, size = "γ and ν along the run", (10.5, 4.6)
    return Drawing.of_panels(name, title, caption, size, panels, len(shown), sharey="row")


def _band(log: pd.DataFrame, key: str, look: Look) -> Series:
    """γ or ν of one run by step: the median over matrices, and the band of all of them."""
    found = log[key].clip(lower=0.0).groupby(log["step"]).agg(["min", "median", "max"]).dropna()
    return Series("", look, found.index, found["median"], found["min"], found["max"], band=True)


def _finish(axes: Axes, top: float, limit: float) -> None:
    """Cut an axis at ``limit``; an arrow with a number says that values reach up to ``top``."""
    axes.set_ylim(0, limit)
    axes.title.set_fontsize(8.5)
    axes.yaxis.label.set(rotation=0, ha="right")
    if top > limit:
        axes.annotate(f"↑ {top:.4g}", (0.08, 0.9), xycoords="axes fraction", fontsize=8)


def _covered(polar: Mapping[str, Any]) -> bool:
    """Whether Proposition 1 (full space) or 2 (Gaussian sketch) applies to a polar map."""
    if polar.get("auto") or polar.get("rest", "dropped") != "dropped":
        return False
    sketched = not polar.get("rank") or polar.get("sketch") == "gaussian"
    return sketched and polar.get("solver") in COVERED


def _polar_map(row: Row) -> str:
    """The polar map of a row's config in words; the row's label where the config has none.

    Of a sketch the words name what differs from the paper's: its kind, its power h, and for how many
    steps it keeps a basis. Where ``polar.auto`` chose the map for each shape, no other setting was read.
    """
    polar = row.polar
    if polar.get("auto"):
        return f"auto ({polar['auto']}): a map for each shape"
    if not polar.get("solver"):
        return row.label
    words = [str(polar["solver"])]
    words += [f"{polar['steps']} steps"] if polar.get("steps") else []
    if polar.get("rank"):
        sketch = str(polar.get("sketch"))
        words.append(f"rank {polar['rank']}")
        words += [sketch] if sketch != "gaussian" else []
        # A warm sketch starts from the last step and takes no power iterations.
        h = 1 if sketch == "warm" else polar.get("power", 1)
        words += [f"h = {h:g}"] if h != 1 else []
        words += [f"basis kept {keep} steps"] if (keep := polar.get("keep", 1)) > 1 else []
    words += [f"rest {rest}"] if (rest := polar.get("rest", "dropped")) != "dropped" else []
    return ", ".join(words)


def _decimal(value: float) -> str:
    """``value`` with four decimals; further decimals are rounding errors of the measurement.

    >>> _decimal(0.02761), _decimal(-4e-5), _decimal(1998.4756)
    ('0.0276', '0.0000', '1998')
    """
    if value >= 10:
        return in_digits(value)
    return f"{value:.4f}".replace("-0.0000", "0.0000").replace("-", "−")
