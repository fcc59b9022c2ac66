"""A run directory: whose it is, what state it is in, its lock, and its claim by a run.

A run directory has a mark, ``.polarstep-run.json``. Nothing is written into a folder that holds files
and has no mark, and nothing is removed from it: others, too, write a ``config.json``, Hugging Face
beside every model.

``.lock`` is held from before the first look into the directory until the run has ended. The operating
system drops the lock when the process dies, by SIGKILL too. The claim is ``config.json``, written by
the process that holds the lock. ``--force`` removes the files of a run by name, and leaves other files
alone.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Literal

try:
    import fcntl
except ImportError:  # Windows has no flock; there, two runs in one directory are not noticed.
    fcntl = None  # type: ignore[assignment]

from polarstep_lab.records import record
from polarstep_lab.records.record import CONFIG, LOCK, MARK, STOP, Result, RunSpec
from polarstep_lab.storage import StorageError, read_object, refuse_unwritable

__all__ = ["RunLock", "check_directory", "claim_directory", "state_of"]

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


# --- the directory --------------------------------------------------------------------------------


def refuse_foreign(directory: Path) -> None:
    """Raise where ``directory`` exists, is not empty, and is not a run directory."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise StorageError(f"{directory} is a file, expected a folder: choose another --out")
    held = [path.name for path in directory.iterdir() if not _is_leftover(path)]
    if held and MARK not in held:
        raise StorageError(
            f"{directory} exists and is not a run directory ({_some_of(held)}): nothing was changed, "
            "and --force would not remove it; choose another one with --out"
        )


def _is_leftover(path: Path) -> bool:
    """Whether a file is a lock, a request to stop, or left by a kill while it was written."""
    return path.name in (LOCK, STOP) or (path.name.startswith(".") and path.name.endswith(".part"))


def _some_of(names: list[str]) -> str:
    """Up to four names, and how many there are beyond."""
    shown = ", ".join(sorted(names)[:4])
    return f"it holds {shown}" + (f" and {len(names) - 4} more" if names[4:] else "")


def state_of(directory: Path) -> DirectoryState:
    """Whether a directory is free, holds a run that can go on, or a run that has ended.

    A run that failed or was stopped can go on. A run that diverged would diverge again.
    """
    refuse_foreign(directory)
    if not (directory / CONFIG).exists():
        remains = [path.name for path in _files_of_run(directory) if path.name != STOP]
        if remains:
            raise StorageError(
                f"{directory} holds a run without its {CONFIG} ({_some_of(remains)}): restore "
                "that file, add --force to remove what is left of the run, or give another --out"
            )
        return "empty"
    result = Result.load(directory)
    return "finished" if result and result.status in ("finished", "diverged") else "resumable"


def _files_of_run(directory: Path) -> list[Path]:
    """The files in ``directory`` that a run wrote."""
    found = [path for pattern in _FILES for path in sorted(directory.glob(pattern))]
    return [p for p in found if p.is_file() or p.is_symlink()]


# --- the claim ------------------------------------------------------------------------------------


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
    if force:
        _discard(directory, notify)
    if state_of(directory) == "empty":
        spec.save(directory)
        return False
    (directory / record.RESULT).unlink(missing_ok=True)
    return True


def _discard(directory: Path, notify: Callable[[str], object]) -> None:
    """Remove the files of the run in ``directory``, if there is one."""
    files = _files_of_run(directory)
    if not files:
        return
    names = ", ".join(path.relative_to(directory).as_posix() for path in files)
    notify(f"--force removes the run in {directory}: {names}")
    for path in files:
        path.unlink()
    with suppress(OSError):  # no such folder, or other files in it
        (directory / "tensorboard").rmdir()


# --- the lock -------------------------------------------------------------------------------------

PATIENCE = 2.0
"""Seconds to wait for a process that has just taken the lock to write down who it is."""


class RunLock:
    """At most one process works in a run directory; the lock dies with the process.

    A directory that does not exist is made. It is removed with the lock if nothing else came into it.
    """

    def __init__(self, directory: Path, label: str = "") -> None:
        """Lock ``directory``; ``label`` tells others what runs there. Raises if it cannot be locked."""
        refuse_foreign(directory)
        refuse_unwritable(directory / LOCK, "--out")
        self._directory = directory
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        self._file: IO[bytes] | None = _locked_file(directory)
        if self._file is not None:
            with suppress(OSError):  # on a full disk the lock holds, and does not say whose it is
                self._file.truncate(0)
                self._file.write(json.dumps(_holder(label)).encode())

    def release(self) -> None:
        """Let others in, and remove the folders that were made and are still empty."""
        if self._file is not None:
            # Unlinked before it is unlocked: after that, the file may be another process's lock.
            (self._directory / LOCK).unlink(missing_ok=True)
            self._file.close()
            self._file = None
        for folder in self._made:
            with suppress(OSError):  # not empty
                folder.rmdir()
        self._made = []

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _locked_file(directory: Path) -> IO[bytes] | None:
    """The lock file of ``directory``, locked; ``None`` where the system has no such locks."""
    path = directory / LOCK
    patience = time.monotonic() + PATIENCE
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if fcntl is None:
                return None
            file = path.open("ab", buffering=0)
        except FileNotFoundError:
            if time.monotonic() < patience:
                continue  # another process removed the empty folder it had made
            raise
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            holder = read_object(path)
            if not holder and time.monotonic() < patience:
                time.sleep(0.01)  # the process that has the lock is about to say who it is
                continue
            raise StorageError(
                f"another process is running in {directory}{_describe(holder)}: wait for it to "
                "end, or give another --out"
            ) from None
        except OSError as error:
            file.close()
            raise StorageError(
                f"{path} cannot be locked ({error}), so that two runs in one directory would go "
                "unnoticed: give an --out on a file system that has locks, as a local disk"
            ) from error
        if _is_at(file, path):
            return file
        file.close()  # the process that had the lock has just removed the file


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(label: str) -> dict[str, object]:
    """What the lock file says about the process that holds the lock."""
    return {
        "process": os.getpid(),
        "host": platform.node(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "label": label,
    }


def _describe(holder: dict[str, object]) -> str:
    """The content of a lock file in words."""
    if not holder:
        return ""
    label = f"{holder.get('label')}, " if holder.get("label") else ""
    return (
        f" ({label}process {holder.get('process')} on {holder.get('host')}, since "
        f"{holder.get('since')})"
    )
