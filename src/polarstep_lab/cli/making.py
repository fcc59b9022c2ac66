"""Runs made for a command: one by one in this process, or by workers, and the table of what came out."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from polarstep_lab.cli.errors import DIVERGED, ERROR, need
from polarstep_lab.config import ConfigError
from polarstep_lab.estimates import Estimate
from polarstep_lab.jobs.job import Job, chosen_rate, jobs_of, rate_jobs, unfinished
from polarstep_lab.jobs.local import EXPLAINED, LocalWorkers, Workers, run_jobs
from polarstep_lab.jobs.progress import Bars
from polarstep_lab.optimizers.peers import find_peer, load
from polarstep_lab.records.record import Result
from polarstep_lab.study import Study
from polarstep_lab.train.observers import Observer, TensorBoard
from polarstep_lab.train.ranks import Ranks
from polarstep_lab.train.run import Interrupted, train

__all__ = ["Where", "check_peers", "make_jobs", "make_study", "run_one_by_one", "workers_for"]

Where = Literal["home", "ray"]


def check_peers(jobs: Sequence[Job]) -> None:
    """Raise if the package of a peer is missing, before the first run is made."""
    for name in dict.fromkeys(job.config.rule.peer for job in jobs):
        if name is not None:
            load(find_peer(name))


@contextmanager
def workers_for(
    where: Where, count: int | None, device: str, notify: Callable[[str], object]
) -> Iterator[Workers]:
    """The workers of ``--on``, ``count`` at a time: by default one at home, or all of a cluster."""
    if where == "home":
        team: Workers = LocalWorkers(count or 1, notify)
    else:
        from polarstep_lab.jobs.ray import RayWorkers

        team = RayWorkers(count, device)
    try:
        yield team
    finally:
        team.close()


def run_one_by_one(
    jobs: Sequence[Job],
    resume: bool,
    force: bool,
    tensorboard: bool,
    ranks: Ranks | None = None,
) -> list[Result]:
    """Make ``jobs`` one after the other in this process and return their results.

    Of several runs, one that fails by a mistake in its own code, as in a map of a study, has no result
    and does not keep the others from being made. ``ranks`` are the processes that make each run
    together; without them this process is alone.
    """
    if tensorboard:
        need("--tensorboard", "tensorboard")
    results = []
    ranks = ranks or Ranks()
    with Bars(Console(stderr=True, quiet=not ranks.first), len(jobs)) as bars:
        for job in jobs:
            observers: list[Observer] = [bars.bar(job.label)]
            if tensorboard:
                observers.append(TensorBoard(job.directory / "tensorboard"))
            try:
                result = train(
                    job.config,
                    job.directory,
                    spec=job.spec,
                    resume=resume,
                    force=force,
                    observers=observers,
                    notify=bars.say,
                    ranks=ranks,
                )
                results.append(result)
            except (*EXPLAINED, Interrupted, torch.cuda.OutOfMemoryError):
                raise
            except Exception:
                if len(jobs) == 1:
                    raise
                traceback.print_exc()
                bars.say(f"{job.label}: failed; the other runs are made")
            bars.count_one()
    return results


def make_jobs(
    jobs: Sequence[Job], where: Where, workers: int | None, force: bool, tensorboard: bool
) -> int:
    """Make the ``jobs`` that are not finished; returns how many failed."""
    console = Console(stderr=True)
    todo = unfinished(jobs, force)
    check_peers(todo)
    if len(todo) < len(jobs):
        console.print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already")
    if not todo:
        return 0
    if where == "home" and workers in (None, 1):
        made = run_one_by_one(todo, resume=True, force=force, tensorboard=tensorboard)
        return len(todo) - len(made)
    if tensorboard:
        raise ConfigError("--tensorboard needs one run at a time: leave out --workers and --on")
    device = jobs[0].config.runtime.device
    with (
        Bars(console, len(todo)) as bars,
        workers_for(where, workers, device, bars.say) as team,
    ):
        outcomes = run_jobs(todo, team, force, bars.start, bars.update, bars.end)
    return sum(bool(outcome.error) for outcome in outcomes.values())


def make_study(
    study: Study,
    out: Path,
    where: Where = "home",
    workers: int | None = None,
    force: bool = False,
    tensorboard: bool = False,
    program: Path | None = None,
) -> tuple[list[Job], int]:
    """Make the runs of a study that are not finished, and print the table of all runs.

    The runs that choose rates come first. Returns all runs and the exit status: 0 where all finished,
    else that of a run that failed or diverged.
    """
    how = (where, workers, force, tensorboard)
    choosing = rate_jobs(study, out, program)
    failed = make_jobs(choosing, *how) if choosing else 0
    rates = None
    if study.rates is not None:
        rates = {v.name: chosen_rate(study, v, out) for v in study.variants if study.rates_of(v)}
    jobs = jobs_of(study, out, program, rates)
    if failed == 0:
        failed = make_jobs(jobs, *how)
    results = [Result.load(job.directory) for job in jobs]
    if not any(results):
        Console(stderr=True).print(
            f"none of {len(jobs)} runs was made", style="red", highlight=False
        )
        raise typer.Exit(ERROR)
    Console().print(_summary(jobs, rates or {}))
    if failed:
        return jobs, ERROR
    diverged = any(result is not None and result.status == "diverged" for result in results)
    return jobs, DIVERGED if diverged else 0


def _summary(jobs: Sequence[Job], rates: Mapping[str, tuple[float, str]]) -> Table:
    """Mean and standard deviation over seeds, by variant; the best in bold."""
    rows: dict[str, list[Result]] = {}
    for job in jobs:
        result = Result.load(job.directory)
        rows.setdefault(job.spec.study["variant"], []).extend([result] if result else [])
    images = jobs[0].config.benchmark == "cifar10"
    metrics = {
        name: Estimate.of([result.value for result in results if result.status == "finished"])
        for name, results in rows.items()
    }
    means = [metric.mean for metric in metrics.values() if metric is not None]
    best = (max if images else min)(means, default=None)
    metric_name = "test accuracy" if images else "test perplexity"
    table = Table("", metric_name, "seeds", "optimizer ms", "step ms")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, results in rows.items():
        metric = metrics[name]
        others = ", ".join(result.status for result in results if result.status != "finished")
        figure = metric.text(4 if images else 2) if metric else ""
        table.add_row(
            name + (f" at {rates[name][0]:g}" if name in rates else ""),
            " ".join(filter(None, [figure, others])),
            str(metric.n if metric else 0),
            _mean([result.optimizer_ms_per_step for result in results]),
            _mean([result.step_ms for result in results]),
            style="bold" if metric is not None and metric.mean == best else "",
        )
    return table


def _mean(times: list[float]) -> str:
    return f"{statistics.fmean(times):.1f}" if times else ""
