"""Methods on ``nanogpt-wiki``, one pass over 73 million tokens, at rates from short runs.

    python benchmarks/long_run.py rates --runs runs/wiki-rates
    python benchmarks/long_run.py table --rates runs/wiki-rates --runs runs/wiki --seeds 1,2,3
    python benchmarks/long_run.py table --lr 0.00054 --methods adamw --runs runs/wiki-other-rates

A row of the study (:data:`ROWS`) is a method, with settings besides the recipe's. ``rates`` trains rows
with several learning rates for a tenth of the recipe's steps, on a seed that the table leaves out.
``table`` takes for each row the rate with the lowest validation perplexity, or with ``--lr`` this rate,
which asks whether the short runs chose well. Rows that take the rate of another row have no short runs.
Rows of an earlier recipe (:data:`SLOW_TABLE`) are shown, and not run again. Rows of other libraries'
optimizers (:data:`PEER_TABLE`) run where ``--methods`` names them, or ``peers`` for all of them. Runs
that ended are left alone. With ``--seconds`` no run is started that would probably end later.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polarstep_lab.cli.making import check_peers, run_one_by_one
from polarstep_lab.cli.options import seeds_of
from polarstep_lab.config import TextData
from polarstep_lab.jobs.job import Job as PlannedRun
from polarstep_lab.jobs.job import plan_run
from polarstep_lab.jobs.job import unfinished as pending
from polarstep_lab.methods import Method, find_method
from polarstep_lab.recipes import resolve
from polarstep_lab.recipes.nanogpt import EMBEDDING_LR
from polarstep_lab.records.record import RunIdentity, RunRecord, find_runs
from polarstep_lab.storage import StorageError

RECIPE = "nanogpt-wiki"
SEEDS = (1, 2, 3)
"""The seeds of the table."""
_RANK = "optimizer.polar.rank"
_FANS = {"optimizer.lr_scale": "fan-ratio"}


@dataclass(frozen=True)
class Row:
    """A row of the study: a method, with settings that differ from the recipe's.

    ``rate_of`` is the slug of the row whose learning rate this row takes. Without it, short runs choose
    the rate. An ``earlier`` row is shown and not run again. ``base`` is the slug of the row that this
    one is compared with, full space with the same rates of embedding and head.
    """

    slug: str
    title: str
    method: Method
    settings: Mapping[str, Any] = field(default_factory=dict)
    rate_of: str | None = None
    earlier: bool = False
    base: str = "muon-polar-express"


def _row(slug: str, title: str = "", method: str = "", **options: Any) -> Row:
    """The row of a method, by default with the slug and title of the method, as the recipe has it."""
    found = find_method(method or slug)
    return Row(slug, title or found.name, found, **options)


TABLE = (
    _row("muon-polar-express"),
    _row("muon-polar-express-rows"),
    _row("deflated", "Deflated Muon, rank 56"),
    _row(
        "deflated-88",
        "Deflated Muon, rank 88",
        "deflated",
        settings={_RANK: 88},
        rate_of="deflated",
    ),
    _row("deflated-120", "Deflated Muon, rank 120", "deflated", settings={_RANK: 120}),
    _row(
        "deflated-rows",
        "Deflated Muon, rank 56, normalized rows",
        rate_of="muon-polar-express-rows",
    ),
    _row(
        "deflated-120-rows",
        "Deflated Muon, rank 120, normalized rows",
        "deflated-rows",
        settings={_RANK: 120},
    ),
    _row(
        "muon-polar-express-fans",
        "Muon (PolarExpress 5, rate times √(m/n))",
        "muon-polar-express",
        settings=_FANS,
    ),
    _row(
        "deflated-120-rows-fans",
        "Deflated Muon, rank 120, normalized rows, rate times √(m/n)",
        "deflated-rows",
        settings=_FANS | {_RANK: 120},
        rate_of="muon-polar-express-fans",
    ),
    _row("rand-muon"),
    _row("adamw"),
    _row("adamw-warmup", "AdamW, warm-up", "adamw", settings={"schedule.warmup": 100}),
    _row(
        "adamw-head",
        "AdamW, head at the rate of the matrices",
        "adamw",
        settings={"optimizer.head_lr": 0.0},
    ),
    _row("muon"),
    _row("rand-muon-kaczmarz"),
    _row("muon-polyak"),
    _row("rand-muon-polyak"),
    _row("sgd"),
)
"""Ours, then Table 2's. For these shapes ``auto`` takes the map of ``deflated-120`` on an H200."""


def _peer(name: str, **options: Any) -> Row:
    """The row of another library's optimizer."""
    return _row(name, method=f"peer:{name}", **options)


PEER_TABLE = (
    _peer("torch-muon"),
    _peer("jordan-muon"),
    _peer("dion-muon"),
    _peer("dion-normuon"),
    _peer("dion2"),
    _peer("dion3"),
    # The recipe gives SOAP the rates of AdamW as a baseline, whose embedding has 0.4. Without a warm-up
    # SOAP ended a sixth higher in perplexity in the loop of the frontier.
    _peer(
        "soap",
        settings={"optimizer.embedding_lr": EMBEDDING_LR["muon"], "schedule.warmup": 100},
    ),
)
"""Optimizers of other libraries on the hidden matrices. Embedding and head have the AdamW, the rates and
the schedule that they have in our rows of :data:`TABLE`."""

SLOW = {"optimizer.embedding_lr": 0.008, "optimizer.head_lr": 0.008}
"""Rates of embedding and head that the recipe had before: the embedding hardly moves."""


def _slow(method: str, title: str = "", infix: str = "", **options: Any) -> Row:
    """A row with the recipe's earlier rates of embedding and head."""
    settings = SLOW | options.pop("settings", {})
    slug = f"{method}{infix}-slow"
    base = "muon-polar-express-slow"
    return _row(slug, title, method, settings=settings, earlier=True, base=base, **options)


SLOW_TABLE = (
    _slow("muon-polar-express"),
    _slow("muon-polar-express-rows"),
    _slow("deflated", "Deflated Muon, rank 48, smaller δ", "-48", settings={_RANK: 48}),
    _slow("deflated", "Deflated Muon, rank 56", "-56", rate_of="muon-polar-express-slow"),
    _slow(
        "deflated",
        "Deflated Muon, rank 120",
        "-120",
        settings={_RANK: 120},
        rate_of="muon-polar-express-slow",
    ),
    _slow(
        "deflated",
        "Deflated Muon, rank 120, normalized rows",
        "-120-rows",
        settings={_RANK: 120, "optimizer.normalize_rows": True},
        rate_of="muon-polar-express-rows-slow",
    ),
    _slow("rand-muon"),
    _slow("adamw"),
    _slow("muon"),
    _slow("rand-muon-kaczmarz"),
    _slow("muon-polyak"),
    _slow("rand-muon-polyak"),
    _slow("sgd", settings={"optimizer.embedding_lr": 0.0, "optimizer.head_lr": 0.0}),
    _slow("adamw", "AdamW, warm-up", "-warmup", settings={"schedule.warmup": 150}),
)
"""Runs from before the recipe had a rate for the embedding that fits entries of size 1."""
SHOWN = (*TABLE, *PEER_TABLE)
"""The rows of one table and figure."""
ROWS = (*SHOWN, *SLOW_TABLE)

FACTORS = {
    "adamw": (0.1, 0.17, 0.3, 0.55, 1.0),
    "adamw-head": (0.17, 0.3, 0.55, 1.0),
    "adamw-warmup": (0.1, 0.17, 0.3, 0.55, 1.0),
    "adamw-slow": (0.1, 0.17, 0.3, 0.55, 1.0),
    "adamw-warmup-slow": (0.17, 0.3, 0.55, 1.0),
    "sgd": (0.3, 1.0, 1.8, 3.0),
    "sgd-slow": (4.9, 16, 49),
    # A quarter of the rows moves in a step, the others wait in the momentum. dion's own configs have
    # Muon's rate all the same; the best one should not be lower than Muon's.
    "dion2": (0.55, 1.0, 1.8, 3.2),
    "dion3": (0.55, 1.0, 1.8, 3.2),
    # Adam's step in a rotated basis, with entries of the same size: from AdamW's best rate upwards.
    "soap": (0.17, 0.3, 0.55, 1.0),
}
"""Rates that are tried for a row, as factors of the recipe's, which is the paper's."""
FACTORS_OF_MUON = (0.3, 0.55, 1.0, 1.8)
"""The same for all Muon rows. A rate means the same in torch's, Jordan's and our Muon, lr·√max(1, m/n).
In dion's it is lr·√(m/n): half of that for the 11 matrices of 768×3072, and the same for all others."""
SEED_OF_RATES = 4
SHORT = {
    "data.stages.0.steps": 40,
    "data.stages.1.steps": 40,
    "data.stages.2.steps": 40,
    "schedule.extension": 3,
    "schedule.momentum_cooldown": 4,
    "evaluation.every": 120,
}
"""A tenth of the recipe: 120 steps, 7.9 million tokens, with the schedule in proportion."""
NO_CHECKPOINTS = {"runtime.keep_checkpoint": False, "runtime.checkpoint_seconds": 1000}


def find_rows(slugs: str) -> Sequence[Row]:
    """The rows of a list like ``"adamw,deflated"``; ``peers`` in it stands for :data:`PEER_TABLE`."""
    known = {row.slug: [row] for row in SHOWN} | {"peers": [*PEER_TABLE]}
    if unknown := [slug for slug in slugs.split(",") if slug not in known]:
        raise ValueError(f"--methods {unknown[0]}: expected some of {', '.join(known)}")
    return [row for slug in slugs.split(",") for row in known[slug]]


def short_run(row: Row, seed: int, lr: float, out: Path = Path()) -> PlannedRun:
    """A run of a tenth of the recipe's steps, one of those that choose the rate of a row."""
    base = resolve(RECIPE, row.method, overrides=row.settings)
    assert isinstance(base.data, TextData)
    warmup = base.schedule.warmup * 120 // sum(stage.steps for stage in base.data.stages)
    changed = {**SHORT, **row.settings, "schedule.warmup": warmup, "optimizer.lr": lr}
    directory = out / row.slug / f"lr-{lr}"
    return plan_run(RECIPE, row.method, seed, changed | NO_CHECKPOINTS, directory)


def whole_run(row: Row, seed: int, lr: float, out: Path = Path()) -> PlannedRun:
    """A run of the whole recipe, one of the table's."""
    changed = {"optimizer.lr": lr, **row.settings, **NO_CHECKPOINTS}
    directory = out / row.slug / f"seed-{seed}"
    return plan_run(RECIPE, row.method, seed, changed, directory)


def row_of(run: RunIdentity, plan: Callable[[Row, int, float], PlannedRun]) -> Row:
    """The row that a recorded run belongs to, where ``plan`` is :func:`short_run` or :func:`whole_run`.

    The run has exactly the config that is planned for the row, its seed and its rate.
    """
    lr = run.config["optimizer"]["lr"]
    for row in ROWS:
        if row.method.name == run.method and plan(row, run.seed, lr).identity.config == run.config:
            return row
    raise StorageError(
        f"`{run.command}` is no run of this study: expected the recipe and settings of one of its rows; "
        "move the run elsewhere, or add a row to ROWS"
    )


def rates_runs(rows: Sequence[Row], out: Path) -> Iterator[PlannedRun]:
    """The short runs of all rows at all rates."""
    for row in rows:
        base = resolve(RECIPE, row.method).optimizer.lr
        for factor in FACTORS.get(row.slug, FACTORS_OF_MUON):
            yield short_run(row, SEED_OF_RATES, float(f"{base * factor:.2g}"), out)


def tried_rates(*folders: Path) -> dict[str, dict[float, float]]:
    """Validation perplexity of the short runs, by row and rate; infinite where a run diverged."""
    found: dict[str, dict[float, float]] = {row.slug: {} for row in ROWS}
    for run in map(RunRecord.load, find_runs(folders)):
        slug = row_of(run.identity, short_run).slug
        assert run.result is not None, f"a run of {slug} has not ended"
        value = run.result.validation if run.result.status == "finished" else None
        lr = run.identity.config["optimizer"]["lr"]
        found[slug][lr] = math.inf if value is None else value
    return {slug: dict(sorted(tried.items())) for slug, tried in found.items() if tried}


def best_rates(*folders: Path) -> dict[str, float]:
    """The rate with the lowest validation perplexity of each row; runs that diverged have none."""
    best = {}
    for slug, tried in tried_rates(*folders).items():
        for lr, loss in tried.items():
            print(f"{slug:30s} lr {lr:<8g} validation {loss:.3f}")
        best[slug] = min(tried, key=lambda lr: tried[lr])
    taken = {row.slug: best[row.rate_of] for row in ROWS if row.rate_of in best}
    return best | taken


def table_runs(
    rows: Sequence[Row], seeds: Iterable[int], rates: Mapping[str, float], out: Path
) -> Iterator[PlannedRun]:
    """The whole runs, seed by seed."""
    for seed in seeds:
        for row in rows:
            yield whole_run(row, seed, rates[row.slug], out)


def other_rate_runs(
    rows: Sequence[Row], seeds: Iterable[int], lr: float, out: Path
) -> Iterator[PlannedRun]:
    """Whole runs at a rate that need not be the one that short runs chose, in folders by rate."""
    for seed in seeds:
        for row in rows:
            planned = whole_run(row, seed, lr)
            yield replace(planned, directory=out / row.slug / f"lr-{lr}" / f"seed-{seed}")


def make(runs: Sequence[PlannedRun], seconds: float) -> None:
    """Make the runs that have not ended, while there is time for the longest so far."""
    begin, longest = time.monotonic(), 0.0
    waiting = pending(runs)
    check_peers(waiting)
    for planned in waiting:
        start = time.monotonic()
        if start - begin + longest > seconds:
            print(f"no time for {planned.directory}")
            continue
        (result,) = run_one_by_one([planned], resume=True, force=False, tensorboard=False)
        took = time.monotonic() - start
        longest = max(longest, took)
        print(
            f"{planned.directory}: lr {planned.config.optimizer.lr:g}, {result.status}, validation "
            f"{result.validation}, test {result.value:.3f}, optimizer "
            f"{result.optimizer_ms_per_step:.2f} ms, step {result.step_ms:.1f} ms, {took:.0f} s",
            flush=True,
        )


def main() -> None:
    """Make the runs that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("rates", "table"))
    parser.add_argument("--methods", help="slugs of rows, or peers; by default all rows but peers")
    parser.add_argument("--runs", type=Path, required=True, help="where the runs go")
    parser.add_argument(
        "--rates", type=Path, help="table: the folder or archive of the rates' runs"
    )
    parser.add_argument("--lr", type=float, help="table: this rate, in place of those of --rates")
    usual = ",".join(map(str, SEEDS))
    parser.add_argument("--seeds", default=usual, help=f"table: by default {usual}")
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    try:
        rows = find_rows(given.methods) if given.methods else TABLE
    except ValueError as error:
        parser.error(str(error))
    if given.what == "rates":
        own = [row for row in rows if row.rate_of is None]
        if not own:
            parser.error(
                f"{rows[0].slug} takes the rate of {rows[0].rate_of}: it has no short runs"
            )
        make(list(rates_runs(own, given.runs)), given.seconds)
        best_rates(given.runs)
        return
    if (given.rates is None) == (given.lr is None):
        parser.error("table needs --rates, the runs that chose the rates, or --lr, and not both")
    seeds = seeds_of(given.seeds)
    if SEED_OF_RATES in seeds:
        parser.error(f"seed {SEED_OF_RATES} chose the rates: leave it out of the table")
    if given.lr is not None:
        make(list(other_rate_runs(rows, seeds, given.lr, given.runs)), given.seconds)
        return
    rates = best_rates(given.rates)
    if without := [row.slug for row in rows if row.slug not in rates]:
        parser.error(
            f"{given.rates} has no rate for {', '.join(without)}: run rates for them first"
        )
    make(list(table_runs(rows, seeds, rates, given.runs)), given.seconds)


if __name__ == "__main__":
    main()
