"""Train on several ranks: ``python -m tests.lab.experiments.ranks_worker JOBS FOLDER`` is one of them.

``… JOBS FOLDER RANKS`` forks all ranks, and ``… alone FOLDER`` makes the runs that the others are
compared with.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tests.lab.experiments.small import tiny_cnn, tiny_gpt
from torch import multiprocessing

from polarstep_lab.cli.errors import clear_errors
from polarstep_lab.config import RunConfig
from polarstep_lab.records.record import MetricRow, Result
from polarstep_lab.train.language import LanguageTask
from polarstep_lab.train.ranks import Parallel, Ranks, launched
from polarstep_lab.train.run import Interrupted, train

STOP = 2
"""The step after which rank 0 is sent a signal."""

LONG = [{"steps": 6, "sequences": 4, "sequence_length": 32}]
TWO_STAGES = [
    {"steps": 3, "sequences": 4, "sequence_length": 16},
    {"steps": 3, "sequences": 6, "sequence_length": 32, "lr": 1.5},
]

# An odd number of sequences to validate on, so that ranks have unequal parts; a spare pair of
# matrices, which never get a gradient.
GPT: dict[str, Any] = {
    "evaluation__tokens": 13 * 32,
    "evaluation__batch": 4,
    "model__spare_mlps": 1,
    "runtime__monitor_every": 2,
}
WARM = {"optimizer__polar__sketch": "warm", "data__stages": LONG}


# An odd number of images to validate on.
IMAGES: dict[str, Any] = {"data__held_out": 41, "data__epochs": 1.0}


def cases(folder: Path) -> dict[str, tuple[Parallel, RunConfig]]:
    """Runs that two ranks make from the first step to the last."""
    images = folder / "data"
    return {
        "gpt-ddp": ("ddp", tiny_gpt("rand-muon", **GPT, runtime__micro_batch=1)),
        "gpt-fsdp": ("fsdp", tiny_gpt("rand-muon", **GPT, runtime__micro_batch=1)),
        "stages-ddp": ("ddp", tiny_gpt("muon", data__stages=TWO_STAGES)),
        "adamw-fsdp": ("fsdp", tiny_gpt("adamw", data__stages=TWO_STAGES)),
        "cnn-ddp": ("ddp", tiny_cnn(images, "rand-muon", **IMAGES)),
        "cnn-fsdp": ("fsdp", tiny_cnn(images, "muon", **IMAGES)),
        "cnn-sgd-ddp": ("ddp", tiny_cnn(images, "sgd", **IMAGES)),
        "noise-ddp": ("ddp", tiny_cnn(images, "muon", data__epochs=0.5, **NOISE)),
        "diverged-ddp": ("ddp", tiny_gpt("sgd", optimizer__lr=1e30)),
    }


NOISE = {
    "runtime__noise__points": 2,
    "runtime__noise__reference": 2,
    "runtime__noise__batches": 2,
    "runtime__noise__examples": 2,
}


def interrupted() -> dict[str, tuple[Parallel, RunConfig]]:
    """Runs that are stopped on some number of ranks and go on with another."""
    return {
        "warm-fsdp": ("fsdp", tiny_gpt("rand-muon", **WARM)),
        "warm-ddp": ("ddp", tiny_gpt("rand-muon", **WARM)),
        "adamw-fsdp": ("fsdp", tiny_gpt("adamw", data__stages=LONG)),
    }


# Numbers of ranks that start a run and end it, and the runs. Two ranks save and load them all. Four
# differ from two in the parts that they have, whatever is in them: each run is saved or loaded once.
CHANGES = {
    (1, 2): tuple(interrupted()),
    (2, 1): tuple(interrupted()),
    (2, 4): ("warm-ddp",),
    (4, 1): ("warm-fsdp", "adamw-fsdp"),
}


class Stopper:
    """An observer that sends this process a signal after step ``STOP``."""

    def start(self, config: RunConfig, steps: int, step: int) -> None: ...

    def row(self, row: MetricRow) -> None: ...

    def advance(self, step: int) -> None:
        if step == STOP:
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self, result: Result | None) -> None: ...


def start_and_stop(config: RunConfig, directory: Path, ranks: Ranks) -> None:
    """Train until the signal has stopped all ranks, with a checkpoint."""
    with pytest.raises(Interrupted) as stopped:
        train(config, directory, observers=[Stopper()], ranks=ranks)
    assert STOP <= stopped.value.step <= STOP + 1


def compare(folder: Path, ranks: Ranks) -> None:
    """Make all runs of ``cases``."""
    for name, (parallel, config) in cases(folder).items():
        train(config, folder / "ranks" / name, ranks=replace(ranks, parallel=parallel))


def alone(folder: Path) -> None:
    """Make all runs of ``cases`` without other ranks.

    In a process of its own, as ranks are: what other tests leave behind in a process, such as its
    number of threads, changes the order of sums.
    """
    for name, (_, config) in cases(folder).items():
        train(config, folder / "alone" / name)


def stop(folder: Path, ranks: Ranks) -> None:
    """Start those runs of ``interrupted`` that another number of ranks goes on with, and stop them."""
    for name, (parallel, config) in interrupted().items():
        if not any(start == ranks.count and name in CHANGES[start, end] for start, end in CHANGES):
            continue
        directory = folder / f"from-{ranks.count}" / name
        start_and_stop(config, directory, replace(ranks, parallel=parallel))


def go_on(folder: Path, ranks: Ranks) -> None:
    """Go on with copies of runs that other numbers of ranks have started."""
    for (start, end), names in CHANGES.items():
        for name in names if end == ranks.count else ():
            parallel, config = interrupted()[name]
            directory = folder / f"from-{start}-to-{end}" / name
            train(config, directory, resume=True, ranks=replace(ranks, parallel=parallel))


def on_fire() -> None:
    raise OSError("the disk of rank 1 is on fire")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(end: Callable[[], None], folder: Path, ranks: Ranks) -> None:
    """End rank 1 in the middle of a run."""
    backward = LanguageTask.backward

    def failing(task: LanguageTask, step: int) -> torch.Tensor:
        if ranks.rank == 1 and step == STOP:
            end()
        return backward(task, step)

    LanguageTask.backward = failing
    train(tiny_gpt("muon"), folder / "failed", ranks=ranks)


JOBS: dict[str, Callable[[Path, Ranks], None]] = {
    "compare": compare,
    "stop": stop,
    "go_on": go_on,
    "on_fire": partial(fail, on_fire),
    "killed": partial(fail, killed),
}


def work(jobs: Sequence[str], folder: Path) -> None:
    try:
        with clear_errors(""), launched("ddp") as ranks:
            for job in jobs:
                JOBS[job](folder, ranks)
    except typer.Exit as status:
        sys.exit(status.exit_code)


def forked(rank: int, count: int, port: int, jobs: Sequence[str], folder: Path) -> None:
    """Be a rank, in the environment that torchrun makes."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    work(jobs, folder)


def keep_store(ours: Connection, theirs: Connection) -> None:
    """Hold the store at which ranks meet, until the process that asked for it has ended.

    In a process of its own: the store has a thread, and what is forked beside a running thread may wait
    for ever for a lock that the thread held.
    """
    ours.close()
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    theirs.send(store.port)
    with contextlib.suppress(EOFError):
        theirs.recv()


def main() -> None:
    jobs, folder = sys.argv[1].split(","), Path(sys.argv[2])
    if jobs == ["alone"]:
        alone(folder)
        return
    if len(sys.argv) == 3:
        work(jobs, folder)
        return
    count = int(sys.argv[3])
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe()
    keeper = forking.Process(target=keep_store, args=(ours, theirs), daemon=True)
    keeper.start()
    multiprocessing.start_processes(
        forked, (count, ours.recv(), jobs, folder), nprocs=count, start_method="fork"
    )


if __name__ == "__main__":
    main()
