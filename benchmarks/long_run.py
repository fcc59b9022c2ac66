"""The methods on ``nanogpt-wiki``, one pass over 73 million tokens, each at a rate of its own.

    python benchmarks/long_run.py rates --runs runs/wiki-rates
    python benchmarks/long_run.py table --rates runs/wiki-rates --runs runs/wiki --seeds 1,2,3

``rates`` trains every method with three learning rates for a tenth of the recipe's steps, on a seed that
the table leaves out: equal budgets. ``table`` takes the rate with the lowest validation perplexity
for each method. Runs that ended are left alone. With ``--seconds`` no run is started
that would probably end later.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polarstep_lab.cli.one_by_one import run_one_by_one
from polarstep_lab.cli.options import seeds_of
from polarstep_lab.methods import Method, find_methods
from polarstep_lab.recipes import resolve
from polarstep_lab.records.record import RunRecord, find_runs
from polarstep_lab.suites.suite import PlannedRun, pending, plan_run

RECIPE = "nanogpt-wiki"
METHODS = (
    "muon-polar-express,deflated,auto-rows,rand-muon,adamw,muon,muon-polar-express-rows,"
    "rand-muon-kaczmarz,muon-polyak,rand-muon-polyak,sgd"
)
"""Table 2's methods and ours. ``auto`` takes the map of ``deflated`` for these shapes on an H200."""
FACTORS = {"muon": (0.3, 0.55, 1.0), "adamw": (0.17, 0.3, 0.55, 1.0), "sgd": (0.3, 1.0, 3.0)}
"""Rates that are tried, as factors of the recipe's, which is the paper's."""
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


def rates_runs(methods: Sequence[Method], out: Path) -> Iterator[PlannedRun]:
    """The short runs of all methods at all rates."""
    for method in methods:
        base = resolve(RECIPE, method)
        for factor in FACTORS[method.algorithm]:
            lr = float(f"{base.optimizer.lr * factor:.2g}")
            warmup = base.schedule.warmup * 120 // sum(stage.steps for stage in base.data.stages)
            changed = SHORT | {"schedule.warmup": warmup, "optimizer.lr": lr} | NO_CHECKPOINTS
            yield plan_run(
                RECIPE,
                method,
                SEED_OF_RATES,
                changed,
                out / method.folder / f"lr-{lr}",
                group="rates",
            )


def best_rates(folder: Path) -> dict[str, float]:
    """The rate with the lowest validation perplexity of each method; runs that diverged have none."""
    found: dict[str, tuple[float, float]] = {}
    for run in map(RunRecord.load, find_runs([folder])):
        assert run.result is not None, f"a run of {run.identity.method} has not ended"
        value = run.result.validation
        loss = value if value is not None and run.result.status == "finished" else math.inf
        lr = run.identity.config["optimizer"]["lr"]
        print(f"{run.identity.method:30s} lr {lr:<8g} validation {loss:.3f}")
        found[run.identity.method] = min(found.get(run.identity.method, (math.inf, lr)), (loss, lr))
    return {method: lr for method, (_, lr) in found.items()}


def table_runs(
    methods: Sequence[Method], seeds: Iterable[int], rates: Mapping[str, float], out: Path
) -> Iterator[PlannedRun]:
    """The whole runs, seed by seed."""
    for seed in seeds:
        for method in methods:
            changed: dict[str, Any] = {"optimizer.lr": rates[method.name]} | NO_CHECKPOINTS
            directory = out / method.folder / f"seed-{seed}"
            yield plan_run(RECIPE, method, seed, changed, directory, group="compare")


def make(runs: Sequence[PlannedRun], seconds: float) -> None:
    """Make the runs that have not ended, while there is time for the longest so far."""
    begin, longest = time.monotonic(), 0.0
    for planned in pending(runs):
        start = time.monotonic()
        if start - begin + longest > seconds:
            print(f"no time for {planned.label}")
            continue
        (result,) = run_one_by_one([planned], resume=True, force=False, tensorboard=False)
        took = time.monotonic() - start
        longest = max(longest, took)
        print(
            f"{planned.label}: lr {planned.config.optimizer.lr:g}, {result.status}, validation "
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
    parser.add_argument("--methods", default=METHODS, help="by default Table 2's and ours")
    parser.add_argument("--runs", type=Path, required=True, help="where the runs go")
    parser.add_argument(
        "--rates", type=Path, help="table: the folder or archive of the rates' runs"
    )
    parser.add_argument("--seeds", default="1,2,3", help="table: by default 1,2,3")
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    methods = find_methods(given.methods)
    if given.what == "rates":
        make(list(rates_runs(methods, given.runs)), given.seconds)
        best_rates(given.runs)
        return
    if given.rates is None:
        parser.error("table needs --rates, the runs that chose the rates")
    seeds = seeds_of(given.seeds)
    if SEED_OF_RATES in seeds:
        parser.error(f"seed {SEED_OF_RATES} chose the rates: leave it out of the table")
    rates = best_rates(given.rates)
    make(list(table_runs(methods, seeds, rates, given.runs)), given.seconds)


if __name__ == "__main__":
    main()
