"""Who may write into a run directory: nobody over another run's results without being told to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

try:
    import fcntl
except ImportError:  # Windows has no flock; there, two runs in one directory are not noticed.
    fcntl = None  # type: ignore[assignment]

from polarstep.storage import StorageError
from polarstep_lab.records import record
from polarstep_lab.records.record import Result, RunIdentity

__all__ = ["RunLock", "check_directory", "claim_directory", "state_of"]

LOCK = ".lock"
State = Literal["empty", "resumable", "finished"]


def state_of(directory: Path) -> State:
    """Whether a directory is free, holds a run that can go on, or one that has ended.

    A run that failed or was stopped can go on; one that diverged would diverge again.
    """
    if not directory.exists() or all(_is_leftover(path) for path in directory.iterdir()):
        return "empty"
    if not (directory / record.CONFIG).exists():
        raise StorageError(
            f"{directory} exists and is not a run directory: choose another one with --out"
        )
    result = Result.load(directory)
    return "finished" if result and result.status in ("finished", "diverged") else "resumable"


def _is_leftover(path: Path) -> bool:
    """Whether a file is a lock, or what a kill left of a file that was being written."""
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith(".part"))


class RunLock:
    """At most one process writes into a run directory; the lock dies with the process."""

    def __init__(self, directory: Path) -> None:
        """Lock ``directory``, which must exist."""
        self._file = (directory / LOCK).open("a")
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise StorageError(
                f"another process is running in {directory}: wait for it, or give another --out"
            ) from None

    def release(self) -> None:
        """Let others in."""
        self._file.close()


def check_directory(
    directory: Path, identity: RunIdentity, *, resume: bool = False, force: bool = False
) -> State:
    """What a run with ``identity`` finds in ``directory``; raises where it may not write there.

    That is where it would overwrite something: a finished run, an unfinished one that was not
    asked to be resumed, or a run with other settings.
    """
    state = state_of(directory)
    if state == "empty" or force:
        return state
    previous = RunIdentity.load(directory)
    if state == "finished":
        raise StorageError(
            f"{directory} holds a finished run ({previous.method}, seed {previous.seed}): nothing "
            "was overwritten; give another --out, or --force to replace it"
        )
    if not resume:
        raise StorageError(
            f"{directory} holds an unfinished run ({previous.method}, seed {previous.seed}): add "
            "--resume to go on with it, --force to replace it, or give another --out"
        )
    if previous.config != identity.config:
        raise StorageError(
            f"{directory} holds an unfinished run with other settings: resume it with "
            f"`{previous.command}`, or give another --out"
        )
    return state


def claim_directory(
    directory: Path, identity: RunIdentity, *, resume: bool = False, force: bool = False
) -> bool:
    """Make ``directory`` ready for a run; returns whether there is a run in it to go on with."""
    state = check_directory(directory, identity, resume=resume, force=force)
    if force and state != "empty":
        # Renamed first: a kill in the middle of deleting must not leave half a run behind.
        discarded = directory.with_name(f".{directory.name}.discarded")
        shutil.rmtree(discarded, ignore_errors=True)
        directory.rename(discarded)
        shutil.rmtree(discarded)
        state = "empty"
    if state == "empty":
        directory.mkdir(parents=True, exist_ok=True)
        identity.save(directory)
        return False
    (directory / record.RESULT).unlink(missing_ok=True)
    return True
