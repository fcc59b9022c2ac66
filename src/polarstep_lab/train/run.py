"""One run, from its config to its result: claimed, begun or resumed, and trained to the end.

A run is a pure function of its config. A checkpoint holds the step, the time and the lengths of the
logs, so that a run killed at any moment can be resumed as if it had not been interrupted: lines
logged after the last checkpoint are cut off and written again, with the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from polarstep_lab.config import ConfigError, RunConfig
from polarstep_lab.optimizers.build import build_optimizer, cycle_of
from polarstep_lab.optimizers.schedule import RunSchedule
from polarstep_lab.records import record
from polarstep_lab.records.directory import RunLock, check_directory, claim_directory
from polarstep_lab.records.environment import record_environment
from polarstep_lab.records.record import Result, RunSpec
from polarstep_lab.storage import StorageError
from polarstep_lab.train.checkpoint import RunProgress, resume_from
from polarstep_lab.train.images import ImageTask
from polarstep_lab.train.interrupt import Interrupted
from polarstep_lab.train.language import LanguageTask
from polarstep_lab.train.logs import RunLogs
from polarstep_lab.train.loop import Loop
from polarstep_lab.train.observers import Observer, StopTraining
from polarstep_lab.train.ranks import Ranks
from polarstep_lab.train.tasks import Task
from polarstep_lab.train.timing import StepTimer

__all__ = ["Interrupted", "Observer", "StopTraining", "build_task", "identify", "train"]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _unsaid(text: str) -> None:
    """Say nothing: rank 0 speaks for all."""


def train(
    config: RunConfig,
    directory: Path,
    *,
    spec: RunSpec | None = None,
    resume: bool = False,
    force: bool = False,
    observers: Sequence[Observer] = (),
    notify: Callable[[str], object] = _to_stderr,
    ranks: Ranks | None = None,
) -> Result:
    """Run ``config`` in ``directory`` and return its result, which is also written there.

    ``resume`` goes on with an unfinished run where there is one. ``force`` replaces a run. ``notify``
    is called with messages to the user that are no errors: what ``force`` is about to remove, or that
    the newest checkpoint is damaged.

    ``ranks`` are the processes that make this run together (:mod:`polarstep_lab.train.ranks`).
    All of them call this function. Rank 0 alone writes into ``directory``, calls ``observers``, which
    may then not raise :class:`StopTraining`, and calls ``notify``.

    Raises :class:`Interrupted` after a Ctrl-C, once the checkpoint is written; a run that was past its
    last step has its result instead, and the exception says ``ended``. Other errors are passed
    on, and what was recorded before them is intact.
    """
    spec, ranks = spec or identify(config), ranks or Ranks()
    if not ranks.first:
        observers, notify = (), _unsaid
    if ranks.parallel == "fsdp" and config.runtime.noise.points is not None:
        raise ConfigError(
            f"runtime.noise.points={config.runtime.noise.points} with --parallel fsdp: expected "
            "null, as gradients of whole batches are measured on one device; take --parallel ddp, or "
            "a single process"
        )
    device = ranks.device(config.runtime.device)
    with ExitStack() as held:

        def lock() -> None:
            held.enter_context(RunLock(directory, spec.label))
            check_directory(directory, spec, resume=resume, force=force)

        def claim() -> bool:
            return claim_directory(directory, spec, resume=resume, force=force, notify=notify)

        ranks.on_rank_zero(lock)
        # Before the claim: bad data must not replace a run.
        task = build_task(config, device, ranks)
        goes_on = ranks.on_rank_zero(claim)
        loop = _begin(config, directory, task, device, tuple(observers), goes_on, notify, ranks)
        return loop.to_the_end()


def identify(config: RunConfig) -> RunSpec:
    """The spec of a run that no command was given for."""
    return RunSpec(
        recipe=config.recipe,
        benchmark=config.benchmark,
        method=config.method,
        seed=config.seed,
        config=config.to_dict(),
    )


def build_task(config: RunConfig, device: torch.device, ranks: Ranks | None = None) -> Task:
    """The benchmark of ``config``, with data loaded and the model on ``device``."""
    if config.benchmark == "nanogpt":
        return LanguageTask.build(config, device, ranks)
    return ImageTask.build(config, device, ranks)


def _begin(
    config: RunConfig,
    directory: Path,
    task: Task,
    device: torch.device,
    observers: tuple[Observer, ...],
    goes_on: bool,
    notify: Callable[[str], object],
    ranks: Ranks,
) -> Loop:
    """Build the optimizer, take up the checkpoint where the run goes on, and open the logs."""
    scheduled = build_optimizer(task.model, config, RunSchedule(config.schedule, task.steps))
    optimizer, progress = scheduled.optimizer, RunProgress()
    if goes_on:
        progress = resume_from(
            directory, task.model, optimizer, config.to_dict(), device, notify, ranks
        )
    if progress.step > task.steps:
        raise StorageError(
            f"the checkpoint in {directory} was taken after step {progress.step}, but the run "
            f"has {task.steps} steps: the data has changed; start anew with --force"
        )
    logs = RunLogs.open(directory, progress, config, task, optimizer, ranks, notify)
    # Last of all that may refuse: a resume that was refused leaves no trace.
    ranks.on_rank_zero(
        lambda: record_environment(
            directory / record.ENVIRONMENT,
            device,
            {**task.data, "steps": task.steps},
            ranks.count,
            ranks.parallel,
        )
    )
    loop = Loop(
        config=config,
        directory=directory,
        task=task,
        scheduled=scheduled,
        ranks=ranks,
        timer=StepTimer(device, cycle=cycle_of(config)),
        logs=logs,
        observers=observers,
        step=progress.step,
        seconds_before=progress.seconds,
    )
    for observer in observers:
        observer.start(config, task.steps, progress.step)
    return loop
