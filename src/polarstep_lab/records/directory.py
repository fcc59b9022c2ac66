"""A run directory: what state it is in, whether a run may write into it, and its claim by a run.

What has no mark (:mod:`polarstep_lab.records.mark`) is foreign: nothing is written into a foreign
directory, and nothing is removed from it. The claim is ``config.json``, written by the process that
holds the lock (:mod:`polarstep_lab.records.lock`). ``--force`` removes the files of a run by name, and
leaves other files in the directory alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from polarstep_lab.records import record
from polarstep_lab.records.mark import (
    CONFIG,
    FORMAT,
    MARK,
    STOP,
    VERSION,
    read_object,
    refuse_foreign,
    some_of,
)
from polarstep_lab.records.record import Result, RunSpec
from polarstep_lab.storage import StorageError, write_json

__all__ = [
    "check_directory",
    "claim_directory",
    "files_of_run",
    "state_of",
]

DirectoryState = Literal["empty", "resumable", "finished"]

_FILES = (
    CONFIG,  # the first to go: half a run must not pass for a whole one
    record.RESULT,
    record.ENVIRONMENT,
    record.CHECKPOINT,
    record.PREVIOUS_CHECKPOINT,
    STOP,
    "*.jsonl",
    "*.jsonl.damaged",
    "tensorboard/events.out.tfevents.*",
)
"""What a run writes, as patterns: all that ``--force`` removes."""


# --- the directory ------------------------------------------------------------------------------


def state_of(directory: Path) -> DirectoryState:
    """Whether a directory is free, holds a run that can go on, or a run that has ended.

    A run that failed or was stopped can go on. A run that diverged would diverge again.
    """
    refuse_foreign(directory)
    if not (directory / CONFIG).exists():
        remains = [path.name for path in files_of_run(directory) if path.name != STOP]
        if remains:
            raise StorageError(
                f"{directory} holds a run without its {CONFIG} ({some_of(remains)}): restore "
                "that file, add --force to remove what is left of the run, or give another --out"
            )
        return "empty"
    result = Result.load(directory)
    return "finished" if result and result.status in ("finished", "diverged") else "resumable"


def files_of_run(directory: Path) -> list[Path]:
    """The files in ``directory`` that a run wrote."""
    found = [path for pattern in _FILES for path in sorted(directory.glob(pattern))]
    return [p for p in found if p.is_file() or p.is_symlink()]


# --- the claim ----------------------------------------------------------------------------------


def check_directory(
    directory: Path, spec: RunSpec, *, resume: bool = False, force: bool = False
) -> None:
    """Raise where a run with ``spec`` may not write into ``directory``.

    With ``force``, a run there may be replaced, damaged or not. Without it, a finished run is in
    the way, and so is an unfinished run that was not asked to be resumed or has other settings.
    """
    if force:
        refuse_foreign(directory)
        return
    state = state_of(directory)
    if state == "empty":
        return
    previous = RunSpec.load(directory)
    if state == "finished":
        raise StorageError(
            f"{directory} holds a finished run ({previous.label}): nothing was overwritten; give "
            "another --out, or --force to replace it"
        )
    if not resume:
        raise StorageError(
            f"{directory} holds an unfinished run ({previous.label}): add --resume to go on with "
            "it, --force to replace it, or give another --out"
        )
    if previous.config != spec.config:
        raise StorageError(
            f"{directory} holds an unfinished run with other settings: "
            f"{_how_to_resume(previous, directory)}, or give another --out"
        )


def _how_to_resume(run: RunSpec, directory: Path) -> str:
    """What to do to go on with the run in ``directory`` as it was begun.

    The command in a record does not name the directory, so that it makes the run anew anywhere.
    """
    if not run.command:
        return "resume it with the config it was started with"
    return f"resume it with `{run.command} --out {shlex.quote(str(directory))} --resume`"


def claim_directory(
    directory: Path,
    spec: RunSpec,
    *,
    resume: bool = False,
    force: bool = False,
    notify: Callable[[str], object] = print,
) -> bool:
    """Make ``directory`` ready for a run; returns whether there is a run in it to go on with.

    The caller holds the lock of ``directory``. ``notify`` is called with what ``force`` removes, before
    anything is removed.
    """
    check_directory(directory, spec, resume=resume, force=force)
    for pattern in (MARK, *_FILES):
        for part in directory.glob(f".{pattern}.*.part"):
            part.unlink()  # a kill left it; whoever could be writing it would hold the lock
    (directory / STOP).unlink(missing_ok=True)
    if not read_object(directory / MARK):
        write_json(directory / MARK, {"format": FORMAT, "version": VERSION})
    if force:
        _discard(directory, notify)
    if state_of(directory) == "empty":
        spec.save(directory)
        return False
    (directory / record.RESULT).unlink(missing_ok=True)
    return True


def _discard(directory: Path, notify: Callable[[str], object]) -> None:
    """Remove the files of the run in ``directory``, if there is one."""
    files = files_of_run(directory)
    if not files:
        return
    names = ", ".join(path.relative_to(directory).as_posix() for path in files)
    notify(f"--force removes the run in {directory}: {names}")
    for path in files:
        path.unlink()
    with suppress(OSError):  # no such folder, or other files in it
        (directory / "tensorboard").rmdir()
