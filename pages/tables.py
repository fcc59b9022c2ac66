"""The tables of the pages, each a function from its record to Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import low_precision
import scaling
from frontier import FULL, WIDTH, title_of
from long_run import SHOWN, SLOW_TABLE
from pages import ROOT
from pages.claims import rms_rates
from pages.claims.cifar10 import cifar_frontier_rows
from pages.claims.ranks import MAPS, MIB, SHAPES, received
from pages.records import best_rates, heads, long_run, read_json
from pages.records.costs import (
    HELD,
    TIMES,
    applied,
    memory,
    on_hosts,
    steps,
)
from pages.records.maps import Weighed, headline_maps, peers, weighed, with_share, with_shares
from pages.records.quality import (
    BASE,
    RATES,
    TEST,
    at_chosen_rates,
    chosen,
    million_tokens,
    perplexities,
    quality,
)
from polarstep import LowRank
from polarstep_lab.storage import read_lines
from step_optimizers import maps
from step_workloads import WORKLOADS


def markdown(columns: Mapping[str, str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; ``columns`` are its titles, each with ``"left"`` or ``"right"``."""
    rules = {"left": "---", "right": "--:"}
    head = [f"| {' | '.join(columns)} |", f"|{'|'.join(rules[side] for side in columns.values())}|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def step_table(record: Path) -> str:
    """Times and ratios of whole steps, from what step_cost.py wrote."""
    return _by_workload(record, lambda row: f"{row['ms']:.2f} ms, {row['ratio']:.2f}×")


def device_table(record: Path) -> str:
    """Times of the same steps on the device alone, for steps that are one graph."""
    return _by_workload(
        record, lambda row: f"{row['device_ms']:.3f} ms" if "device_ms" in row else None
    )


def speedup_table(record: Path) -> str:
    """How many times as fast as the loop of seven steps, for workloads where it was timed."""
    steps = read_json(record)["steps"]
    loop = {row["workload"]: row["ms"] for row in steps if row["optimizer"].endswith("Schulz 7")}

    def cell(row: dict[str, Any]) -> str | None:
        compared = row["optimizer"].startswith(("LowRank", "full space", "a loop of batches"))
        return f"{loop[row['workload']] / row['ms']:.1f}" if compared else None

    return _by_workload(record, cell)


def _by_workload(record: Path, cell: Callable[[dict[str, Any]], str | None]) -> str:
    """A row for each optimizer and a column for each workload, without rows that are empty."""
    found = read_json(record)
    steps = found["steps"]
    loads = list(dict.fromkeys(row["workload"] for row in steps))
    device = "cpu" if found["machine"].startswith("CPU") else "cuda"
    titles = [
        f"{load}, `LowRank` in full space" if _unsketched(load, device) else load for load in loads
    ]
    table = []
    for name in dict.fromkeys(row["optimizer"] for row in steps):
        rows = {row["workload"]: row for row in steps if row["optimizer"] == name}
        cells = [cell(rows[load]) if load in rows else None for load in loads]
        if any(cells):
            table.append([name, *(each or "–" for each in cells)])
    return markdown(dict.fromkeys(["optimizer", *titles], "left"), table)


def _unsketched(load: str, device: str) -> bool:
    """Whether no row of LowRank sketches a matrix of the workload: all of them run the inner map."""
    if load not in WORKLOADS:
        return False
    shapes, rank, oversample = WORKLOADS[load]
    made = [make() for make in maps(rank, oversample).values()]
    rows = [polar for polar in made if isinstance(polar, LowRank)]
    on = torch.device(device)
    return all(polar.full_space_reason(m, n, on) for polar in rows for _, m, n in shapes)


def accuracy_table(record: Path) -> str:
    """γ on recorded momentum, the largest Δγ and the largest ν of each map, from step_accuracy.py.

    Maps that were measured on wide matrices alone have no γ on recorded momentum.
    """
    rows, table = applied(record), []
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        real = [row for row in mine if row.matrices.startswith("recorded")]
        assert len(real) <= 1, name
        delta, nu = max(row.delta for row in mine), max(row.nu for row in mine)
        gamma = f"{real[0].median:.3f} ({real[0].largest:.3f})" if real else "—"
        cells = [gamma, f"{delta:.3f}", f"{nu:.3f}"]
        table.append([name, *(cell.replace("-", "−") for cell in cells)])
    return markdown(_first_left("map", "γ, median (largest)", "largest Δγ", "largest ν"), table)


def tightness_table(record: Path) -> str:
    """The exact γ and ν beside their cheap bounds, from what certificate_tightness.py wrote."""
    titles = ["map", "γ, median (largest)", "bound, median (largest)", "largest ν", "largest bound"]
    table = []
    for row in read_json(record)["maps"]:
        cells = [
            f"{row[f'{kind}_median']:.3f} ({row[f'{kind}_largest']:.3f})".replace("-", "−")
            for kind in ("gamma", "bound")
        ]
        cells += [f"{row[name]:.3f}" for name in ("nu_largest", "nu_bound_largest")]
        table.append([row["map"], *cells])
    return markdown(dict.fromkeys(titles, "left"), table)


def low_precision_table(record: Path) -> str:
    """Losses and bytes of state, from what low_precision.py wrote."""
    return "\n".join(low_precision.table(read_lines(record)))


def frontier_table(summary: Path) -> str:
    """The table that frontier.py made, as it is."""
    return summary.read_text().rstrip("\n")


def chosen_table(record: Path) -> str:
    """Every map and peer at the best of three rates, chosen on one seed and reported on others.

    Those with other rates than :data:`RATES` are in :func:`peers_table` only. An asterisk is for maps
    with runs that have no test half.
    """
    table = []
    for name in dict.fromkeys(name for name, _ in perplexities()):
        found = at_chosen_rates(name)
        if found is None or not set(RATES) <= set(found.tried):
            continue
        title = title_of(name) + ("" if found.text == TEST else " *")
        tried = [f"{found.tried[rate]:.2f}" for rate in RATES]
        told = "–" if name == FULL else found.change.told(unit="%")
        table.append([title, *tried, f"{found.rate:g}", told])
    rates = [f"{rate:g}" for rate in RATES]
    return markdown(_first_left("map", *rates, "chosen", "other seeds, to full space"), table)


def _first_left(first: str, *others: str) -> dict[str, str]:
    """Columns for :func:`markdown` of names, aligned on the left, and numbers, on the right."""
    return {first: "left", **dict.fromkeys(others, "right")}


def scaling_table(record: Path, unit: scaling.Unit) -> str:
    """The gap to full space over tokens or over width."""
    return "\n".join(scaling.table(scaling.recorded(record, scaling.FRONTIER), unit))


def peers_table(record: Path) -> str:
    """Prices, memory and perplexity of other libraries' optimizers, beside those of ours.

    As soon as a peer was trained to the end of the long run, there is a column for it.
    """
    first = next(iter(HELD))
    table = []
    bases = _baselines()
    ours = [each for each in weighed() if each.timed and each.trained]
    others = peers()
    long = any(each.long in long_run.runs() for each in others)
    for each in (*ours, *others):
        rows = [steps().get((each.timed, load)) if each.timed else None for load in HELD]
        times = [
            _time(on_hosts(each.timed, load) if each in others and each.timed else [], row)
            for load, row in zip(HELD, rows, strict=True)
        ]
        rate = _rate(each)
        title = each.timed if each in others and each.timed else each.title
        cells = [title, *times, memory(rows[0]), rate, *(_told(each, base) for base in bases)]
        table.append([*cells, _told_of_the_long_run(each)] if long else cells)
    titles = [*_loads(), f"MiB, {first}", "rate", f"test perplexity, {_to(bases[0])}"]
    titles += [f"the same, {_to(base)}" for base in bases[1:]]
    if long:
        titles.append(f"test, after {long_run.million_tokens():.1f}M tokens")
    return markdown(_first_left("optimizer", *titles), table)


def _time(hosts: Sequence[Mapping[str, Any]], row: Mapping[str, Any] | None) -> str:
    """The time of a row, or from the shortest to the longest on several hosts."""
    text = f"{row['ms']:.2f} ms, {row['ratio']:.2f}×" if row else "not timed"
    if len(hosts) > 1:
        ms, ratios = ([found[key] for found in hosts] for key in ("ms", "ratio"))
        text = (
            f"{min(ms):.2f} to {max(ms):.2f} ms, {min(ratios):.2f} to {max(ratios):.2f}× "
            f"({len(hosts)} hosts)"
        )
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _rate(each: Weighed) -> str:
    """The rate that a map or peer was trained with, and whether it had a warm-up."""
    if each.trained is None:
        return "–"
    name, rate = each.trained
    return f"{rate:g}, warm-up" if name.endswith("+warmup") else f"{rate:g}"


def _loads() -> list[str]:
    """The titles of the columns of times."""
    return [f"step, {load}" for load in HELD]


def long_run_table(folder: Path, *, slow: bool = False) -> str:
    """The long run; ``slow``: its runs with the recipe's earlier rate of the embedding."""
    return "\n".join(long_run.table(SLOW_TABLE if slow else SHOWN))


def best_rates_table(folder: Path) -> str:
    """The rows of the long run that were run to the end at several rates, at the best of these."""
    return "\n".join(best_rates.table())


def rates_of_the_long_run(folder: Path, *, slow: bool = False) -> str:
    """The short runs that chose the rates of the same rows."""
    return "\n".join(long_run.table_of_rates(SLOW_TABLE if slow else SHOWN))


def accuracies_table(folder: Path) -> str:
    """Test accuracy of each method against full space on the same seeds, in points."""
    table = []
    for name, mean, found in cifar_frontier_rows(folder):
        table.append([name, f"{100 * mean:.2f}%", "–" if found is None else found.told(2)])
    return markdown(_first_left("method", "test accuracy", "to full space, points"), table)


def headline_table(record: Path) -> str:
    """What a user gives, what a step of it costs, and where training ends: the README's table."""
    table = []
    for given, each in headline_maps():
        times = [f"{steps()[each.timed or '', load]['ratio']:.1f}×" for load in HELD]
        ells = ", ".join(with_shares(each.columns or ())) or "–"
        table.append([given, ells, *times, _told(each), _told_of_the_long_run(each)])
    after = [f"{of():.1f}M tokens" for of in (million_tokens, long_run.million_tokens)]
    ends = (f"perplexity, {after[0]}, {_to(BASE)}", f"perplexity, {after[1]}, to full space")
    titles = ("ℓ as timed", *_loads(), *ends)
    return markdown(_first_left("you give `ps.Muon`", *titles), table)


def weighed_table(record: Path) -> str:
    """What a step of each map costs, against AdamW's, and what the map does to perplexity."""
    table = []
    bases = _baselines()
    for each in weighed():
        times = [
            f"{row['ratio']:.2f}×"
            if each.timed and (row := steps().get((each.timed, load)))
            else "not timed"
            for load in HELD
        ]
        told = [_told(each, base) for base in bases]
        table.append([each.name, *times, *told, _told_of_the_long_run(each)])
    after = [f"after {of():.1f}M tokens" for of in (million_tokens, long_run.million_tokens)]
    titles = [*_loads(), f"test, {after[0]}, {_to(bases[0])}"]
    titles += [f"the same, {_to(base)}" for base in bases[1:]]
    titles.append(f"test, {after[1]}, to full space")
    return markdown(_first_left("map", *titles), table)


def _baselines() -> list[tuple[str, float]]:
    """Full space at the rate of the text, and at the one that the seed of choices has for it."""
    rate = chosen(FULL)
    return [BASE] if rate in (None, BASE[1]) else [BASE, (FULL, rate)]


def _to(base: tuple[str, float]) -> str:
    """What a column is compared with."""
    return f"to full space at {base[1]:g}"


def _told(each: Weighed, base: tuple[str, float] = BASE) -> str:
    """The quality of a map, for a table."""
    if each.trained is None:
        return "not run"
    found = quality(each.trained, base)
    return found.told(unit="%") if found.interval or found.pairs == 1 else "–"


def _told_of_the_long_run(each: Weighed) -> str:
    """The same for the long run, at the best of the rates over all steps where there are several."""
    if each.long == long_run.BASE:
        return "–"
    return (best_rates.told_gap(each.long) if each.long else None) or "not run"


# Where maps were timed: the matrices, the machine, the record, and the column in it.
PLACES = (
    ("nanoGPT", "one H200", Path(TIMES).stem, "nanoGPT"),
    ("an 8B layer", "one H200", Path(TIMES).stem, "8B layer"),
    ("a tenth of nanoGPT", "two ARM cores", "cpu-arm", "nanoGPT"),
)


def choice_table(folder: Path) -> str:
    """For each set of matrices and each budget the map with the lowest perplexity that fits it.

    Maps that another map beats in both time and perplexity are left out, and so are maps that were
    trained with one seed, as a single run decides nothing, and sketches whose part of the width as
    timed is not the part as trained.
    """
    table = []
    for matrices, machine, record, load in PLACES:
        rows = steps(f"{folder.relative_to(ROOT)}/{record}.json")
        width = HELD[load]
        columns_of = Weighed.columns_on_arm if record == "cpu-arm" else Weighed.columns_on
        known = [
            (rows[each.timed, load]["ratio"], quality(each.trained).value, each)
            for each in weighed()
            if each.timed and each.trained and (each.timed, load) in rows
            if quality(each.trained).interval is not None
            if each.trained_as(columns_of(each, load), width)
        ]
        kept: list[tuple[float, float, Weighed]] = []
        for row in sorted(known, key=lambda row: row[0]):
            if not kept or row[1] < kept[-1][1]:
                kept.append(row)
        for ratio, _, each in kept:
            timed, trained = columns_of(each, load), each.trained_columns
            parts = [
                "–" if ell is None else with_share(ell, d)
                for ell, d in ((timed, width), (trained, WIDTH))
            ]
            told = [_told(each), _told_of_the_long_run(each)]
            table.append([matrices, machine, f"{ratio:.1f}×", each.title, *parts, *told])
            matrices = machine = ""
    columns = {
        "matrices": "left",
        "machine": "left",
        "from, × AdamW": "right",
        "map": "left",
        "ℓ as timed": "right",
        "ℓ as trained": "right",
        f"test perplexity at width {WIDTH}, {million_tokens():.1f}M tokens, {_to(BASE)}": "right",
        f"the same, {long_run.million_tokens():.1f}M tokens, to full space": "right",
    }
    return markdown(columns, table)


def heads_table(folder: Path) -> str:
    """How near heads of three widths come to full space, after two lengths and by two texts."""
    columns = ("head, of the width", "tokens", "rates", "test", "validation", "within a hundredth")
    return markdown(dict.fromkeys(columns, "left"), list(heads.rows()))


def received_table(plans: Path) -> str:
    """Megabytes that a rank receives in a step for each map and shape, by the formulas of the plans."""
    titles = [f"{count} × {m}×{n}" if m != n else f"{count} × {m}²" for count, m, n in SHAPES]
    rows = [
        [name, *(f"{received(polar, *shape) / MIB:.2f} MiB" for shape in SHAPES)]
        for name, polar in MAPS.items()
    ]
    return markdown(dict.fromkeys(["", *titles], "left"), rows)


def rms_rates_table(folder: Path) -> str:
    """The best rates on the toy GPT with ``"rms"``, and what AdamW's rate does to each map."""
    titles = ("best rate", "at AdamW's rate, to its own best", "at AdamW's rate, to AdamW")
    return markdown(_first_left("optimizer", *titles), rms_rates.rows())


TABLES: dict[str, Callable[[Path], str]] = {
    "table": step_table,
    "device": device_table,
    "speedup": speedup_table,
    "accuracy": accuracy_table,
    "frontier": frontier_table,
    "tightness": tightness_table,
    "low-precision": low_precision_table,
    "headline": headline_table,
    "weighed": weighed_table,
    "chosen": chosen_table,
    "heads": heads_table,
    "over-tokens": partial(scaling_table, unit="tokens"),
    "over-width": partial(scaling_table, unit="width"),
    "peers": peers_table,
    "long-run": long_run_table,
    "long-run-rates": rates_of_the_long_run,
    "best-rates": best_rates_table,
    "slow-long-run": partial(long_run_table, slow=True),
    "slow-long-run-rates": partial(rates_of_the_long_run, slow=True),
    "accuracies": accuracies_table,
    "choice": choice_table,
    "received": received_table,
    "rms-rates": rms_rates_table,
}
