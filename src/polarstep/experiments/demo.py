"""The demonstration: all seven methods on a small GPT, at learning rates tuned with equal budgets.

The runs are independent and small, so they are spread over processes with one thread each: on a few
cores that is faster than one run at a time on all of them, and every method is timed alike.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch

from polarstep.experiments.config import RunConfig
from polarstep.experiments.directory import state_of
from polarstep.experiments.methods import METHODS
from polarstep.experiments.recipes import resolve
from polarstep.experiments.record import MetricRow, Result, RunIdentity
from polarstep.experiments.train import Interrupted, train
from polarstep.storage import StorageError, read_json

__all__ = ["RECIPE", "SEEDS", "Event", "Plan", "Tuning", "plan", "run_all", "tuning_budget"]

RECIPE = "nanogpt-toy"
SEEDS = (1, 2)
"""Not the seed of the tuning, which is 0: the comparison is on runs that no rate was chosen by."""


@dataclass(frozen=True)
class Plan:
    """One run of the demonstration."""

    config: RunConfig
    directory: Path
    finished: bool

    @property
    def title(self) -> str:
        """How the run is called while it lasts."""
        return f"{self.config.method}, seed {self.config.seed}"

    @property
    def identity(self) -> RunIdentity:
        """What the run records about itself."""
        config = self.config
        words = ["polarstep", "run", RECIPE, "--method", config.rule.slug]
        return RunIdentity(
            recipe=config.recipe,
            benchmark=config.benchmark,
            method=config.method,
            seed=config.seed,
            config=config.to_dict(),
            group="demo",
            command=shlex.join([*words, "--seed", str(config.seed)]),
        )


@dataclass(frozen=True)
class Event:
    """Something a run has to say: a step, a validation loss, its end, or what went wrong."""

    run: int
    step: int = 0
    steps: int = 0
    loss: float | None = None
    status: str = ""
    error: str = ""


@dataclass(frozen=True)
class Tuning:
    """How the learning rates of the demonstration were found."""

    trials: int
    command: str


def tuning_budget() -> Tuning | None:
    """The budget that every method was tuned with; ``None`` where the budgets were not equal."""
    path = Path(__file__).parent / "tuned" / f"{RECIPE}.json"
    if not path.exists():
        return None
    methods = read_json(path)["methods"]
    entries = [methods.get(method.slug, {}).get("tuned", {}) for method in METHODS]
    budgets = {(entry.get("trials"), entry.get("command")) for entry in entries}
    if len(budgets) != 1:
        return None
    ((trials, command),) = budgets
    return Tuning(trials, command) if trials else None


def plan(
    folder: Path,
    again: bool = False,
    seeds: Sequence[int] = SEEDS,
    overrides: Mapping[str, Any] | None = None,
) -> list[Plan]:
    """All runs of the demonstration in ``folder``, with those that an earlier one finished.

    Runs come seed by seed, so that an interrupted demonstration has all methods early.
    """
    plans = []
    for seed in seeds:
        for method in METHODS:
            config = resolve(RECIPE, method, seed, overrides)
            directory = folder / f"{method.slug}-seed{seed}"
            finished = not again and state_of(directory) == "finished"
            if finished and RunIdentity.load(directory).config != config.to_dict():
                raise StorageError(
                    f"{directory} holds a run with other settings than the demonstration has now: "
                    "add --again to run everything anew, or give another --out"
                )
            plans.append(Plan(config, directory, finished))
    return plans


def run_all(plans: Sequence[Plan], workers: int, again: bool = False) -> Iterator[Event]:
    """Make all runs that are not finished, and yield what they report, as it comes."""
    due = [index for index, each in enumerate(plans) if not each.finished]
    # Spawned, not forked: torch's thread pools do not survive a fork.
    context = multiprocessing.get_context("spawn")
    jobs: Queue[tuple[int, Plan] | None] = context.Queue()
    events: Queue[Event] = context.Queue()
    team = [
        context.Process(target=_work, args=(jobs, events, again))
        for _ in range(min(workers, len(due)))
    ]
    for index in due:
        jobs.put((index, plans[index]))
    for process in team:
        jobs.put(None)
        process.start()
    try:
        yield from _listen(events, team, len(due))
    finally:
        for process in team:
            process.join(timeout=20)  # after a Ctrl-C they still write their checkpoints
            if process.is_alive():
                process.terminate()
                process.join()


def default_workers() -> int:
    """One process for each core this one may use, and no more than there are methods."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, len(METHODS)))


def _listen(events: Queue[Event], team: Sequence[Any], count: int) -> Iterator[Event]:
    ended = 0
    while ended < count:
        try:
            event = events.get(timeout=0.5)
        except queue.Empty:
            if not any(process.is_alive() for process in team):
                codes = [process.exitcode for process in team]
                raise RuntimeError(
                    f"the worker processes ended early, with exit codes {codes}; run the same "
                    "command again to go on"
                ) from None
            continue
        ended += bool(event.status or event.error)
        yield event


def _work(jobs: Queue[tuple[int, Plan] | None], events: Queue[Event], again: bool) -> None:
    """The life of a worker process: run after run, until there are none left."""
    torch.set_num_threads(1)
    try:
        while (job := jobs.get()) is not None:
            index, each = job
            try:
                result = train(
                    each.config,
                    each.directory,
                    identity=each.identity,
                    resume=True,
                    force=again,
                    observers=[_Messenger(index, events.put)],
                )
                events.put(Event(index, status=result.status))
            except Interrupted:
                return
            except Exception as error:
                traceback.print_exc()
                events.put(Event(index, error=f"{type(error).__name__}: {error}"))
    except KeyboardInterrupt:
        return


class _Messenger:
    """An observer that sends what it sees to the parent process."""

    def __init__(self, run: int, send: Callable[[Event], None]) -> None:
        self.run, self.send = run, send
        self.steps = 0

    def start(self, config: RunConfig, steps: int, step: int) -> None:
        """Say how long the run is and where it stands."""
        self.steps = steps
        self.send(Event(self.run, step, steps))

    def row(self, row: MetricRow) -> None:
        """Pass a validation loss on."""
        if row.kind == "val":
            self.send(Event(self.run, row.step, self.steps, row.loss))

    def advance(self, step: int) -> None:
        """Pass every fourth step on: often enough for a bar."""
        if step % 4 == 0 or step == self.steps:
            self.send(Event(self.run, step, self.steps))

    def end(self, result: Result | None) -> None:
        """The worker itself tells how the run ended."""
