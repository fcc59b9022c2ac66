"""Independent runs spread over processes with one thread each.

For networks as small as those of the demonstration that is faster than one run at a time on all
cores, and every method is timed alike. The runs report through a queue to the process that shows
them.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue

import torch

from polarstep_lab.config import ConfigError, RunConfig
from polarstep_lab.data.cifar10 import DatasetError
from polarstep_lab.data.shards import ShardError
from polarstep_lab.records.record import MetricRow, Result
from polarstep_lab.storage import StorageError
from polarstep_lab.suites.suite import PlannedRun
from polarstep_lab.train.interrupt import ctrl_c_blocked, unblock_ctrl_c
from polarstep_lab.train.run import Interrupted, train

__all__ = ["EXPLAINED", "Event", "Messenger", "available_cores", "outcome", "run_in_processes"]

EXPLAINED = (ConfigError, DatasetError, ShardError, StorageError)
"""Errors whose message says what to do: nobody needs to see where they were raised."""


@dataclass(frozen=True)
class Event:
    """Something a run has to say: a step, a validation, a notice, its end, or what went wrong."""

    label: str
    step: int = 0
    steps: int = 0
    validation: MetricRow | None = None
    result: Result | None = None
    error: str = ""
    notice: str = ""


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_in_processes(
    runs: Sequence[PlannedRun], workers: int, force: bool = False
) -> Iterator[Event]:
    """Make all ``runs``, resuming those under way, and yield what they report as it comes.

    A run that fails ends with an event that carries the error; the others go on.
    """
    # Spawned, not forked: torch's thread pools do not survive a fork.
    context = multiprocessing.get_context("spawn")
    jobs: Queue[PlannedRun | None] = context.Queue()
    events: Queue[Event] = context.Queue()
    team = [
        context.Process(target=_work, args=(jobs, events, force))
        for _ in range(min(workers, len(runs)))
    ]
    for run in runs:
        jobs.put(run)
    try:
        with ctrl_c_blocked():
            for process in team:
                jobs.put(None)
                process.start()
        yield from _listen(events, team, len(runs))
    finally:
        # Runs that no worker took are still in the queue. Without this the process would wait at its
        # end until somebody reads them, for ever after a Ctrl-C.
        jobs.cancel_join_thread()
        for process in team:
            process.join(timeout=20)  # after a Ctrl-C they still write their checkpoints
            if process.is_alive():
                process.terminate()
                process.join()


def _listen(events: Queue[Event], team: Sequence[BaseProcess], count: int) -> Iterator[Event]:
    ended = 0
    while ended < count:
        try:
            event = events.get(timeout=0.5)
        except queue.Empty:
            if not any(process.is_alive() for process in team):
                codes = [process.exitcode for process in team]
                raise ChildProcessError(
                    f"the worker processes ended early, with exit codes {codes}: run the same "
                    "command again to go on"
                ) from None
            continue
        ended += event.result is not None or bool(event.error)
        yield event


def _work(jobs: Queue[PlannedRun | None], events: Queue[Event], force: bool) -> None:
    """The life of a worker process: run after run, until there are none left."""
    torch.set_num_threads(1)
    try:
        unblock_ctrl_c()
        while (run := jobs.get()) is not None:
            events.put(outcome(run, Messenger(run.label, events.put), force))
    except (Interrupted, KeyboardInterrupt):
        return


def outcome(run: PlannedRun, messenger: Messenger, force: bool) -> Event:
    """Make ``run``, resuming it if it is under way; the event says how it ended."""
    try:
        result = train(
            run.config,
            run.directory,
            identity=run.identity,
            resume=True,
            force=force,
            observers=[messenger],
            tell=messenger.tell,
        )
        return Event(run.label, result=result)
    except Interrupted:
        raise
    except EXPLAINED as error:
        return Event(run.label, error=str(error))
    except Exception as error:
        traceback.print_exc()
        return Event(run.label, error=f"{type(error).__name__}: {error}")


class Messenger:
    """An observer that sends what it sees to the parent process."""

    def __init__(self, label: str, send: Callable[[Event], None]) -> None:
        self.label, self.send = label, send
        self.steps = 0

    def start(self, config: RunConfig, steps: int, step: int) -> None:
        """Say how long the run is and where it stands."""
        self.steps = steps
        self.send(Event(self.label, step, steps))

    def row(self, row: MetricRow) -> None:
        """Pass a validation on."""
        if row.kind == "val":
            self.send(Event(self.label, row.step, self.steps, validation=row))

    def advance(self, step: int) -> None:
        """Pass every fourth step on: often enough for a bar."""
        if step % 4 == 0 or step == self.steps:
            self.send(Event(self.label, step, self.steps))

    def tell(self, text: str) -> None:
        """Pass a notice on."""
        self.send(Event(self.label, notice=text))

    def end(self, result: Result | None) -> None:
        """Do nothing: the worker process itself reports how the run ended."""
