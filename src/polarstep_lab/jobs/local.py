"""Workers that make runs: processes of this machine, several at a time.

A run directory is all that a worker and the process that asked for the run have in common. The progress
of a run is read from its ``metrics.jsonl``. A file ``stop`` in the directory asks for a checkpoint and
the end. What the run needs to go on is its checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Protocol

import torch

from polarstep_lab.config import ConfigError
from polarstep_lab.data.download import DatasetError
from polarstep_lab.data.shards import ShardError
from polarstep_lab.jobs.job import Job
from polarstep_lab.records.record import LOCK, STOP
from polarstep_lab.storage import StorageError
from polarstep_lab.study import load_study
from polarstep_lab.train.interrupt import ctrl_c_blocked
from polarstep_lab.train.run import Interrupted, train

__all__ = [
    "EXPLAINED",
    "LocalWorkers",
    "Outcome",
    "Workers",
    "available_cores",
    "make",
    "run_jobs",
]

EXPLAINED = (ConfigError, DatasetError, ShardError, StorageError)
"""Errors whose message says what to do: nobody needs to see where they were raised."""

ATTEMPTS = 3
"""How many workers may die of a run before it counts as failed."""

PARTING = 30.0
"""Seconds that workers have to write their checkpoints after an interruption."""


@dataclass(frozen=True)
class Outcome:
    """How a worker left a run: why it failed, if it did, and what it had to say.

    Whether the run has finished is in its directory.
    """

    error: str = ""
    notices: tuple[str, ...] = ()


class Workers(Protocol):
    """Processes that make runs. The records do not depend on where the processes are."""

    count: int
    """How many runs are made at a time."""

    def start(self, job: Job, force: bool = False) -> None:
        """Hand a run to a worker; a run that is under way in its directory is resumed."""

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The runs that have ended since the last call; waits so many seconds for the first."""

    def close(self) -> None:
        """End the workers, which are idle."""

    def stop(self) -> None:
        """Let the runs under way write their checkpoints, and end the workers."""


def make(job: Job, force: bool) -> Outcome:
    """Make a run in this process, resuming it where it is under way."""
    notices: list[str] = []
    error = ""
    try:
        if job.program is not None:
            load_study(job.program)
        train(
            job.config,
            job.directory,
            spec=job.spec,
            resume=True,
            force=force,
            notify=notices.append,
        )
    except Interrupted:
        pass  # the run goes on when the same command is run again
    except EXPLAINED as reason:
        error = str(reason)
    except Exception as reason:
        traceback.print_exc()
        error = f"{type(reason).__name__}: {reason}"
    return Outcome(error, tuple(notices))


def run_jobs(
    jobs: Iterable[Job],
    workers: Workers,
    force: bool = False,
    on_start: Callable[[Job], object] = lambda job: None,
    on_wait: Callable[[], object] = lambda: None,
    on_end: Callable[[Job, Outcome], object] = lambda job, outcome: None,
) -> dict[str, Outcome]:
    """Make all ``jobs``, as many at a time as there are workers; returns the outcomes by label.

    A run that fails does not keep the others from being made. An interruption stops the workers, once
    their runs have written checkpoints.
    """
    waiting, running, outcomes = list(reversed(list(jobs))), 0, dict[str, Outcome]()
    try:
        while waiting or running:
            while waiting and running < workers.count:
                job = waiting.pop()
                on_start(job)
                workers.start(job, force)
                running += 1
            for job, outcome in workers.ended(0.3):
                running -= 1
                outcomes[job.label] = outcome
                on_end(job, outcome)
            on_wait()
    except BaseException:
        workers.stop()
        raise
    return outcomes


class LocalWorkers:
    """Spawned processes on this machine, with one thread each where there are several."""

    def __init__(self, count: int, notify: Callable[[str], object] = print) -> None:
        """``notify`` is called with a message where a worker dies and its runs are made again."""
        self.count, self._notify = count, notify
        self._pool: ProcessPoolExecutor | None = None
        self._running: dict[Future[Outcome], tuple[Job, bool]] = {}
        self._deaths: dict[str, int] = {}

    def start(self, job: Job, force: bool = False) -> None:
        """Hand a run to a process."""
        if self._pool is None:
            # Spawned, not forked: torch's thread pools do not survive a fork.
            context = multiprocessing.get_context("spawn")
            threads = 1 if self.count > 1 else torch.get_num_threads()
            self._pool = ProcessPoolExecutor(self.count, context, _begin_worker, (threads,))
        with ctrl_c_blocked():  # a worker is asked to stop by a file
            self._running[self._pool.submit(make, job, force)] = job, force

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The runs that have ended; those whose worker has died are handed to another."""
        done, _ = wait(self._running, seconds, FIRST_COMPLETED)
        found, again = [], []
        for future in done:
            job, force = self._running[future]
            try:
                found.append((job, future.result()))
            except BrokenProcessPool:  # which breaks all runs of the pool, and names none
                wait(self._running)
                again = list(self._running.values())
                break
            del self._running[future]
        if again:
            self.close()
        for job, force in again:
            self._deaths[job.label] = deaths = self._deaths.get(job.label, 0) + 1
            if deaths == ATTEMPTS:
                found.append((job, Outcome(error=f"{deaths} workers died of this run")))
                continue
            self._notify(f"{job.label}: a worker died; the run is made again")
            self.start(job, force and not (job.directory / LOCK).exists())
        return found

    def stop(self) -> None:
        """Ask the runs under way for their checkpoints, and end the processes."""
        deadline = time.monotonic() + PARTING
        for future in self._running:
            future.cancel()
        while time.monotonic() < deadline and (
            under_way := [job for future, (job, _) in self._running.items() if not future.done()]
        ):
            # Again and again: a run that was just taken up removes the file of an earlier stop.
            ask_to_stop(under_way)
            time.sleep(0.1)
        for process in (self._pool._processes or {}).values() if self._pool else ():
            process.terminate()
        self.close()

    def close(self) -> None:
        """End the processes; no run is under way any more."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool, self._running = None, {}


def ask_to_stop(jobs: Iterable[Job]) -> None:
    """Put a file ``stop`` into the directories of those ``jobs`` that are under way."""
    for job in jobs:
        if (job.directory / LOCK).exists():
            (job.directory / STOP).touch()


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _begin_worker(threads: int) -> None:
    """Leave Ctrl-C to the parent, and stop with a checkpoint where the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PARTING)
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()
